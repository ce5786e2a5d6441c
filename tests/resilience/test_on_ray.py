"""Agents are actors on the nodes of a Ray cluster: its own test cluster, whose nodes are processes of this machine.

pip install "dilatant[ray]" && pytest -m slow tests/resilience/test_on_ray.py
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.environment import show_ray_token
from dilatant.resilience.ray_machines import shortage
from harness.faults.chaos import losses
from harness.faults.machines import Machines, free_port, undisturbed
from harness.patience import HANG_SECONDS, wait_until

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


def authenticate() -> str:
    """Return a token that Ray requires from now on, in this process and its children."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # tests hide GPUs, and Ray's nodes shall have some
    token = secrets.token_hex(32)
    show_ray_token(token)
    return token


def finding(address: str, token: str) -> tuple[str, ...]:
    """Return what comes before a command that is to find the cluster."""
    return ("env", f"RAY_ADDRESS={address}", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={token}")


@contextmanager
def ray_cluster(nodes: int) -> Iterator[tuple[Any, list[Any], tuple[str, ...]]]:
    """Yield a cluster, its nodes beside the head, and what comes before a command that is to find it."""
    token = authenticate()
    from ray.cluster_utils import Cluster  # behind the token, which it reads once

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "num_gpus": 0})
    try:
        yield cluster, [cluster.add_node(**NODE) for _ in range(nodes)], finding(cluster.address, token)
    finally:
        cluster.shutdown()


def fake_machines(address: str, head: str, most: int) -> dict[str, Any]:
    """Return the autoscaler's config of a cluster at `address`, with at most so many nodes beside the head."""
    resources = {"CPU": 1, "object_store_memory": 80 << 20}
    commands = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
    return {
        **{f"{name}_commands": [] for name in commands},
        "file_mounts": {},
        "cluster_synced_files": [],
        "auth": {},
        "cluster_name": "test",
        "max_workers": most,
        "provider": {
            "type": "external",  # `fake_multinode` takes defaults from a file that Ray's wheel has not got
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "head_node_id": head,
            "gcs_address": address,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "machine": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
    }


@contextmanager
def autoscaled_cluster(most: int) -> Iterator[tuple[Callable[[], list[int]], tuple[str, ...]]]:
    """Yield a function and what comes before a command that is to find a cluster whose nodes Ray's autoscaler starts.

    most: its nodes beside the head, where there is demand for them; at first there is none. The function returns the
    process ids of the raylets of those that run. Ray's `AutoscalingCluster` starts its cluster in this way, too, but
    first ends all others of this machine.
    """
    token = authenticate()
    import ray
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID as HEAD

    def processes(mark: str, program: str) -> list[int]:
        """Return those of this cluster, as the token in their environment shows, with `mark` there, too."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment, command = ((process / file).read_bytes() for file in ("environ", "cmdline"))
                is_ours = token.encode() in environment and mark.encode() in environment
                if is_ours and command.split(b"\0")[0].endswith(program.encode()):
                    found.append(int(process.name))
        return found

    host, port = str(ray.util.get_node_ip_address()), free_port()
    settings = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S": "45",  # a busy machine starts no raylet in Ray's 30 s
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",  # as `ray up` and KubeRay do
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    }
    with closing(TemporaryFolder("ray-", longest=24)) as folder:
        file, log = Path(folder.path, "cluster.json"), Path(folder.path, "head.txt")
        file.write_text(json.dumps(fake_machines(f"{host}:{port}", HEAD, most)))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0", "--num-gpus=0"]
        command += [f"--node-ip-address={host}", f"--port={port}", f"--object-store-memory={80 << 20}"]
        command += ["--disable-usage-stats", "--include-dashboard=false"]
        command += [f"--temp-dir={folder.path}/ray", f"--autoscaling-config={file}"]
        try:
            with log.open("wb") as output:
                assert not subprocess.call(command, stdout=output, stderr=output, env={**os.environ, **settings})
            yield partial(processes, "RAY_NODE_TYPE_NAME=machine", "/raylet"), finding(f"{host}:{port}", token)
        finally:
            while rest := [process for process in processes("", "") if process != os.getpid()]:
                for process in rest:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.1)


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
            await_members(machines, leading, 3)
            assert leading.wait(HANG_SECONDS) == 0, machines.output
        check_no_step_is_lost(machines)
    finally:
        machines.close()


def be_served_by_the_autoscaler(folder: Path) -> None:
    machines = Machines(folder, samples=SAMPLES)
    machines.write_project(replicas=2, listen=None, lease_seconds=30.0)
    try:
        with autoscaled_cluster(most=3) as (raylets, finds):
            assert not raylets()
            leading = machines.start(*ON_RAY, on=finds)
            machines.await_step(4)
            assert "0 of its 1 node have 1 CPU, and the run needs 2 such nodes" in machines.output
            assert len(raylets()) == num_members(machines) == 2
            os.kill(raylets()[0], signal.SIGKILL)
            await_members(machines, leading, 1)
            await_members(machines, leading, 2)
            assert leading.wait(HANG_SECONDS) == 0, machines.output
        check_no_step_is_lost(machines)
    finally:
        machines.close()


def await_members(machines: Machines, leading: subprocess.Popen[bytes], count: int) -> None:
    def is_so() -> bool:
        assert leading.poll() is None, machines.output
        return num_members(machines) == count

    wait_until(is_so, lambda: machines.output)


def check_no_step_is_lost(machines: Machines) -> None:
    assert machines.status.stopped == "finished"
    assert "was lost" in machines.output
    assert "(NodeAgent pid=" in machines.output  # what the first rank showed
    assert losses(machines.run) == pytest.approx(undisturbed(machines.project / "alone", SAMPLES), rel=TOLERANCE)
    assert any((machines.run / "export").iterdir())


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

    def test_rays_autoscaler_starts_and_replaces_nodes(self, tmp_path: Path) -> None:
        """The head is alone until the run asks for two nodes. One is killed, and the autoscaler starts another one."""
        in_own_process(be_served_by_the_autoscaler, tmp_path)

    def test_too_few_nodes_are_one_error_after_the_wait(self, tmp_path: Path) -> None:
        in_own_process(ask_for_too_many_nodes, tmp_path)
