"""Check that replicas are equal: compare weights and optimizer state between the ranks that hold the same boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShard
from dilatant.runtime.state.shared_groups import group_of

_ROUNDING = 1e-9
"""Relative tolerance of sums of up to 1e9 positive float64 in different orders; unequal weights differ far more."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparedTensors:
    """Tensors that must be equal. what: their name in errors. tensor_of: cell → this rank's part of the tensor, or None
    (then None on all ranks). is_state: optimizer state is compared between the owners of the same shard, weights
    between all holders."""

    what: str
    tensor_of: Callable[[Box], Tensor | None]
    is_state: bool = False


@dataclass(slots=True, eq=False)
class _Sums:
    """Checksums of this rank's part of a bucket, as [sums, -sums]; the maximum over ranks yields both extremes."""

    compared: ComparedTensors
    boxes: tuple[Box, ...]
    rounds: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    widest: Tensor


@torch.no_grad()
def require_equal(comm: Comm, shares: Iterable[BucketShard], everything: Sequence[ComparedTensors]) -> None:
    """Raise UserError naming the tensors that differ between replicas; summing their gradients would be meaningless.

    Compares two checksums per tensor, which differ for other random weights or files, in one message per set of ranks.
    Called by all ranks.
    """
    sums = [made for each in everything for share in shares if (made := _sums(comm, share, each)) is not None]
    for number in range(max((len(each.rounds) for each in sums), default=0)):
        together: dict[tuple[int, ...], list[_Sums]] = {}
        for each in sums:
            if number < len(each.rounds):
                together.setdefault(each.rounds[number], []).append(each)
        started = []
        for ranks, members in together.items():
            joined = torch.cat([each.widest for each in members])
            what = f"comparing {members[0].boxes[0].name} and others"
            started.append((members, joined, group_of(comm, ranks).max_(joined, what)))
        for members, joined, pending in started:
            pending.wait()
            for each, part in zip(members, joined.split([each.widest.numel() for each in members])):
                each.widest = part
    problems: dict[str, list[str]] = {}
    for each in sums:
        largest, smallest = each.widest[: len(each.widest) // 2], -each.widest[len(each.widest) // 2 :]
        # Written so that NaN compares as different.
        same = (largest - smallest <= _ROUNDING * largest.abs()).view(-1, 2).all(1).tolist()
        unlike = [box for box, equal in zip(each.boxes, same) if not equal]
        if unlike:
            problems.setdefault(each.compared.what, []).extend(
                f"{box.key!r} on ranks {list(each.ranks)}" for box in unlike
            )
    if problems:
        what, found = next(iter(problems.items()))
        raise UserError(
            f"{what} that replicas share differ between ranks: {', '.join(found[:4])}"
            + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            + "; every rank must build the model with the same seed and read the same files"
        )


def _sums(comm: Comm, share: BucketShard, compared: ComparedTensors) -> _Sums | None:
    """Return the checksums of a share, or None if no other rank holds any of it."""
    boxes = share.own if compared.is_state else share.bucket.boxes
    if compared.is_state:
        rounds: tuple[tuple[int, ...], ...] = (share.alike,)
    else:
        rounds = (share.sharing, share.alike) if share.even else (share.bucket.ranks,)
    rounds = tuple(ranks for ranks in rounds if len(ranks) > 1)
    if not rounds or not boxes:
        return None
    sums = torch.cat([_magnitudes(compared.tensor_of(box), comm.device) for box in boxes])
    ranks = share.alike if compared.is_state else share.bucket.ranks
    return _Sums(compared, boxes, rounds, ranks, torch.cat([sums, -sums]))


def _magnitudes(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Sum absolute values and squares: float64 [2], with little memory beyond the tensor's own; -1 for no tensor."""
    total = torch.full((2,), -1.0 if tensor is None else 0.0, dtype=torch.float64, device=device)
    if tensor is None:
        return total
    for piece in tensor.flatten().split(1 << 24):
        wide = piece.double()
        total += torch.stack([wide.abs().sum(), wide.square().sum()]).to(device)  # state may be on the host
    return total
