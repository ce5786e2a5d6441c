"""Process groups: one for each set of ranks that sum gradients or shard optimizer state, and those within a stage."""

from __future__ import annotations

from collections.abc import Iterable

from dilatant.comm.comm import Comm
from dilatant.comm.group import Group
from dilatant.plan.buckets import BucketShard
from dilatant.plan.plan import Stage

LAYERS = "layers"
SHARDS = "shards"
"""Purposes of groups: buckets that are summed and gathered once per step, and those of sharded weights, which are used
in every action."""


def open_groups(comm: Comm, shares: Iterable[BucketShard], purpose: str = LAYERS) -> None:
    """Open every group that `shares` need, in the same order on all ranks, which prevents deadlock."""
    wanted = set()
    for share in shares:
        wanted |= {share.sharing, share.alike} if share.even else {share.sharing, share.bucket.ranks}
    for ranks in sorted(wanted):
        if len(ranks) > 1:
            group_of(comm, ranks, purpose)


def group_of(comm: Comm, ranks: tuple[int, ...], purpose: str = LAYERS) -> Group:
    """Return the group of `ranks`. Collectives of different purposes may interleave differently on its members, so
    each purpose has communicators of its own."""
    return comm.group(f"{purpose}/" + "-".join(map(str, ranks)), ranks)


def group_in(comm: Comm, name: str, stage: Stage, size: int) -> Group:
    """Return the group of `size` consecutive ranks of a stage that contains this rank: of tp ranks, "tensor"."""
    first = stage.ranks.index(comm.rank) // size * size
    ranks = stage.ranks[first : first + size]
    return comm.group(f"{name}/" + "-".join(map(str, ranks)), ranks)
