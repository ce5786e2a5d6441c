"""The step in hand of one rank, as far as it is finished: what is noted while it runs, so that it may be salvaged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from dilatant.models.core.unit import Unit
from dilatant.plan.plan import PlacedStage
from dilatant.runtime.forward_outcome import Outcome
from dilatant.runtime.partial_step.salvage import (
    Finished,
    Layer,
    LayerShare,
    LayerWeights,
    LossShare,
    Salvage,
    Salvaged,
)
from dilatant.runtime.state.exact_sums import rounded_loss


@dataclass(slots=True)
class Ledger:
    """What an executor has finished of a step. added: stage → samples of its backwards; forwards: (stage, samples, what
    it made of losses). open: stages whose gradients an action is adding to, and if it was ended, may have added some
    of."""

    added: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    forwards: list[tuple[int, tuple[int, ...], Sequence[Outcome]]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)

    @contextmanager
    def adding(self, stage: int) -> Iterator[None]:
        """Around what adds to gradients; an error leaves them in nobody knows which state."""
        self.open.add(stage)
        yield
        self.open.discard(stage)


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Their gradients stay as they are, whatever is added inside."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def trained_by_layer(units: Mapping[str, Unit]) -> LayerWeights:
    """The weights of every layer that train, of whole units."""
    found: dict[str, list[frozenset[str]]] = {}
    for unit_name, unit in units.items():
        parameters = {name for name, _ in unit.named_logical_parameters()} - unit.frozen
        found[unit_name] = [
            frozenset(w.canonical for w in unit.weights if w.layer == layer) & parameters
            for layer in unit.layers
        ]
    return found


def speaking_layers(units: Mapping[str, Unit]) -> dict[str, range]:
    """Unit → its layers that make losses: the last one of its own, and any of others (its routers')."""
    return {
        name: range(0 if len(unit.losses) > 1 else len(unit.layers) - 1, len(unit.layers))
        for name, unit in units.items()
        if unit.losses
    }


@dataclass(frozen=True, slots=True)
class _Begun:
    step: int
    draws: tuple[int, ...]
    salvaged: Salvaged | None
    ledger: Ledger
    sources: tuple[int, ...]


class UnfinishedStep:
    """Of one rank under one plan: what was salvaged for it, and what it has finished since.

    weights, speaking: of the model, see `trained_by_layer` and `speaking_layers`. num_sources: data sets whose losses
    are told apart.
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
        self.salvage: Salvage | None = None
        """What counts of the next step."""
        self.gradients: dict[str, Tensor] = {}
        """This rank's part of it, by logical name."""
        self._begun: _Begun | None = None

    def take_up(self, salvage: Salvage, gradients: Mapping[str, Tensor]) -> None:
        """Go on with what counts of the step to come."""
        self.salvage, self.gradients = salvage, dict(gradients)

    def begin(
        self, step: int, draws: tuple[int, ...], salvaged: Salvaged | None, sources: Sequence[int]
    ) -> tuple[Ledger, dict[str, Tensor]]:
        """A step runs, on top of what was `salvaged` where that is good for it. sources: of its samples. Returns where
        to note what is finished, and the gradients to begin with."""
        ledger = Ledger()
        self._begun = _Begun(step, draws, salvaged, ledger, tuple(sources))
        gradients = self.gradients if salvaged is not None else {}
        self.salvage, self.gradients = None, {}
        return ledger, gradients

    @property
    def is_to_come(self) -> bool:
        """Whether what was salvaged waits for its step."""
        return self._begun is None and self.salvage is not None

    def forget(self) -> None:
        """The step is applied."""
        self._begun = None

    def covered(
        self, stage: PlacedStage, samples: Sequence[int], by_layer: Mapping[Layer, frozenset[int]]
    ) -> set[str]:
        """The weights of a stage whose gradients of these samples are there already, for all of them alike."""
        names: set[str] = set()
        for number in range(stage.stage.first, stage.stage.end):
            if samples and by_layer.get((stage.unit, number), frozenset()).issuperset(samples):
                names |= self.weights[stage.unit][number]
        return names

    def finished(self, local: Mapping[str, Tensor]) -> Finished | None:
        """What this rank has. local: its own gradients, of what was salvaged, too; None where there is nothing."""
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
        return Finished(
            self._rank, begun.step, begun.draws, tuple(layers), tuple(losses), frozenset(used - local.keys())
        )

    def _taken_up(self) -> Finished | None:
        salvage = self.salvage
        if salvage is None:
            return None
        layers = tuple(share for share in salvage.layers if self._rank in share.ranks)
        losses = tuple(share for rank, share in salvage.losses if rank == self._rank)
        used = {name for share in layers for name in self.weights[share.layer[0]][share.layer[1]]}
        unused = frozenset(used - self.gradients.keys())
        return Finished(self._rank, salvage.step, salvage.draws, layers, losses, unused)

    def _unsure(self, open_stages: Collection[int]) -> set[str]:
        """The weights that an action was adding to when it was ended."""
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
