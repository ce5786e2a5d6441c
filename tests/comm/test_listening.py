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

LISTEN = "0A"


def listening(process: int) -> dict[str, str]:
    """Addresses that a process listens on, by the inode of the socket."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                found[fields[9]] = _address(fields[1].split(":")[0])
    return found


def _address(text: str) -> str:
    """The kernel writes words of four bytes in the machine's order."""
    words = [int.from_bytes(bytes.fromhex(text[at : at + 8]), "little") for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word.to_bytes(4, "big") for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


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
        assert {
            address for address in ours.values() if not ipaddress.ip_address(address).is_loopback
        } == set()
