"""A rank's trainable weights: those it updates, their gradient sync, and the check that replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import Zero
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import BUCKET_BYTES, Bucket, BucketShard, Format, Holdings, make_buckets, shard_of
from dilatant.runtime.state.gradient_sync import GradientSync
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.sharded_stage import ShardedStage
from dilatant.runtime.state.shared_groups import SHARDS, group_of, open_groups

_ROUNDING = 1e-9
"""Relative tolerance of sums of up to 1e9 positive float64 in different orders; unequal weights differ far more."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Distribution of optimizer state over ranks. zero: which ranks shard the state of a weight, see
    `cost.memory.Zero`; node_of: rank → node (default: detected). keeps_masters: hold fp32 masters of owned bf16
    weights. bucket_bytes: size of the buckets in which gradients are summed. shard: unit → what these ranks shard
    besides the state. uncut: weights whose state no rank may own in part."""

    zero: Zero = "none"
    node_of: Sequence[int] | None = None
    keeps_masters: bool = True
    bucket_bytes: int = BUCKET_BYTES
    shard: Mapping[str, Shard] = field(default_factory=dict)
    uncut: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class BucketedWeights:
    """A rank's trainable weights. shares: its parts of buckets. owned: boxes it updates. sync: their gradient sync.
    fixed: boxes of frozen weights that are sharded. sharded: the parts of buckets in `ShardedStage`: those of `shares`
    whose gradients are summed in every backward, and those of frozen weights. stages: number of a stage here → its
    sharded weights, once they are released."""

    shares: tuple[BucketShard, ...]
    owned: OwnedWeights
    sync: GradientSync
    fixed: OwnedWeights
    sharded: tuple[BucketShard, ...] = ()
    stages: dict[int, ShardedStage] = field(default_factory=dict)

    @torch.no_grad()
    def require_equal(self, state: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Check that all holders of a weight have equal values, and all owners of a box equal `state`. `state` is kind
        → key → tensor, shaped like the owned weight, or absent on all ranks. Raises UserError naming the tensors that
        differ between replicas; summing their gradients would be meaningless.

        Compares two checksums per tensor, which differ for other random weights or files, in one message per set of
        ranks. Called by all ranks.
        """
        comm = self.owned.comm
        # A released weight is only in the owned parameters.
        apart = self.owned.sharded if self.stages else frozenset()
        sums = [
            _sums(comm, share, "weights", self.owned.view, False)
            if apart.isdisjoint(share.bucket.names)
            else _sums(comm, share, "weights", lambda box: self.owned.parameters[box.key], True)
            for share in self.shares
        ]
        sums += [
            _sums(comm, share, kind, partial(self._state_of, tensors), True)
            for kind, tensors in (state or {}).items()
            for share in self.shares
        ]
        compared = [each for each in sums if each is not None]
        for number in range(max((len(each.rounds) for each in compared), default=0)):
            together: dict[tuple[int, ...], list[_Sums]] = {}
            for each in compared:
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
        for each in compared:
            largest, smallest = each.widest[: len(each.widest) // 2], -each.widest[len(each.widest) // 2 :]
            # Written so that NaN compares as different.
            same = (largest - smallest <= _ROUNDING * largest.abs()).view(-1, 2).all(1).tolist()
            unlike = [box for box, equal in zip(each.boxes, same) if not equal]
            if unlike:
                problems.setdefault(each.what, []).extend(f"{box.key!r} on ranks {list(each.ranks)}" for box in unlike)
        if problems:
            what, found = next(iter(problems.items()))
            raise UserError(
                f"{what} that replicas share differ between ranks: {', '.join(found[:4])}"
                + (f" and {len(found) - 4} more" if len(found) > 4 else "")
                + "; every rank must build the model with the same seed and read the same files"
            )

    def _state_of(self, tensors: Mapping[str, Tensor], box: Box) -> Tensor | None:
        key = box.key if box.key in self.owned.parameters else self.owned.held[box.name].key
        held = tensors.get(key)
        return None if held is None else held[self.owned.boxes[key].place(box)]


def bucket_weights(
    comm: Comm,
    weights: Mapping[str, nn.Parameter],
    stages_of: Mapping[str, Collection[int]],
    holdings: Holdings,
    formats: Mapping[str, Format],
    layout: StateLayout,
    exact: Mapping[str, Tensor] | None = None,
    before: BucketedWeights | None = None,
    apart: Mapping[str, str] = MappingProxyType({}),
    frozen: Set[str] = frozenset(),
    read: Mapping[str, Box] = MappingProxyType({}),
) -> BucketedWeights:
    """Bucket the weights for ownership, gradient sync and sharding; called by all ranks, on which only `weights` and
    `stages_of` differ.

    weights: the trainable ones and those of `frozen` held here, by logical name. stages_of: this rank's stages that use
    them. formats: of every such weight on any rank. layout: see `shard_of`; without node_of all ranks are on one node.
    exact, read: see `OwnedWeights`. before: those of the last generation. apart: weight that may be sharded → its
    layer. frozen: weights that do not train, of units whose weights are sharded. Raises UserError if nothing of a unit
    can be sharded.
    """
    shares, sharded = cut_shares(comm, holdings, formats, layout, apart, frozen)
    apart_ids = {*map(id, sharded)}
    in_step = tuple(share for share in shares if id(share) not in apart_ids)
    open_groups(comm, shares)
    open_groups(comm, sharded, SHARDS)
    gathered = {unit for unit, how in layout.shard.items() if how.startswith("weights")}
    names = {name for share in sharded for name in share.bucket.names if name.partition(".")[0] in gathered}
    trained = {name: weight for name, weight in weights.items() if name not in frozen}
    held = {name: weight for name, weight in weights.items() if name in frozen & names}
    masters, earlier = layout.keeps_masters, (None, None) if before is None else (before.owned, before.fixed)
    owned = OwnedWeights(comm, trained, holdings, shares, exact, masters, earlier[0], names - frozen)
    of_fixed = tuple(share for share in sharded if share.bucket.names[0] in frozen)
    duplicates = frozenset(name for name in trained if comm.rank in holdings[name].duplicates)
    using = {name: frozenset(stages_of[name]) for name in trained}
    sync = GradientSync(comm, owned, using, in_step, duplicates)
    fixed = OwnedWeights(comm, held, holdings, of_fixed, exact, False, earlier[1], held, read)
    return BucketedWeights(shares, owned, sync, fixed, sharded)


def cut_shares(
    comm: Comm,
    holdings: Holdings,
    formats: Mapping[str, Format],
    layout: StateLayout,
    apart: Mapping[str, str],
    frozen: Set[str],
) -> tuple[tuple[BucketShard, ...], tuple[BucketShard, ...]]:
    """Return this rank's parts of the buckets of weights that train, and of all that are sharded, frozen ones last; see
    `bucket_weights`."""
    nodes = [0] * comm.size if layout.node_of is None else layout.node_of
    buckets = make_buckets(holdings, formats, formats.keys() - frozen, layout.bucket_bytes, apart, layout.uncut)
    fixed = make_buckets(holdings, formats, frozen, layout.bucket_bytes, apart)
    layers = _divided_layers([*buckets, *fixed], layout, nodes, apart)
    shares, of_fixed = (
        tuple(shard_of(bucket, comm.rank, layout.zero, nodes) for bucket in each if comm.rank in bucket.ranks)
        for each in (buckets, fixed)
    )
    return shares, tuple(each for each in (*shares, *of_fixed) if apart.get(each.bucket.names[0]) in layers)


def _divided_layers(
    buckets: Sequence[Bucket], layout: StateLayout, nodes: Sequence[int], apart: Mapping[str, str]
) -> set[str]:
    """Return the layers in `apart` all of whose buckets are divided, equally on all ranks. Raises UserError on every
    rank if a requested unit has none."""
    whole: set[str] = set()
    for bucket in buckets:
        share = shard_of(bucket, bucket.ranks[0], layout.zero, nodes)
        if not (share.is_divided and share.even):
            whole.add(apart.get(bucket.names[0], ""))
    found = set(apart.values()) - whole
    units = {name.partition(".")[0] for name, layer in apart.items() if layer in found}
    if lacking := sorted({unit for unit, how in layout.shard.items() if how != "none"} - units):
        raise UserError(
            f"train.shard: no layer of {lacking[0]} that one stage alone holds is on equally many ranks of every node, "
            "and on more than one; set train.zero: all, or leave train.shard out"
        )
    return found


@dataclass(slots=True, eq=False)
class _Sums:
    """Checksums of this rank's part of a bucket, as [sums, -sums]; the maximum over ranks yields both extremes. what:
    name of the tensors in errors."""

    what: str
    boxes: tuple[Box, ...]
    rounds: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    widest: Tensor


def _sums(
    comm: Comm, share: BucketShard, what: str, tensor_of: Callable[[Box], Tensor | None], is_state: bool
) -> _Sums | None:
    """Return the checksums of this rank's tensors of a share, or None if no other rank holds any of it. is_state:
    optimizer state is compared between the owners of the same shard, weights between all holders."""
    boxes = share.own if is_state else share.bucket.boxes
    if is_state:
        rounds: tuple[tuple[int, ...], ...] = (share.alike,)
    else:
        rounds = (share.sharing, share.alike) if share.even else (share.bucket.ranks,)
    rounds = tuple(ranks for ranks in rounds if len(ranks) > 1)
    if not rounds or not boxes:
        return None
    sums = torch.cat([_magnitudes(tensor_of(box), comm.device) for box in boxes])
    ranks = share.alike if is_state else share.bucket.ranks
    return _Sums(what, boxes, rounds, ranks, torch.cat([sums, -sums]))


def _magnitudes(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Sum absolute values and squares: float64 [2], with little memory beyond the tensor's own; -1 for no tensor."""
    total = torch.full((2,), -1.0 if tensor is None else 0.0, dtype=torch.float64, device=device)
    if tensor is None:
        return total
    for piece in tensor.flatten().split(1 << 24):
        wide = piece.double()
        total += torch.stack([wide.abs().sum(), wide.square().sum()]).to(device)  # state may be on the host
    return total
