"""Layout of a run: the plan that its config asks for, proven valid before any process starts."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from dilatant.config import Config, UserError, list_problems
from dilatant.config.environment import place_from
from dilatant.config.files.own_files import read_text
from dilatant.config.memory_modes import SHARDS, Shard
from dilatant.config.parallel import ParallelConfig
from dilatant.cost.memory import DEFAULT_ZERO, ZEROS, Zero
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.manual import Specs, plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan, parse_plan
from dilatant.plan.sharding import shard_by_unit, shard_problems
from dilatant.plan.templates.membership import ChainCosts
from dilatant.plan.validate import plan_problems
from dilatant.planning.assemble import recompute_by_unit
from dilatant.report.text.wording import ranks_text
from dilatant.runtime.layouts import layout_problems
from dilatant.runtime.rank_trial import divide_as_planned
from dilatant.runtime.state.holders import holdings_of, trainable_layers
from dilatant.schedule import plan_scorer
from dilatant.schedule.assignment.assign import POLICIES, NamedPolicy
from dilatant.schedule.assignment.step_assignment import Microbatching, assign
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import ScheduleFamily, serial
from dilatant.schedule.trainability import trainability_of
from dilatant.schedule.validate import validate

MICROBATCHES = 4
MOST_MICROBATCHES = 1 << 20
"""Limit in plan files, above what any step has; a larger number would fill the memory."""
SCHEDULE = "eager"
INTERLEAVED, FRUGAL = "interleaved", plan_scorer.FRUGAL
ASSIGNMENT: NamedPolicy = "balanced"
"""Default of a run over several ranks if neither its config nor its plan file says otherwise."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Plan of a run, and how its steps are cut and ordered.

    schedule: a key of `schedule.families.FAMILIES`, or "serial" on one rank. predicted_seconds: of a step, if a planner
    predicted it. costs: of its steps, by which samples are assigned. row_tokens: most language-model tokens of a
    microbatch, if limited; `num_microbatches` is then the minimum of a step. zero: which ranks share optimizer state.
    chain: costs from which later memberships are planned, if this plan was made from them. shard: unit → what these
    ranks share besides the state.
    """

    plan: Plan
    num_microbatches: int
    schedule: str
    assignment: NamedPolicy
    predicted_seconds: float | None = None
    costs: StepCosts | None = field(default=None, compare=False)
    row_tokens: int | None = None
    zero: Zero = DEFAULT_ZERO
    chain: ChainCosts | None = field(default=None, compare=False)
    shard: Mapping[str, Shard] = field(default_factory=dict)

    def to_json(self, indent: int | None = 1) -> str:
        """Return the plan.json of a run, which `from_json`, `Plan.from_json` and `dilatant simulate` read. indent: None
        for one line, which takes a fraction of the time."""
        step = {
            "num_microbatches": self.num_microbatches,
            "row_tokens": self.row_tokens,
            "schedule": self.schedule,
            "assignment": self.assignment,
            "zero": self.zero,
            "shard": dict(self.shard),
            "predicted_seconds": self.predicted_seconds,
            "costs": None if self.costs is None else self.costs.to_document(),
            "chain": None if self.chain is None else self.chain.to_document(),
        }
        return json.dumps({**msgspec.to_builtins(self.plan), "step": step}, indent=indent) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainingPlan:
        """Read a document that `to_json` or `dilatant plan` wrote. Raises ValueError for anything else."""
        document = parse_plan(text)
        plan = Plan.from_document(document)
        step = document.get("step", {})
        if not isinstance(step, dict):
            raise ValueError("'step' is not a mapping")
        known = {**msgspec.to_builtins(plan), "step": dict.fromkeys(_STEP)}
        if unknown := next(_unknown_keys(document, known), None):
            raise ValueError(f"{unknown} is no key of a plan; correct or remove it")
        count, tokens = step.get("num_microbatches", MICROBATCHES), step.get("row_tokens")
        schedule = step.get("schedule", SCHEDULE)
        assignment = step.get("assignment", ASSIGNMENT)
        zero = step.get("zero", DEFAULT_ZERO)
        if type(count) is not int or not 1 <= count <= MOST_MICROBATCHES:
            raise ValueError(
                f"step.num_microbatches is {count!r}; it must be a whole number from 1 to {MOST_MICROBATCHES:,}"
            )
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"step.row_tokens is {tokens!r}; it must be a whole number from 1 on, or null")
        if not isinstance(schedule, str) or schedule not in {*FAMILIES, "serial"}:
            raise ValueError(f"step.schedule is {schedule!r}; there are {', '.join(FAMILIES)}")
        if assignment not in POLICIES:
            raise ValueError(f"step.assignment is {assignment!r}; there are {', '.join(POLICIES)}")
        if zero not in ZEROS:
            raise ValueError(f"step.zero is {zero!r}; there are {', '.join(ZEROS)}")
        shard = step.get("shard", {})
        if not isinstance(shard, dict) or not set(shard.values()) <= set(SHARDS):
            raise ValueError(f"step.shard is {shard!r}; it names for units one of {', '.join(SHARDS)}")
        seconds, costs = step.get("predicted_seconds"), None
        if step.get("costs") is not None:
            try:
                costs = StepCosts.from_document(step["costs"], plan)
            except ValueError as error:
                raise ValueError(f"step.costs: {error}; remove that entry, and training finds its own") from None
        if seconds is not None and (type(seconds) not in (int, float) or not 0.0 <= seconds < math.inf):
            raise ValueError(f"step.predicted_seconds is {seconds!r}; it must be a number of seconds, or null")
        chain = step.get("chain")
        try:
            chain = None if chain is None else ChainCosts.from_document(chain)
            if chain and chain.layers != {unit.name: unit.replicas[0].stages[-1].end for unit in plan.units}:
                raise ValueError(f"its units have {chain.layers} layers, those of the plan others")
        except ValueError as error:
            raise ValueError(f"step.chain: {error}; without that entry, a run finds its own") from None
        return cls(plan, count, schedule, assignment, seconds, costs, tokens, zero, chain, shard)

    @property
    def family(self) -> ScheduleFamily:
        """The schedule family. One rank gains nothing from more than one microbatch in flight."""
        return serial if self.schedule == "serial" else FAMILIES[self.schedule]

    def microbatching(self, config: Config) -> Microbatching:
        """Return how the runtime cuts steps: by this plan, and by the config's token budget if that is set and
        smaller."""
        return Microbatching(
            self.num_microbatches,
            self.family,
            self.assignment,
            config.seed,
            min(filter(None, (config.train.row_tokens, self.row_tokens)), default=config.row_tokens),
            config.train.deterministic,
        )


_STEP = (
    "num_microbatches", "row_tokens", "schedule", "assignment", "zero", "shard", "predicted_seconds", "costs", "chain",
)  # fmt: skip
"""Keys of a plan file's `step`."""


def _unknown_keys(found: Any, known: Any, at: str = "") -> Iterator[str]:
    """Yield the place of each key of `found` that `known`, a document of the same plan, lacks."""
    if isinstance(found, Mapping) and isinstance(known, Mapping):
        for key, value in found.items():
            place = f"{at}.{key}" if at else str(key)
            yield from _unknown_keys(value, known[key], place) if key in known else [place]
    elif isinstance(found, list) and isinstance(known, list | tuple):
        for number, (one, other) in enumerate(zip(found, known)):
            yield from _unknown_keys(one, other, f"{at}[{number}]")


def _specs(parallel: ParallelConfig) -> dict[str, ParallelSpec]:
    """Return every unit's layout. A unit that is only colocated is a single stage on the first ranks of each of its
    host's replicas. Replicas that divide experts are one replica of the plan, in which colocated units divide items.
    Raises UserError if replicas do not divide evenly."""
    specs = {name: ParallelSpec(**dict(unit)) for name, unit in (parallel.units or {}).items()}
    specs |= {
        name: replace(specs[host], ep=1, pp=1, chunks=1, cuts=None)
        for name, host in parallel.colocated.items()
        if name not in specs and host in specs
    }
    joined = {}
    for name, spec in specs.items():
        own = spec.degrees.groups
        groups = own if own > 1 else specs.get(parallel.colocated.get(name, name), spec).degrees.groups
        if spec.replicas % groups:
            raise UserError(
                f"parallel.units.{name}.replicas: {spec.replicas} replicas cannot divide experts by {groups} (ep over "
                f"tp x cp, here or of the unit on whose ranks it is); give it a multiple of {groups}, or less ep"
            )
        joined[name] = replace(spec, replicas=spec.replicas // groups, cp=spec.cp * (groups if own == 1 else 1))
    return joined


CutFunction = Callable[[Specs, Mapping[str, str], Plan], Specs]
"""(specs of units, colocated unit → host, their plan with equal cuts) → specs with cuts for all units."""


def plan_from_config(
    config: Config, model: MultimodalModel, searched: TrainingPlan | None = None, cut: CutFunction | None = None
) -> TrainingPlan:
    """Return the plan that the config asks for, proven to be able to train `model`, which may be on the meta device.

    If the config names no plan, the plan is `searched` or, without it, a plan of one rank. Values of a plan file, or of
    `searched`, apply unless the config sets them. cut: function that cuts units without cuts into stages; without it,
    their stages have equally many layers. Raises UserError that lists every problem.
    """
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    graph, parallel, zero = model.graph, config.parallel, config.train.zero
    if searched is None and not parallel.is_laid_out:
        shared = {name: graph.anchor for name in layers if name != graph.anchor}
        plan = plan_from_specs(layers, dict.fromkeys(layers, ParallelSpec()), graph.feeds, shared)
        problems = _nothing_to_share(config, plan, model)
        problems = problems or _sharded(config.train.shard, plan, model, zero or DEFAULT_ZERO)[1]
        if problems:
            raise list_problems("this plan cannot train:", problems)
        return TrainingPlan(plan, parallel.microbatches or 1, "serial", ASSIGNMENT, zero=zero or DEFAULT_ZERO)
    if searched is not None:
        planned = searched
    elif parallel.plan is None:
        plan = plan_from_specs(layers, _specs(parallel), graph.feeds, parallel.colocated)
        goes_round = any(unit.chunks > 1 for unit in (parallel.units or {}).values())
        planned = TrainingPlan(plan, MICROBATCHES, INTERLEAVED if goes_round else SCHEDULE, ASSIGNMENT)
        if len(plan.ranks) == 1:  # nothing to gain from more in flight
            planned = replace(planned, num_microbatches=1, schedule="serial")
    else:
        planned = _read_plan(parallel.plan)
    link = Link(bandwidth=1.0)
    unbounded = Cluster(1, max(planned.plan.ranks, default=0) + 1, float("inf"), link, link)  # one node for all ranks
    problems = plan_problems(planned.plan, _model_spec(model), unbounded)
    problems += _too_few_devices(planned.plan)
    problems += _ranks_left_out(planned.plan)
    divide_as_planned(model, planned.plan)
    if not problems:
        problems = layout_problems(planned.plan, model.units)
    shard: Mapping[str, Shard] = {}
    if not problems and searched is None:  # a searched plan need not share state
        problems = _nothing_to_share(config, planned.plan, model)
    if not problems:
        wanted = planned.shard if searched is not None or config.train.shard is None else config.train.shard
        shard, problems = _sharded(wanted, planned.plan, model, zero or planned.zero)
        problems += [] if config.train.shard is None else _whole_four_bit(shard, model)
    if problems:
        raise list_problems("this plan cannot train:", problems)
    if cut is not None and searched is None and parallel.is_cut_here:
        specs = cut(_specs(parallel), parallel.colocated, planned.plan)
        planned = replace(planned, plan=plan_from_specs(layers, specs, graph.feeds, parallel.colocated))
    own = _recomputed(config, planned.plan, model)
    is_as_planned = own == planned.plan and zero in (None, planned.zero) and shard == planned.shard
    count, chain = parallel.microbatches or planned.num_microbatches, planned.chain
    if chain is not None and chain.keeps_layout:
        chain = None  # of an earlier start; a run finds its own
    elif chain is not None:  # the config has a minimum, and unlike pipelines share what was planned for all
        count = max(count, planned.num_microbatches)
        is_kept = is_as_planned and count == planned.num_microbatches
        chain = _tolerating(config, chain) if is_kept else None
    return replace(
        planned,
        plan=own,
        costs=planned.costs if is_as_planned else None,
        chain=chain,
        num_microbatches=count,
        row_tokens=None if parallel.microbatches else planned.row_tokens,
        schedule=parallel.schedule or planned.schedule,
        assignment=config.plan.assignment or planned.assignment,
        zero=zero or planned.zero,
        shard=shard,
    )


def _sharded(
    wanted: Shard | Mapping[str, Shard] | None, plan: Plan, model: MultimodalModel, zero: Zero
) -> tuple[Mapping[str, Shard], list[str]]:
    """Return what is sharded of each unit, and why what is `wanted` cannot be."""
    trains = {name: any(layers) for name, layers in trainable_layers(model.units).items()}
    shard = shard_by_unit(plan, trains, wanted)
    return shard, shard_problems(plan, trains, zero, shard, wanted)


def _whole_four_bit(shard: Mapping[str, Shard], model: MultimodalModel) -> list[str]:
    return [
        f"train.shard: ranks hold the four-bit weights of {name} (model.lora.load_in_4bit) whole; write gradients for "
        "it, or leave one of these keys out"
        for name, how in shard.items()
        if how.startswith("weights") and model.units[name].four_bit
    ]


def _tolerating(config: Config, chain: ChainCosts) -> ChainCosts:
    """Return the costs with the fault tolerance of the config, which applies to plans after a loss."""
    asked = config.resilience.fault_tolerance
    if not config.resilience.enabled or asked == chain.fault_tolerance:
        return chain
    warnings.warn(
        f"this plan was made to survive the loss of {chain.fault_tolerance} nodes at once; plans after a loss keep to "
        f"resilience.fault_tolerance {asked}",
        stacklevel=2,
    )
    return replace(chain, fault_tolerance=asked)


def _recomputed(config: Config, plan: Plan, model: MultimodalModel) -> Plan:
    """Return the plan without its recomputation for units whose recomputation the config sets."""
    asked = recompute_by_unit(config, model.units)
    return Plan(tuple(unit if asked[unit.name] is None else replace(unit, recompute=()) for unit in plan.units))


def zero_text(planned: TrainingPlan, model: MultimodalModel) -> str:
    """Describe in one line which ranks keep optimizer state, and what else they share."""
    words: dict[str, list[str]] = {}
    for name, how in planned.shard.items():
        words.setdefault(how, []).append(name)
    what = {"weights": "gradients and weights", "weights_by_step": "gradients and, between steps, weights"}
    shared = [f"; of {' and '.join(names)} they also share {what.get(how, how)}" for how, names in words.items()]
    return _zero_text(planned, model) + "".join(shared)


def _zero_text(planned: TrainingPlan, model: MultimodalModel) -> str:
    if planned.zero == "none" or not shares_state(planned.plan, model):
        return "every rank keeps the optimizer state of all that it trains"
    if planned.zero == "node":
        return "the ranks of a node that train the same weight share its optimizer state"
    return (
        "all ranks that train the same weight share its optimizer state (zero: all): a rank that is lost takes its "
        "part along, so the run goes on from its last checkpoint"
    )


def shares_state(plan: Plan, model: MultimodalModel) -> bool:
    """Return True if any weight that trains is held more than once."""
    trained = {
        name for unit in model.units.values() for name, _ in unit.named_logical_parameters() if name not in unit.frozen
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


def prove_schedule(planned: TrainingPlan, model: MultimodalModel) -> None:
    """Prove that the steps of this layout cannot deadlock, on a batch in which every sample has work everywhere.

    This also compiles what every rank needs to order its messages, once for all of them. Raises UserError.
    """
    plan, count = planned.plan, planned.num_microbatches
    ones = {unit.name: [1] * count * max(len(unit.replicas) for unit in plan.units) for unit in plan.units}
    assignment = assign(plan, ones, Microbatching(count), anchor=model.graph.anchor)
    trainability = trainability_of(plan, trainable_layers(model.units))
    validate(plan, assignment, planned.family(plan, assignment, trainability), trainability)


def _read_plan(path: str) -> TrainingPlan:
    try:
        return TrainingPlan.from_json(read_text(Path(path)))
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


def _ranks_left_out(plan: Plan) -> list[str]:
    """Report unused ranks below the highest: training starts one rank for each that the plan uses, numbered from 0."""
    idle = sorted({*range(max(plan.ranks, default=0))} - {*plan.ranks})
    if not idle:
        return []
    return [
        f"ranks {ranks_text(idle)} have nothing to do, but ranks above them have; plan without these devices "
        "(leave them out of `cluster`, or of its groups)"
    ]


def _too_few_devices(plan: Plan) -> list[str]:
    devices = torch.cuda.device_count()
    if not devices or len(plan.ranks) <= devices or place_from() is not None:
        return []
    return [
        f"the plan needs {len(plan.ranks)} devices, and this machine has {devices} GPUs; start it on more machines "
        "with torchrun or Slurm, or let it run on the CPU (train.device: cpu)"
    ]
