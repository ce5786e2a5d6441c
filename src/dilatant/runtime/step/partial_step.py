"""Partly recovered steps: the gradients of a failed step that ranks report and reuse, and the samples to rerun.

A rank holds the gradient of a layer as one sum over the samples whose backward it ran. Such a sum can only be reused as
a whole, so missing gradients are tracked by layer and sample. A sample that lacks the gradient of any layer is rerun;
layers that already have its gradient are masked (see `Executor`). `resilience.partial_step` decides what is reused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from dilatant.config.degrees import Degrees
from dilatant.data.sample import EncodedSample

Layer = tuple[str, int]
"""A unit, and the index of one of its layers."""
LayerWeights = Mapping[str, Sequence[frozenset[str]]]
"""Unit → for each layer, the logical names of its trainable weights; a tied weight occurs in two layers."""


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
        layers = [(members, *same) for same, members in alike.items()]
        report = (self.rank, self.step, self.draws, layers, self.losses, sorted(self.unused))
        return msgspec.json.encode(report).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        rank, step, draws, alike, losses, unused = msgspec.json.decode(text, type=_ReportTree)
        layers = tuple(LayerShare(layer, *same) for members, *same in alike for layer in members)
        return cls(rank, step, draws, layers, losses, unused)


_ReportTree = tuple[
    int,
    int,
    tuple[int, ...],
    list[tuple[list[Layer], tuple[int, ...], Degrees, tuple[int, ...]]],
    tuple[LossShare, ...],
    frozenset[str],
]


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

    def is_of(self, step: int, samples: Sequence[EncodedSample]) -> bool:
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
        self, tokens: Mapping[str, Sequence[int]], weights: LayerWeights, loss_layers: Mapping[str, Collection[int]]
    ) -> frozenset[int]:
        """Return the samples to rerun, always at least one.

        tokens: unit → tokens of each sample. loss_layers: unit → layers that compute a loss. A sample is rerun if one
        of its gradients or losses is missing, and so are all samples whose loss is known only as a sum with such a
        sample's.
        """
        covered = self.covered()
        reported: dict[Layer, set[int]] = defaultdict(set)
        for _, share in self.losses:
            for number in range(share.first, share.end):
                reported[share.unit, number].update(share.samples)
        again: set[int] = set()
        for unit, of_layers in weights.items():
            processed = {number for number, count in enumerate(tokens[unit]) if count}
            for number, names in enumerate(of_layers):
                if names:
                    again |= processed - covered.get((unit, number), frozenset())
                if number in loss_layers.get(unit, ()):
                    again |= processed - reported[unit, number]
        again = again or {0}
        sums = [frozenset(share.samples) for _, share in self.losses]
        while mixed := [samples for samples in sums if samples & again and not samples <= again]:
            again = again.union(*mixed)
        return frozenset(again)


@dataclass(frozen=True, slots=True)
class PartialStep:
    """The reused part of a step, and the samples that still have to run (`missing`)."""

    reuse: ReusePlan
    missing: frozenset[int]

    def losses_of(self, rank: int) -> list[LossShare]:
        """Return the reused losses that a rank adds to the losses of the rerun samples."""
        return [
            share for holder, share in self.reuse.losses if holder == rank and self.missing.isdisjoint(share.samples)
        ]


def patterns_of(samples: Collection[int], covered: Mapping[Layer, frozenset[int]]) -> dict[int, int]:
    """Return sample → pattern number, equal for samples that lack the gradients of the same layers."""
    sets = sorted({*covered.values()}, key=sorted)
    numbers: dict[tuple[bool, ...], int] = {}
    found = {}
    for sample in sorted(samples):
        pattern = tuple(sample in each for each in sets)
        found[sample] = numbers.setdefault(pattern, len(numbers))
    return found
