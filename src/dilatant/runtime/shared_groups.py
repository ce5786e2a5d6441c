"""The groups that sum gradients and share optimizer state: one for every set of ranks, whatever it is used for."""

from __future__ import annotations

from collections.abc import Iterable

from dilatant.comm.comm import Comm
from dilatant.comm.group import Group
from dilatant.plan.buckets import BucketShare


def open_groups(comm: Comm, shares: Iterable[BucketShare]) -> None:
    """Open every group that `shares` need, in one order everywhere, so that no two ranks wait for each other."""
    wanted = set()
    for share in shares:
        wanted |= {share.sharing, share.alike} if share.even else {share.sharing, share.bucket.ranks}
    for ranks in sorted(wanted):
        if len(ranks) > 1:
            group_of(comm, ranks)


def group_of(comm: Comm, ranks: tuple[int, ...]) -> Group:
    return comm.group("layers/" + "-".join(map(str, ranks)), ranks)
