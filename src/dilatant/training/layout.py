"""The layout of a run: the plan that its config asks for, proven before a process starts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dilatant.config import Config, UserError, list_problems
from dilatant.config.environment import place_from
from dilatant.cost.memory import DEFAULT_ZERO
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.validate import plan_problems
from dilatant.runtime.holders import holdings_of, trainable_layers
from dilatant.runtime.layouts import layout_problems
from dilatant.runtime.step_planner import Family, Microbatching
from dilatant.schedule import FAMILIES, trainability_of, validate
from dilatant.schedule.assign import POLICIES, Policy
from dilatant.schedule.distribute import assign
from dilatant.schedule.families import serial

MICROBATCHES = 4
SCHEDULE = "eager"
ASSIGNMENT: Policy = "balanced"
"""Of a run over several ranks whose config and plan file say nothing else."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A plan, and how its steps are cut and ordered: what is planned, whole.

    schedule: a key of `schedule.FAMILIES`, or "serial" on one rank. predicted_seconds: of a step, where a planner said.
    """

    plan: Plan
    num_microbatches: int
    schedule: str
    assignment: Policy
    predicted_seconds: float | None = None

    def to_json(self) -> str:
        """plan.json of a run, which `from_json`, `Plan.from_json` and `dilatant simulate` read."""
        step = {
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "assignment": self.assignment,
            "predicted_seconds": self.predicted_seconds,
        }
        return json.dumps({**json.loads(self.plan.to_json()), "step": step}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainingPlan:
        """Read what `to_json` or `dilatant plan` wrote. Raises ValueError when it is something else."""
        plan = Plan.from_json(text)
        step = json.loads(text).get("step", {})
        if not isinstance(step, dict):
            raise ValueError("'step' is not a mapping")
        count = step.get("num_microbatches", MICROBATCHES)
        schedule = step.get("schedule", SCHEDULE)
        assignment = step.get("assignment", ASSIGNMENT)
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"step.num_microbatches is {count!r}; it must be a whole number from 1 on")
        if schedule not in FAMILIES and schedule != "serial":
            raise ValueError(f"step.schedule is {schedule!r}; there are {', '.join(FAMILIES)}")
        if assignment not in POLICIES:
            raise ValueError(f"step.assignment is {assignment!r}; there are {', '.join(POLICIES)}")
        seconds = step.get("predicted_seconds")
        return cls(plan, count, schedule, assignment, seconds if isinstance(seconds, float) else None)

    @property
    def family(self) -> Family:
        """The schedule family. One rank gains nothing by more than one microbatch in flight."""
        return serial if self.schedule == "serial" else FAMILIES[self.schedule]

    def microbatching(self, config: Config) -> Microbatching:
        """How the runtime cuts steps: by this, and by the token budget of the config."""
        return Microbatching(
            self.num_microbatches, self.family, self.assignment, config.seed, token_budget(config)
        )


def plan_from_config(config: Config, model: MultimodalModel) -> TrainingPlan:
    """The plan that the config asks for, proven to be one that can train `model`; the model may be on the meta device.

    Without a `parallel` section it is a plan of one rank. Of a plan file all is taken that the config does not say
    otherwise. Raises UserError that lists every problem.
    """
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    graph, parallel = model.graph, config.parallel
    if parallel is None:
        shared = {name: graph.anchor for name in layers if name != graph.anchor}
        plan = plan_from_specs(layers, dict.fromkeys(layers, ParallelSpec()), graph.feeds, shared)
        problems = _nothing_to_share(config, plan, model)
        if problems:
            raise list_problems("this plan cannot train:", problems)
        return TrainingPlan(plan, 1, "serial", ASSIGNMENT)
    if parallel.plan is None:
        specs = {name: ParallelSpec(**dict(unit)) for name, unit in (parallel.units or {}).items()}
        plan = plan_from_specs(layers, specs, graph.feeds, parallel.colocated)
        planned = TrainingPlan(plan, MICROBATCHES, SCHEDULE, ASSIGNMENT)
    else:
        planned = _read_plan(parallel.plan)
    problems = plan_problems(planned.plan, _model_spec(model), _unbounded(planned.plan))
    problems += _too_few_devices(planned.plan)
    if not problems:
        problems = layout_problems(planned.plan, model.units)
    if not problems:
        problems = _nothing_to_share(config, planned.plan, model)
    if problems:
        raise list_problems("this plan cannot train:", problems)
    planned = replace(
        planned,
        num_microbatches=parallel.microbatches or planned.num_microbatches,
        schedule=parallel.schedule or planned.schedule,
        assignment=config.plan.assignment or planned.assignment,
    )
    if len(planned.plan.ranks) == 1:
        return replace(planned, num_microbatches=1, schedule="serial")
    return planned


def zero_text(config: Config, plan: Plan, model: MultimodalModel) -> str:
    """Who keeps optimizer state, in one line."""
    zero = config.train.zero or DEFAULT_ZERO
    if zero == "none" or not shares_state(plan, model):
        return "every rank keeps the optimizer state of all that it trains"
    if zero == "node":
        return "the ranks of a node that train the same weight share its optimizer state"
    return (
        "all ranks that train the same weight share its optimizer state (train.zero: all): a rank that is lost takes "
        "its part along, so the run goes on from its last checkpoint"
    )


def shares_state(plan: Plan, model: MultimodalModel) -> bool:
    """Whether any weight that trains is held more than once."""
    trained = {
        name
        for unit in model.units.values()
        for name, _ in unit.named_logical_parameters()
        if name not in unit.frozen
    }
    held = holdings_of(plan, model.units)
    return any(len(held[name].boxes) > 1 for name in trained)


def _nothing_to_share(config: Config, plan: Plan, model: MultimodalModel) -> list[str]:
    if config.train.zero in (None, "none") or shares_state(plan, model):
        return []
    return [
        f"train.zero is {config.train.zero!r}, but every weight that trains is held by one rank, so there is no "
        "optimizer state to share; leave it out, or give a unit `replicas` in 'parallel'"
    ]


def token_budget(config: Config) -> int | None:
    """Most tokens of the language model in one microbatch, hence in one sample."""
    return config.train.row_tokens or config.data.max_length


def prove_schedule(planned: TrainingPlan, model: MultimodalModel) -> None:
    """Prove that the steps of this layout cannot deadlock, on a batch in which every sample has work everywhere.

    It also compiles what every rank needs to order its messages, once and for all of them. Raises UserError.
    """
    plan, count = planned.plan, planned.num_microbatches
    ones = {unit.name: [1] * count * max(len(unit.replicas) for unit in plan.units) for unit in plan.units}
    assignment = assign(plan, ones, count, anchor=model.graph.anchor)
    trainability = trainability_of(plan, trainable_layers(model.units))
    validate(plan, assignment, planned.family(plan, assignment, trainability), trainability)


def units_decoded_on(model: MultimodalModel, plan: Plan, rank: int) -> frozenset[str]:
    """The units whose media `rank` reads: it holds a stage of theirs that does."""
    return frozenset(
        p.unit
        for p in plan.stages()
        if rank in p.stage.ranks and model.units[p.unit].reads_media(p.stage.first, p.stage.end)
    )


def _read_plan(path: str) -> TrainingPlan:
    try:
        return TrainingPlan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"parallel.plan: {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"parallel.plan: {path!r}: {error}") from None


def _model_spec(model: MultimodalModel) -> ModelSpec:
    trains = trainable_layers(model.units)
    return ModelSpec(
        tuple(
            UnitSpec(
                name,
                tuple(LayerSpec(layer, name, 0, flag) for layer, flag in zip(unit.layers, trains[name])),
                model.graph.feeds[name],
            )
            for name, unit in model.units.items()
        )
    )


def _unbounded(plan: Plan) -> Cluster:
    """One node that has all ranks of the plan, and any memory."""
    link = Link(bandwidth=1.0)
    return Cluster(1, max(plan.ranks, default=0) + 1, float("inf"), link, link)


def _too_few_devices(plan: Plan) -> list[str]:
    devices = torch.cuda.device_count()
    if not devices or len(plan.ranks) <= devices or place_from() is not None:
        return []
    return [
        f"the plan needs {len(plan.ranks)} devices, and this machine has {devices} GPUs; start it on more machines "
        "with torchrun or Slurm, or let it run on the CPU (train.device: cpu)"
    ]
