"""Failure replay: training through a node trace with pipeline templates, against restarts from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config import UserError
from dilatant.config.degrees import Degrees
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import NodeTrace
from dilatant.plan.replay.reactions import compare_recovery
from dilatant.plan.replay.replay import RecoveryCosts, Replay
from dilatant.plan.templates.templates import LayerMemory, Template, plan_templates
from dilatant.planning.planning import PlanningProblem
from dilatant.report.pages.replay_page import ReplaySetting
from dilatant.report.text.wording import origin_text

DISK = 1e9
"""Bytes per second at which a node writes or reads a checkpoint: an assumption, as of a local NVMe disk or better."""

SAVE_EVERY = 600.0
"""Seconds of training between checkpoints if `train.save_steps` is not set."""


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """Templates by their number of nodes, for `microbatches` of `size` samples a step."""

    templates: dict[int, Template]
    microbatches: int
    size: int

    def seconds(self, nodes: int) -> float:
        """Return the step seconds on `nodes` nodes in equal pipelines, as if all divided evenly; infinite if none
        fit."""
        best = math.inf
        for own, template in self.templates.items():
            pipelines = min(nodes // own, self.microbatches)
            if pipelines:
                more = math.ceil(self.microbatches / pipelines) - 1
                best = min(best, template.seconds + more * template.bottleneck)
        return best


@dataclass(frozen=True, slots=True)
class FailureReplay:
    """Replays of one trace. nodes: the most that it has at once. plan: templates that nodes train by. recovery: what
    changes were assumed to cost."""

    replays: tuple[Replay, ...]
    nodes: int
    plan: TemplateSet
    recovery: RecoveryCosts

    def setting(self, problem: PlanningProblem, run: str, fault_tolerance: int) -> ReplaySetting:
        """Return what was replayed, for a reader. run: its name."""
        cluster = problem.target.cluster
        return ReplaySetting(
            run=run,
            models=problem.model.names,
            device=problem.target.hardware.name,
            gpus_per_node=cluster.gpus_per_node,
            nodes=self.nodes,
            nodes_asked=cluster.nodes,
            templates=tuple(sorted(self.plan.templates)),
            microbatches=self.plan.microbatches,
            microbatch_size=self.plan.size,
            costs=origin_text(problem.measured.origin),
            fault_tolerance=fault_tolerance,
            recovery=self.recovery,
        )


def replay_failures(problem: PlanningProblem, trace: NodeTrace, fault_tolerance: int = 1) -> FailureReplay:
    """Replay `trace` in three ways with nodes like the problem's (see `compare_recovery`).

    A template runs the units one after another, as one chain of layers (Oobleck, section 2.4 of the thesis): its
    advantage is that any number of nodes can train. Raises PlanError if no number of nodes of the trace can.
    """
    most = max(alive for _, alive in trace.counts())
    best = best_templates(problem, most)
    layer_bytes = [
        round(problem.target.rules.held(layer.parameters, layer.trained))
        for unit in problem.model.spec.units
        for layer in unit.layers
    ]
    recovery = recovery_costs(problem, sum(layer_bytes), most, best.seconds(most))
    replays = compare_recovery(
        trace, best.templates, fault_tolerance, best.microbatches, best.size, layer_bytes, recovery
    )
    return FailureReplay(replays, most, best, recovery)


def recovery_costs(
    problem: PlanningProblem, state_bytes: int, nodes: int, step_seconds: float
) -> RecoveryCosts:
    """Return what changes cost this run, by its links and its state; the rest are the defaults of `RecoveryCosts`."""
    saving = state_bytes / nodes / DISK
    usual = RecoveryCosts()
    return RecoveryCosts(
        copy_bytes_per_second=problem.target.cluster.between.bandwidth,
        restart_seconds=usual.restart_seconds + saving,
        checkpoint_steps=problem.config.train.save_steps or max(1, round(SAVE_EVERY / step_seconds)),
        checkpoint_seconds=saving,
        keeps_pipelines=problem.config.resilience.salvage,
    )


def best_templates(problem: PlanningProblem, most_nodes: int) -> TemplateSet:
    """Return templates of up to `most_nodes` nodes, for the microbatch size with the fastest step on all of them.

    Raises PlanError if no number of nodes can hold the model, and for unlike devices.
    """
    if problem.target.groups:
        raise PlanError(
            "templates are made of equal devices; leave out cluster.groups, or name one kind with --cluster"
        )
    batch = problem.global_batch
    found: list[TemplateSet] = []
    problems = set()
    for size in sorted(set(problem.config.plan.microbatch_sizes)):
        if batch % size == 0:
            try:
                found.append(_templates(problem, most_nodes, size, batch // size))
            except PlanError as error:
                problems.add(str(error))
    best = min(found, key=lambda one: one.seconds(most_nodes), default=None)
    if best is None or not best.templates:
        why = f": {'; '.join(sorted(problems))}" if problems else ""
        raise PlanError(
            f"no pipeline of 1 to {most_nodes} nodes of {problem.target.cluster.gpus_per_node} devices holds the "
            f"model{why}; take nodes with fewer devices or more memory, other tensor-parallel degrees, or recomputation"
        )
    return best


def _templates(problem: PlanningProblem, most_nodes: int, size: int, microbatches: int) -> TemplateSet:
    cluster = problem.target.cluster
    units = [unit.name for unit in problem.model.spec.units]
    known = problem.model.spec, problem.costs, problem.simulated()
    table = UnitLayers(*known, cluster.gpus_per_node, problem.target.rules)
    widths = [degrees.tp for degrees in table.degrees(units) if degrees.copies == 1]
    if not widths:
        raise UserError("templates need layer costs without context parallelism; the cost file has none")
    columns: dict[str, dict[int, NDArray[np.float64]]] = {
        name: {
            width: np.concatenate([getattr(table.layers(unit, Degrees(width), size), name) for unit in units])
            for width in widths
        }
        for name in ("seconds", "static", "kept", "transient")
    }
    transient = max(float(column.max()) for column in columns["transient"].values())
    seconds = columns["seconds"]
    templates = plan_templates(
        {width: column.tolist() for width, column in seconds.items()},
        range(1, most_nodes + 1),
        cluster.gpus_per_node,
        max(microbatches, len(seconds[widths[0]])),
        LayerMemory(
            {width: column.tolist() for width, column in columns["static"].items()},
            {width: column.tolist() for width, column in columns["kept"].items()},
            cluster.bytes_per_device - transient,
        ),
    )

    def one(template: Template) -> float:
        return sum(float(seconds[gpus][first:end].sum()) for first, end, gpus in template.stages)

    # The papers' T1 + T2 + T3 is too low, even negative, for fewer microbatches than stages, as in long pipelines.
    # Here: one microbatch through all stages, and the slowest stage's time for each further microbatch.
    timed = {
        nodes: replace(template, seconds=one(template), num_microbatches=1)
        for nodes, template in templates.items()
    }
    return TemplateSet(timed, microbatches, size)
