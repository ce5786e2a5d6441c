"""Proof that ranks which hold the same hold it alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.group import Pending
from dilatant.config.errors import UserError
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BucketShare
from dilatant.runtime.shared_groups import group_of

_ROUNDING = 1e-9
"""Between sums of up to 1e9 positive float64 that ranks add in different orders; unlike draws differ far more."""


@torch.no_grad()
def require_equal(
    comm: Comm,
    shares: Iterable[BucketShare],
    tensor_of: Callable[[Box], Tensor | None],
    what: str,
    state: bool = False,
) -> None:
    """Raises UserError naming what differs: gradients would be summed all the same, and mean nothing.

    tensor_of: what this rank holds of a cell; there may be none, then on all ranks. what: named in the error.
    Compares two sums for each, which unlike draws and unlike files do not share. Of weights all holders are compared;
    with `state`, those that own the same share. Called by all ranks.
    """
    started: list[tuple[BucketShare, tuple[int, ...], tuple[Box, ...], Tensor, Pending]] = []
    for share in shares:
        boxes = share.own if state else share.bucket.boxes
        if state:
            rounds = [share.alike]
        else:
            rounds = [share.sharing, share.alike] if share.even else [share.bucket.ranks]
        rounds = [ranks for ranks in rounds if len(ranks) > 1]
        if not rounds or not boxes:
            continue
        widest = torch.cat([_magnitudes(tensor_of(box), comm.device) for box in boxes])
        widest = torch.cat([widest, -widest])
        for ranks in rounds:
            pending = group_of(comm, ranks).max_(widest, f"comparing {boxes[0].name} and others")
            if ranks is not rounds[-1]:
                pending.wait()
        started.append((share, rounds[-1], boxes, widest, pending))
    problems = []
    for share, ranks, boxes, widest, pending in started:
        pending.wait()
        largest, smallest = widest[: len(widest) // 2], -widest[len(widest) // 2 :]
        # Written so that what is not a number differs.
        same = (largest - smallest <= _ROUNDING * largest.abs()).view(-1, 2).all(1).tolist()
        compared = ranks if state else share.bucket.ranks
        problems += [f"{box.key!r} on ranks {list(compared)}" for box, equal in zip(boxes, same) if not equal]
    if problems:
        raise UserError(
            f"{what} that replicas share differ between ranks: {', '.join(problems[:4])}"
            + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
            + "; every rank must build the model with the same seed and read the same files"
        )


def _magnitudes(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Sums of absolute values and of squares: float64 [2], in little memory beside the tensor's own; -1 for none."""
    total = torch.full((2,), -1.0 if tensor is None else 0.0, dtype=torch.float64, device=device)
    if tensor is None:
        return total
    for piece in tensor.flatten().split(1 << 24):
        wide = piece.double()
        total += torch.stack([wide.abs().sum(), wide.square().sum()]).to(device)  # state may be on the host
    return total
