"""Ranks know who shares their machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dilatant.comm import rendezvous
from dilatant.comm.comm import Comm
from harness.worker_pool import Worker, WorkerPool


def _nodes(worker: Worker, hosts: list[str], boots: list[str], folder: Path) -> tuple[int, ...]:
    boot = folder / f"boot-{worker.rank}"
    boot.write_text(boots[worker.rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hosts[worker.rank])
        patch.setattr(rendezvous, "_BOOT_ID", boot)
        comm = Comm(worker.store, worker.rank, worker.size)
    found = comm.nodes
    comm.world.barrier("all to have connected")
    comm.close()
    return found


def test_a_node_is_a_host_that_was_booted_once(workers: WorkerPool, tmp_path: Path) -> None:
    hosts = ["a", "b", "a", "localhost", "localhost"]
    found = workers.run(_nodes, 5, hosts, ["1", "2", "1", "3", "4"], tmp_path)
    assert found == [(0, 1, 0, 2, 3)] * 5
