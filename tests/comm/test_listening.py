"""A run on one machine listens on loopback only, as the kernel lists its sockets."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.launch import Worker, launch_local
from harness.listening import listening


def _everything_open(worker: Worker, launcher: int) -> dict[str, str]:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:  # what Gloo would take on several machines
        os.environ["GLOO_SOCKET_IFNAME"] = others[0]
    comm = Comm(worker.store, worker.rank, worker.size)
    comm.group("pair", (0, 1)).barrier() if worker.rank < 2 else None
    comm.edge("edge", 1, 2) if worker.rank > 0 else None
    comm.world.sum_(torch.ones(1)).wait()
    processes = [os.getpid(), os.getppid()]
    found = {inode: address for process in processes for inode, address in listening(process).items()}
    if worker.rank == 0:
        found |= {f"launcher {inode}": address for inode, address in listening(launcher).items()}
    all_gather_object(comm, 0)
    comm.close()
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed in /proc")
def test_every_listening_socket_of_a_local_run_is_on_loopback() -> None:
    before = {f"launcher {inode}" for inode in listening(os.getpid())}
    assert multiprocessing.parent_process() is None
    of_ranks = launch_local(_everything_open, 3, os.getpid())
    store = {inode for inode in of_ranks[0] if inode.startswith("launcher")} - before
    assert len(store) == 1
    for found in of_ranks:
        ours = {inode: address for inode, address in found.items() if inode not in before}
        assert any(not inode.startswith("launcher") for inode in ours)  # Gloo's
        assert {address for address in ours.values() if not ipaddress.ip_address(address).is_loopback} == set()
