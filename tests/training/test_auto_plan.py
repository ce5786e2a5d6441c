"""Who plans a run: itself, where it has several devices and nobody said otherwise; once, for all of its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.engine_case import PLAN
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import connect
from dilatant.comm.store.token import fresh_token
from dilatant.config import Config, UserError
from dilatant.config.config import parse_config
from dilatant.config.environment import LaunchPlace
from dilatant.planning import auto_plan
from dilatant.planning.auto_plan import Devices, devices_at_hand, is_planned_here, share_plan
from dilatant.planning.layout import TrainingPlan
from harness.patience import HANG_SECONDS

LAID_OUT = {"units": {"vision": {}, "language": {}}}
PLANNED = TrainingPlan(PLAN, 3, "1f1b", "balanced", 0.5)


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
    cluster = Devices(2, 4, "Slurm").cluster(
        elsewhere.cluster.model_copy(update={"nodes": 128, "gpus_per_node": 8})
    )
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)


def shared(
    choose: Callable[[Callable[[], None]], TrainingPlan | None], timeout_seconds: float = 60.0
) -> list[Any]:
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

    def choose(signs: int) -> Callable[[Callable[[], None]], TrainingPlan]:
        def work(sign: Callable[[], None]) -> TrainingPlan:
            for number in range(15):
                if number < signs:
                    sign()
                threading.Event().wait(0.2)
            return PLANNED

        return work

    assert shared(choose(15), timeout_seconds=2.0) == [PLANNED] * 3
    _, *others = shared(choose(0), timeout_seconds=1.0)
    assert all("without a sign" in other for other in others)
