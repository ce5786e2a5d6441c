"""Dense rows: their counts by length never descend, are nearest to what was measured, and are the same to planner,
simulator and run."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.config import UserError
from dilatant.config.degrees import ONE
from dilatant.cost.dense import DenseRows
from dilatant.cost.layer import LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic

MEASURED = st.lists(st.floats(-1.0, 4.0), min_size=1, max_size=6)


def pooled(tokens: list[int], times: list[float]) -> list[float]:
    """The non-descending numbers nearest in weighted least squares, by the formula of least upper means of all spans
    (Barlow et al. 1972, 1.9), and none below 1."""
    weight = [length**2 for length in tokens]

    def mean(first: int, last: int) -> float:
        span = range(first, last + 1)
        return sum(weight[i] * times[i] for i in span) / sum(weight[i] for i in span)

    count = len(tokens)
    return [
        max(1.0, max(min(mean(first, last) for last in range(at, count)) for first in range(at + 1)))
        for at in range(count)
    ]


@settings(max_examples=200)
@given(MEASURED)
def test_counts_are_the_nearest_that_do_not_descend(times: list[float]) -> None:
    tokens = [2**place for place in range(5, 5 + len(times))]
    found = DenseRows.nearest(tokens, times)
    # Kept to six digits.
    assert found.times == pytest.approx(pooled(tokens, times), rel=1e-5)
    lengths = np.linspace(1, 2 * tokens[-1], 200)
    assert (np.diff(found.at(lengths)) >= 0).all()
    assert found.at(lengths).min() >= found.least >= 1.0
    assert found.at(tokens) == pytest.approx(found.times)
    assert found.at(10 * tokens[-1]) == found.times[-1]
    assert msgspec.convert(msgspec.to_builtins(found), DenseRows) == found


@settings(max_examples=50)
@given(MEASURED, MEASURED)
def test_the_dearer_of_two_is_nowhere_cheaper_than_either(one: list[float], other: list[float]) -> None:
    both = [DenseRows.nearest([10 * k + 7 * k**at for k in range(1, len(t) + 1)], t)
            for at, t in enumerate((one, other))]  # fmt: skip
    dearer = both[0].or_dearer(both[1])
    for length in {*both[0].tokens, *both[1].tokens, 1.0, 1e6}:
        assert dearer.at(length) == max(rows.at(length) for rows in both)


@pytest.mark.parametrize(
    ("tokens", "times"),
    [((), ()), ((4.0, 4.0), (1.0, 1.0)), ((4.0, 8.0), (2.0, 1.0)), ((4.0,), (0.0,)), ((4.0,), (float("inf"),)),
     ((4.0, 8.0), (1.0,))],
)  # fmt: skip
def test_what_no_rows_can_count_is_refused(tokens: tuple[float, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"dense rows|inhomogeneous"):
        DenseRows(tokens, times)


def test_one_number_holds_at_every_length() -> None:
    assert DenseRows.always(2.0).at([1, 10, 1e6]).tolist() == [2.0, 2.0, 2.0]


COST = LayerCost(*(Quadratic(1e-9, 1e-6, 1e-4) for _ in range(4)), dense_seconds=((256, 0.001), (512, 0.02)))


def test_measured_seconds_of_dense_rows_survive_their_file() -> None:
    costs = CostModel("here", "measured", "float32", {"block": {ONE: COST}})
    assert CostModel.from_yaml(costs.to_yaml()) == costs


@pytest.mark.parametrize(
    "wrong", ["[[256, .nan]]", "[[0, 1.0]]", "[[256, 1.0], [256, 2.0]]", "[256]", "true", "[[1, 2, 3]]"]
)
def test_seconds_of_dense_rows_that_are_none_are_refused(wrong: str) -> None:
    document = yaml.safe_load(CostModel("here", "measured", "float32", {"block": {ONE: COST}}).to_yaml())
    document["layers"]["block"]["tp1 cp1"]["dense_seconds"] = yaml.safe_load(wrong)
    with pytest.raises(UserError, match="not a cost model"):
        CostModel.from_yaml(yaml.safe_dump(document))
