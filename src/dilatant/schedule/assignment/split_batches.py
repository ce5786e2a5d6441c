"""Splitting microbatches further, so that a property holds for every sample of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.schedule.schedule import Assignment, Microbatch


def split_by_pattern(assignment: Assignment, pattern_of: Mapping[int, int]) -> Assignment:
    """Return the assignment with every microbatch split so that all its samples have the same pattern. Microbatches
    split from one number stay neighbours in all units, since schedules pair microbatches by their order."""
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
