"""The papers' tables, computed again: models have their public sizes, and what the tables conclude still holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from papers import cornstarch, disttrain, entrain_stability, models  # noqa: E402

needs_sizes = pytest.mark.skipif(
    not (SHARED / "data/workload_stats").exists(),
    reason="the size statistics are absent: their tables were not rerun",
)


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [
        (models.LLAMA_3_2_1B, 1.24e9),
        (models.LLAMA_3_2_3B, 3.21e9 + 0.0),
        (models.DISTTRAIN_LLM["72B"], 70e9),
        (models.VIT_HUGE, 0.63e9),
    ],
)
def test_counted_models_have_their_public_number_of_parameters(layers, parameters):
    counted = sum(layer.per_token for layer in layers) / 2.0  # two operations per parameter and token
    assert counted == pytest.approx(parameters, rel=0.03)  # norms and input embeddings are not counted


def test_counted_vision_encoder_has_its_public_number_of_parameters():
    *blocks, merger = models.qwen_vision(2048)
    patches = 4  # a merged token is four patches
    assert sum(block.per_token for block in blocks) / 2.0 / patches == pytest.approx(0.63e9, rel=0.03)
    assert merger.per_token / 2.0 == pytest.approx(36.7e6, rel=0.01)


def test_backward_of_a_long_sequence_is_two_forwards():
    ratio = models.backward(models.LLAMA_3_2_1B, 2048) / models.forward(models.LLAMA_3_2_1B, 2048)
    assert ratio == pytest.approx(2.0)  # weights: input and weight gradient; attention: both of its factors


def test_frozen_aware_partitioning_is_never_slower_and_keeps_the_papers_order():
    simulated, shapes = cornstarch.tables(SHARED)
    assert cornstarch.rank_correlation(list(simulated.rows), 8, 9) > 0.8
    assert cornstarch.rank_correlation(list(shapes.rows), 1, 5) > 0.6
    assert all(row[2] > 0.99 and row[5] > 0.99 for row in shapes.rows)


@needs_sizes
def test_counted_ratios_ask_for_the_papers_allocations():
    means, table, feasible = entrain_stability.tables(SHARED)
    assert all(
        abs(row[3] - row[5]) < 1.5 for row in means.rows
    )  # nothing is fitted in the analytic cost model
    stable = [row for row in table.rows if row[3] == 256]
    assert sum(row[4] == row[6] for row in stable) >= 7
    assert all(
        sum(map(int, row[6].split(":"))) == 16 and int(row[6].split(":")[0]) % 2 == 0 for row in feasible.rows
    )


@needs_sizes
def test_orchestration_is_optimal_and_ahead_of_the_rigid_layout():
    assert all(row[6] for row in disttrain.orchestration_time(SHARED).rows)
    gains = [row[5] for row in disttrain.orchestration_gain(SHARED).rows]
    assert min(gains) > 1.0
    assert gains == sorted(gains, reverse=True)
