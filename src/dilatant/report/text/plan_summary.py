"""Sentences that summarize a plan report, and that answer why a search did not choose a layout."""

from __future__ import annotations

from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.plan import Plan
from dilatant.plan.search.search_result import SearchResult
from dilatant.plan.search.why_not import WhyNot
from dilatant.report.plan_report import ComparedPlan, PlanReport
from dilatant.report.search_report import compared_plan
from dilatant.report.text.gantt_summary import NOTABLE, losses, measurement, pace
from dilatant.report.text.wording import (
    bytes_text,
    count_text,
    counted,
    listed,
    lost_to,
    percent_text,
    seconds_text,
    three_digits,
)

_REMEDY = {
    "warm-up": "more microbatches in a step, or fewer stages, would shorten the filling of the pipeline",
    "drain": "more microbatches in a step, or fewer stages, would shorten the draining of the pipeline",
    "imbalance": "work that is spread more evenly, over stages by other cuts or over microbatches by "
    "`plan.assignment: searched`, would shorten the waits",
    "communication": "faster links, or neighbouring stages and replicas of a stage on one machine, would shorten "
    "transfers",
}


def summarize(report: PlanReport) -> tuple[str, ...]:
    """Return the report in sentences for newcomers: speed, losses, slowest stage, memory, data, alternatives."""
    sentences = [_speed(report)]
    if report.measured is not None and report.remodelled is not None:
        sentences += measurement(report.remodelled, report.measured, report.plan)
    sentences += [losses(report.timeline, report.plan), *pace(report.timeline, report.plan)]
    sentences += [*_memory(report), *_data(report), *_optimality(report), *_rivals(report)]
    return tuple(sentences)


def short_answer(report: PlanReport) -> str:
    """Return speed, memory, the smallest number of devices, and the plan's shape and memory modes in one line."""
    return " ".join([_speed(report), *_memory(report), *_fewest(report), *report.reasons[:1], *_memory_modes(report)])


def suggest(report: PlanReport) -> tuple[str, ...]:
    """Return the planner's advice, then a remedy for each large loss with the most it can save."""
    advice = list(report.advice)
    for cause, fraction in report.timeline.idle_fractions().items():
        if fraction < 3 * NOTABLE or len(advice) >= len(report.advice) + 2:
            break
        remedy = _REMEDY.get(cause)
        if cause == "imbalance" and all(len(own.stages) == 1 for unit in report.plan.units for own in unit.replicas):
            remedy = "more samples in a step (`train.global_batch_size`), which even out, would shorten the waits"
        if cause == "communication" and (report.gpus_per_node or 0) > max(report.plan.ranks):
            remedy = "faster links would shorten transfers"
        if remedy is None and cause.startswith("waiting for "):
            unit = cause.removeprefix("waiting for ")
            remedy = f"more devices for {unit}, or fewer of its layers on the slowest stage, would shorten the wait"
        if remedy:
            advice.append(f"{remedy[0].upper()}{remedy[1:]}: {percent_text(fraction)} of device time at most.")
    return tuple(advice)


def explain(candidate: ComparedPlan, chosen: ComparedPlan) -> str:
    """Return why `candidate` was not chosen: the planner's reason, else its memory or its largest extra loss."""
    if candidate.why:
        return candidate.why
    if candidate.chosen:
        return "The fastest plan that fits."
    if candidate.peak_memory > 1.0:
        return f"Does not fit: {percent_text(candidate.peak_memory)} of a device's memory."
    if candidate.recomputed and not chosen.recomputed:
        return f"To fit memory it computes forwards again: {candidate.recomputed}."
    if candidate.step_seconds < (1.0 + NOTABLE / 2) * chosen.step_seconds and candidate.devices >= chosen.devices:
        return "As fast, within the accuracy of the prediction."
    extra = {cause: part - chosen.idle.get(cause, 0.0) for cause, part in candidate.idle.items()}
    worst = max(extra, key=lambda cause: extra[cause], default="")
    if worst and extra[worst] >= NOTABLE:
        return f"Loses {percent_text(extra[worst])} more of device time to {lost_to(worst)}."
    waits = candidate.sync_seconds - chosen.sync_seconds
    if waits >= NOTABLE * chosen.step_seconds:
        return f"Summing gradients and updating weights take {seconds_text(waits)} longer after the last backward."
    if candidate.devices < chosen.devices:
        return f"Leaves {chosen.devices - candidate.devices} devices unused."
    if candidate.step_seconds <= chosen.step_seconds:
        return "As fast, within the accuracy of the prediction."
    return "Its slowest stage has more work."


def _speed(report: PlanReport) -> str:
    devices = len(report.plan.ranks)
    unused = (report.allocated_devices or devices) - devices
    sentence = (
        f"One step should take {seconds_text(report.step_seconds)} for {report.global_batch:,} samples: "
        f"{count_text(report.samples_per_second)} samples per second on {counted(devices, 'device')}."
    )
    stay = "stays" if unused == 1 else "stay"
    return f"{sentence} {counted(unused, 'allocated device')} {stay} unused." if unused > 0 else sentence


def _memory(report: PlanReport) -> list[str]:
    if not report.memory:
        return []
    fullest = max(report.memory, key=lambda use: use.fraction)
    who = f"rank {min(fullest.ranks)}"
    need, capacity = bytes_text(fullest.peak_bytes), bytes_text(fullest.capacity_bytes)
    if fullest.fraction > 1.0:
        over = bytes_text(fullest.peak_bytes - fullest.capacity_bytes)
        return [f"It does not fit: {who} needs {need} of {capacity}, {over} too much."]
    reserve = fullest.bytes_by_use.get("reserve", 0)
    free = f", {bytes_text(reserve)} of it a reserve (cluster.reserve)" if reserve else ""
    return [f"Memory fits: {who}, the fullest, needs {need} of {capacity} ({percent_text(fullest.fraction)}){free}."]


def _memory_modes(report: PlanReport) -> list[str]:
    again = report.chosen.recomputed if report.candidates else ""
    shards = [f"{how.replace('_', ' ')} of {unit}" for unit, how in report.shard.items()]
    found = [f"ranks share {listed(shards)} (train.shard)"] if shards else []
    found += [f"the backward computes {again} again (train.recompute)"] if again else []
    text = listed(found)
    return [f"{text[0].upper()}{text[1:]}."] if found else []


def _fewest(report: PlanReport) -> list[str]:
    if report.fewest is None:
        return []
    devices, faster = report.fewest.devices, report.fewest.step_seconds / report.step_seconds
    return [
        f"Of 1, 2, 4, … devices it fits from {devices} on, where a step takes "
        f"{seconds_text(report.fewest.step_seconds)}: these are {three_digits(faster)} times as fast."
    ]


def _data(report: PlanReport) -> list[str]:
    ratio = report.ratio
    if ratio is None or not ratio.shares:
        return []
    shares = []
    for unit, share in ratio.shares.items():
        off = 100 * max(ratio.high[unit] - share, share - ratio.low[unit])
        shares.append(f"{unit} {percent_text(share)} (± {off:.2g} points)")
    basis = f"estimated from {ratio.samples:,} samples with {percent_text(ratio.confidence)} confidence"
    return [f"The work of single samples is {listed(shares)}, {basis}."]


def _optimality(report: PlanReport) -> list[str]:
    bound = report.lower_bound_seconds
    searched = f" ({report.searched})" if report.searched else ""
    if report.proven:
        return [f"Of what was searched{searched}, no plan is faster in this model of costs."]
    if bound is None or bound <= 0.0:
        return []
    gap = max(report.step_seconds / bound - 1.0, 0.0)
    if gap > 1.0:
        return [
            f"No plan of those searched{searched} can take less than {seconds_text(bound)}; that bound is too loose to "
            "tell how good this one is."
        ]
    return [
        f"No plan of those searched{searched} can take less than {seconds_text(bound)}; this one is within "
        f"{percent_text(gap)} of that."
    ]


def _rivals(report: PlanReport) -> list[str]:
    chosen = report.chosen if report.candidates else None
    others = [one for one in report.ranked if not one.chosen and one.peak_memory <= 1.0]
    if chosen is None or not chosen.chosen or not others:
        return []
    second = others[0]
    slower = second.step_seconds / chosen.step_seconds - 1.0
    name = f"{second.name}: {second.layout}" if second.layout else second.name
    if abs(slower) < 0.0005:
        return [f"The runner-up ({name}) takes as long."]
    relation = "slower" if slower >= 0.0 else "faster"
    return [f"The runner-up ({name}) is {percent_text(abs(slower))} {relation}. {explain(second, chosen)}"]


def why_not_text(answer: WhyNot, result: SearchResult, cluster: Cluster) -> tuple[str, ...]:
    """Return whether such a plan was tried, was cut by its bound, does not fit, or is slower and why."""
    if answer.is_chosen:
        return ("The plan that was chosen is like that.",)
    if not answer.plans:
        return no_plan_text(answer, cluster)
    best, winner = answer.plans[0], compared_plan(result.winner, cluster, chosen=True)
    own = compared_plan(best, cluster)
    slower = best.score.seconds / result.seconds - 1.0
    return (
        _tried(answer, result),
        f"The fastest like that: {own.name}, {own.layout}, schedule {best.score.schedule}, takes "
        f"{seconds_text(best.score.seconds)} a step, {percent_text(abs(slower))} "
        f"{'more' if slower >= 0 else 'less'} than the plan that was chosen ({seconds_text(result.seconds)}).",
        explain(own, winner),
        *([f"It needs {fullest_text(cluster, best.plan, best.score)}."] if best.score.peak_bytes else []),
    )


def fullest_text(cluster: Cluster, plan: Plan, score: PlanScore) -> str:
    """Describe the memory of the fullest device; as in the plan's report, used and total include the reserve."""
    peaks = zip(score.peak_bytes, cluster.bytes_of(plan.ranks).tolist(), plan.ranks, strict=True)
    peak, capacity, rank = max(peaks, key=lambda one: one[0] - one[1])
    reserve = cluster.at(rank).reserve.total
    return f"{bytes_text(peak + reserve)} of {bytes_text(capacity + reserve)} on the fullest device"


def no_plan_text(answer: WhyNot, cluster: Cluster) -> tuple[str, ...]:
    """Return why an answer has no plan."""
    if answer.impossible:
        return tuple(f"No plan is like that: {why}." for why in answer.impossible)
    return (
        f"No plan like that fits memory, of which plans may use {_capacities(cluster)} on each device: the nearest, "
        f"{answer.overflow}.",
    )


def _capacities(cluster: Cluster) -> str:
    """Return the memory of a device that plans may use."""
    if not cluster.parts:
        return bytes_text(cluster.bytes_per_device)
    return listed([f"{bytes_text(own.bytes_per_device)} ({own.name})" for own in cluster.parts])


def _tried(answer: WhyNot, result: SearchResult) -> str:
    are = "is" if answer.candidates == 1 else "are"
    like = f"{counted(answer.candidates, 'candidate')} of the search {are} like that"
    if answer.was_simulated:
        return f"{like}, and the fastest of them was simulated and compared."
    if not answer.candidates:
        return "The search took no plan like that to fit memory; simulated now, one does."
    if answer.bound >= result.seconds:
        return f"{like}, and none was simulated: none can take less than {seconds_text(answer.bound)}."
    return (
        f"{like}, and the fastest was not simulated, since others promised more (it cannot take less than "
        f"{seconds_text(answer.bound)}); simulated now:"
    )
