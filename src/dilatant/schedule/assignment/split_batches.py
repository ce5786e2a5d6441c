"""Microbatches cut further: so that what is told of one microbatch holds for each of its samples."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.schedule.schedule import Assignment, Microbatch


def split_by_pattern(assignment: Assignment, pattern_of: Mapping[int, int]) -> Assignment:
    """The assignment with every microbatch cut so that all samples of one have the same pattern. Microbatches of one
    number stay beside each other in all units, since schedules pair them by their order."""
    depth = max((len(own) for replicas in assignment.microbatches.values() for own in replicas), default=0)
    patterns: list[list[int]] = []
    for number in range(depth):
        here = {
            pattern_of[sample]
            for replicas in assignment.microbatches.values()
            for own in replicas
            for sample in (own[number] if number < len(own) else ())
        }
        patterns.append(sorted(here))

    def cut(own: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        return tuple(
            tuple(sample for sample in batch if pattern_of[sample] == pattern)
            for number, batch in enumerate(own)
            for pattern in patterns[number]
        )

    return Assignment({unit: tuple(map(cut, own)) for unit, own in assignment.microbatches.items()})
