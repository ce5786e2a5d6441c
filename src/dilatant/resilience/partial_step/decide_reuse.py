"""Partial-step recovery: after ranks are lost, decide which gradients of the step to reuse, and who adopts them.

All ranks decide identically from equal reports. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dilatant.config.degrees import Degrees
from dilatant.plan.plan import Plan, Stage
from dilatant.runtime.step.partial_step import (
    AccumulationReport,
    Layer,
    LayerShare,
    LayerWeights,
    LossShare,
    Move,
    ReusePlan,
)

Reports = Sequence[tuple[int, AccumulationReport]]


def decide_reuse(
    reports: Sequence[AccumulationReport | None],
    step: int,
    plan: Plan,
    weights: LayerWeights,
    gone: Sequence[tuple[int, AccumulationReport]] = (),
) -> ReusePlan | None:
    """Decide which gradients of step `step` are reused, and which rank of `plan` adopts them; None if nothing is.

    reports: of each new rank, None without one. gone: (rank that acts for it, report) of each departed rank; moves
    number their sources from `len(reports)`. Any one-rank stage with the layer can adopt the gradients of a one-rank
    stage; those of several ranks are reused only if the same ranks form a stage of equal degrees again.
    """
    all_reports = [*reports, *(each for _, each in gone)]
    having = [(rank, each) for rank, each in enumerate(all_reports) if each is not None and each.step == step]
    if not having or len({each.draws for _, each in having}) > 1:
        return None
    new_of = {each.rank: rank for rank, each in having}
    shares = _complete_shares(having, new_of)
    targets = _targets(shares, new_of, plan)
    shares = _reusable_shares(shares, targets, weights, _tied_together(plan, weights))
    kept: dict[Layer, Counter[int]] = defaultdict(Counter)
    for share in shares:
        kept[share.layer].update(share.samples)
    if any(max(counts.values(), default=0) > 1 for counts in kept.values()):  # would be added twice
        return None
    unused = {rank: each.unused for rank, each in having}
    moves: dict[Move, None] = {}
    merged: dict[tuple[Layer, tuple[int, ...], Degrees], set[int]] = defaultdict(set)
    for share in shares:
        target = targets[share.layer, share.ranks]
        assert target is not None
        merged[share.layer, target, share.degrees].update(share.samples)
        for old, new in zip(share.ranks, target, strict=True):
            for name in sorted(weights[share.layer[0]][share.layer[1]] - unused[new_of[old]]):
                moves[Move(name, new_of[old], new)] = None
    layers = tuple(
        LayerShare(layer, ranks, degrees, tuple(sorted(samples))) for (layer, ranks, degrees), samples in merged.items()
    )
    acting = [*range(len(reports)), *(rank for rank, _ in gone)]
    losses = tuple(
        (acting[rank], replace(share, ranks=tuple(acting[new_of[old]] for old in share.ranks)))
        for rank, share in _complete_losses(having, new_of)
        if rank < len(reports) or len(share.ranks) == 1
    )
    if _has_duplicate_losses(losses):
        losses = ()
    return ReusePlan(step, having[0][1].draws, layers, losses, tuple(moves)) if layers else None


def _complete_shares(having: Reports, new_of: Mapping[int, int]) -> list[LayerShare]:
    """Return the shares that all ranks of their stage report identically."""
    reporting: dict[LayerShare, set[int]] = defaultdict(set)
    for _, each in having:
        for share in each.layers:
            if share.samples:
                reporting[share].add(each.rank)
    return [share for share, ranks in reporting.items() if ranks == {*share.ranks} and ranks <= new_of.keys()]


def _complete_losses(having: Reports, new_of: Mapping[int, int]) -> list[tuple[int, LossShare]]:
    reporting: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for _, each in having:
        for share in each.losses:
            reporting[_loss_key(share)].add(each.rank)
    return [
        (rank, share)
        for rank, each in having
        for share in each.losses
        if reporting[_loss_key(share)] == {*share.ranks} and {*share.ranks} <= new_of.keys()
    ]


def _has_duplicate_losses(losses: Sequence[tuple[int, LossShare]]) -> bool:
    counts: Counter[tuple[str, int, int]] = Counter()
    for share in {_loss_key(share): share for _, share in losses}.values():
        layers = range(share.first, share.end)
        counts.update((share.unit, layer, sample) for layer in layers for sample in share.samples)
    return max(counts.values(), default=0) > 1


def _loss_key(share: LossShare) -> tuple[Any, ...]:
    return share.unit, share.first, share.end, share.ranks, share.samples


def _targets(
    shares: Sequence[LayerShare], new_of: Mapping[int, int], plan: Plan
) -> dict[tuple[Layer, tuple[int, ...]], tuple[int, ...] | None]:
    """Return (layer, old ranks) → ranks that adopt these gradients, unchanged if possible; None if no rank can."""
    holders: dict[Layer, list[Stage]] = defaultdict(list)
    for placed in plan.stages():
        for number in range(placed.stage.first, placed.stage.end):
            holders[placed.unit, number].append(placed.stage)
    taken: Counter[int] = Counter()
    adopters: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)  # keeps tied layers together
    found: dict[tuple[Layer, tuple[int, ...]], tuple[int, ...] | None] = {}
    for share in sorted(shares, key=lambda share: (share.layer, share.ranks)):
        same = tuple(new_of[rank] for rank in share.ranks)
        groups = [stage.ranks for stage in holders[share.layer] if stage.degrees == share.degrees]
        alone = [ranks for ranks in groups if len(ranks) == 1] if len(same) == 1 else []
        target = (
            same
            if same in groups
            else min(
                alone, key=lambda ranks: (ranks not in adopters[share.ranks], taken[ranks[0]], ranks), default=None
            )
        )
        if target is not None and target != same:
            taken[target[0]] += 1
            adopters[share.ranks].add(target)
        found[share.layer, share.ranks] = target
    return found


def _tied_together(plan: Plan, weights: LayerWeights) -> list[tuple[Layer, Layer]]:
    """Return pairs of layers that share a weight within one stage, where their gradients cannot be separated."""
    pairs: dict[tuple[Layer, Layer], None] = {}
    for placed in plan.stages():
        names = weights[placed.unit]
        own = range(placed.stage.first, placed.stage.end)
        for one in own:
            for other in range(one + 1, placed.stage.end):
                if names[one] & names[other]:
                    pairs[(placed.unit, one), (placed.unit, other)] = None
    return list(pairs)


def _reusable_shares(
    shares: Sequence[LayerShare],
    targets: Mapping[tuple[Layer, tuple[int, ...]], tuple[int, ...] | None],
    weights: LayerWeights,
    tied: Sequence[tuple[Layer, Layer]],
) -> list[LayerShare]:
    """Return the shares that can be reused. A rank holds one gradient sum for a tied weight, so the shares of all its
    layers are adopted by the same rank or all dropped."""
    kept = [share for share in shares if targets[share.layer, share.ranks] is not None]
    dropped = {*shares} - {*kept}
    shared: dict[LayerShare, set[LayerShare]] = defaultdict(set)
    twice = {
        unit: {name for name, count in Counter(name for names in layers for name in names).items() if count > 1}
        for unit, layers in weights.items()
    }
    sums: dict[tuple[int, str], list[LayerShare]] = defaultdict(list)
    for share in shares:
        unit, number = share.layer
        for name in twice[unit] & weights[unit][number]:
            for rank in share.ranks:
                sums[rank, name].append(share)
    for alike in sums.values():
        for one in alike:
            shared[one].update(other for other in alike if other is not one)
    for share, others in shared.items():
        if len({targets[each.layer, each.ranks] for each in (share, *others)}) > 1:
            dropped.add(share)
    while True:
        more = {other for share in dropped for other in shared.get(share, ())} - dropped
        covered: dict[Layer, set[int]] = defaultdict(set)
        for share in shares:
            if share not in dropped:
                covered[share.layer].update(share.samples)
        unlike = {layer for pair in tied if covered[pair[0]] != covered[pair[1]] for layer in pair}
        more |= {share for share in shares if share.layer in unlike} - dropped
        if not more:
            return [share for share in shares if share not in dropped]
        dropped |= more
