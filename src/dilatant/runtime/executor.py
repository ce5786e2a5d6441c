"""Executor: run one rank's actions in schedule order.

The executor handles stages, rows and gradients, independently of schedule families and units. Before an action, it
waits for the rows listed in the routes; after the action, it sends the rows that other ranks need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.config.errors import UserError
from dilatant.models.core.stage import Boundary, StageOutput, StepData
from dilatant.runtime.build import LocalStage
from dilatant.runtime.compiled_blocks import COMPILER_ERRORS, gradients_aside
from dilatant.runtime.routes import Routes
from dilatant.runtime.state.gradient_sync import GradientSync
from dilatant.runtime.state.weight_gradients import DelayedGradient, accumulate
from dilatant.runtime.step.agreement import Agreement, Diverged
from dilatant.runtime.step.loss_sums import ForwardOutcome
from dilatant.runtime.step.recorder import Recorder
from dilatant.runtime.step.row_owners import RowOwners
from dilatant.runtime.step.unfinished_step import Ledger, mask_gradients
from dilatant.runtime.transport import Transport
from dilatant.schedule.dependencies import Message
from dilatant.schedule.schedule import Action, ActionKind
from dilatant.schedule.shard_rounds import Joins


class ActionFailed(RuntimeError):
    """An action raised `__cause__`; the message names rank, stage, action and samples."""


@dataclass(slots=True)
class _Piece:
    """A forward whose backward has not run; if `samples` is set, only the weight-gradient half (W) of it is left."""

    inputs: dict[str, Tensor]
    rows: dict[str, Tensor]
    losses: Mapping[str, Tensor]
    deferred: list[DelayedGradient] = field(default_factory=list)
    samples: tuple[int, ...] | None = None


AlreadyAccumulated = Callable[[int, tuple[int, ...]], Sequence[nn.Parameter]]
"""Function (stage, samples) → weights for which the gradients of these samples already exist on some rank."""
PieceKey = tuple[int, int, tuple[int, ...] | None]


def nothing_accumulated(stage: int, samples: tuple[int, ...]) -> tuple[nn.Parameter, ...]:
    """Return no weights: a step that starts from scratch has no recovered gradients."""
    return ()


class Executor:
    """Runs steps on the stages of one rank. stages: by stage number."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, LocalStage],
        unit_of_stage: Mapping[int, str],
        transport: Transport,
        sync: GradientSync,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._unit_of_stage = unit_of_stage
        self._transport = transport
        self._sync = sync
        self._recorder = recorder
        self._exact = sync.exact
        self._device = device
        self._pieces: dict[PieceKey, _Piece] = {}
        self._agreement: Agreement
        self._owners: RowOwners
        self._ledger = Ledger()
        self._covered: AlreadyAccumulated = nothing_accumulated

    def run(
        self,
        actions: Sequence[Action],
        routes: Routes,
        data: StepData,
        agreement: Agreement,
        owners: RowOwners,
        ledger: Ledger | None = None,
        covered: AlreadyAccumulated = nothing_accumulated,
        joins: Joins = MappingProxyType({}),
    ) -> list[ForwardOutcome]:
        """Run `actions` and return the losses of their forwards, or predictions if `data` requests predictions (all
        `actions` are then forwards, and no gradients are computed).

        agreement: check that all ranks run this step; awaited before the first row or gradient is sent or received.
        owners: which rank has which rows. ledger: records what has been accumulated. covered: weights whose gradients
        must not be added to. joins: rounds of sharded weights in which this rank only takes part. Raises ActionFailed
        (a UserError, caused by a bad sample, is raised unchanged), Diverged, CommAborted if another rank failed, and
        CommTimeout if another rank does not respond.
        """
        self._agreement = agreement
        self._owners = owners
        self._ledger = ledger or Ledger()
        self._covered = covered
        self._pieces.clear()
        last = {
            action.stage: index
            for index, action in enumerate(actions)
            if action.kind != ActionKind.F and self._stages[action.stage].needs_backward
        }
        if not data.predicts:
            self._sync.begin(last)
        for stage in self._stages.values():
            if stage.sharded is not None:
                stage.sharded.begin()
        split = {action.stage for action in actions if action.kind == ActionKind.I}
        for number, stage in self._stages.items():
            # Exact sums must not depend on the schedule, either: always use the same functions for the same products.
            stage.gradients.splits = number in split or self._exact is not None
        if not data.predicts:
            self._warm_up(actions, routes, data)
        results: list[ForwardOutcome] = []
        for index, action in enumerate(actions):
            self._join(joins.get(index, ()))
            self._transport.reached(index)
            stage = self._stages[action.stage]
            samples = routes.samples[action]
            self._recorder.start(stage.placed.unit, action, samples)
            try:
                if action.kind == ActionKind.F:
                    results += self._forward(stage, action, samples, routes, data)
                elif stage.needs_backward:
                    agreement.require()  # gradients are summed over ranks as soon as they are complete
                    is_last = last[action.stage] == index
                    if action.kind == ActionKind.W:
                        self._weight_gradients(action, samples)
                    else:
                        self._backward(stage, action, samples, routes, is_last)
                    if is_last:
                        self._sync.left_last_backward(action.stage)
                else:
                    self._recorder.computing()
                    self._recorder.done()
            except (CommAborted, CommTimeout, Diverged, UserError):
                raise
            except Exception as error:
                raise ActionFailed(self._explain(stage, action, samples, data, error)) from error
        agreement.require()
        self._join(joins.get(len(actions), ()))
        self._transport.finish()
        self._pieces.clear()
        return results

    def _warm_up(self, actions: Sequence[Action], routes: Routes, data: StepData) -> None:
        """Run a forward and a backward of each stage whose compiled blocks have not run, on zeros in place of rows of
        other stages. All ranks thus compile at once, and before an action's time counts. Gradients stay as they are."""
        for action in actions:
            stage, samples = self._stages[action.stage], routes.samples[action]
            compiled = stage.compiled
            if compiled is None or compiled.is_warm or action.kind != ActionKind.F or stage.sharded is not None:
                continue
            inputs: dict[str, Tensor] = {}
            for unit, (boundary, needs_gradient) in stage.inbound.items():
                rows = sum(self._counts(stage, samples, unit, boundary).values())
                zeros = torch.zeros(rows, boundary.width, dtype=boundary.dtype, device=self._device)
                inputs[unit] = zeros.requires_grad_(needs_gradient and stage.needs_backward)
            if stage.has_peers:
                self._agreement.require()
            dropout = nullcontext() if stage.dropout is None else stage.dropout.running(data, samples)
            with torch.set_grad_enabled(stage.needs_backward), dropout:
                output = stage.module.run(data, samples, inputs)
                rows_out = (output.rows_for(unit) for unit in stage.outbound)
                ends = [end for end in (*rows_out, *output.losses.values()) if end is not None and end.requires_grad]
            if not ends:  # it is frozen, or the microbatch has nothing for its unit
                compiled.is_warm = output.rows is not None and not stage.needs_backward
                continue
            compiled.is_warm = True
            try:
                with gradients_aside(stage.module.parameters()), stage.gradients.deferring():
                    torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
            except COMPILER_ERRORS as error:
                compiled.give_up(error)
            stage.gradients.take()
        for stage in self._stages.values():
            if stage.compiled is not None:
                stage.compiled.settle()

    def _join(self, rounds: Sequence[tuple[int, ActionKind]]) -> None:
        for number, kind in rounds:
            self._agreement.require()
            stage = self._stages[number]
            if stage.sharded is not None and (kind == ActionKind.F or stage.needs_backward):
                stage.sharded.take_part(kind)

    def _forward(
        self, stage: LocalStage, action: Action, samples: tuple[int, ...], routes: Routes, data: StepData
    ) -> list[ForwardOutcome]:
        inputs: dict[str, Tensor] = {}
        needs_backward = stage.needs_backward and not data.predicts
        for unit, (boundary, needs_gradient) in stage.inbound.items():
            messages = self._from(unit, routes.received.get(action, ()))
            self._require_all(messages, samples, unit, boundary, data)
            # Detached: a tensor passed within the rank may have other consumers.
            rows = self._assemble(messages, self._counts(stage, samples, unit, boundary), boundary).detach()
            inputs[unit] = rows.requires_grad_(needs_gradient and needs_backward)
        if stage.has_peers:
            self._agreement.require()
        self._recorder.computing()
        with torch.set_grad_enabled(needs_backward):
            dropout = nullcontext() if stage.dropout is None else stage.dropout.running(data, samples)
            with stage.running(action.kind), dropout:
                output = stage.module.run(data, samples, inputs)
            made = self._made(stage, action, output, samples, routes)
        self._recorder.done()
        outcomes = [
            ForwardOutcome(name, loss.detach(), samples, output.sample_losses.get(name))
            for name, loss in (output.losses.items() if stage.reports_losses else ())
        ]
        self._ledger.forwards.append((action.stage, samples, outcomes))
        if needs_backward:
            self._pieces[_key(action)] = _Piece(inputs, made, output.losses)
        for unit, boundary in stage.outbound.items():
            messages = self._to(unit, routes.sent.get(action, ()))
            self._send(messages, self._counts(stage, samples, unit, boundary), made[unit].detach())
        if output.predicted is not None:
            own = stage.module.chosen(data, samples) if stage.reports_predictions else ()
            return [ForwardOutcome(stage.placed.unit, output.predicted, own)] if own else []
        return outcomes

    def _made(
        self, stage: LocalStage, action: Action, output: StageOutput, samples: tuple[int, ...], routes: Routes
    ) -> dict[str, Tensor]:
        """Return the rows for each consumer in the dtype in which they are sent; a stage without output yields zero
        rows. Raises UserError if rows that a consumer needs do not have the declared shape."""
        made = {}
        for unit, boundary in stage.outbound.items():
            rows = output.rows_for(unit)
            if rows is None:
                rows = torch.zeros(0, boundary.width, device=self._device)
            said = [sum(self._counts(stage, samples, unit, boundary).values()), boundary.width]
            if [*rows.shape] != said and self._to(unit, routes.sent.get(action, ())):
                raise UserError(
                    f"{stage.placed.unit} gives rows of shape {[*rows.shape]} where {said} were expected; does its "
                    "module, projector or callback return other tokens or another width than is stated?"
                )
            made[unit] = rows.to(boundary.dtype)
        return made

    def _backward(
        self, stage: LocalStage, action: Action, samples: tuple[int, ...], routes: Routes, is_last: bool
    ) -> None:
        piece = self._pieces[_key(action)]
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for unit, boundary in stage.outbound.items():
            received = self._from(unit, routes.received.get(action, ()))
            if piece.rows[unit].requires_grad and received:
                outputs.append(piece.rows[unit])
                counts = self._counts(stage, samples, unit, boundary)
                gradients.append(self._assemble(received, counts, boundary))
            else:  # nothing trains in this microbatch, but messages that were sent must be received
                for message in received:
                    self._take(message)
        for name, loss in piece.losses.items():
            if loss.requires_grad:
                outputs.append(loss)
                weight = stage.loss_weights[name]
                gradients.append(None if weight == 1.0 and not loss.dim() else torch.full_like(loss, weight))
        self._recorder.computing()
        splits = action.kind == ActionKind.I
        if outputs:
            covered = self._covered(action.stage, samples)
            if is_last and not covered and self._exact is None:
                self._sync.entering_last_backward(action.stage)
            with self._adding(action.stage, covered), stage.running(action.kind):
                if splits:
                    with stage.gradients.deferring():
                        torch.autograd.backward(outputs, gradients)
                    piece.deferred = stage.gradients.take()
                else:
                    torch.autograd.backward(outputs, gradients)
        elif stage.sharded is not None:
            stage.sharded.take_part(action.kind)
        if splits:
            piece.samples = samples
        else:
            self._ledger.added[action.stage].update(samples)
        self._recorder.done()
        for unit, (boundary, needs_gradient) in stage.inbound.items():
            if needs_gradient:
                rows = piece.inputs[unit]
                gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
                counts = self._counts(stage, samples, unit, boundary)
                self._send(self._to(unit, routes.sent.get(action, ())), counts, gradient)
        if splits:
            piece.inputs, piece.rows, piece.losses = {}, {}, {}
        else:
            del self._pieces[_key(action)]

    def _from(self, unit: str, messages: Sequence[Message]) -> list[Message]:
        return [m for m in messages if self._unit_of_stage[m.producer.stage] == unit]

    def _to(self, unit: str, messages: Sequence[Message]) -> list[Message]:
        return [m for m in messages if self._unit_of_stage[m.consumer.stage] == unit]

    def _weight_gradients(self, action: Action, samples: tuple[int, ...]) -> None:
        self._recorder.computing()
        self._add_deferred(action.stage, samples, self._pieces.pop(_key(action)))
        self._recorder.done()

    def _add_deferred(self, stage: int, samples: tuple[int, ...], piece: _Piece) -> None:
        local = self._stages[stage]
        with self._adding(stage, self._covered(stage, samples)), local.running(ActionKind.W):
            if local.sharded is None:
                accumulate(piece.deferred)
            else:
                accumulate(piece.deferred, local.sharded.reached)
        self._ledger.added[stage].update(samples)

    @contextmanager
    def _adding(self, number: int, covered: Sequence[nn.Parameter]) -> Iterator[None]:
        """Accumulate gradients of a stage inside, but leave those of `covered` weights unchanged."""
        if self._exact is None:
            with self._ledger.adding(number), mask_gradients(covered):
                yield
            return
        parameters = [p for _, p in self._stages[number].module.named_logical_parameters() if p.requires_grad]
        with self._ledger.adding(number), self._exact.adding(parameters, covered):
            yield

    def settle(self) -> None:
        """Clean up an interrupted step. If gradients are kept, run its outstanding weight-gradient actions, which need
        no other rank; drop everything that waits for other ranks, with its activations."""
        for (stage, _, _), piece in self._pieces.items() if self._sync.keeps else ():
            if piece.samples is not None and stage not in self._ledger.open:
                self._add_deferred(stage, piece.samples, piece)
        self._pieces.clear()

    def _counts(self, stage: LocalStage, samples: tuple[int, ...], other: str, boundary: Boundary) -> dict[int, int]:
        """Return sample → number of its rows on this rank at the boundary to or from the unit `other`."""
        counts = self._owners.counts(stage.placed.index, self._rank, samples, other, boundary)
        return dict(zip(samples, counts, strict=True))

    def _assemble(self, messages: Sequence[Message], counts: Mapping[int, int], boundary: Boundary) -> Tensor:
        """Concatenate the rows of `messages` in sample order, `counts` rows for each sample. Rows of one sample from
        several messages (gradients from several consumers) are added."""
        parts: dict[int, Tensor] = {}
        whole = None
        for message in messages:
            rows = self._take(message)
            if message.samples == tuple(counts):
                whole = rows if whole is None else whole + rows
                continue
            for sample, part in zip(message.samples, rows.split([counts[s] for s in message.samples])):
                parts[sample] = parts[sample] + part if sample in parts else part
        if not parts and whole is not None:
            return whole
        empty = torch.zeros(0, boundary.width, dtype=boundary.dtype, device=self._device)
        missing = {
            sample: empty.new_zeros(count, boundary.width) for sample, count in counts.items() if sample not in parts
        }
        assembled = torch.cat([empty, *((parts | missing)[sample] for sample in counts)])
        return assembled if whole is None else assembled + whole

    def _require_all(
        self, messages: Sequence[Message], samples: tuple[int, ...], unit: str, boundary: Boundary, data: StepData
    ) -> None:
        made = {sample for message in messages for sample in message.samples}
        lacking = [data.samples[s].id for s in samples if s not in made and boundary.rows_of(data.samples[s])]
        if lacking:
            raise ValueError(f"nobody makes the {unit} rows of samples {lacking[:8]}: the assignment lacks them")

    def _take(self, message: Message) -> Tensor:
        began = time.perf_counter()
        rows, source = self._transport.receive(message)
        if source is not None:
            self._recorder.waited(source, time.perf_counter() - began)
        return rows

    def _send(self, messages: Sequence[Message], counts: Mapping[int, int], rows: Tensor) -> None:
        parts = None
        for message in messages:
            if message.samples == tuple(counts):
                chosen = rows
            else:
                if parts is None:
                    parts = dict(zip(counts, rows.split([*counts.values()])))
                chosen = torch.cat([parts[sample] for sample in message.samples])
            self._transport.send(message, chosen)

    def _explain(
        self, stage: LocalStage, action: Action, samples: tuple[int, ...], data: StepData, error: Exception
    ) -> str:
        names = ", ".join(repr(data.samples[sample].id) for sample in samples[:8])
        more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
        placed = stage.placed
        remedy = (
            "; a smaller train.row_tokens, train.recompute: block or model.lora need less (docs/memory.md)"
            if isinstance(error, torch.OutOfMemoryError)
            else ""
        )
        return (
            f"rank {self._rank}, {placed.unit} replica {placed.replica} stage {placed.position} (layers "
            f"{placed.stage.first} to {placed.stage.end - 1}), {action.kind} of microbatch {action.microbatch} with "
            f"samples {names}{more}: {type(error).__name__}: {error}{remedy}"
        )


def _key(action: Action) -> PieceKey:
    return (action.stage, action.microbatch, action.samples)
