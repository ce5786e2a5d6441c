"""The attention benchmark's functions on rows so short that a CPU runs them; a GPU runs the same code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.attention import attention, contenders, kernels, shares
from benchmarks.attention.rows import KINDS, build, count_visible_pairs, draw_row
from oracles.dense_mask import word_matrix

SHAPE = kernels.Shape(2, 1, 8, torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_the_visible_area_is_counted_pair_by_pair(kind: str) -> None:
    mask = build(kind, draw_row(kind, 150, seed=1))
    dense = word_matrix(mask.fields, mask.fields, mask.positions, mask.positions, mask.window)
    assert count_visible_pairs(mask) == dense.sum()


def test_one_command_measures_checks_and_says_who_could_not(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = "--device cpu --sections rates shares memory --kinds causal EE --tokens 300 --share-tokens 600 --ranks 3"
    report = attention.main([*command.split(), "--heads", "2", "1", "8", "--repeats", "1", "--out", str(out)])
    assert out.exists()
    assert report["machine"]["torch"] in torch.__version__
    for row in report["rates"]["rates"]:
        assert set(row["results"]) | set(row["unavailable"]) == {
            contender.name for contender in contenders.contenders(contenders.FlexTuning(lambda *_: 0.0))
        }
        assert row["results"]["ours"]["ours_is_faster_forward"] == 1.0
        assert all(reason for reason in row["unavailable"].values())
    for row in report["rates"]["largest_errors"]:
        # Float32 sums in another order, values of order one.
        assert all(error < 1e-5 for name, error in row.items() if name not in ("mask", "tokens"))
    for row in report["shares"]:
        assert {entry["policy"] for entry in row["policies"]} == set(shares.POLICIES)


def test_optional_libraries_are_named_where_they_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--device cpu --sections rates backends --kinds EE --tokens 64 --repeats 1 --no-out --heads 2 1 8"
    report = attention.main([*command.split(), "--only", "cudnn_flex", "magi"])
    (row,) = report["rates"]["rates"]
    assert (set(row["results"]), set(row["unavailable"])) == ({"ours"}, {"cudnn_flex", "magi"})
    lines = capsys.readouterr().out.splitlines()
    for name in ("cudnn_flex", "magi"):
        reason = report["backends_not_run"][name]
        assert reason == row["unavailable"][name]
        assert f"{name} not run: {reason}" in lines


def test_costs_of_blocks_are_found_again() -> None:
    counts = [(10, 3, 4), (0, 9, 4), (50, 1, 8), (7, 7, 2), (100, 30, 20)]
    seconds = [2e-6 * full + 3e-6 * partial + 1e-6 * rows for full, partial, rows in counts]
    fitted = shares.fit_block_cost([(*count, taken) for count, taken in zip(counts, seconds)])
    assert fitted["partial_in_full_blocks"] == pytest.approx(1.5)
    assert fitted["row_in_full_blocks"] == pytest.approx(0.5)
    assert fitted["worst_relative_error"] == pytest.approx(0, abs=1e-9)


def test_flex_attention_is_tuned_once_per_kind_and_logs_failures() -> None:
    problem = kernels.make_problem("EE", 64, SHAPE, CPU)
    seconds = iter([3.0, 1.0, 2.0])

    def measure(attend, problem):
        if "bwd_num_warps" in attend:
            raise RuntimeError("out of shared memory")
        return next(seconds)

    tuning = contenders.FlexTuning(measure)
    assert tuning.options(problem, dict) == contenders.FLEX_OPTIONS[1]
    assert tuning.options(problem, dict) == contenders.FLEX_OPTIONS[1]
    failed = [entry for entry in tuning.tried["EE"] if "failed" in entry]
    assert failed[0]["failed"] == "RuntimeError: out of shared memory"


def test_flex_attention_is_called_on_our_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs uncompiled and forward only, since a CPU supports no more."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem = kernels.make_problem("MP", 300, kernels.Shape(2, 1, 16, torch.float32), CPU)
    inputs = (problem.query, problem.key, problem.value)
    expected = contenders._ours(problem)(*inputs)
    torch.testing.assert_close(contenders._flex_call(problem, {})(*inputs), expected, rtol=1e-4, atol=1e-5)
