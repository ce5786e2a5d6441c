"""State transfer: copy boxes by name from several holders to the ranks that need them, checked by hash."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.plan.boxes import Box
from dilatant.training.checkpoints.checkpoint import BoxPiece

_HASH_BYTES = 16
ROUND_BYTES = 128 << 20
"""Bytes that a rank sends and receives at once, in buffers beside the state itself."""


class StateLost(Exception):
    """No rank in this generation holds some of the state; the message names it."""


class TransferCorrupted(RuntimeError):
    """Received data differs from what was sent."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A cell of a tensor to be copied from one rank to another."""

    cell: Box
    source: int
    target: int


def plan_copies(held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]]) -> tuple[Copy, ...]:
    """Plan the copies that give every rank its wanted boxes; equal arguments yield the same plan on all ranks.

    held, wanted: by rank. A cell's source is the target itself if it holds the cell, else the holder that has sent
    least. Raises StateLost.
    """
    holders: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders[box.name].append((rank, box))
    own = [set(boxes) for boxes in held]
    sent: Counter[int] = Counter()
    copies: list[Copy] = []
    lost: dict[str, None] = {}
    for target, boxes in enumerate(wanted):
        for box in boxes:
            if target < len(own) and box in own[target]:
                copies += [Copy(cell, target, target) for cell in box.cells()]
                continue
            found = _cover(box, target, holders[box.name], sent)
            if sum(cell.size for _, cell in found) != box.size:
                lost[box.name] = None
            for source, cell in found:
                copies.append(Copy(cell, source, target))
                if source != target:
                    sent[source] += cell.size
    if lost:
        names = list(lost)
        raise StateLost(", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    return tuple(copies)


@torch.no_grad()
def transfer(comm: Comm, held: Sequence[BoxPiece], wanted: Sequence[BoxPiece], round_bytes: int = ROUND_BYTES) -> int:
    """Fill the `wanted` pieces from the pieces that all ranks have `held`; called by all ranks. Returns the bytes
    received from others. round_bytes: see `ROUND_BYTES`.

    Raises StateLost on all ranks, before anything is filled, and TransferCorrupted.
    """
    own = [[piece.box for piece in pieces] for pieces in (held, wanted)]
    texts = [msgspec.json.encode(boxes).decode() for boxes in own]
    gathered = all_gather_object(comm, texts)
    read = dict(zip(texts, own))  # most ranks hold and want the same
    for text in {text for two in gathered for text in two} - read.keys():
        read[text] = msgspec.json.decode(text, type=list[Box])
    copies = plan_copies([read[has] for has, _ in gathered], [read[wants] for _, wants in gathered])
    source_of, target_of = finder(held), finder(wanted)

    for copy in copies:
        if copy.source == copy.target == comm.rank:
            target_of(copy.cell).copy_(source_of(copy.cell))
    rounds = _rounds(copies, comm.rank, round_bytes)
    return sum(_exchange(comm, source_of, target_of, *each) for each in rounds)


def _exchange(
    comm: Comm,
    source_of: Callable[[Box], Tensor],
    target_of: Callable[[Box], Tensor],
    outgoing: Mapping[int, Sequence[Box]],
    incoming: Mapping[int, Sequence[Box]],
) -> int:
    """Send and receive the cells of one round; returns the bytes received."""
    buffers = {
        source: torch.empty(sum(_num_bytes(target_of(cell)) for cell in cells) + _HASH_BYTES, dtype=torch.uint8)
        for source, cells in incoming.items()
    }
    pending = [comm.world.receive(buffer, source, what="state of a layer") for source, buffer in buffers.items()]
    pending += [
        comm.world.send(pack([source_of(cell) for cell in cells]), target, what="state of a layer")
        for target, cells in outgoing.items()
    ]
    for each in pending:
        each.wait()
    for source, buffer in buffers.items():
        unpack(buffer, source, [target_of(cell) for cell in incoming[source]])
    return sum(buffer.numel() - _HASH_BYTES for buffer in buffers.values())


def _rounds(
    copies: Sequence[Copy], rank: int, round_bytes: int
) -> list[tuple[dict[int, list[Box]], dict[int, list[Box]]]]:
    """Divide the copies between ranks into rounds, equally on all ranks: a rank sends and receives up to `round_bytes`,
    or one larger cell, in each. Returns those of `rank`: target → cells, source → cells."""
    last, loads = Counter[int](), Counter[int]()  # by rank
    rounds: dict[int, tuple[dict[int, list[Box]], dict[int, list[Box]]]] = {}
    for copy in copies:
        size, ends = 4 * copy.cell.size, (copy.source, copy.target)  # numbers have at most four bytes
        if copy.source == copy.target:
            continue
        number = max(last[end] for end in ends)
        if any(last[end] == number and 0 < loads[end] > round_bytes - size for end in ends):
            number += 1
        for end in ends:
            loads[end] = size + (loads[end] if last[end] == number else 0)
            last[end] = number
        if rank in ends:
            outgoing, incoming = rounds.setdefault(number, ({}, {}))
            if copy.source == rank:
                outgoing.setdefault(copy.target, []).append(copy.cell)
            else:
                incoming.setdefault(copy.source, []).append(copy.cell)
    return list(rounds.values())


def _cover(
    wanted: Box, target: int, holders: Sequence[tuple[int, Box]], sent: Mapping[int, int]
) -> list[tuple[int, Box]]:
    """Return (source, cell) for the cells of a box; parts that no rank holds are omitted."""
    if not wanted.size:
        return []
    order = sorted(holders, key=lambda holder: (holder[0] != target, sent.get(holder[0], 0), holder[0]))
    found: list[tuple[int, Box]] = []
    missing = list(wanted.cells())
    for rank, box in order:
        left: list[Box] = []
        for cell in missing:
            both = cell.meet(box) if cell.whole == box.whole else None
            if both is None:
                left.append(cell)
                continue
            found += [(rank, piece) for piece in both.cells()]
            left += _without(cell, both)
        missing = left
        if not missing:
            break
    return found


def _without(cell: Box, taken: Box) -> list[Box]:
    """Return the rest of a cell without `taken`, as cells."""
    left = [cell]
    for hole in taken.cells():
        left = [piece for each in left for piece in _cut(each, hole)]
    return left


def _cut(cell: Box, hole: Box) -> list[Box]:
    both = cell.meet(hole)
    if both is None:
        return [cell]
    pieces = []
    rest = [spans[0] for spans in cell.intervals]
    for dim, ((start, end),) in enumerate(both.intervals):
        for span in ((rest[dim][0], start), (end, rest[dim][1])):
            if span[0] < span[1]:
                intervals = tuple((span if i == dim else each,) for i, each in enumerate(rest))
                pieces.append(Box(cell.name, cell.whole, intervals))
        rest[dim] = (start, end)
    return pieces


def finder(pieces: Sequence[BoxPiece]) -> Callable[[Box], Tensor]:
    """Return a function that returns the part of the pieces' tensors that a cell covers."""
    by_name: dict[str, list[BoxPiece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.box.name].append(piece)

    def find(cell: Box) -> Tensor:
        for piece in by_name[cell.name]:
            with suppress(ValueError):  # another piece contains it
                return piece.tensor[piece.box.place(cell)]
        raise AssertionError(f"{cell.key} was planned, and is not here")

    return find


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the tensors, followed by their hash."""
    buffer, start = torch.empty(sum(map(_num_bytes, tensors)) + _HASH_BYTES, dtype=torch.uint8), 0
    for tensor in tensors:
        own = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + own.numel()] = own
        start += own.numel()
    buffer[start:] = torch.frombuffer(bytearray(_hash(buffer[:start])), dtype=torch.uint8)
    return buffer


def unpack(buffer: Tensor, source: int, targets: Sequence[Tensor]) -> None:
    """Fill `targets` from what `pack` made on rank `source`. Raises TransferCorrupted."""
    data, start = buffer[:-_HASH_BYTES], 0
    if _hash(data) != buffer[-_HASH_BYTES:].numpy().tobytes():
        raise TransferCorrupted(f"state from rank {source} was changed on its way")
    for target in targets:
        size = _num_bytes(target)
        part = data[start : start + size].clone()  # aligned
        target.copy_(part.view(target.dtype).view(target.shape))
        start += size


def _hash(data: Tensor) -> bytes:
    # It detects damage. Against an attacker on the network, a hash that he can compute is no help, however slow it is.
    return xxhash.xxh3_128_digest(data.numpy().data)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
