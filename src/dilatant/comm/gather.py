"""All-gather of small values over the ranks' CPU group, with few hops.

Ranks exchange with those 1, 2, ..., 7 places further, then forward all collected values with strides of 8, 64, ...: up
to eight ranks need one hop, a thousand need four (Bruck et al., 1997, with radix 8). Gloo's own collectives use a ring,
with as many hops as ranks; `benchmarks/ranks/agreement.py` measures both.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.group import Pending

RADIX = 8


class AsyncAllGather:
    """An all-gather of equally shaped CPU tensors that begins at construction and completes in `wait`.

    what: named in errors. radix: number of ranks that have exchanged values after one hop. All ranks must begin their
    all-gathers in the same order.
    """

    def __init__(self, comm: Comm, tensor: Tensor, what: str, radix: int = RADIX) -> None:
        self._comm = comm
        self._radix = radix
        self._what = what
        self._held = tensor[None].clone()  # the values of this rank, of the next rank, ...
        self._round = 0
        self._pending: list[Pending] = []
        self._arriving: list[Tensor] = []
        self._begin_round()

    def wait(self) -> Tensor:
        """Return all tensors, [ranks, *shape of tensor], by rank."""
        while self._pending:
            for pending in self._pending:
                pending.wait()
            self._held = torch.cat([self._held, *self._arriving])
            self._round += 1
            self._begin_round()
        return self._held.roll(self._comm.rank, 0)

    def _begin_round(self) -> None:
        rank, size, group = self._comm.rank, self._comm.size, self._comm.world
        held = len(self._held)
        distances = range(held, min(self._radix * held, size), held)
        counts = [min(held, size - distance) for distance in distances]
        self._arriving = [self._held.new_empty(count, *self._held.shape[1:]) for count in counts]
        self._pending = [
            group.receive(rows, (rank + distance) % size, self._round, self._what)
            for distance, rows in zip(distances, self._arriving)
        ]
        self._pending += [
            group.send(self._held[:count], (rank - distance) % size, self._round, self._what)
            for distance, count in zip(distances, counts)
        ]


def all_gather_object(comm: Comm, value: Any) -> list[Any]:
    """Return every rank's JSON value, by rank; for infrequent use."""
    text = json.dumps(value).encode()
    lengths = AsyncAllGather(comm, torch.tensor([len(text)]), "lengths of values").wait().flatten().tolist()
    own = torch.zeros(max(lengths), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = AsyncAllGather(comm, own, "values of all ranks").wait()
    return [json.loads(bytes(row[:length].numpy().tobytes())) for row, length in zip(rows, lengths)]


def any_rank(comm: Comm, flag: bool, what: str) -> bool:
    """Return True on all ranks if the flag is set on any rank. what: named in errors."""
    value = torch.tensor([float(flag)])
    comm.world.max_(value, what).wait()
    return bool(value.item())
