"""The run's store under torchrun, Slurm or Kubernetes: rank 0 hosts it, and the other ranks find its address."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import Store, connect
from dilatant.comm.store.token import shared_token
from dilatant.config.environment import LaunchPlace
from dilatant.config.errors import UserError

LOOPBACK = "127.0.0.1"
AGENT_SECONDS = 300.0
LAST_SECONDS = 60.0
"""Time that other ranks have to end after rank 0 is done; then the store closes with rank 0."""


@contextlib.contextmanager
def shared_store(place: LaunchPlace, timeout_seconds: float) -> Iterator[Store]:
    """Provide the store of all ranks for the duration of the context.

    timeout_seconds: time limit for rank 0 to be reachable. Raises UserError.
    """
    token = shared_token()
    server = _serve(place, token) if place.rank == 0 else None
    try:
        host, port = _address(place, server, timeout_seconds)
        at = LOOPBACK if server is not None else host
        store = connect(at, port, token, place.one_machine, timeout_seconds)
        store = store.prefixed(f"attempt{place.attempt}")
        try:
            yield store
        finally:
            with contextlib.suppress(Exception):
                store.set(f"ended/{place.rank}", b"")
            if server is not None:
                _await_others(store, place.size)
            store.close()
    finally:
        if server is not None:
            server.close()


def _serve(place: LaunchPlace, token: bytes) -> StoreServer:
    """Start the server, on loopback for one machine. Under torchrun, whose agent uses the port, use any free port."""
    try:
        return StoreServer(LOOPBACK if place.one_machine else "", place.port if place.hosts_store else 0, token)
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on port {place.port} ({error.strerror}); set MASTER_PORT to a free one on all ranks"
        ) from None


def _address(place: LaunchPlace, server: StoreServer | None, timeout_seconds: float) -> tuple[str, int]:
    """Return the store's host and port; under torchrun read them from the agent's store, to which any process may
    write: the token protects the run's store. Raises UserError."""
    if place.hosts_store:
        return LOOPBACK if place.one_machine else place.host, place.port
    key, timeout = f"dilatant/{place.attempt}", timedelta(seconds=timeout_seconds)
    try:
        agent = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        if server is not None:
            agent.set(key, f"{LOOPBACK if place.one_machine else _own_address(place)} {server.port}")
        host, port = agent.get(key).decode().split()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"torchrun's store at {place.host}:{place.port} gives no address of rank 0 within {timeout_seconds:g} s "
            f"({' '.join(str(error).split())[:200]}): rank 0 did not start, or a firewall is in between"
        ) from None
    return host, int(port)


def _own_address(place: LaunchPlace) -> str:
    """Return this machine's address towards the agent, or the agent's address if the agent is on this machine."""
    with socket.create_connection((place.host, place.port), AGENT_SECONDS) as probe:
        own: str = probe.getsockname()[0]
    return place.host if own.startswith("127.") or own == "::1" else own.removeprefix("::ffff:")


def _await_others(store: Store, size: int) -> None:
    deadline = time.monotonic() + LAST_SECONDS
    with contextlib.suppress(Exception):
        store.wait([f"ended/{rank}" for rank in range(size)], timedelta(seconds=deadline - time.monotonic()))
