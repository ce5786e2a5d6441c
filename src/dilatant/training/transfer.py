"""State on the move: every rank gets, by logical name, what it must hold next from ranks that hold it now.

Who holds what is asked, not remembered: ranks exchange inventories first. So the same few lines serve a new plan in
the same processes, a node that joins, and the survivors of one that left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object

State = dict[str, dict[str, Tensor]]
"""Kind of state ("weight", "exp_avg", ...) → logical name → tensor."""

CHUNK_BYTES = 64 << 20


class MissingState(RuntimeError):
    """No rank holds what some rank needs; the message lists the names."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor on its way."""

    kind: str
    name: str
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str


def move_state(comm: Comm, have: Mapping[str, Mapping[str, Tensor]], need: Collection[str]) -> State:
    """The state of the weights in `need`, of every kind that anybody holds for them; called by all ranks.

    have: what this rank holds now; it is not changed, and what is kept is not copied. A kind that nobody has for a
    name (moments of what never trained) is absent. Raises MissingState on every rank when a "weight" is nowhere.
    """
    own = {
        kind: {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}
        for kind, tensors in have.items()
    }
    answers = all_gather_object(comm, {"have": own, "need": sorted(need)})
    copies = plan_copies(answers)
    received = dict(_carry_out(comm, have, copies))
    wanted = set(need)
    state: State = {}
    for answer in answers:
        for kind in answer["have"]:
            state.setdefault(kind, {})
    for kind, tensors in have.items():
        state[kind] = {name: tensor for name, tensor in tensors.items() if name in wanted}
    for copy, tensor in received.items():
        state[copy.kind][copy.name] = tensor
    return state


def plan_copies(answers: list[Any]) -> list[Copy]:
    """Which tensors travel from whom to whom: the same list from the same answers, sources sharing the bytes evenly.

    answers: by rank, {"have": kind → name → [shape, dtype], "need": names}. Raises MissingState.
    """
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    what: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, answer in enumerate(answers):
        for kind, tensors in answer["have"].items():
            for name, (shape, dtype) in tensors.items():
                holders[kind, name].append(rank)
                what[kind, name] = tuple(shape), dtype
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, name in holders:
        kinds[name].append(kind)
    needed = {name for answer in answers for name in answer["need"]}
    missing = sorted(name for name in needed if "weight" not in kinds[name])
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise MissingState(f"no rank holds {listed}; go on from the last checkpoint")
    sent = [0] * len(answers)
    copies = []
    for target, answer in enumerate(answers):
        for name in answer["need"]:
            for kind in kinds[name]:
                sources = holders[kind, name]
                if target in sources:
                    continue
                shape, dtype = what[kind, name]
                source = min(sources, key=lambda rank: (sent[rank], rank))
                size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                # A holder may not be asked for everything just because its tensors are small.
                sent[source] += size + 1024
                copies.append(Copy(kind, name, source, target, shape, dtype))
    return copies


@torch.no_grad()
def _carry_out(
    comm: Comm, have: Mapping[str, Mapping[str, Tensor]], copies: list[Copy]
) -> Iterator[tuple[Copy, Tensor]]:
    """Send and receive, pair by pair of ranks in one byte stream cut into chunks; yields what arrives here."""
    pairs: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        pairs[copy.source, copy.target].append(copy)
    # Every rank opens its pairs in the same order of all pairs, so nobody waits in a circle.
    mine = {pair: pairs[pair] for pair in sorted(pairs) if comm.rank in pair}
    groups = {pair: comm.edge(f"state/{pair[0]}-{pair[1]}", *pair) for pair in mine}
    streams = {pair: list(_chunks(members)) for pair, members in mine.items()}
    for turn in range(max((len(chunks) for chunks in streams.values()), default=0)):
        pending = []
        arriving = []
        for pair, chunks in streams.items():
            if turn >= len(chunks):
                continue
            source, target = pair
            what = f"state from rank {source} to rank {target}"
            if source == comm.rank:
                buffer = torch.cat(
                    [_bytes(have[c.kind][c.name].to(comm.device)) for c in chunks[turn]]
                    or [torch.empty(0, dtype=torch.uint8)]
                )
                pending.append(groups[pair].send(buffer, target, what=what))
            else:
                total = sum(_size(copy) for copy in chunks[turn])
                buffer = torch.empty(total, dtype=torch.uint8, device=comm.device)
                pending.append(groups[pair].receive(buffer, source, what=what))
                arriving.append((buffer, chunks[turn]))
        for transfer in pending:
            transfer.wait()
        for buffer, members in arriving:
            parts = buffer.split([_size(copy) for copy in members])
            for copy, part in zip(members, parts, strict=True):
                dtype = getattr(torch, copy.dtype)
                # Cloned: a part of the buffer may not be aligned for its dtype, and would keep the whole alive.
                yield copy, part.clone().view(dtype).view(copy.shape)


def _chunks(copies: list[Copy]) -> Iterator[list[Copy]]:
    chunk: list[Copy] = []
    total = 0
    for copy in copies:
        if chunk and total + _size(copy) > CHUNK_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(copy)
        total += _size(copy)
    if chunk:
        yield chunk


def _size(copy: Copy) -> int:
    return torch.Size(copy.shape).numel() * getattr(torch, copy.dtype).itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
