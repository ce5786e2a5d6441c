"""The layout of a run: the plan that its config asks for, proven before a process starts."""

from __future__ import annotations

from pathlib import Path

import torch

from dilatant.config import Config, ParallelConfig, UserError, list_problems
from dilatant.config.environment import place_from
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.validate import plan_problems
from dilatant.runtime.holders import trainable_layers
from dilatant.runtime.step_planner import Microbatching
from dilatant.schedule import FAMILIES, trainability_of, validate
from dilatant.schedule.distribute import assign
from dilatant.schedule.families import serial


def plan_from_config(config: ParallelConfig | None, model: MultimodalModel) -> Plan:
    """The plan that the config asks for, proven to be one that can train `model`; the model may be on the meta device.

    Without a `parallel` section it is a plan of one rank. Raises UserError that lists every problem.
    """
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    graph = model.graph
    if config is None:
        shared = {name: graph.anchor for name in layers if name != graph.anchor}
        return plan_from_specs(layers, dict.fromkeys(layers, ParallelSpec()), graph.feeds, shared)
    if config.plan is None:
        specs = {name: ParallelSpec(**dict(unit)) for name, unit in (config.units or {}).items()}
        plan = plan_from_specs(layers, specs, graph.feeds, config.colocated)
    else:
        plan = _read_plan(config.plan)
    trains = trainable_layers(model.units)
    spec = ModelSpec(
        tuple(
            UnitSpec(
                name,
                tuple(LayerSpec(layer, name, 0, flag) for layer, flag in zip(unit.layers, trains[name])),
                graph.feeds[name],
            )
            for name, unit in model.units.items()
        )
    )
    link = Link(bandwidth=1.0)
    everywhere = Cluster(1, max(plan.ranks, default=0) + 1, float("inf"), link, link)
    problems = plan_problems(plan, spec, everywhere, split_layers=False)
    problems += _too_few_devices(plan)
    if problems:
        raise list_problems("this plan cannot train:", problems)
    return plan


def microbatching(config: Config, plan: Plan) -> Microbatching:
    """How steps of the run are cut. One rank gains nothing by microbatches: there are as many as the token budget asks
    for, and each is done before the next begins."""
    budget = token_budget(config)
    if len(plan.ranks) == 1:
        return Microbatching(1, serial, row_tokens=budget)
    assert config.parallel is not None
    return Microbatching(
        config.parallel.microbatches,
        FAMILIES[config.parallel.schedule],
        config.plan.assignment,
        config.seed,
        budget,
    )


def token_budget(config: Config) -> int | None:
    """Most tokens of the language model in one microbatch, hence in one sample."""
    return config.train.row_tokens or config.data.max_length


def prove_schedule(config: Config, plan: Plan, model: MultimodalModel) -> None:
    """Prove that the steps of this layout cannot deadlock, on a batch in which every sample has work everywhere.

    It also compiles what every rank needs to order its messages, once and for all of them. Raises UserError.
    """
    how = microbatching(config, plan)
    count = how.num_microbatches * max(len(unit.replicas) for unit in plan.units)
    ones = {unit.name: [1] * count for unit in plan.units}
    assignment = assign(plan, ones, how.num_microbatches, anchor=model.graph.anchor)
    trainability = trainability_of(plan, trainable_layers(model.units))
    validate(plan, assignment, how.family(plan, assignment, trainability), trainability)


def units_decoded_on(model: MultimodalModel, plan: Plan, rank: int) -> frozenset[str]:
    """The units whose media `rank` reads: it holds a stage of theirs that does."""
    return frozenset(
        p.unit
        for p in plan.stages()
        if rank in p.stage.ranks and model.units[p.unit].reads_media(p.stage.first, p.stage.end)
    )


def _read_plan(path: str) -> Plan:
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"parallel.plan: {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"parallel.plan: {path!r}: {error}") from None


def _too_few_devices(plan: Plan) -> list[str]:
    devices = torch.cuda.device_count()
    if not devices or len(plan.ranks) <= devices or place_from() is not None:
        return []
    return [
        f"the plan needs {len(plan.ranks)} devices, and this machine has {devices} GPUs; start it on more machines "
        "with torchrun or Slurm, or let it run on the CPU (train.device: cpu)"
    ]
