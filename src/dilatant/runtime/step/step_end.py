"""Step end: all ranks sum a few numbers, and this exchange is also their agreement that every gradient is complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather, all_gather_object
from dilatant.models.core.graph import ModelGraph
from dilatant.models.core.stage import StepData
from dilatant.plan.costs.step_costs import TOKENS
from dilatant.plan.plan import Plan
from dilatant.runtime.forward_outcome import ForwardOutcome
from dilatant.runtime.state.exact_sums import square_sums, squares_of
from dilatant.runtime.state.gradient_sync import GradientSync
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.step.cost_correction import CostCorrection
from dilatant.runtime.step.loss_sums import sum_losses, sum_sources
from dilatant.runtime.step.recorder import Recorder
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.runtime.step.step_result import StepResult
from dilatant.runtime.step.time_shares import ShareCounter


class StepEnd:
    """Exchange a step's results between all ranks. costs: receives the measured times. num_sources, exact: see
    `Runtime`."""

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        graph: ModelGraph,
        costs: CostCorrection,
        sync: GradientSync,
        owned: OwnedWeights,
        recorder: Recorder,
        num_sources: int,
        exact: bool,
    ) -> None:
        self._comm = comm
        self._graph = graph
        self._costs = costs
        self._sync = sync
        self._owned = owned
        self._recorder = recorder
        self._num_sources = num_sources
        self._exact = exact
        self._shares = ShareCounter(plan)

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
        anchor = self._graph.anchor
        told = () if step.salvaged is None else step.salvaged.losses_of(self._comm.rank)
        own_losses, nonfinite = sum_losses(outcomes, data, told, self._exact)
        own_sources = sum_sources(outcomes, data, told, anchor, self._num_sources)
        self._sync.finish()
        weights = {name: loss.weight for name, loss in self._graph.losses.items()}
        actions = self._recorder.rows()
        shares = self._shares.own(actions, self._recorder.seconds())
        own_found = list(found())
        squares = self._own_squares()
        own = (
            *(own_losses.get(name, 0.0) for name in weights),
            *squares,
            float(should_stop()),
            float(len(own_found)),
            *own_sources,
            *self._costs.own(self._comm.rank, step.work, [action.seconds for action in actions]),
            *shares,
        )
        # A rank that contributes here has all its gradients: when all have contributed, the step may commit.
        values = torch.tensor(own, dtype=torch.float64)
        gathered = AsyncAllGather(self._comm, values, "the agreement that all gradients are there").wait()
        sums = gathered.sum(0).tolist()
        losses = dict(zip(weights, sums))
        squared = sums[len(losses) : len(losses) + len(squares)]
        stops, num_found, *rest = sums[len(losses) + len(squares) :]
        sources, rest = rest[: len(own_sources)], rest[len(own_sources) :]
        warning = self._costs.finish(number, rest[: self._costs.num_sums])
        loss = sum(weights[name] * value for name, value in losses.items())
        samples: tuple[str, ...] = ()
        if not math.isfinite(loss):
            everybody = all_gather_object(self._comm, nonfinite)
            samples = tuple(dict.fromkeys(name for names in everybody for name in names))
        everything = all_gather_object(self._comm, own_found) if num_found else []
        return StepResult(
            loss=loss,
            losses=losses,
            target_tokens=int(data.counts[anchor]),
            grad_norm=math.sqrt(squares_of(squared) if self._exact else squared[0]),
            should_stop=stops > 0,
            shares=self._shares.shares(rest[self._costs.num_sums :]),
            nonfinite_samples=samples,
            found=tuple(one for of_rank in everything for one in of_rank),
            predicted_seconds=step.predicted_seconds,
            is_rough=step.is_rough,
            drift=self._costs.drift if step.origin != TOKENS else {},
            warning=warning,
            source_losses=tuple(value / data.counts[anchor] for value in sources),
        )

    def _own_squares(self) -> list[float]:
        """Return this rank's part of the squared gradient norm, to be summed over ranks."""
        if not self._exact:
            return [self._owned.squared_norm()]
        gradients = {key: parameter.grad for key, parameter in self._owned.parameters.items()}
        return square_sums(gradient for _, gradient in self._owned.spoken_parts(gradients))
