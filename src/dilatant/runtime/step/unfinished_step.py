"""Track the gradients and losses that one rank has accumulated in the current step, for reuse after a failure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.state.exact_sums import rounded_loss
from dilatant.runtime.state.gradient_sync import GradientSync
from dilatant.runtime.state.holders import trained_by_layer
from dilatant.runtime.step.loss_sums import ForwardOutcome
from dilatant.runtime.step.partial_step import AccumulationReport, Layer, LayerShare, LossShare, PartialStep, ReusePlan


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


@dataclass(frozen=True, slots=True)
class _CurrentStep:
    step: int
    draws: tuple[int, ...]
    salvaged: PartialStep | None
    ledger: Ledger
    sources: tuple[int, ...]


class UnfinishedStep:
    """Track, for one rank, which gradients were recovered after a failure and which have been accumulated since.

    settle: completes the outstanding work of an interrupted step. num_sources: number of data sets with separate
    losses. weights: see `trained_by_layer`. loss_layers: unit → layers that compute losses: the last one, or all if the
    unit also has router losses.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        rank: int,
        sync: GradientSync,
        settle: Callable[[], None],
        num_sources: int,
    ) -> None:
        self._rank = rank
        self._stages = {each.index: each for each in plan.stages() if rank in each.stage.ranks}
        self._sync = sync
        self._settle = settle
        self._anchor = model.graph.anchor
        self._num_sources = num_sources
        self.weights = trained_by_layer(model.units)
        self.loss_layers = {
            name: range(0 if len(unit.losses) > 1 else len(unit.layers) - 1, len(unit.layers))
            for name, unit in model.units.items()
            if unit.losses
        }
        self._reuse: ReusePlan | None = None
        self._adopted: dict[str, Tensor] = {}
        self._begun: _CurrentStep | None = None
        self._has_planned = False

    def adopt(self, reuse: ReusePlan, gradients: Mapping[str, Tensor]) -> None:
        """Adopt the recovered part of a failed step: when that step is planned and executed next, only its missing part
        runs. gradients: this rank's recovered gradients by logical name. A next step with other samples runs
        completely. Raises RuntimeError if a step is already planned, since it would run completely."""
        if self._has_planned:
            raise RuntimeError("a step was planned before it was known what of it is salvaged")
        self._reuse, self._adopted = reuse, dict(gradients)

    def reused_in(self, step: int, samples: Sequence[EncodedSample]) -> ReusePlan | None:
        """Return the adopted part of a step that is being planned, None if nothing of it was recovered."""
        self._has_planned = True
        reuse = self._reuse
        return reuse if reuse is not None and reuse.is_of(step, samples) else None

    def begin(self, step: int, draws: tuple[int, ...], salvaged: PartialStep | None, sources: Sequence[int]) -> Ledger:
        """Begin a step, with the reused part `salvaged` if not None. sources: index of each sample's data set. Returns
        the ledger to fill."""
        self._begun = _CurrentStep(step, draws, salvaged, Ledger(), tuple(sources))
        self._sync.begin_with(self._adopted if salvaged is not None else {})
        self._reuse, self._adopted = None, {}
        return self._begun.ledger

    def forget(self) -> None:
        """Discard this rank's own gradients of the current step, which has been applied."""
        self._begun = None
        self._sync.forget()

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's own gradients of the current step: sums over its samples, not over ranks."""
        return self._adopted if self._begun is None and self._reuse is not None else self._sync.local()

    @property
    def dtype_of_sums(self) -> torch.dtype | None:
        """The dtype of `gradients`; None if each has the dtype of its weight's gradient."""
        return None if self._sync.exact is None else torch.int64

    def covered(self, stage: int, samples: Sequence[int], by_layer: Mapping[Layer, frozenset[int]]) -> set[str]:
        """Return the weights of a stage whose gradients exist for all of these samples."""
        names: set[str] = set()
        for layer in _layers_of(self._stages[stage]):
            if samples and by_layer.get(layer, frozenset()).issuperset(samples):
                names |= self.weights[layer[0]][layer[1]]
        return names

    def report(self) -> AccumulationReport | None:
        """Return what this rank has accumulated in the current step, including adopted gradients; None if it keeps no
        gradients, or if no step is unfinished."""
        self._settle()
        begun, reuse = self._begun, self._reuse
        if not self._sync.keeps or (begun is None and reuse is None):
            return None
        if begun is None:
            assert reuse is not None
            layers = [share for share in reuse.layers if self._rank in share.ranks]
            losses = [share for rank, share in reuse.losses if rank == self._rank]
            return self._report(reuse.step, reuse.draws, layers, losses)
        salvaged = begun.salvaged
        losses = [*self._losses(begun.ledger, begun.sources)]
        losses += [] if salvaged is None else salvaged.losses_of(self._rank)
        return self._report(begun.step, begun.draws, self._shares(begun), losses)

    def _report(
        self, step: int, draws: tuple[int, ...], layers: Sequence[LayerShare], losses: Sequence[LossShare]
    ) -> AccumulationReport:
        used = {name for share in layers for name in self.weights[share.layer[0]][share.layer[1]]}
        unused = frozenset(used - self.gradients.keys())
        return AccumulationReport(self._rank, step, draws, tuple(layers), tuple(losses), unused)

    def _shares(self, begun: _CurrentStep) -> list[LayerShare]:
        reuse = None if begun.salvaged is None else begun.salvaged.reuse
        covered = {} if reuse is None else reuse.covered()
        adopted: dict[Layer, set[int]] = defaultdict(set)
        for share in () if reuse is None else reuse.layers:
            if self._rank in share.ranks:
                adopted[share.layer].update(share.samples)
        unsure = {  # weights whose gradients an interrupted action was modifying
            name
            for index in begun.ledger.open & self._stages.keys()
            for unit, number in _layers_of(self._stages[index])
            for name in self.weights[unit][number]
        }
        shares = []
        for placed in self._stages.values():
            stage = placed.stage
            for layer in _layers_of(placed):
                names = self.weights[layer[0]][layer[1]]
                added = begun.ledger.added[placed.index] - covered.get(layer, frozenset())
                samples = adopted[layer] | added
                if names and samples and not names & unsure:
                    shares.append(LayerShare(layer, stage.ranks, stage.degrees, tuple(sorted(samples))))
        return shares

    def _losses(self, ledger: Ledger, sources: Sequence[int]) -> Iterator[LossShare]:
        for number, samples, outcomes in ledger.forwards:
            placed = self._stages[number]
            stage = placed.stage
            computing = self.loss_layers.get(placed.unit, range(0))
            if not any(layer in computing for layer in range(stage.first, stage.end)):
                continue
            values: dict[str, float] = {}
            by_source = [0.0] * self._num_sources
            for outcome in outcomes:
                assert isinstance(outcome.value, Tensor)
                loss = sum(map(rounded_loss, outcome.value.reshape(-1).tolist()))
                values[outcome.name] = values.get(outcome.name, 0.0) + loss
                if outcome.name == self._anchor and outcome.by_sample is not None and self._num_sources > 1:
                    for sample, part in zip(outcome.samples, outcome.by_sample.tolist(), strict=True):
                        by_source[sources[sample]] += part
            if all(map(math.isfinite, values.values())):
                yield LossShare(placed.unit, stage.first, stage.end, stage.ranks, samples, values, tuple(by_source))


def _layers_of(placed: PlacedStage) -> list[Layer]:
    return [(placed.unit, number) for number in range(placed.stage.first, placed.stage.end)]
