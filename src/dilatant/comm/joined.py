"""Ranks that another program has started and connected: they use torch.distributed's default group to meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dilatant.comm.launch import Worker, local_worker, worker_here
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import connect
from dilatant.comm.store.token import fresh_token
from dilatant.config.environment import place_from
from dilatant.config.errors import UserError

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32


class JoinedRanks:
    """The ranks of torch.distributed's default group as workers; all of them make this together. `close` ends their
    store.

    worker: this process. alone: a group of this process only. Raises UserError if the environment variables of the
    launcher (RANK, WORLD_SIZE, MASTER_ADDR) are missing.
    """

    def __init__(self) -> None:
        self._server: StoreServer | None = None
        rank, size = dist.get_rank(), dist.get_world_size()
        self.alone: Any = dist.new_group([rank], use_local_synchronization=True)
        if size == 1:
            self.worker: Worker = local_worker()
            return
        place = place_from()
        if place is None:
            raise UserError(
                "the ranks of torch.distributed do not know their places; set RANK, WORLD_SIZE, MASTER_ADDR"
            )
        known = torch.zeros(TOKEN_BYTES + 2, dtype=torch.uint8)  # nothing is unpickled, unlike in objects of torch
        if rank == 0:
            token = fresh_token()
            self._server = StoreServer(LOOPBACK if place.one_machine else "", 0, token)
            known = torch.tensor([*token, *self._server.port.to_bytes(2)], dtype=torch.uint8)
        dist.broadcast(known, 0)
        told = bytes(known.tolist())
        host = LOOPBACK if place.one_machine or rank == 0 else place.host
        store = connect(host, int.from_bytes(told[TOKEN_BYTES:]), told[:TOKEN_BYTES], place.one_machine)
        self.worker = worker_here(rank, size, place.local_rank, place.local_size, store, started_here=False)

    def close(self) -> None:
        """Close the store, where it is hosted. Idempotent."""
        if self._server is not None:
            self._server.close()
