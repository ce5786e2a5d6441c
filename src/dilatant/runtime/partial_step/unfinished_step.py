"""Track the gradients and losses that one rank has accumulated in the current step, for reuse after a failure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from dilatant.models.core.unit import Unit
from dilatant.plan.plan import PlacedStage
from dilatant.runtime.forward_outcome import ForwardOutcome
from dilatant.runtime.partial_step.salvage import (
    AccumulationReport,
    Layer,
    LayerShare,
    LayerWeights,
    LossShare,
    PartialStep,
    ReusePlan,
)
from dilatant.runtime.state.exact_sums import rounded_loss


@dataclass(slots=True)
class Ledger:
    """The part of a step that an executor has completed. added: stage → samples whose gradients are accumulated.
    forwards: (stage, samples, losses). open: stages whose gradients an action is modifying; they may be incomplete if
    it was interrupted."""

    added: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    forwards: list[tuple[int, tuple[int, ...], Sequence[ForwardOutcome]]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)

    @contextmanager
    def adding(self, stage: int) -> Iterator[None]:
        """Mark a stage's gradients as being modified; after an error the mark stays, since they may be incomplete."""
        self.open.add(stage)
        yield
        self.open.discard(stage)


@contextmanager
def mask_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Discard what is accumulated into the gradients of `parameters` inside this context."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def trained_by_layer(units: Mapping[str, Unit]) -> LayerWeights:
    """Return the logical names of the trainable weights of every layer of all units."""
    found: dict[str, list[frozenset[str]]] = {}
    for unit_name, unit in units.items():
        parameters = {name for name, _ in unit.named_logical_parameters()} - unit.frozen
        found[unit_name] = [
            frozenset(w.canonical for w in unit.weights if w.layer == layer) & parameters
            for layer in unit.layers
        ]
    return found


def loss_layers(units: Mapping[str, Unit]) -> dict[str, range]:
    """Return unit → layers that compute losses: the last one, or all if the unit also has router losses."""
    return {
        name: range(0 if len(unit.losses) > 1 else len(unit.layers) - 1, len(unit.layers))
        for name, unit in units.items()
        if unit.losses
    }


@dataclass(frozen=True, slots=True)
class _CurrentStep:
    step: int
    draws: tuple[int, ...]
    salvaged: PartialStep | None
    ledger: Ledger
    sources: tuple[int, ...]


class UnfinishedStep:
    """Track, for one rank, which gradients were recovered after a failure and which have been accumulated since.

    weights, speaking: see `trained_by_layer`, `loss_layers`. num_sources: number of data sets with separate losses.
    """

    def __init__(
        self,
        rank: int,
        placed: Sequence[PlacedStage],
        weights: LayerWeights,
        speaking: Mapping[str, range],
        anchor: str,
        num_sources: int,
    ) -> None:
        self._rank = rank
        self._own = [each for each in placed if rank in each.stage.ranks]
        self.weights = weights
        self.speaking = speaking
        self._anchor = anchor
        self._num_sources = num_sources
        self.salvage: ReusePlan | None = None
        """The reused part of the next step."""
        self.gradients: dict[str, Tensor] = {}
        """This rank's reused gradients by logical name."""
        self._begun: _CurrentStep | None = None

    def take_up(self, salvage: ReusePlan, gradients: Mapping[str, Tensor]) -> None:
        """Adopt the reused part of the next step."""
        self.salvage, self.gradients = salvage, dict(gradients)

    def begin(
        self, step: int, draws: tuple[int, ...], salvaged: PartialStep | None, sources: Sequence[int]
    ) -> tuple[Ledger, dict[str, Tensor]]:
        """Begin a step, with the reused part `salvaged` if not None. sources: index of each sample's data set. Returns
        the ledger to fill and the initial gradients."""
        ledger = Ledger()
        self._begun = _CurrentStep(step, draws, salvaged, ledger, tuple(sources))
        gradients = self.gradients if salvaged is not None else {}
        self.salvage, self.gradients = None, {}
        return ledger, gradients

    @property
    def is_to_come(self) -> bool:
        """True if a reused part was adopted and its step has not begun."""
        return self._begun is None and self.salvage is not None

    def forget(self) -> None:
        """Mark the step as applied."""
        self._begun = None

    def covered(
        self, stage: PlacedStage, samples: Sequence[int], by_layer: Mapping[Layer, frozenset[int]]
    ) -> set[str]:
        """Return the weights of a stage whose gradients exist for all of these samples."""
        names: set[str] = set()
        for number in range(stage.stage.first, stage.stage.end):
            if samples and by_layer.get((stage.unit, number), frozenset()).issuperset(samples):
                names |= self.weights[stage.unit][number]
        return names

    def finished(self, local: Mapping[str, Tensor]) -> AccumulationReport | None:
        """Return this rank's report of the unfinished step, if any. local: its own gradients, including reused ones."""
        if self._begun is None:
            return self._taken_up()
        begun = self._begun
        salvage = None if begun.salvaged is None else begun.salvaged.salvage
        covered = {} if salvage is None else salvage.covered()
        before: dict[Layer, set[int]] = defaultdict(set)
        for share in () if salvage is None else salvage.layers:
            if self._rank in share.ranks:
                before[share.layer].update(share.samples)
        unsure = self._unsure(begun.ledger.open)
        layers = []
        for placed in self._own:
            stage = placed.stage
            for number in range(stage.first, stage.end):
                layer = placed.unit, number
                names = self.weights[placed.unit][number]
                samples = before[layer] | (begun.ledger.added[placed.index] - covered.get(layer, frozenset()))
                if names and samples and not names & unsure:
                    degrees = stage.tp, stage.cp, stage.ep
                    layers.append(LayerShare(layer, stage.ranks, degrees, tuple(sorted(samples))))
        losses = [*self._losses(begun.ledger, begun.sources)]
        if begun.salvaged is not None:
            losses += begun.salvaged.losses_of(self._rank)
        used = {name for share in layers for name in self.weights[share.layer[0]][share.layer[1]]}
        return AccumulationReport(
            self._rank, begun.step, begun.draws, tuple(layers), tuple(losses), frozenset(used - local.keys())
        )

    def _taken_up(self) -> AccumulationReport | None:
        salvage = self.salvage
        if salvage is None:
            return None
        layers = tuple(share for share in salvage.layers if self._rank in share.ranks)
        losses = tuple(share for rank, share in salvage.losses if rank == self._rank)
        used = {name for share in layers for name in self.weights[share.layer[0]][share.layer[1]]}
        unused = frozenset(used - self.gradients.keys())
        return AccumulationReport(self._rank, salvage.step, salvage.draws, layers, losses, unused)

    def _unsure(self, open_stages: Collection[int]) -> set[str]:
        """Return the weights whose gradients an interrupted action was modifying."""
        return {
            name
            for placed in self._own
            if placed.index in open_stages
            for number in range(placed.stage.first, placed.stage.end)
            for name in self.weights[placed.unit][number]
        }

    def _losses(self, ledger: Ledger, sources: Sequence[int]) -> Iterator[LossShare]:
        by_index = {placed.index: placed for placed in self._own}
        for number, samples, outcomes in ledger.forwards:
            placed = by_index[number]
            stage = placed.stage
            speaking = self.speaking.get(placed.unit, range(0))
            if not any(layer in speaking for layer in range(stage.first, stage.end)):
                continue
            values: dict[str, float] = {}
            by_source = [0.0] * self._num_sources
            for outcome in outcomes:
                assert isinstance(outcome.value, Tensor)
                made = sum(map(rounded_loss, outcome.value.reshape(-1).tolist()))
                values[outcome.name] = values.get(outcome.name, 0.0) + made
                if outcome.name == self._anchor and outcome.by_sample is not None and self._num_sources > 1:
                    for sample, loss in zip(outcome.samples, outcome.by_sample.tolist(), strict=True):
                        by_source[sources[sample]] += loss
            if all(map(math.isfinite, values.values())):
                yield LossShare(
                    placed.unit, stage.first, stage.end, stage.ranks, samples, values, tuple(by_source)
                )
