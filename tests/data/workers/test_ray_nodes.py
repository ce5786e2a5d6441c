"""A node of a Ray cluster dies while it makes samples.

pip install "dilatant[ray]" && pytest -m slow tests/data/workers/test_ray_nodes.py
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import secrets
import sys
from collections import Counter
from pathlib import Path

import pytest

from cases.data_builders import small_encoding
from cases.pool_cases import Numbered, contents, requests
from dilatant.comm.ray_cluster import Connection
from dilatant.config.environment import show_ray_token
from dilatant.data.workers.pool import InlineSource
from dilatant.data.workers.ray_source import RaySource


def kill_a_node() -> None:
    folders = [str(Path(__file__).parent), *sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    show_ray_token(secrets.token_hex(32))
    from ray.cluster_utils import Cluster  # behind the token, which it reads once

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    connection = Connection(cluster.address)
    ours = RaySource({"train": Numbered(seconds=0.1)}, small_encoding(), 1 << 24, most=2)
    alone = InlineSource({"train": Numbered()}, small_encoding())
    try:
        count, killed = 80, False
        for each in (ours, alone):
            each.ask(requests(range(count)))
        ledger: Counter[int] = Counter()
        for number in range(count):
            taken = ours.take("train", number + 100)
            assert contents(taken) == contents(alone.take("train", number + 100))
            ledger[taken.draw] += 1
            if len(ours.producers) == 2 and not killed:
                cluster.remove_node(nodes[0], allow_graceful=False)
                killed = True
        assert killed
        assert ledger == Counter({number + 100: 1 for number in range(count)})
    finally:
        ours.close()
        connection.close()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason='Ray is not installed, so no node of a cluster was killed: pip install "dilatant[ray]"',
)
def test_no_sample_is_lost_or_doubled_where_a_node_dies() -> None:
    """Two nodes of one processor each make samples, beside a head that makes none. One is killed with what is being
    made on it and what lies ready there; the other makes the rest, each draw once, as the caller would."""
    # Of its own, for Ray reads the token once in a process.
    process = multiprocessing.get_context("spawn").Process(target=kill_a_node)
    process.start()
    process.join()
    assert process.exitcode == 0
