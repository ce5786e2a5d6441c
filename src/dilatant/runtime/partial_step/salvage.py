"""Partial-step recovery: after ranks are lost, decide which gradients of the step to reuse and which samples to rerun.

A rank holds the gradient of a layer as one sum over the samples whose backward it ran. Such a sum can only be reused as
a whole, so missing gradients are tracked by layer and sample. A sample that lacks the gradient of any layer is rerun;
layers that already have its gradient are masked (see `Executor`). All ranks decide identically from equal reports.
Imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from dilatant.plan.plan import Plan, Stage

Layer = tuple[str, int]
"""A unit, and the index of one of its layers."""
Degrees = tuple[int, int, int]
"""tp, cp and ep of a stage."""
LayerWeights = Mapping[str, Sequence[frozenset[str]]]
"""Unit → for each layer, the logical names of its trainable weights; a tied weight occurs in two layers."""


class NumberedSample(Protocol):
    """A sample with its position in training order (`draw`)."""

    @property
    def draw(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerShare:
    """The gradients of one layer that a stage has accumulated. ranks: of the stage; each holds its part. samples:
    ascending indices into the global batch."""

    layer: Layer
    ranks: tuple[int, ...]
    degrees: Degrees
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LossShare:
    """Losses of some samples, from the stage with layers `first <= layer < end`. values: loss name → this rank's sum.
    by_source: sum of the language model's loss for each data set (see `StepResult.source_losses`)."""

    unit: str
    first: int
    end: int
    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    values: Mapping[str, float] = field(default_factory=dict)
    by_source: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AccumulationReport:
    """One rank's report of the gradients and losses accumulated in step `step`, which no rank has applied. draws:
    `draw` of each sample of the batch. unused: weights in `layers` without a gradient, since no sample used them."""

    rank: int
    step: int
    draws: tuple[int, ...]
    layers: tuple[LayerShare, ...]
    losses: tuple[LossShare, ...]
    unused: frozenset[str] = frozenset()

    def to_json(self) -> str:
        alike: dict[tuple[Any, ...], list[Layer]] = defaultdict(list)  # layers with equal samples
        for share in self.layers:
            alike[share.ranks, share.degrees, share.samples].append(share.layer)
        return json.dumps(
            [
                self.rank,
                self.step,
                self.draws,
                [[layers, *same] for same, layers in alike.items()],
                [
                    [s.unit, s.first, s.end, s.ranks, s.samples, dict(s.values), s.by_source]
                    for s in self.losses
                ],
                sorted(self.unused),
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        rank, step, draws, alike, losses, unused = json.loads(text)
        return cls(
            rank,
            step,
            tuple(draws),
            tuple(
                LayerShare((unit, number), tuple(ranks), (tp, cp, ep), tuple(samples))
                for layers, ranks, (tp, cp, ep), samples in alike
                for unit, number in layers
            ),
            tuple(
                LossShare(unit, first, end, tuple(ranks), tuple(samples), values, tuple(sources))
                for unit, first, end, ranks, samples, values, sources in losses
            ),
            frozenset(unused),
        )


@dataclass(frozen=True, slots=True)
class Move:
    """Send the gradient of a weight from `source` to rank `target`, often the same rank, which adds it to its own.
    source: a rank, or a number past all ranks for gradients exported by a departed rank (see `decide_reuse`)."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The reused part of a step, the same on every rank. Ranks are numbered as in the new plan. losses: (rank that
    holds the values, losses)."""

    step: int
    draws: tuple[int, ...]
    layers: tuple[LayerShare, ...]
    losses: tuple[tuple[int, LossShare], ...]
    moves: tuple[Move, ...] = ()

    def is_of(self, step: int, samples: Sequence[NumberedSample]) -> bool:
        """Return True if this is the reused part of that step with exactly these samples."""
        return self.step == step and self.draws == tuple(sample.draw for sample in samples)

    def covered(self) -> dict[Layer, frozenset[int]]:
        """Return layer → the samples whose gradients exist on some rank."""
        found: dict[Layer, frozenset[int]] = {}
        for share in self.layers:
            found[share.layer] = found.get(share.layer, frozenset()) | frozenset(share.samples)
        return found

    def pairs(self, weights: LayerWeights) -> tuple[int, int]:
        """Count the (trainable layer, sample) pairs whose gradients exist, and those whose gradients are missing."""
        layers = sum(bool(names) for of_layers in weights.values() for names in of_layers)
        kept = sum(map(len, self.covered().values()))
        return kept, layers * len(self.draws) - kept

    def missing(
        self,
        tokens: Mapping[str, Sequence[int]],
        weights: LayerWeights,
        speaking: Mapping[str, Collection[int]],
    ) -> frozenset[int]:
        """Return the samples to rerun, always at least one.

        tokens: unit → tokens of each sample. speaking: unit → layers that compute a loss. A sample is rerun if one of
        its gradients or losses is missing, and so are all samples whose loss is known only as a sum with such a
        sample's.
        """
        covered = self.covered()
        told: dict[Layer, set[int]] = defaultdict(set)
        for _, share in self.losses:
            for number in range(share.first, share.end):
                told[share.unit, number].update(share.samples)
        again: set[int] = set()
        for unit, of_layers in weights.items():
            own = {number for number, count in enumerate(tokens[unit]) if count}
            for number, names in enumerate(of_layers):
                if names:
                    again |= own - covered.get((unit, number), frozenset())
                if number in speaking.get(unit, ()):
                    again |= own - told[unit, number]
        again = again or {0}
        sums = [frozenset(share.samples) for _, share in self.losses]
        while mixed := [samples for samples in sums if samples & again and not samples <= again]:
            again = again.union(*mixed)
        return frozenset(again)


@dataclass(frozen=True, slots=True)
class PartialStep:
    """The reused part of a step, and the samples that still have to run (`missing`)."""

    salvage: ReusePlan
    missing: frozenset[int]

    def losses_of(self, rank: int) -> list[LossShare]:
        """Return the reused losses that a rank adds to the losses of the rerun samples."""
        return [
            share
            for holder, share in self.salvage.losses
            if holder == rank and self.missing.isdisjoint(share.samples)
        ]


def decide_reuse(
    told: Sequence[AccumulationReport | None],
    step: int,
    plan: Plan,
    weights: LayerWeights,
    gone: Sequence[tuple[int, AccumulationReport]] = (),
) -> ReusePlan | None:
    """Decide which gradients of step `step` are reused, and which rank of `plan` adopts them; None if nothing is.

    told: the report of each new rank, None without one. gone: (rank that acts for it, report) of each departed rank;
    moves number their sources from `len(told)`. Any one-rank stage with the layer can adopt the gradients of a one-rank
    stage; those of several ranks are reused only if the same ranks form a stage of equal degrees again.
    """
    everybody = [*told, *(each for _, each in gone)]
    having = [(rank, each) for rank, each in enumerate(everybody) if each is not None and each.step == step]
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
        LayerShare(layer, ranks, degrees, tuple(sorted(samples)))
        for (layer, ranks, degrees), samples in merged.items()
    )
    acting = [*range(len(told)), *(rank for rank, _ in gone)]
    losses = tuple(
        (acting[rank], replace(share, ranks=tuple(acting[new_of[old]] for old in share.ranks)))
        for rank, share in _complete_losses(having, new_of)
        if rank < len(told) or len(share.ranks) == 1
    )
    if _has_duplicate_losses(losses):
        losses = ()
    return ReusePlan(step, having[0][1].draws, layers, losses, tuple(moves)) if layers else None


def patterns_of(samples: Collection[int], covered: Mapping[Layer, frozenset[int]]) -> dict[int, int]:
    """Return sample → pattern number, equal for samples that lack the gradients of the same layers."""
    sets = sorted({*covered.values()}, key=sorted)
    numbers: dict[tuple[bool, ...], int] = {}
    found = {}
    for sample in sorted(samples):
        pattern = tuple(sample in each for each in sets)
        found[sample] = numbers.setdefault(pattern, len(numbers))
    return found


Reports = Sequence[tuple[int, AccumulationReport]]


def _complete_shares(having: Reports, new_of: Mapping[int, int]) -> list[LayerShare]:
    """Return the shares that all ranks of their stage report identically."""
    said: dict[LayerShare, set[int]] = defaultdict(set)
    for _, each in having:
        for share in each.layers:
            if share.samples:
                said[share].add(each.rank)
    return [share for share, ranks in said.items() if ranks == {*share.ranks} and ranks <= new_of.keys()]


def _complete_losses(having: Reports, new_of: Mapping[int, int]) -> list[tuple[int, LossShare]]:
    said: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for _, each in having:
        for share in each.losses:
            said[_loss_key(share)].add(each.rank)
    return [
        (rank, share)
        for rank, each in having
        for share in each.losses
        if said[_loss_key(share)] == {*share.ranks} and {*share.ranks} <= new_of.keys()
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
    given: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)  # keeps tied layers together
    found: dict[tuple[Layer, tuple[int, ...]], tuple[int, ...] | None] = {}
    for share in sorted(shares, key=lambda share: (share.layer, share.ranks)):
        same = tuple(new_of[rank] for rank in share.ranks)
        groups = [stage.ranks for stage in holders[share.layer] if _degrees(stage) == share.degrees]
        alone = [ranks for ranks in groups if len(ranks) == 1] if len(same) == 1 else []
        target = (
            same
            if same in groups
            else min(
                alone,
                key=lambda ranks: (ranks not in given[share.ranks], taken[ranks[0]], ranks),
                default=None,
            )
        )
        if target is not None and target != same:
            taken[target[0]] += 1
            given[share.ranks].add(target)
        found[share.layer, share.ranks] = target
    return found


def _degrees(stage: Stage) -> Degrees:
    return stage.tp, stage.cp, stage.ep


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
        unit: {
            name for name, count in Counter(name for names in layers for name in names).items() if count > 1
        }
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
