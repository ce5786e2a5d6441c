"""On described GPUs, rows are as long as memory allows if no key of the config sets their length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.planning.planned_project import BATCH, config, write_samples
from dilatant.config import Config, PlanConfig
from dilatant.plan.search.why_not import AskedLayout
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.planned_run import plan_report, training_plan
from dilatant.planning.planning import PlanningProblem, plan_run, planning_problem, scorer_of, time_plan, with_faster
from dilatant.planning.problem import planned_hardware
from dilatant.planning.row_length import row_length, with_best_rows, with_long_rows
from dilatant.training.prepare import prepare

SHORT = 128  # data.max_length


def _config(folder: Path, **sections: Any) -> Config:
    cluster = {"hardware": "H100", "gpus_per_node": 1, **sections.pop("cluster", {})}
    asked = config(folder, **{"cluster": cluster, **sections})
    return asked if "plan" in sections else asked.model_copy(update={"plan": PlanConfig(measure_seconds=0)})


def _problem(folder: Path, **sections: Any) -> PlanningProblem:
    write_samples(folder, 2 * BATCH)
    asked = _config(folder, **sections)
    return planning_problem(asked, assemble_samples(asked))


def test_a_gpu_gets_rows_that_hold_a_whole_step(tmp_path: Path) -> None:
    """`dilatant plan`, the run that trains the plan and its simulation do not cut samples that fit in one row."""
    problem = _problem(tmp_path)
    searched = plan_run(problem)
    planned = with_long_rows(searched)
    winner = planned.result.winner
    assert winner.row_tokens == 4096  # a step has some 700 tokens, so 8,192 would change nothing
    assert winner.microbatches[0] == 1
    assert winner.score.seconds < searched.result.winner.score.seconds
    assert planned.rows[0].startswith(
        "Rows hold up to 4,096 tokens (train.row_tokens is unset): the longest of 128 and"
    )
    assert planned.rows[0] in plan_report(planned, "test").reasons
    limited = replace(planned.problem, model=replace(planned.problem.model, limits=("a reason",)))
    assert plan_report(replace(planned, problem=limited), "test").limits == ("a reason",)
    timed = time_plan(problem, winner.plan, winner.num_microbatches, winner.row_tokens)
    assert timed.result.winner.score.seconds == pytest.approx(winner.score.seconds)
    (tmp_path / "plan.json").write_text(training_plan(planned.problem, winner).to_json(), encoding="utf-8")
    run = _config(tmp_path, parallel={"plan": str(tmp_path / "plan.json")})
    assert prepare(run).planned.microbatching(run).row_tokens == 4096


def test_rows_stay_short_where_longer_ones_do_not_fit(tmp_path: Path) -> None:
    roomy = _problem(tmp_path)
    plan = plan_run(roomy).result.winner.plan
    longer = row_length(roomy, plan)
    assert longer is not None
    peaks = max(longer[1].peak_bytes), max(scorer_of(roomy)(plan, 1, SHORT).peak_bytes)
    assert peaks[0] > peaks[1]
    found = row_length(_problem(tmp_path, cluster={"memory_gib": sum(peaks) / 2 / 2**30}), plan)
    assert found is not None
    assert found[0].config.row_tokens == SHORT
    assert found[2].endswith("longer ones would not fit memory.")


def test_rows_of_one_step_are_not_longer_than_it(tmp_path: Path) -> None:
    """Samples may have up to 2,048 tokens, but a step of 16 short ones already fits in one row."""
    problem = _problem(tmp_path, data={"train": [{"path": "train.jsonl"}], "max_length": 2048, "workers": 0})
    found = row_length(problem, plan_run(problem).result.winner.plan)
    assert found is not None
    assert found[0].config.row_tokens == 2048
    assert found[2].endswith("a replica has no more in a step.")


def test_rows_of_all_samples_that_overflow_memory_are_not_made(tmp_path: Path) -> None:
    """A step fits in one row of 2,048 tokens but not in memory: the plan keeps the microbatches of its search."""
    data = {"train": [{"path": "train.jsonl"}], "max_length": 2048, "workers": 0}
    roomy = _problem(tmp_path, data=data)
    plan = plan_run(roomy).result.winner.plan
    one_row = row_length(roomy, plan)
    assert one_row is not None
    tight = _problem(tmp_path, data=data, cluster={"memory_gib": 0.99 * max(one_row[1].peak_bytes) / 2**30})
    assert row_length(tight, plan) is None


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"global_batch_size": BATCH, "row_tokens": 200}},
        {"train": {"global_batch_size": BATCH, "deterministic": True}},
        pytest.param({"plan": {"microbatch_tokens": [64]}}, marks=pytest.mark.slow),
        pytest.param({"plan": {"microbatch_sizes": [2]}}, marks=pytest.mark.slow),
        {"cluster": {"hardware": "CPU"}},
    ],
)
def test_row_lengths_of_the_config_and_of_cpus_are_kept(tmp_path: Path, sections: dict[str, Any]) -> None:
    problem = _problem(tmp_path, **sections)
    planned = plan_run(problem)
    assert with_long_rows(planned) is planned


def test_pipelines_keep_their_microbatches(tmp_path: Path) -> None:
    problem = _problem(tmp_path, cluster={"gpus_per_node": 2, "memory_gib": 80})
    result = plan_run(problem).result
    ranked = [one.plan for one in (result.winner, *result.runners_up)]
    pipelines = [plan for plan in ranked if len({*(placed.stage.ranks for placed in plan.stages())}) > 1]
    staged = [plan for plan in pipelines if any(len(r.stages) > 1 for unit in plan.units for r in unit.replicas)]
    assert staged
    assert all(row_length(problem, plan) is None for plan in staged)


def test_a_second_search_with_long_rows_decides_where_pipelines_win(tmp_path: Path) -> None:
    """A step of small samples is many rows of 128 tokens, and one of 4,096 on each device."""
    problem = _problem(tmp_path, cluster={"gpus_per_node": 2, "memory_gib": 80})
    searched = plan_run(problem)
    staged = next(
        (one for one in (searched.result.winner, *searched.result.runners_up) if row_length(problem, one.plan) is None),
        None,
    )
    assert staged is not None
    pipelined = replace(searched, result=replace(searched.result, winner=staged, seconds=staged.score.seconds))
    found = with_best_rows(pipelined)
    assert with_long_rows(pipelined) is pipelined
    assert found.result.seconds < staged.score.seconds
    assert found.result.winner.row_tokens is not None
    assert found.rows[0].startswith("Rows hold up to")
    fixed = time_plan(
        problem, found.result.winner.plan, found.result.winner.num_microbatches, found.result.winner.row_tokens
    )
    assert fixed.result.seconds == pytest.approx(found.result.seconds)


def test_a_run_in_one_process_chooses_as_its_plan_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan file or a search, a run on the GPU that this machine seems to have chooses the same rows."""
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(planned_hardware, "pick_precision", lambda *asked: torch.bfloat16)
    write_samples(tmp_path, 2 * BATCH)
    train = {"steps": 2, "global_batch_size": BATCH, "report_to": []}
    run = _config(tmp_path, train=train)
    prepared = prepare(run)
    assert prepared.rows.startswith("Rows hold up to 4,096 tokens")
    assert prepared.planned.microbatching(run).row_tokens == 4096
    by_hand = _config(tmp_path, train={**train, "row_tokens": 300})
    assert not prepare(by_hand).rows
    assert prepare(by_hand).planned.microbatching(by_hand).row_tokens == 300


def test_a_faster_layout_that_a_user_asks_about_replaces_the_plan(tmp_path: Path) -> None:
    planned = plan_run(_problem(tmp_path, cluster={"gpus_per_node": 2, "memory_gib": 80}))
    result = planned.result
    slow = max(result.runners_up, key=lambda one: one.score.seconds)
    known = replace(planned, result=replace(result, winner=slow, runners_up=(), seconds=slow.score.seconds))
    replicas = len(result.winner.plan.unit("language").replicas)
    asked = {"language: one": AskedLayout({"language": {"replicas": replicas}}, zero=result.winner.zero)}
    found = with_faster(known, asked)
    assert found.result.seconds == found.result.winner.score.seconds < slow.score.seconds
    assert found.result.runners_up == (slow,)
    assert "replaces it" in found.notes[-1]
    assert with_faster(planned, asked).result is result


def test_every_plan_of_the_comparison_has_the_long_rows(tmp_path: Path) -> None:
    """Two devices share sixteen samples: one row each of the winner is not set against many short ones of others."""
    problem = _problem(tmp_path, cluster={"gpus_per_node": 2, "memory_gib": 80})
    searched = plan_run(problem)
    found = with_best_rows(searched).result
    assert found.winner.row_tokens == 4096
    zeros = {zero: seconds for zero, seconds in found.by_zero.items() if seconds is not None}
    longer = problem.with_row_tokens(4096)
    again = {
        zero: min(
            scorer_of(longer.sharing(zero))(one.plan, one.num_microbatches, one.row_tokens).seconds
            for one in (found.winner, *found.runners_up)
            if one.zero == zero
        )
        for zero in zeros
    }
    assert zeros == pytest.approx(again)
    assert min(zeros.values()) == pytest.approx(found.seconds)
    short = {zero: seconds for zero, seconds in searched.result.by_zero.items() if seconds is not None}
    assert all(zeros[zero] < seconds for zero, seconds in short.items())


def test_rows_that_hold_less_than_a_step_are_not_said_to_hold_it(tmp_path: Path) -> None:
    data = {"train": [{"path": "train.jsonl"}], "max_length": 2**15, "workers": 0}
    problem = _problem(tmp_path, data=data).with_row_tokens(2**15)
    plan = plan_run(problem).result.winner.plan
    held = problem.samples.workload
    many = replace(held, tokens={unit: tokens * 1000 for unit, tokens in held.tokens.items()})
    config = problem.config.model_copy(update={"train": problem.config.train.model_copy(update={"row_tokens": None})})
    found = row_length(replace(problem, config=config, samples=replace(problem.samples, workload=many)), plan)
    assert found is not None
    assert found[2].endswith("longer ones are not tried.")
