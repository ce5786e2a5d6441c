"""The runtime: one rank's part of a model under one plan, for one generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather, all_gather_object
from dilatant.comm.nodes import nodes_of
from dilatant.cost.memory import Zero
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.stage import Boundary, Stage, StepData, stage_tensors
from dilatant.plan.plan import Plan
from dilatant.runtime.agreement import Agreement, Diverged, digest
from dilatant.runtime.build import build_shared, build_stages, derive_boundaries
from dilatant.runtime.executor import Executor, LocalStage, Outcome
from dilatant.runtime.holders import boxes_held_on, holdings_of, part, trainable_layers
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.owned_weights import OwnedWeights
from dilatant.runtime.recorder import Recorder
from dilatant.runtime.routes import Routes, boundary_of, derive_routes, stages_before
from dilatant.runtime.step_planner import Microbatching, PlannedStep, StepPlanner
from dilatant.runtime.step_shares import ShareCounter, StepShares
from dilatant.runtime.transport import Transport
from dilatant.runtime.weight_gradients import WeightGradients, replace_linears, restore_linears
from dilatant.schedule.dependencies import Message, messages
from dilatant.schedule.graph import build
from dilatant.schedule.measured import MeasuredAction, MeasuredStep
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.trainability import trainability_of

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class StepResult:
    """The same on every rank. Reduced gradients are in the parameters of every holder.

    loss: of the global batch, the weighted sum of `losses`, which are by unit. target_tokens: of the language model.
    grad_norm: of all gradients, every logical weight counted once. should_stop: whether any rank was asked to stop (see
    `execute`). shares: where the step's time went, up to the last gradient. nonfinite_samples: the ids of microbatches
    whose loss is not finite; whoever gets such a loss or norm should not apply the gradients.
    """

    loss: float
    losses: Mapping[str, float]
    target_tokens: int
    grad_norm: float
    should_stop: bool
    shares: StepShares
    nonfinite_samples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What one rank derives from an assignment and a schedule, kept while they are the same values."""

    assignment: Assignment
    schedule: Schedule
    digests: dict[str, int]
    routes: Routes


class Runtime:
    """The stages of `comm.rank` under `plan`, ready to execute steps until `close()`.

    model: its units may be on the meta device; the layers held here are then given memory and weights fixed by `seed`,
    the others stay without. weights: logical name → tensor for weights held here, instead of the seed's: whole, or what
    `boxes` says. Every rank builds the same model and plan. Nothing is global: a process may close one runtime and
    build another under another plan. Raises UserError where replicas would begin with unlike weights, and for a plan
    that cannot be trained.
    precision: what weights, activations and rows are held in, by the model from now on; None: as they are. In bf16
    gradients are fp32 all the same: `training.master_weights` has the optimizer for them.
    microbatching: how `execute` plans a step that it is not given. check_transport: prove with a header that both ends
    of every message mean the same. owns_comm: `close` ends communication, too.

    holdings: who holds what; boxes: of each weight and buffer held here, by logical name, the part of it that is.
    parameters: logical name → parameter held here, an ordinary one: an ordinary optimizer updates it after `execute` as
    every other holder does.

    zero: who shares the optimizer's state of a weight, see `cost.memory.Zero`; node_of: rank → node (default: as they
    are). Unless it is "none", gradients come to `owned`, whose parameters an optimizer updates instead, and
    `owned.gather` follows every update.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        comm: Comm,
        *,
        microbatching: Microbatching = Microbatching(),  # noqa: B008  # a frozen value
        seed: int | None = 0,
        weights: Mapping[str, Tensor] | None = None,
        precision: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        zero: Zero = "none",
        node_of: Sequence[int] | None = None,
        look_ahead: int = 2,
        check_transport: bool = False,
        owns_comm: bool = False,
    ) -> None:
        require_trainable(plan, model.units)
        if zero == "node" and node_of is None:
            node_of = nodes_of(comm)
        self.model = model
        self.plan = plan
        self.comm = comm
        self._owns_comm = owns_comm
        self._plan_digest = digest(plan.to_json(), f"{zero} {node_of}")
        self._trainability = trainability_of(plan, trainable_layers(model.units))
        self._with_backward = {
            index for index, backward in enumerate(self._trainability.backward) if backward
        }
        self._placed = plan.stages()
        self._replaced: list[tuple[nn.Module, str, nn.Linear]] = []
        self.holdings = holdings_of(plan, model.units)
        self.boxes = boxes_held_on(self.holdings, comm.rank)
        weights = {
            name: part(tensor, self.boxes[name]) if tensor.shape == self.boxes[name].whole else tensor
            for name, tensor in (weights or {}).items()
            if name in self.boxes
        }
        modules = build_stages(model, plan, comm, seed, weights, self.boxes, precision)
        self._boundaries = derive_boundaries(model, plan)
        self._stages = self._wire(modules)
        self.parameters = {
            name: parameter
            for module in modules.values()
            for name, parameter in module.named_logical_parameters()
        }
        self._shared = build_shared(
            model, plan, comm, modules, self.holdings, bucket_bytes, zero, node_of, weights
        )
        self._sync = self._shared.sync
        self._shared.require_equal()
        self._recorder = Recorder(comm.rank, comm.device)
        self._shares = ShareCounter(plan)
        self._transport = Transport(comm, [p.stage.ranks for p in self._placed], look_ahead, check_transport)
        self._executor = Executor(
            comm.rank,
            self._stages,
            {p.index: p.unit for p in self._placed},
            self._transport,
            self._sync,
            self._recorder,
            comm.device,
        )
        self._planner = StepPlanner(plan, self._trainability, model.graph, microbatching)
        self._last: PlannedStep | None = None
        self._step = 0
        self._prepared: _Prepared | None = None

    @property
    def modules(self) -> dict[int, Stage]:
        """The stages held here, by stage number."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def owned(self) -> OwnedWeights:
        """What an optimizer updates on this rank."""
        return self._shared.owned

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters for an optimizer; a rank of frozen layers has none."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def execute(
        self,
        samples: Sequence[EncodedSample],
        assignment: Assignment | None = None,
        schedule: Schedule | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        step: int | None = None,
    ) -> StepResult:
        """Forward, backward and gradient sync of one global batch, on all ranks together.

        samples: the whole batch in one order everywhere; media are needed only where an encoder's first stage runs
        the sample. assignment and schedule: instead of those that the runtime's microbatching gives. Gradients that are
        already there are added to. Returns when every rank holds its reduced gradients: whoever applies them now
        applies what all apply. should_stop: asked at the end; where any rank is to stop, all learn it with the result.
        step: the caller's own number of this step, on which all ranks must agree, too.

        Raises Diverged when ranks were given different steps, ActionFailed or UserError when an action fails here,
        CommAborted when another rank failed. The runtime can then only be closed.
        """
        with self._telling_others():
            if assignment is None or schedule is None:
                self._last = self._planner.plan_step(samples)
                assignment, schedule = self._last.assignment, self._last.schedule
            self._step = self._step + 1 if step is None else step
            return self._execute(self._step_data(samples), assignment, schedule, should_stop)

    def predict(
        self,
        samples: Sequence[EncodedSample],
        assignment: Assignment | None = None,
        schedule: Schedule | None = None,
    ) -> dict[int, list[int]]:
        """Sample number → the likeliest token in the place of each of its targets, given all that comes before it;
        of the samples whose language model ends on this rank. Called by all ranks together.

        schedule: forwards only. Raises as `execute` does.
        """
        with self._telling_others():
            if assignment is None or schedule is None:
                step = self._planner.plan_forwards(samples)
                assignment, schedule = step.assignment, step.schedule
            data = self._step_data(samples, predicts=True)
            predicted = {}
            for made in self._run(data, assignment, schedule):
                counts = [int((samples[number].labels[1:] != -100).sum()) for number in made.samples]
                for number, own in zip(made.samples, made.value.cpu().split(counts), strict=True):
                    predicted[number] = own.tolist()
            return predicted

    def grad_norm(self) -> float:
        """The norm of all gradients as they are now; the same on every rank, and called by all of them."""
        total = torch.tensor(self.owned.squared_norm(), dtype=torch.float64)
        self.comm.world.sum_(total, "the gradient norm").wait()
        return float(total.sqrt())

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm before.

        norm: `StepResult.grad_norm`, where gradients are still what that step left; otherwise all ranks must call.
        """
        norm = self.grad_norm() if norm is None else norm
        gradients = [p.grad for p in self.owned.parameters.values() if p.grad is not None]
        if norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm

    def measured(self) -> tuple[MeasuredAction, ...]:
        """When every action of the last step ran, on all ranks; called by all of them."""
        rows = all_gather_object(self.comm, [action.to_row() for action in self._recorder.rows()])
        return tuple(MeasuredAction.from_row(row) for of_rank in rows for row in of_rank)

    def measured_step(self) -> MeasuredStep | None:
        """The last step that the runtime planned itself, as all ranks ran it; None before the first; called by all."""
        if self._last is None:
            return None
        return MeasuredStep(self._last.assignment, self._last.schedule, self._last.tokens, self.measured())

    def arrows(self) -> list[tuple[Action, Action]]:
        """Which action of that step made rows for which other one, for `write_timeline`."""
        if self._last is None:
            return []
        edges = messages(self.plan, self._last.assignment, self._last.schedule).values()
        return [(message.producer, message.consumer) for edge in edges for message in edge]

    def tensors(self) -> dict[str, Tensor]:
        """Every weight and persistent buffer held here by logical name, tied ones once; not copies. What `boxes` says
        of each."""
        held: dict[str, Tensor] = {}
        for module in self.modules.values():
            held |= stage_tensors(module)
        return held

    def require_equal(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Prove that all holders of a weight have the same, and all who own the same box the same state, after they
        were loaded; called by all ranks. masters: what is updated of the owned weights, by their keys. moments: key →
        kind → tensor, as `optimizer_tensors` gives them. Raises UserError."""
        self._shared.require_equal()
        copies = {key: tensor for key, tensor in masters.items() if tensor is not self.owned.parameters[key]}
        self._shared.require_equal_state(copies, "master weights")
        for kind in ("exp_avg", "exp_avg_sq"):
            own = {key: tensors[kind] for key, tensors in moments.items() if kind in tensors}
            self._shared.require_equal_state(own, f"moments ({kind})")

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of the stages held here."""
        for module in self.modules.values():
            module.train(mode)

    def close(self) -> None:
        """Give the model back as it was: plain linear layers, no hooks. Communication stays with its owner."""
        self._sync.close()
        restore_linears(self._replaced)
        self._replaced = []
        if self._owns_comm:
            self.comm.close()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except Diverged:  # every rank finds out for itself; an abort would overtake its answers
            raise
        except BaseException as error:
            self.comm.abort(f"rank {self.comm.rank} failed: {error}")
            raise

    def _execute(
        self, data: StepData, assignment: Assignment, schedule: Schedule, should_stop: Callable[[], bool]
    ) -> StepResult:
        own_losses, nonfinite = _sum_losses(self._run(data, assignment, schedule), data)
        self._sync.finish()
        weights = {unit: loss.weight for unit, loss in self.model.graph.losses.items()}
        own = (
            *(own_losses.get(unit, 0.0) for unit in weights),
            self.owned.squared_norm(),
            float(should_stop()),
            *self._shares.own(self._recorder.rows(), self._recorder.seconds()),
        )
        # Who answers here has all its gradients: the last answer is the agreement that the step commits.
        values = torch.tensor(own, dtype=torch.float64)
        gathered = AsyncAllGather(self.comm, values, "the agreement that all gradients are there").wait()
        sums = gathered.sum(0).tolist()
        losses = dict(zip(weights, sums))
        squares, stops, *times = sums[len(losses) :]
        shares = self._shares.shares(times)
        loss = sum(weights[unit] * value for unit, value in losses.items())
        targets = int(data.counts[self.model.graph.anchor])
        samples: tuple[str, ...] = ()
        if not math.isfinite(loss):
            samples = tuple(name for names in all_gather_object(self.comm, nonfinite) for name in names)
        return StepResult(loss, losses, targets, math.sqrt(squares), stops > 0, shares, samples)

    def _run(self, data: StepData, assignment: Assignment, schedule: Schedule) -> list[Outcome]:
        """Run this rank's part of a step that all agree on; what its last stages made, with the samples it is of."""
        prepared = self._prepare(assignment, schedule, data.predicts)
        agreement = Agreement(
            self.comm,
            {
                "the plan": self._plan_digest,
                **prepared.digests,
                "the global batch": digest(*(f"{s.key} {sorted(s.sizes.items())}" for s in data.samples)),
                "tokens or labels": digest(*(str(s.content_digest) for s in data.samples)),
                "the step number": self._step,
            },
        )

        def shape(message: Message) -> tuple[int, int, torch.dtype]:
            boundary = self._boundary_of(message)
            rows = sum(boundary.rows_of(data.samples[sample]) for sample in message.samples)
            return rows, boundary.width, boundary.dtype

        if not self._transport.has_open(prepared.routes):
            agreement.require()
        self._transport.begin(prepared.routes, shape)
        self._recorder.begin(kept=not data.predicts)
        actions = schedule.actions.get(self.comm.rank, ())
        return self._executor.run(actions, prepared.routes, data, agreement)

    def _prepare(self, assignment: Assignment, schedule: Schedule, predicts: bool) -> _Prepared:
        last = self._prepared
        if last is not None and last.assignment is assignment and last.schedule is schedule:
            return last
        digests = {
            "the assignment": digest(assignment.to_json()),
            "the schedule": digest(schedule.to_json()),
        }
        graph = build(self.plan, assignment, schedule)
        routes = derive_routes(graph, self.comm.rank, () if predicts else self._with_backward)
        self._prepared = _Prepared(assignment, schedule, digests, routes)
        return self._prepared

    def _step_data(self, samples: Sequence[EncodedSample], predicts: bool = False) -> StepData:
        return StepData.of(samples, self.model.graph.losses, self.comm.device, predicts)

    def _boundary_of(self, message: Message) -> Boundary:
        """The boundary that the rows of a message, or the rows that its gradients belong to, pass."""
        made = boundary_of(message)
        taken = message.consumer.stage if message.producer.stage == made else message.producer.stage
        return self._boundaries[made][self._placed[taken].unit]

    def _wire(self, modules: Mapping[int, Stage]) -> dict[int, LocalStage]:
        before = stages_before(self.plan)
        stages = {}
        for index, module in modules.items():
            placed = self._placed[index]
            gradients = WeightGradients()
            self._replaced += replace_linears(module, gradients, module.undeferred)
            inbound: dict[str, tuple[Boundary, bool]] = {}
            for source in before[index]:
                # The frozen rule looks at layers, so all replicas of a unit say the same at its end.
                inbound[self._placed[source].unit] = (
                    self._boundaries[source][placed.unit],
                    self._trainability.backward[source],
                )
            stages[index] = LocalStage(
                placed=placed,
                module=module,
                outbound=self._boundaries[index],
                inbound=inbound,
                needs_backward=self._trainability.backward[index],
                gradients=gradients,
                loss_weights={unit: loss.weight for unit, loss in self.model.graph.losses.items()},
                speaks=placed.stage.ranks[0] == self.comm.rank,
                together=len(placed.stage.ranks) > 1,
            )
        return stages


def _sum_losses(outcomes: Sequence[Outcome], data: StepData) -> tuple[dict[str, float], list[str]]:
    """Unit → the sum of its losses computed here; and the samples of those that are not finite."""
    values = torch.stack([outcome.value.float() for outcome in outcomes]).tolist() if outcomes else []
    sums: dict[str, float] = {}
    nonfinite: list[str] = []
    for value, outcome in zip(values, outcomes, strict=True):
        if not math.isfinite(value):
            nonfinite += [data.samples[sample].id for sample in outcome.samples]
        sums[outcome.unit] = sums.get(outcome.unit, 0.0) + value
    return sums, nonfinite
