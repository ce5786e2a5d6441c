"""Nothing that clocks, networks and crashes do makes a step count twice, be forgotten, or differ between nodes."""

from __future__ import annotations

import pytest

from harness.faults.simulator import simulate


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1_000, 10_000, 1_000))]
)
def test_steps_count_once_on_all_survivors_whatever_is_lost(first: int) -> None:
    worlds = [simulate(seed) for seed in range(first, first + 1_000)]
    # The seeds must be hard enough to mean anything.
    assert sum(world.crashed for world in worlds) > 300
    assert sum(world.generations for world in worlds) > 1_500
    assert sum(world.ended == "finished" for world in worlds) > 650
    assert sum(world.gone_for_good and world.ended == "finished" for world in worlds) > 20
    assert sum(world.handed_over for world in worlds) > 10
    assert sum("are left of the" in world.ended and world.generations > 1 for world in worlds) > 70
    assert sum(world.idle for world in worlds) > 100
    assert sum("is saved" in world.ended for world in worlds) > 0  # 8 in the mean of ten thousand


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_count_once_on_all_survivors_in_many_more_seeds() -> None:
    for seed in range(10_000, 110_000):
        simulate(seed)
