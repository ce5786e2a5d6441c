"""Failure replay: training through a node trace with pipeline templates, against restarts from a checkpoint; and the
reactions to a changed membership."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import NodeTrace
from dilatant.plan.replay.replay import Reaction, RecoveryCosts, Replay, RunningPipelines, replay
from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner, pipelines_of, ranks_of
from dilatant.plan.templates.templates import Template, share_microbatches
from dilatant.planning.memberships import node_devices, plan_memberships
from dilatant.planning.planning import PlanningProblem
from dilatant.report.text.wording import bytes_text, counted, listed, origin_text, ranks_text, seconds_text

DISK = 1e9
"""Bytes per second at which a node writes or reads a checkpoint: an assumption, as of a local NVMe disk or better."""

SAVE_EVERY = 600.0
"""Seconds of training between checkpoints if `train.save_steps` is not set."""


@dataclass(frozen=True, slots=True)
class FailureReplay:
    """Replays of one trace. nodes: maximum number of nodes at one time. planner: makes the plans of all memberships.
    recovery: assumed costs of changes of membership."""

    replays: tuple[Replay, ...]
    nodes: int
    planner: MembershipPlanner
    recovery: RecoveryCosts

    def title(self, problem: PlanningProblem, run: str) -> str:
        """Return run, model and cluster in one line. run: name of the run."""
        return f"{run}: {' + '.join(problem.model.names.values())} on {self._nodes(problem)}"

    def sentences(self, problem: PlanningProblem) -> tuple[str, ...]:
        """Return what was replayed, and the assumed costs of changes of membership."""
        costs, recovery, count = self.planner.costs, self.recovery, self.planner.costs.num_microbatches
        units = listed([f"{unit} ({model})" for unit, model in problem.model.names.items()])
        nodes, asked = self._nodes(problem), problem.target.cluster.num_devices // costs.devices
        other = f" (not the {asked} of the cluster)" if self.nodes != asked else ""
        samples = counted(max(1, problem.global_batch // count), "sample")
        kept = "Of an interrupted step, what pipelines without a loss had done is kept."
        return (
            f"Replayed: {units} on {nodes}, as the trace has them{other}; {counted(costs.fault_tolerance, 'loss')} at "
            "once must leave a replica whole.",
            f"Plan: pipelines of {ranks_text(self.planner.templates(costs.devices, self.nodes))} nodes, one chain of "
            f"all units each; a step has {counted(count, 'microbatch')} of {samples}. Costs: "
            f"{origin_text(problem.measured.origin)}.",
            f"Assumed: {seconds_text(recovery.reconfigure_seconds)} to form new pipelines and "
            f"{bytes_text(recovery.copy_bytes_per_second)} per second copied to or from a node; "
            f"{seconds_text(recovery.restart_seconds)} to restart; a checkpoint every "
            f"{counted(recovery.checkpoint_steps, 'step')}, which takes {seconds_text(recovery.checkpoint_seconds)}. "
            + (kept if recovery.keeps_pipelines else "An interrupted step is repeated."),
            "With `resilience.enabled`, `dilatant train` adopts these plans; without, it restarts from a checkpoint.",
        )

    def _nodes(self, problem: PlanningProblem) -> str:
        nodes = counted(self.nodes, "node")
        return f"up to {nodes} of {self.planner.costs.devices} × {problem.target.hardware.name}"


def replay_failures(
    problem: PlanningProblem, trace: NodeTrace, fault_tolerance: int | None = None, chain: ChainCosts | None = None
) -> FailureReplay:
    """Replay `trace` in three ways with nodes like the problem's (see `compare_recovery`): each membership has the plan
    that a run adopts. chain: costs that the run has in its plan; by default those of a plan for the problem's nodes, or
    if these are too few, for the most of the trace. Raises PlanError if no number of nodes of the trace can train."""
    most = max(alive for _, alive in trace.counts())
    wanted = problem.config.resilience.fault_tolerance if fault_tolerance is None else fault_tolerance
    if chain is not None and fault_tolerance in (None, chain.fault_tolerance) and not problem.target.rules.shard:
        planner = MembershipPlanner(chain)
    else:
        try:
            nodes = problem.target.cluster.num_devices // node_devices(problem)
            planner, _ = plan_memberships(problem, nodes, wanted)
        except PlanError:
            planner, _ = plan_memberships(problem, most, wanted)
    costs = planner.costs
    recovery = recovery_costs(problem, costs, most, planner.first(most).seconds)
    replays = compare_recovery(
        trace,
        from_planner(planner),
        planner.templates(costs.devices, most),
        (costs.num_microbatches, problem.global_batch),
        recovery,
        costs.fault_tolerance + 1,
    )
    return FailureReplay(replays, most, planner, recovery)


def recovery_costs(problem: PlanningProblem, costs: ChainCosts, nodes: int, step_seconds: float) -> RecoveryCosts:
    """Return the recovery costs of this run from its links and its state; others are defaults of `RecoveryCosts`."""
    saving = sum(costs.layer_bytes) / nodes / DISK
    usual = RecoveryCosts()
    return RecoveryCosts(
        copy_bytes_per_second=costs.bytes_per_second,
        restart_seconds=usual.restart_seconds + saving,
        checkpoint_steps=problem.config.train.save_steps or max(1, round(SAVE_EVERY / step_seconds)),
        checkpoint_seconds=saving,
        keeps_pipelines=problem.config.resilience.salvage,
    )


_STOPPED = RunningPipelines((), math.inf)


def from_planner(planner: MembershipPlanner) -> Reaction:
    """Return a reaction that plans every membership as a run does, with nodes like those of the planner's costs. If the
    nodes cannot hold the model, the run stops; it starts again from a checkpoint, with a new first plan."""
    size, first = planner.costs.devices, range(len(planner.costs.domains))

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
                each = (here.values(), planner.costs.domains_of(first, members))
                found = planner.next(plan, survivors, *([one for one in own for _ in range(size)] for own in each))
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

    @cache
    def grid(nodes: int) -> tuple[float, int]:
        """Return (seconds of a step, nodes of each pipeline) of the fastest grid."""
        best = (math.inf, 0)
        for size in sorted(templates):
            replicas = min(nodes // size, num_microbatches)
            if replicas:
                best = min(best, (share_microbatches([templates[size]] * replicas, num_microbatches)[1], size))
        return best

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        seconds, size = grid(len(alive))
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
    return tuple(replay(name, trace, reaction, samples, spent, replicas_wanted) for name, reaction, spent in runs)


def without_cost(reaction: Reaction) -> Reaction:
    """Return a reaction with the same pipelines but without recovery costs: an upper bound of its throughput."""

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        after = reaction(before, alive)
        return RunningPipelines(after.pipelines, after.step_seconds, plan=after.plan, members=after.members)

    return react
