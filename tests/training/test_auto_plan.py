"""Who plans a run: itself, where it has several devices and nobody said otherwise; once, for all of its ranks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cases.engine_case import PLAN
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import connect
from dilatant.comm.store.token import fresh_token
from dilatant.config import Config, UserError
from dilatant.config.config import parse_config
from dilatant.config.environment import LaunchPlace
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.planning import auto_plan
from dilatant.planning.auto_plan import Devices, choose_plan, devices_at_hand, is_planned_here, share_plan
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.planning_process import ChosenPlan
from dilatant.report.run_folder import RunFolder
from harness.patience import HANG_SECONDS

LAID_OUT = {"units": {"vision": {}, "language": {}}}
PLANNED = TrainingPlan(PLAN, 3, "1f1b", "balanced", 0.5)
LARGER = Plan((PLAN.units[0], UnitPlan("language", (Replica((Stage(0, 2, (2,)), Stage(2, 4, (3,)))),))))


def config(parallel: Any) -> Config:
    tree = {
        "model": {"encoders": {"vision": {"kind": "image", "id": "a"}}, "language_model": {"id": "b"}},
        "data": {"train": [{"path": "x.jsonl"}]},
        "parallel": parallel,
    }
    return parse_config(tree, Path())


def place(size: int, local_size: int) -> LaunchPlace:
    return LaunchPlace("torchrun", 0, size, 0, local_size, "localhost", 29500, True)


@pytest.mark.parametrize(
    ("parallel", "gpus", "launched", "planned"),
    [
        (None, 0, False, False),
        (None, 1, False, False),
        (None, 2, False, True),
        (None, 0, True, True),
        ("auto", 0, False, True),
        ("single", 8, False, False),
        ("single", 8, True, False),
        ({"microbatches": 2}, 2, False, True),
        (LAID_OUT, 8, True, False),
        ({"plan": "plan.json"}, 8, True, False),
    ],
)
def test_run_plans_itself_only_on_several_unplanned_devices(
    monkeypatch: pytest.MonkeyPatch, parallel: Any, gpus: int, launched: bool, planned: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert is_planned_here(config(parallel), place(4, 4) if launched else None) is planned


@pytest.mark.parametrize(
    ("size", "local_size", "devices"),
    [
        (16, 8, (2, 8)),
        (8, 8, (1, 8)),
        (4, 1, (4, 1)),
        # 4 + 2 processes: counted as three machines of two, whose links nobody takes for faster than they are.
        (6, 4, (3, 2)),
    ],
)
def test_a_launchers_processes_are_the_devices(size: int, local_size: int, devices: tuple[int, int]) -> None:
    assert devices_at_hand(config("auto"), place(size, local_size)) == Devices(*devices, "torchrun")


def test_launcher_devices_override_the_configured_cluster() -> None:
    elsewhere = config("auto").model_copy(update={})
    cluster = Devices(2, 4, "Slurm").cluster(elsewhere.cluster.model_copy(update={"nodes": 128, "gpus_per_node": 8}))
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("first", "devices", "kept"),
    [(PLAN, 4, True), (PLAN, 3, False), (LARGER, 4, False), (LARGER, 3, True)],
    ids=["one stays idle", "fewer", "after a loss", "as many as were left"],
)
def test_a_resumed_run_plans_anew_for_other_devices_than_its_last_plan_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: Plan, devices: int, kept: bool
) -> None:
    """The first plan was for 4 devices; the last, of 3 ranks, is it (and leaves one idle) or followed a loss."""
    run, said = RunFolder(tmp_path / "run"), io.StringIO()
    before = config("auto")
    before = before.model_copy(update={"cluster": before.cluster.model_copy(update={"gpus_per_node": 4})})
    for folder, plan in ((run, PLANNED), (RunFolder(run.path / "plan"), replace(PLANNED, plan=first))):
        folder.write_config(before)
        folder.write_text("plan.json", plan.to_json())
    anew = ChosenPlan(replace(PLANNED, num_microbatches=7).to_json(), ())
    monkeypatch.setattr(auto_plan, "plan_in_process", lambda job, progress: anew)
    found = choose_plan(before, Devices(1, devices), run, True, Console(file=said, width=200))
    assert found is not None
    assert found.num_microbatches == (3 if kept else 7)
    assert ("as it was planned before" if kept else "planned anew: the run had") in said.getvalue()


def test_a_resumed_run_plans_anew_if_ranks_were_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its ranks cannot be started without those between them, whatever their number."""
    run, said = RunFolder(tmp_path / "run"), io.StringIO()
    run.write_config(config("auto"))
    run.write_text("plan.json", replace(PLANNED, plan=PLAN.shifted(1)).to_json())
    anew = ChosenPlan(replace(PLANNED, num_microbatches=7).to_json(), ())
    monkeypatch.setattr(auto_plan, "plan_in_process", lambda job, progress: anew)
    found = choose_plan(config("auto"), Devices(1, len(PLAN.ranks)), run, True, Console(file=said, width=200))
    assert found is not None
    assert found.num_microbatches == 7
    assert "planned anew: the last plan left ranks idle" in said.getvalue()


def shared(choose: Callable[[Callable[[], None]], TrainingPlan | None], timeout_seconds: float = 60.0) -> list[Any]:
    """What three ranks get: a plan, or the text of what each raised."""
    token = fresh_token()
    server = StoreServer("127.0.0.1", 0, token)
    answers: list[Any] = [None] * 3

    def run(rank: int) -> None:
        store = connect("127.0.0.1", server.port, token, on_one_machine=True)
        try:
            answers[rank] = share_plan(store, rank, timeout_seconds, choose)
        except Exception as error:
            answers[rank] = f"{type(error).__name__}: {error}"
        finally:
            store.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    server.close()
    return answers


def test_rank_0_alone_plans_and_all_ranks_get_its_plan() -> None:
    calls = []

    def choose(sign: Callable[[], None]) -> TrainingPlan:
        calls.append(sign())
        return PLANNED

    assert shared(choose) == [PLANNED] * 3
    assert len(calls) == 1


def test_a_refusal_of_rank_0_is_that_of_all_ranks() -> None:
    def choose(sign: Callable[[], None]) -> TrainingPlan:
        raise UserError("no plan")

    assert shared(choose) == ["UserError: no plan"] * 3


def test_a_failure_of_rank_0_ends_all_ranks() -> None:
    def choose(sign: Callable[[], None]) -> TrainingPlan:
        raise RuntimeError("out of paper")

    first, *others = shared(choose)
    assert first == "RuntimeError: out of paper"
    assert others == ["UserError: rank 0 failed while it planned"] * 2


def test_ranks_wait_for_a_plan_while_rank_0_gives_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_plan, "_LOOK_SECONDS", 0.2)

    def choose(parts: int, has_signs: bool) -> Callable[[Callable[[], None]], TrainingPlan]:
        def work(sign: Callable[[], None]) -> TrainingPlan:
            for _ in range(parts):
                if has_signs:
                    sign()
                threading.Event().wait(0.2)
            return PLANNED

        return work

    assert shared(choose(12, True), timeout_seconds=2.0) == [PLANNED] * 3
    _, *others = shared(choose(4, False), timeout_seconds=0.3)
    assert all("without a sign" in other for other in others)
