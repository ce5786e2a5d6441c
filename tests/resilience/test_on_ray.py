"""Agents are actors on the nodes of a Ray cluster: its own test cluster, whose nodes are processes of this machine.

pip install "dilatant[ray]" && pytest -m slow tests/resilience/test_on_ray.py
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dilatant.config.environment import show_ray_token
from dilatant.resilience.ray_machines import shortage
from harness.faults.chaos import losses
from harness.faults.machines import Machines, undisturbed
from harness.patience import HANG_SECONDS

TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""
SAMPLES = 512
"""Of a step, so that a machine has time to join before the last one."""
NODE = {"num_cpus": 3, "num_gpus": 1, "object_store_memory": 80 << 20}
"""A processor and what Ray takes for a GPU are for a rank, two processors for producers."""
ON_RAY = ("train", "config.yaml", "--on", "ray")
on_a_cluster = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "dilatant[ray]"'
    ),
]


def test_what_a_ray_cluster_lacks_is_named() -> None:
    bundle = {"CPU": 8, "GPU": 8}
    large, small = {"CPU": 64.0, "GPU": 8.0, "memory": 1e9}, {"CPU": 64.0}
    assert shortage(bundle, 2, [large, small], {}) == (
        "1 of its 2 nodes have 8 CPUs and 8 GPUs, and the run needs 2 such nodes"
    )
    assert shortage(bundle, 2, [large, large, small], {"CPU": 180.0, "GPU": 8.0}) == (
        "the run needs 2 nodes with 8 CPUs and 8 GPUs, but others use the cluster: 180 of 192 CPUs and 8 of 16 GPUs "
        "are free"
    )


@contextmanager
def ray_cluster(nodes: int) -> Iterator[tuple[Any, list[Any], tuple[str, ...]]]:
    """Yield a cluster, its nodes beside the head, and what comes before a command that is to find it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # tests hide GPUs, and Ray's nodes shall have some
    token = secrets.token_hex(32)
    show_ray_token(token)
    from ray.cluster_utils import Cluster  # behind the token, which it reads once

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "num_gpus": 0})
    try:
        finds = ("env", f"RAY_ADDRESS={cluster.address}", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={token}")
        yield cluster, [cluster.add_node(**NODE) for _ in range(nodes)], finds
    finally:
        cluster.shutdown()


def in_own_process(function: Callable[[Path], None], folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


def num_members(machines: Machines) -> int:
    return sum(node.is_member and node.is_alive for node in machines.status.nodes)


def lose_and_gain_a_node(folder: Path) -> None:
    machines = Machines(folder, samples=SAMPLES)
    machines.write_project(replicas=3, listen=None, lease_seconds=30.0)  # starting a node of Ray takes all cores
    try:
        with ray_cluster(nodes=3) as (cluster, nodes, finds):
            leading = machines.start(*ON_RAY, "--set", "data.preprocess=ray", on=finds)
            machines.await_step(4)
            assert num_members(machines) == 3
            for rank in [pid for node in machines.status.nodes for pid in node.workers]:
                assert b"CUDA_VISIBLE_DEVICES=0\0" in Path(f"/proc/{rank}/environ").read_bytes()
            cluster.remove_node(nodes[0], allow_graceful=False)
            machines.await_step(6)
            assert num_members(machines) == 2
            cluster.add_node(**NODE)
            while num_members(machines) < 3:
                assert leading.poll() is None, machines.output
                time.sleep(0.1)
            assert leading.wait(HANG_SECONDS) == 0, machines.output
        assert machines.status.stopped == "finished"
        assert "was lost" in machines.output
        assert "(NodeAgent pid=" in machines.output  # what the first rank showed
        assert losses(machines.run) == pytest.approx(undisturbed(folder / "alone", SAMPLES), rel=TOLERANCE)
        assert any((machines.run / "export").iterdir())
    finally:
        machines.close()


def ask_for_too_many_nodes(folder: Path) -> None:
    machines = Machines(folder)
    machines.write_project(replicas=2, listen=None)
    try:
        with ray_cluster(nodes=1) as (_, _, finds):
            leading = machines.start(*ON_RAY, "--set", "parallel.timeout_seconds=3", on=finds)
            assert leading.wait(HANG_SECONDS) == 2, machines.output
        assert "1 of its 2 nodes have 1 CPU and 1 GPU, and the run needs 2 such nodes" in machines.output
        assert "Traceback" not in machines.output
    finally:
        machines.close()


class TestOnACluster:
    """Each in a process of its own, for Ray reads its token once."""

    pytestmark = on_a_cluster

    def test_a_lost_node_is_replaced_and_no_step_is_lost(self, tmp_path: Path) -> None:
        """Three nodes have a rank each, and producers of samples beside it. One is killed, and another one comes."""
        in_own_process(lose_and_gain_a_node, tmp_path)

    def test_too_few_nodes_are_one_error_after_the_wait(self, tmp_path: Path) -> None:
        in_own_process(ask_for_too_many_nodes, tmp_path)
