"""What decoding takes is measured, and told as the processors that keep up with a plan."""

from __future__ import annotations

from dilatant.planning.measuring.decode_costs import DecodeCost


def test_processors_keep_up_with_the_samples_that_a_plan_takes() -> None:
    cost = DecodeCost(0.012, 16)
    assert cost.processors(210.0) == 3  # 2.52 processors
    assert cost.processors(1000 / 12) == 1
    assert cost.processors(0.1) == 1
