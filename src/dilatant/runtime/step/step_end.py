"""Step end: all ranks sum a few numbers, and this exchange is also their agreement that every gradient is complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather, all_gather_object
from dilatant.models.core.stage import StepData
from dilatant.models.core.unit import ModelGraph
from dilatant.plan.costs.step_costs import TOKENS
from dilatant.runtime.state.exact_sums import square_sums, squares_of
from dilatant.runtime.state.shared_weights import BucketedWeights
from dilatant.runtime.step.cost_correction import CostCorrection
from dilatant.runtime.step.loss_sums import ForwardOutcome, sum_losses, sum_sources
from dilatant.runtime.step.recorder import Recorder
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.runtime.step.step_result import ShareCounter, StepResult


@dataclass(eq=False)
class StepEnd:
    """Exchange a step's results between all ranks. costs: receives the measured times. num_sources: see
    `Execution`."""

    _comm: Comm
    _shares: ShareCounter
    _graph: ModelGraph
    _costs: CostCorrection
    _weights: BucketedWeights
    _recorder: Recorder
    _num_sources: int

    def agree(
        self,
        number: int,
        step: PreparedStep,
        data: StepData,
        outcomes: Sequence[ForwardOutcome],
        should_stop: Callable[[], bool],
        found: Callable[[], Sequence[Any]],
    ) -> StepResult:
        """Finish the gradient sync of step `number`, whose actions produced `outcomes` on this rank, and agree with all
        ranks; returns the same result on each. should_stop, found: see `Runtime.execute`."""
        anchor, exact = self._graph.anchor, self._weights.sync.exact is not None
        salvaged = () if step.salvaged is None else step.salvaged.losses_of(self._comm.rank)
        own_losses, nonfinite = sum_losses(outcomes, data, salvaged, exact)
        sources = sum_sources(outcomes, data, salvaged, anchor, self._num_sources)
        for stage in self._weights.stages.values():
            stage.finish()
        self._weights.sync.finish()
        weights = {name: loss.weight for name, loss in self._graph.losses.items()}
        actions = self._recorder.rows()
        own_found, on_cpu = list(found()), self._comm.device.type == "cpu"
        own = {
            "losses": [own_losses.get(name, 0.0) for name in weights],
            "squares": self._own_squares(exact),
            "stops": [float(should_stop())],
            "found": [float(len(own_found))],
            "sources": sources,
            "costs": self._costs.own(self._comm.rank, step.prediction.work, [action.seconds for action in actions]),
            "shares": self._shares.own(self._comm.rank, actions, self._recorder.seconds()),
            "memory": [0.0 if on_cpu else torch.cuda.max_memory_allocated(self._comm.device)],
        }
        # A rank that contributes here has all its gradients: when all have contributed, the step may commit.
        sums = _sum_by_name(self._comm, own, "the agreement that all gradients are there")
        losses = dict(zip(weights, sums["losses"]))
        warning = self._costs.finish(number, sums["costs"])
        loss = sum(weights[name] * value for name, value in losses.items())
        samples: tuple[str, ...] = ()
        if not math.isfinite(loss):
            everybody = all_gather_object(self._comm, nonfinite)
            samples = tuple(dict.fromkeys(name for names in everybody for name in names))
        everything = all_gather_object(self._comm, own_found) if sums["found"][0] else []
        return StepResult(
            loss=loss,
            losses=losses,
            target_tokens=max(1, sum(sample.target_tokens for sample in data.samples)),
            grad_norm=math.sqrt(squares_of(sums["squares"]) if exact else sums["squares"][0]),
            should_stop=sums["stops"][0] > 0,
            times=replace(
                self._shares.shares(sums["shares"]),
                predicted_seconds=step.prediction.seconds,
                is_rough=step.prediction.is_rough,
                drift=self._costs.drift if step.prediction.origin != TOKENS else {},
            ),
            nonfinite_samples=samples,
            found=tuple(one for of_rank in everything for one in of_rank),
            warning=warning,
            source_losses=tuple(value / data.counts[anchor] for value in sums["sources"]),
            peak_bytes=sums["memory"][0] or None,
        )

    def _own_squares(self, exact: bool) -> list[float]:
        """Return this rank's part of the squared gradient norm, to be summed over ranks."""
        if not exact:
            return [self._weights.owned.squared_norm()]
        gradients = {key: parameter.grad for key, parameter in self._weights.owned.parameters.items()}
        return square_sums(gradient for _, gradient in self._weights.owned.primary_parts(gradients))


def _sum_by_name(comm: Comm, values: Mapping[str, Sequence[float]], what: str) -> dict[str, list[float]]:
    """Sum lists of numbers over all ranks, which have the same names and lengths, or take the largest of
    "memory"; called by all ranks."""
    numbers = torch.tensor([*chain.from_iterable(values.values())], dtype=torch.float64)
    parts = AsyncAllGather(comm, numbers, what).wait().split([len(part) for part in values.values()], 1)
    return {
        name: (part.amax(0) if name == "memory" else part.sum(0)).tolist()
        for name, part in zip(values, parts, strict=True)
    }
