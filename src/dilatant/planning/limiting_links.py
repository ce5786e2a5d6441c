"""Limits of a step: links, arithmetic, memory bandwidth and buffers take nothing when the step is simulated again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dilatant.cost.hardware import Hardware, Link
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.sync_time import sync_seconds
from dilatant.planning.planning import PlannedRun, PlanningProblem, scorer_of
from dilatant.planning.remodelled import remodelled
from dilatant.report.text.wording import listed, percent_text
from dilatant.schedule.plan_scorer import step_costs

NOTABLE = 0.01
"""Share of a step that a link must take to be named."""


def link_reasons(planned: PlannedRun) -> list[str]:
    """Say how much of a step the links inside nodes, or those between nodes, take, and for which messages. Nothing for
    one device, or for unlike ones."""
    cluster = planned.problem.target.cluster
    if len(planned.result.winner.plan.ranks) == 1 or cluster.parts:
        return []
    names = {"inside": _inside(planned.problem.target.hardware), "between": "the network between nodes"}
    found = {names[name]: _saved(planned, name) for name in names if name == "inside" or cluster.nodes > 1}
    texts = []
    for link, parts in sorted(found.items(), key=lambda one: -one[1][""]):
        whole = parts.pop("")
        by = [f"{what} {percent_text(share)}" for what, share in parts.items() if share >= NOTABLE / 2]
        if whole >= NOTABLE:
            texts.append(f"{link} by {percent_text(whole)}{f' ({listed(by)})' if by else ''}")
    both = _saved(planned, *names)[""] if len(found) > 1 and not texts else 0.0
    if both >= NOTABLE:  # messages on both travel at the same time
        return [
            f"The links inside nodes and those between nodes make the step longer by {percent_text(both)} together: "
            "either kind alone takes about as long."
        ]
    if not texts:
        return ["No link limits the step: it would be less than 1 % shorter if messages took no time."]
    return [f"Links make the step longer: {listed(texts)}."]


def device_reasons(planned: PlannedRun) -> list[str]:
    """Say how much of a step the devices' arithmetic, memory bandwidth and kernel launches take; nothing for measured
    layers."""
    problem, plan, simulated = planned.problem, planned.result.winner.plan, _simulated(planned)
    target, spec = problem.target, problem.model.spec
    hardware, cluster = target.hardware, target.cluster
    modelled = {
        "arithmetic": (replace(hardware, peak_flops=dict.fromkeys(hardware.peak_flops, math.inf)), cluster),
        "memory bandwidth": (replace(hardware, bandwidth=math.inf), replace(cluster, memory_bandwidth=math.inf)),
        "kernel launches": (replace(hardware, host=0.0, launch=0.0), cluster),
    }
    free = {name: (remodelled(problem, device), machine) for name, (device, machine) in modelled.items()}
    if any(own is problem for own, _ in free.values()):
        return []

    def seconds(own: PlanningProblem, machine: Cluster) -> float:
        return simulated(step_costs(plan, spec, own.costs, machine, target.rules))

    whole = seconds(problem, cluster)
    shares = {name: 1.0 - seconds(*own) / whole for name, own in free.items()}
    texts = [f"{name} {percent_text(share)}" for name, share in sorted(shares.items(), key=lambda one: -one[1])]
    return [f"Of the step, each device's {listed(texts)}: so much shorter would it be if these took no time."]


def peaks_without_buffers(planned: PlannedRun) -> list[float]:
    """Return by rank the peak bytes of a step that holds nothing only while a stage runs or sums its gradients; nothing
    if memory is not simulated."""
    problem, winner = planned.problem, planned.result.winner
    own = step_costs(winner.plan, problem.model.spec, problem.costs, problem.target.cluster, problem.target.rules)
    names = ("transient_bytes", "forward_bytes", "late_bytes", "shard_bytes", "sum_bytes")
    kept = replace(own.stages, **{name: np.zeros_like(getattr(own.stages, name)) for name in names})
    steps = scorer_of(problem, winner.score.schedule or None).steps(
        winner.plan, winner.num_microbatches, winner.row_tokens, costs=replace(own, stages=kept)
    )
    found = [peaks for step in steps if (peaks := step.timeline.peak_bytes) is not None]
    return np.max(found, axis=0).tolist() if found else []


def _simulated(planned: PlannedRun) -> Callable[[StepCosts], float]:
    """Return the function that simulates the winner's first step under given costs, in seconds."""
    problem, winner = planned.problem, planned.result.winner
    step = problem.samples.first(problem.global_batch)
    scorer = replace(scorer_of(problem, winner.score.schedule or None), workload=step)
    asked = winner.plan, winner.num_microbatches, winner.row_tokens
    return lambda costs: scorer.steps(*asked, costs=costs)[0].seconds


def _inside(hardware: Hardware) -> str:
    """Return the name of the links inside a node, by the hardware's data sheet."""
    kind = next((word for word in ("NVLink", "Infinity Fabric", "PCIe") if word in hardware.source), "the links")
    return f"{kind} inside {'NVLink domains' if hardware.domain else 'nodes'}"


def _saved(planned: PlannedRun, *links: str) -> dict[str, float]:
    """Return by kind of message, largest first, the share of a step that is saved if they took no time on these links.
    Links are fields of `Cluster`; the share under "" is of all messages together."""
    problem, plan, seconds = planned.problem, planned.result.winner.plan, _simulated(planned)
    target, spec = problem.target, problem.model.spec
    free: dict[str, Any] = dict.fromkeys(links, Link(math.inf))
    cluster, rules = replace(target.cluster, **free), target.rules
    own = step_costs(plan, spec, problem.costs, target.cluster, rules)
    others, layers = step_costs(plan, spec, problem.costs, cluster, rules), problem.costs
    if any(placed.stage.degrees.ranks > 1 for placed in plan.stages()):
        layers = remodelled(problem, replace(target.hardware, **free)).costs
    whole = seconds(own)
    kinds = {
        "": replace(others, stages=stage_costs(plan, spec, layers, rules, cluster)),
        "rows between stages": replace(own, cluster=cluster),
        "gradients and updated weights": replace(own, sync=sync_seconds(plan, spec, cluster, rules)),
        "sharded weights and gradients": replace(own, stages=others.stages),
        "collectives inside stages": replace(own, stages=stage_costs(plan, spec, layers, rules, target.cluster)),
    }
    saved: dict[str, float] = {}
    for kind, costs in kinds.items():
        if saved.get("", 1.0) >= NOTABLE:
            saved[kind] = 1.0 - seconds(costs) / whole
    return dict(sorted(saved.items(), key=lambda one: -one[1]))
