"""Reactions: strategies for continuing training after a change of membership, which a replay compares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import NodeTrace
from dilatant.plan.replay.replay import Reaction, RecoveryCosts, Replay, RunningPipelines, replay
from dilatant.plan.templates.compose import share_microbatches
from dilatant.plan.templates.membership import MembershipPlanner, pipelines_of, ranks_of
from dilatant.plan.templates.templates import Template

_STOPPED = RunningPipelines((), math.inf)


def from_planner(planner: MembershipPlanner) -> Reaction:
    """Return a reaction that plans every membership as a run does, with nodes like those of the planner's costs. If the
    nodes cannot hold the model, the run stops; it starts again from a checkpoint, with a new first plan."""
    size = planner.costs.devices

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        plan, old = (None, ()) if before is None else (before.plan, before.members)
        stay = [node for node in old if node in alive]
        members = (*stay, *sorted(alive - {*stay}))
        here = {node: number for number, node in enumerate(members)}
        survivors = {old.index(node) * size + k: here[node] * size + k for node in stay for k in range(size)}
        kept = before is None if plan is None else planner.holds_all(plan, survivors)
        try:
            if plan is None:
                found = planner.first(len(members))
            else:
                found = planner.next(plan, survivors, [node for node in here.values() for _ in range(size)])
        except PlanError:
            return _STOPPED
        return RunningPipelines(
            tuple(
                tuple(dict.fromkeys(members[rank // size] for rank in ranks_of(one)))
                for one in pipelines_of(found.plan)
            ),
            found.seconds,
            found.moved_bytes if kept and plan is not None else 0,
            kept,
            in_flight_seconds=found.microbatch_seconds,
            plan=found.plan,
            members=members,
        )

    return react


def restart_from_checkpoint(templates: Mapping[int, Template], num_microbatches: int) -> Reaction:
    """Restart all processes from the last checkpoint at every change, on a grid: equal pipelines, other nodes idle.

    The grid is the fastest over all pipeline sizes. Checkpoint-based elastic training works this way (Varuna, the
    baseline of Oobleck: the thesis, 2.7).
    """

    def grid(nodes: int) -> tuple[float, int]:
        """Return (seconds of a step, nodes of each pipeline) of the fastest grid."""
        best = (math.inf, 0)
        for size in sorted(templates):
            replicas = min(nodes // size, num_microbatches)
            if replicas:
                best = min(
                    best, (share_microbatches([templates[size]] * replicas, num_microbatches)[1], size)
                )
        return best

    known: dict[int, tuple[float, int]] = {}

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        if len(alive) not in known:
            known[len(alive)] = grid(len(alive))
        seconds, size = known[len(alive)]
        if not size:
            return _STOPPED
        ordered = sorted(alive)
        replicas = min(len(ordered) // size, num_microbatches)
        pipelines = tuple(tuple(ordered[first : first + size]) for first in range(0, replicas * size, size))
        return RunningPipelines(pipelines, seconds, restarted=True)

    return react


def compare_recovery(
    trace: NodeTrace,
    ours: Reaction,
    templates: Mapping[int, Template],
    batch: tuple[int, float],
    costs: RecoveryCosts,
    replicas_wanted: int,
) -> tuple[Replay, ...]:
    """Replay one trace three times: our reaction, restarts from a checkpoint in a grid of `templates`, and our reaction
    at no cost. batch: microbatches and samples of a step.

    Our reaction needs checkpoints only for losses that no replica survives; these are saved in the background, so
    `costs.checkpoint_seconds` applies only to the restarts. The last replay is an upper bound of the first.
    """
    count, samples = batch
    restart = restart_from_checkpoint(templates, count)
    background, free = replace(costs, checkpoint_seconds=0.0), RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0)
    runs = (
        ("templates", ours, background),
        ("restart from checkpoint", restart, replace(costs, keeps_pipelines=False)),
        ("templates at no cost", without_cost(ours), free),
    )
    return tuple(
        replay(name, trace, reaction, samples, spent, replicas_wanted) for name, reaction, spent in runs
    )


def without_cost(reaction: Reaction) -> Reaction:
    """Return a reaction with the same pipelines but without recovery costs: an upper bound of its throughput."""

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        after = reaction(before, alive)
        return RunningPipelines(after.pipelines, after.step_seconds, plan=after.plan, members=after.members)

    return react
