"""Why a search chose its winner, in sentences a user can check."""

from __future__ import annotations

from dilatant.plan.candidates import EncoderPosition
from dilatant.plan.search import RankedPlan, SearchResult
from dilatant.report.wording import counted, degrees_text, listed, percent_text, seconds_text

_WHERE = {
    EncoderPosition.PARALLEL: "every unit on devices of its own",
    EncoderPosition.COLOCATED: "the encoders together on devices of their own",
    EncoderPosition.IN_LANGUAGE: "the encoders in the language model's first stage",
}


def search_reasons(result: SearchResult) -> tuple[str, ...]:
    """Sentences on the winner's shape, its devices against its work, its slowest stage, and how sure the search is.
    Idle time, memory and runners-up are not among them: the plan report draws these."""
    winner = result.winner
    lines = [_shape(winner), *_shares(winner), _bottleneck(winner)]
    sync = winner.score.sync_seconds
    if sync > 0.0:
        lines.append(
            f"Summing gradients adds {seconds_text(sync)} ({percent_text(sync / result.seconds)} of the step) "
            "after the last backward."
        )
    if winner.idle_devices:
        lines.append(
            f"Unused devices: {winner.idle_devices}. No shape with profiled degrees uses all of them exactly."
        )
    lines += [f"Rejected: {text}." for text in result.rejected[:3]]
    lines.append(_certainty(result))
    return tuple(lines)


def _shape(one: RankedPlan) -> str:
    units = []
    for unit in one.plan.units:
        stages = unit.replicas[0].stages
        times = f"{len(unit.replicas)} × " if len(unit.replicas) > 1 else ""
        degrees = degrees_text(stages[0].tp, stages[0].cp, stages[0].ep)
        units.append(f"{unit.name} {times}{counted(len(stages), 'stage')} {degrees}".rstrip())
    return (
        f"{counted(one.replicas, 'pipeline')}, {counted(one.num_microbatches, 'microbatch')} of "
        f"{counted(one.microbatch_size, 'sample')} each: {', '.join(units)}; {_WHERE[one.encoders_at]}."
    )


def _shares(one: RankedPlan) -> list[str]:
    """Every chain's share of the devices beside its share of a mean microbatch's device time, over all replicas."""
    devices, work = {}, {}
    for unit in one.plan.units:
        if unit.name in one.stage_seconds:
            stages = [stage for replica in unit.replicas for stage in replica.stages]
            devices[unit.name] = len({rank for stage in stages for rank in stage.ranks})
            work[unit.name] = (
                sum(one.stage_seconds[unit.name]) * stages[0].tp * stages[0].cp * len(unit.replicas)
            )
    if len(work) < 2:
        return []
    shares = [
        f"{name} has {percent_text(devices[name] / sum(devices.values()))} of the devices for "
        f"{percent_text(work[name] / sum(work.values()))} of the device time"
        for name in work
    ]
    return [f"Devices follow work: {listed(shares)}."]


def _bottleneck(one: RankedPlan) -> str:
    stages = [
        (seconds, name, position)
        for name, each in one.stage_seconds.items()
        for position, seconds in enumerate(each)
    ]
    slowest, fastest = max(stages), min(stages)
    if len(stages) == 1:
        return f"One stage takes {seconds_text(slowest[0])} for a mean microbatch."
    return (
        f"The slowest stage, {slowest[1]} stage {slowest[2]}, takes {seconds_text(slowest[0])} for a mean microbatch, "
        f"the fastest, {fastest[1]} stage {fastest[2]}, {seconds_text(fastest[0])}."
    )


def _certainty(result: SearchResult) -> str:
    seen = 1 + len(result.runners_up) + len(result.rejected)
    tried = f"{seen} of {counted(result.candidates, 'candidate')} were simulated"
    if result.proven:
        return f"{tried}; no other of them can be faster."
    return f"{tried}; no other of them can be faster than {seconds_text(result.lower_bound)}."
