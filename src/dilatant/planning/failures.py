"""Failure replay: training through a node trace with pipeline templates, against restarts from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import NodeTrace
from dilatant.plan.replay.reactions import compare_recovery, from_planner
from dilatant.plan.replay.replay import RecoveryCosts, Replay
from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner
from dilatant.planning.memberships import node_devices, plan_memberships
from dilatant.planning.planning import PlanningProblem
from dilatant.report.pages.replay_page import ReplaySetting
from dilatant.report.text.wording import origin_text

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

    def setting(self, problem: PlanningProblem, run: str) -> ReplaySetting:
        """Return the description of the replay for its report. run: name of the run."""
        cluster, costs = problem.target.cluster, self.planner.costs
        return ReplaySetting(
            run=run,
            models=problem.model.names,
            device=problem.target.hardware.name,
            gpus_per_node=costs.devices,
            nodes=self.nodes,
            nodes_asked=cluster.num_devices // costs.devices,
            templates=tuple(sorted(self.planner.templates(costs.devices, self.nodes))),
            microbatches=costs.num_microbatches,
            microbatch_size=max(1, problem.global_batch // costs.num_microbatches),
            costs=origin_text(problem.measured.origin),
            fault_tolerance=costs.fault_tolerance,
            recovery=self.recovery,
        )


def replay_failures(
    problem: PlanningProblem,
    trace: NodeTrace,
    fault_tolerance: int | None = None,
    chain: ChainCosts | None = None,
) -> FailureReplay:
    """Replay `trace` in three ways with nodes like the problem's (see `compare_recovery`): each membership has the plan
    that a run adopts. chain: costs that the run has in its plan; by default those of a plan for the problem's nodes, or
    if these are too few, for the most of the trace. Raises PlanError if no number of nodes of the trace can train."""
    most = max(alive for _, alive in trace.counts())
    wanted = problem.config.resilience.fault_tolerance if fault_tolerance is None else fault_tolerance
    if chain is not None and fault_tolerance in (None, chain.fault_tolerance):
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


def recovery_costs(
    problem: PlanningProblem, costs: ChainCosts, nodes: int, step_seconds: float
) -> RecoveryCosts:
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
