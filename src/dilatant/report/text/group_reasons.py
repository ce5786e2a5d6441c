"""Sentences on a plan's use of groups of different devices, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dilatant.plan.cluster import Cluster
from dilatant.plan.search.search_result import SearchResult
from dilatant.report.text.wording import counted, listed, percent_text, seconds_text, three_digits
from dilatant.schedule.timeline import Timeline


def group_reasons(
    result: SearchResult,
    timeline: Timeline,
    cluster: Cluster,
    language: str,
    work: Mapping[str, Mapping[str, float]],
) -> tuple[str, ...]:
    """Return sentences on each group's units, fraction of samples and busy time, and on the alternatives.
    The alternatives are units on other groups and the best plans on one group alone. timeline: a step of the winner;
    `work[group][unit]`: device seconds of the mean sample. Empty for equal devices."""
    if not cluster.parts:
        return ()
    return (
        *(_has(number, timeline, cluster, language) for number in range(len(cluster.parts))),
        *_compared(cluster, work),
        *_alone(result, cluster),
    )


def _has(number: int, timeline: Timeline, cluster: Cluster, language: str) -> str:
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


def _compared(cluster: Cluster, work: Mapping[str, Mapping[str, float]]) -> list[str]:
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


def _alone(result: SearchResult, cluster: Cluster) -> list[str]:
    """Return the best plan on each single group."""
    best: dict[str, float] = {}
    for one in (result.winner, *result.runners_up):
        names = {cluster.at(rank).name for rank in one.plan.ranks}
        if len(names) == 1:
            name = names.pop()
            best[name] = min(best.get(name, np.inf), one.score.seconds)
    texts = [f"on {name} alone {seconds_text(seconds)}" for name, seconds in best.items()]
    used = _groups_of(result.winner.plan.ranks, cluster)
    if len(used) == 1:
        return [f"The best plan found is on {used[0]} alone: nothing that adds other devices is faster."]
    return (
        [f"The best plans found take {listed(texts)}, and {seconds_text(result.seconds)} on all."]
        if texts
        else []
    )


def _groups_of(ranks: Sequence[int], cluster: Cluster) -> list[str]:
    return list(dict.fromkeys(cluster.at(rank).name for rank in ranks))
