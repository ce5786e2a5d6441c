"""Sentences on why a search chose its winner, which a user can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from dilatant.config.memory_modes import Recompute
from dilatant.cost.memory import Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.plan import Plan, Replica
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.search_result import SearchResult
from dilatant.report.text.wording import counted, listed, microbatches_text, percent_text, seconds_text, three_digits
from dilatant.schedule.timeline import Timeline

_WHERE = {
    EncoderPosition.PARALLEL: "every unit on devices of its own",
    EncoderPosition.COLOCATED: "the encoders together on devices of their own",
    EncoderPosition.IN_LANGUAGE: "the encoders in the language model's first stage",
    EncoderPosition.MIXED: "the encoders in different places from pipeline to pipeline",
}

_SHARED_BY: Mapping[Zero, str] = {
    "none": "shared by nobody",
    "node": "shared by the ranks of a node that hold the same weight",
    "all": "shared by all ranks that hold the same weight",
}

_KEEPING: Mapping[Recompute, str] = {
    "block": "",
    "block_keep_attention": " (all but attention)",
    "block_offload": " (inputs in host memory)",
}


def search_reasons(result: SearchResult, timeline: Timeline, cluster: Cluster | None = None) -> tuple[str, ...]:
    """Return sentences on the winner's shape, its devices against its work, its slowest stage, and the certainty.
    timeline: one of its steps.
    Idle time, memory and runners-up are left to the plan report, which draws them."""
    winner = result.winner
    lines = [
        _shape(winner, cluster),
        *_shares(timeline),
        _bottleneck(timeline, cluster),
        *_tensor(result),
        *_sharing(result),
        *_recomputation(winner.plan),
    ]
    sync = winner.score.sync_seconds
    if sync > 0.0:
        sums = "Summing gradients and updating weights add" if len(winner.plan.ranks) > 1 else "Updating weights adds"
        lines.append(
            f"{sums} {seconds_text(sync)} ({percent_text(sync / result.seconds)} of the step) after the last backward."
        )
    if winner.idle_devices:
        slower = " Every plan on all of them that was simulated is slower." if result.candidates > 1 else ""
        lines.append(f"Unused devices: {winner.idle_devices}.{slower}")
    lines += [f"Rejected: {text}." for text in result.rejected[:3]]
    lines.append(_certainty(result))
    return tuple(lines)


def layout_text(plan: Plan, cluster: Cluster | None = None) -> str:
    """Return every unit's replicas, stages and, if not 1, degrees: `vision 4 × 2 stages, language 4 × 3 stages tp 2`,
    or `1 × 8 stages (4 a rank)` in chunks. In a heterogeneous cluster the device groups are added."""

    def group(replica: Replica) -> str:
        if cluster is None or not cluster.parts:
            return ""
        names = dict.fromkeys(cluster.at(stage.ranks[0]).name for stage in replica.stages)
        return f"on {' and '.join(names)}"

    texts = []
    for unit in plan.units:
        alike = Counter(
            (_stages(replica), tuple(sorted({stage.degrees for stage in replica.stages})), group(replica))
            for replica in unit.replicas
        )
        shapes = [
            " ".join([f"{count} × {stages}", *filter(None, (*(one.text() for one in degrees), where))])
            for (stages, degrees, where), count in alike.items()
        ]
        texts.append(f"{unit.name} {' and '.join(shapes)}")
    return ", ".join(texts)


def _stages(replica: Replica) -> str:
    """Return the number of stages, and how many a rank holds if several."""
    text, groups = counted(len(replica.stages), "stage"), len({stage.ranks for stage in replica.stages})
    chunks = len(replica.stages) // groups
    return text if chunks == 1 else f"{text} ({chunks} a rank)"


def _shape(one: RankedPlan, cluster: Cluster | None) -> str:
    extra = ", one of them on the devices that the others leave" if one.extra else ""
    each = (
        " on average" if cluster is not None and cluster.parts else " each" if not one.extra or one.row_tokens else ""
    )
    where = f"; {_WHERE[one.encoders_at]}" if len(one.plan.units) > 1 else ""
    pipelines = counted(one.replicas + one.extra, "pipeline")
    return f"{pipelines}{extra}, {cut_text(one)}{each}: {layout_text(one.plan, cluster)}{where}."


def cut_text(one: RankedPlan) -> str:
    """Return the number and size of microbatches; unequal pipelines get unequal shares of all samples."""
    if not one.extra or one.row_tokens is not None:
        return microbatches_text(*one.microbatches, one.row_tokens)
    samples = one.replicas * one.num_microbatches * one.microbatch_size
    return f"{counted(one.microbatches[0], 'microbatch')} each, of {counted(samples, 'sample')} in all"


def _shares(timeline: Timeline) -> list[str]:
    """Return the fraction of the devices, and of all device time in a step, of units that share none."""
    ranks: dict[str, set[int]] = {}
    for unit in timeline.plan.units:
        own = {rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks}
        for name in [name for name, others in ranks.items() if others & own]:
            own |= ranks.pop(name)
        ranks[unit.name] = own
    if len(ranks) < 2:
        return []
    busy = dict(zip(timeline.ranks, timeline.busy.tolist(), strict=True))
    shares = [
        f"{name} has {percent_text(len(own) / len(busy))} of the devices for "
        f"{percent_text(sum(busy[rank] for rank in own) / sum(busy.values()))} of the device time"
        for name, own in ranks.items()
    ]
    return [f"Devices follow work: {listed(shares)}."]


def _tensor(result: SearchResult) -> list[str]:
    """Return the best step for each tensor-parallel degree of the widest unit, if several were simulated."""
    plans = (result.winner, *result.runners_up)

    def widest(one: RankedPlan) -> int:
        return max(placed.stage.tp for placed in one.plan.stages())

    best = {tp: min(one.score.seconds for one in plans if widest(one) == tp) for tp in sorted(map(widest, plans))}
    if len(best) < 2:
        return []
    own = widest(result.winner)
    others = [f"tp {tp} {seconds_text(seconds)}" for tp, seconds in best.items() if tp != own]
    takes = f"tp {own} takes {seconds_text(best[own])}"
    return [f"Tensor parallelism: {takes}, the best step simulated with {listed(others)}."]


def _sharing(result: SearchResult) -> list[str]:
    """Return the sharding of optimizer state, and the best simulated step under other kinds of sharding."""
    own, others = result.winner.zero, [zero for zero in result.by_zero if zero != result.winner.zero]
    if not others:
        return []
    found = {zero: result.by_zero[zero] for zero in others}
    slower = [f"zero {zero} {seconds_text(seconds)}" for zero, seconds in found.items() if seconds is not None]
    takes = f"takes {seconds_text(result.seconds)}"
    clauses = [f"{takes}, the best step simulated with {listed(slower)}"] if slower else [takes]
    clauses += [f"with zero {zero} no plan that was simulated fits" for zero in others if found[zero] is None]
    return [f"Optimizer state is {_SHARED_BY[own]}: zero {own} {'; '.join(clauses)}."]


def recomputation_text(plan: Plan) -> str:
    """Return which units recompute forwards in the backward, and how many of their layers; "" for none."""
    found = []
    for unit in plan.units:
        counts = Counter(how for how in unit.recompute if how != "none")
        how = [f"{count} of {len(unit.recompute)} layers{_KEEPING[level]}" for level, count in counts.items()]
        if how:
            found.append(f"{unit.name} {listed(how)}")
    return listed(found) if found else ""


def _recomputation(plan: Plan) -> list[str]:
    text = recomputation_text(plan)
    return [f"To fit memory, the backward computes forwards again (train.recompute): {text}."] if text else []


def _bottleneck(timeline: Timeline, cluster: Cluster | None) -> str:
    stages = _stage_seconds(timeline, cluster)
    slowest, fastest = (pick(stages, key=lambda name: stages[name]) for pick in (max, min))
    if len(stages) == 1:
        return f"One stage takes {seconds_text(stages[slowest])} for a mean microbatch."
    return (
        f"The slowest stage, {slowest}, takes {seconds_text(stages[slowest])} for a mean microbatch, "
        f"the fastest, {fastest}, {seconds_text(stages[fastest])}."
    )


def _stage_seconds(timeline: Timeline, cluster: Cluster | None) -> dict[str, float]:
    """Return stage → seconds of its actions for a mean microbatch, in the first pipeline of each group of devices. A
    unit in a stage of another counts there."""
    first: dict[tuple[str, str], int] = {}
    several = cluster is not None and cluster.parts
    found: dict[str, float] = {}
    at: dict[tuple[int, ...], str] = {}
    for placed in timeline.plan.stages():
        ranks, unit = placed.stage.ranks, placed.unit
        where = f" on {cluster.at(ranks[0]).name}" if cluster is not None and several else ""
        if first.setdefault((unit, where), placed.replica) != placed.replica:
            continue
        spent = sum(end - begin for action, begin, end in timeline.of_rank(ranks[0]) if action.stage == placed.index)
        seconds = spent / len(timeline.assignment.microbatches[unit][placed.replica])
        name = f"{unit} stage {placed.position}{where}"
        if (guest := at.get(ranks)) is not None and not guest.startswith(f"{unit} stage "):
            seconds += found.pop(guest)
        found[name], at[ranks] = seconds, name
    return found


def _certainty(result: SearchResult) -> str:
    # A candidate may be simulated in several rank orders, or with one more pipeline on idle devices.
    plans = 1 + len(result.runners_up) + len(result.rejected)
    tried = f"{result.simulated:,} of {counted(result.candidates, 'candidate')} were simulated"
    if plans > result.simulated:
        tried += f" (as {plans:,} plans)"
    if cut := sum(group.cut for group in result.groups):
        tried += f", {cut:,} cut off by their bounds"
    if left := sum(group.left for group in result.groups):
        tried += f", {left:,} left out because others promised more"
    if result.proven:
        return f"{tried}; no other of them can be faster."
    return f"{tried}; no other of them can be faster than {seconds_text(result.lower_bound)}."


def group_reasons(
    result: SearchResult, timeline: Timeline, cluster: Cluster, language: str, work: Mapping[str, Mapping[str, float]]
) -> tuple[str, ...]:
    """Return sentences on each group's units, fraction of samples and busy time, and on the alternatives.
    The alternatives are units on other groups and the best plans on one group alone. timeline: a step of the winner;
    `work[group][unit]`: device seconds of the mean sample. Empty for equal devices."""
    if not cluster.parts:
        return ()
    return (
        *(_group_use(number, timeline, cluster, language) for number in range(len(cluster.parts))),
        *_on_other_groups(cluster, work),
        *_on_one_group(result, cluster),
    )


def _group_use(number: int, timeline: Timeline, cluster: Cluster, language: str) -> str:
    """Return a sentence on the contents of a group."""
    group, plan = cluster.parts[number], timeline.plan
    name = f"{group.name} ({group.num_devices:,} × {group.device})"
    units = [
        unit.name
        for unit in plan.units
        if any(cluster.group_of(s.ranks[0]) == number for one in unit.replicas for s in one.stages)
    ]
    if not units:
        return f"{name} stays idle."
    share = ""
    homes = [cluster.group_of(one.stages[0].ranks[0]) for one in plan.unit(language).replicas]
    if len(set(homes)) > 1 and number in homes:
        samples = [sum(map(len, own)) for own in timeline.assignment.microbatches[language]]
        part = sum(count for count, home in zip(samples, homes) if home == number) / sum(samples)
        share = f", with {counted(homes.count(number), 'pipeline')} and {percent_text(part)} of the samples"
    mine = [place for place, rank in enumerate(timeline.ranks) if cluster.group_of(rank) == number]
    busy = float(np.mean(timeline.busy[mine]))
    return (
        f"{name} runs {listed(units)}{share}; its devices in use are busy for {seconds_text(busy)} of "
        f"{seconds_text(timeline.seconds)}, on average."
    )


def _on_other_groups(cluster: Cluster, work: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return each unit's time on other groups as a multiple of that on the first group."""
    first, *others = [group.name for group in cluster.parts]
    lines = []
    for other in others:
        times = [
            f"{unit} {three_digits(seconds / work[first][unit])}"
            for unit, seconds in work[other].items()
            if work[first][unit] > 0.0
        ]
        if times:
            lines.append(f"A device of {other} takes {listed(times)} times as long as one of {first}.")
    return lines


def _on_one_group(result: SearchResult, cluster: Cluster) -> list[str]:
    """Return the best plan on each single group."""
    best: dict[str, float] = {}
    for one in (result.winner, *result.runners_up):
        names = {cluster.at(rank).name for rank in one.plan.ranks}
        if len(names) == 1:
            name = names.pop()
            best[name] = min(best.get(name, np.inf), one.score.seconds)
    texts = [f"on {name} alone {seconds_text(seconds)}" for name, seconds in best.items()]
    used = list(dict.fromkeys(cluster.at(rank).name for rank in result.winner.plan.ranks))
    if len(used) == 1:
        return [
            f"The best plan found is on {used[0]} alone: nothing found that adds other devices is faster. Without the "
            "other groups in the config, longer rows (train.row_tokens) are tried, too, and may be faster."
        ]
    on_all = f", and {seconds_text(result.seconds)} on all."
    return [f"The best plans found take {listed(texts)}{on_all}"] if texts else []
