"""Why this plan: the reasons behind a search's winner, in sentences a user can check."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.plan.candidates import Placement
from dilatant.plan.search import RankedPlan, SearchResult

_GIB = 2.0**30


def reasons(result: SearchResult, bytes_per_device: float) -> tuple[str, ...]:
    """Sentences on the winner: its devices against its work, what bounds it, where it idles, memory, the runner-up,
    and how sure the search is."""
    winner = result.winner
    lines = [*choice(result)]
    if winner.evaluation.bubble > 0.0 and winner.evaluation.idle_seconds:
        lines.append(_bubble(winner))
    lines.append(_memory(winner, bytes_per_device))
    if result.runners_up:
        lines.append(_runner_up(winner, result.runners_up[0]))
    return tuple(lines)


def choice(result: SearchResult) -> tuple[str, ...]:
    """Sentences on what was chosen and how sure the search is: those of `reasons` that a plan report, which draws idle
    time, memory and runners-up, does not say anyway."""
    winner = result.winner
    lines = [_shape(winner), *_shares(winner), _bottleneck(winner)]
    if winner.evaluation.sync_seconds > 0.0:
        lines.append(
            f"Summing gradients adds {_ms(winner.evaluation.sync_seconds)} "
            f"({winner.evaluation.sync_seconds / result.seconds:.1%} of the step) after the last backward."
        )
    if winner.idle_devices:
        lines.append(
            f"{winner.idle_devices} devices stay idle: no shape with profiled degrees uses all of them exactly."
        )
    lines += [f"Rejected: {text}." for text in result.rejected[:3]]
    lines.append(_certainty(result))
    return tuple(lines)


def _shape(one: RankedPlan) -> str:
    units = ", ".join(
        f"{unit.name} {_times(len(unit.replicas))}{_count(len(unit.replicas[0].stages), 'stage')}"
        + (f" tp {stage.tp}" if stage.tp > 1 else "")
        + (f" cp {stage.cp}" if stage.cp > 1 else "")
        for unit in one.plan.units
        for stage in unit.replicas[0].stages[:1]
    )
    where = {
        Placement.PARALLEL: "every unit on devices of its own",
        Placement.COLOCATED: "the encoders together on devices of their own",
        Placement.IN_LANGUAGE: "the encoders in the language model's first stage",
    }[one.placement]
    return (
        f"{_count(one.replicas, 'pipeline')}, {_count(one.num_microbatches, 'microbatch')} of "
        f"{_count(one.microbatch_size, 'sample')} each: "
        f"{units}; {where}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('h') else 's'}"


def _times(count: int) -> str:
    return f"{count} x " if count > 1 else ""


def _work(one: RankedPlan) -> Mapping[str, float]:
    """Device seconds of a mean microbatch by chain, all replicas together."""
    work = {}
    for unit in one.plan.units:
        if unit.name in one.stage_seconds:
            stage = unit.replicas[0].stages[0]
            work[unit.name] = sum(one.stage_seconds[unit.name]) * stage.tp * stage.cp * len(unit.replicas)
    return work


def _shares(one: RankedPlan) -> list[str]:
    work = _work(one)
    if len(work) < 2:
        return []
    devices = {
        name: len({rank for r in one.plan.unit(name).replicas for stage in r.stages for rank in stage.ranks})
        for name in work
    }
    return [
        "Devices follow work: "
        + ", ".join(
            f"{name} has {devices[name] / sum(devices.values()):.0%} of the devices for "
            f"{work[name] / sum(work.values()):.0%} of the device time"
            for name in work
        )
        + "."
    ]


def _bottleneck(one: RankedPlan) -> str:
    stages = [
        (seconds, name, k) for name, each in one.stage_seconds.items() for k, seconds in enumerate(each)
    ]
    slowest, fastest = max(stages), min(stages)
    if len(stages) == 1:
        return f"One stage takes {_ms(slowest[0])} for a mean microbatch."
    return (
        f"The slowest stage, {slowest[1]} stage {slowest[2]}, takes {_ms(slowest[0])} for a mean microbatch, "
        f"the fastest, {fastest[1]} stage {fastest[2]}, {_ms(fastest[0])}."
    )


def _bubble(one: RankedPlan) -> str:
    total = sum(one.evaluation.idle_seconds.values())
    causes = sorted(one.evaluation.idle_seconds.items(), key=lambda cause: -cause[1])
    named = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in causes if seconds > 0.05 * total)
    return f"Devices idle {one.evaluation.bubble:.1%} of the time; of that {named}."


def _memory(one: RankedPlan, capacity: float) -> str:
    peaks = one.evaluation.peak_bytes
    if not peaks:
        return "Memory was not modelled."
    rank = one.plan.ranks[max(range(len(peaks)), key=peaks.__getitem__)]
    held = " and ".join(
        f"{placed.unit} stage {placed.position}" for placed in one.plan.stages() if rank in placed.stage.ranks
    )
    return (
        f"The fullest rank, {rank} ({held}), peaks at {max(peaks) / _GIB:.2f} of {capacity / _GIB:.2f} GiB."
    )


def _runner_up(winner: RankedPlan, second: RankedPlan) -> str:
    slower = second.evaluation.seconds / winner.evaluation.seconds - 1.0
    differences = {
        name: second.evaluation.idle_seconds.get(name, 0.0) / len(second.plan.ranks)
        - winner.evaluation.idle_seconds.get(name, 0.0) / len(winner.plan.ranks)
        for name in {**winner.evaluation.idle_seconds, **second.evaluation.idle_seconds}
    }
    why = ""
    cause = max(differences, key=lambda name: (differences[name], name), default="")
    if cause and differences[cause] > 0.0:
        why = f", mostly by {_ms(differences[cause])} more {cause} per device"
    return f"The runner-up ({_shape(second).rstrip('.')}) is {slower:.1%} slower{why}."


def _certainty(result: SearchResult) -> str:
    seen = 1 + len(result.runners_up) + len(result.rejected)
    tried = f"{seen} of {result.candidates} candidates were simulated"
    if result.proven:
        return f"{tried}; no other can be faster."
    return f"{tried}; no other can be faster than {_ms(result.lower_bound)}."


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
