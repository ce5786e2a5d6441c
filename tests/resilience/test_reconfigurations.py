"""Members join and leave at any point of a rebuild: losses equal those of one process, and ranks leak no memory."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.tiny_project import tiny_config, write_images
from dilatant.config import Config
from dilatant.config.config import parse_config
from dilatant.plan.templates.templates import LayerMemory
from dilatant.planning.layout import TrainingPlan
from dilatant.resilience.protocol.values import FAILS_AGAIN, TOO_FEW
from dilatant.resilience.status import read_rebuilds
from dilatant.training.checkpoints.checkpoint import list_checkpoints
from dilatant.training.run import train
from harness.faults.chaos import losses
from harness.faults.ranks import DYING_STEP, Dies, Held, Leaves, Ranks

STAGES: tuple[tuple[Leaves, ...], ...] = (
    ("fenced",),
    ("rebuilding",),
    ("joined",),  # what was being built on weights that stay is torn then
    ("joined", "joined"),  # and so is the copy that is made of them in its place
    ("joined", "rebuilding", "fenced"),
)
OFTEN = (STAGES[4],)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Config of a run whose sums are equal to the bit for any distribution of samples."""
    data = write_images(tmp_path, 24)
    schedule = {"kind": "constant"}
    tree = tiny_config(steps=10**9, global_batch_size=8, save_steps=None, schedule=schedule, deterministic=True)
    tree["data"]["train"] = [{"path": str(data)}]
    return tree


def alone(folder: Path, tree: dict[str, Any], steps: int) -> Config:
    train_ = {**tree["train"], "steps": steps}
    return parse_config({**tree, "train": train_, "output_dir": str(folder / "alone")}, base=folder)


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def require_flat(before: dict[str, Held], after: dict[str, Held], mebibytes: float) -> None:
    """Check that processes which existed all the time hold no more files, threads and memory than before."""
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        assert (now.files, now.threads) <= (was.files, was.threads), name
        assert now.mebibytes < was.mebibytes + mebibytes, name


@pytest.mark.parametrize("tried", [OFTEN, pytest.param(STAGES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_reconfigured_run_has_losses_of_one_process_to_the_bit(
    tmp_path: Path, config: dict[str, Any], tried: tuple[tuple[Leaves, ...], ...]
) -> None:
    ranks = Ranks(tmp_path, config, 3, guests=1)
    try:
        ranks.await_commit(ranks.visit("joined", "rebuilding", "fenced"))  # while no rank holds state yet
        ranks.await_commit(ranks.lose("node2"))  # visitors take its place, and the others stay as they are
        ranks.await_commit(ranks.visit(*STAGES[0]))
        before = ranks.held()
        for stages in tried:
            ranks.await_commit(ranks.visit(*stages, later=0.03))
        # The allocator keeps memory that was used once, and each generation has new threads.
        require_flat(before, ranks.held(), mebibytes=16)
        assert len(ranks.reasons()) >= 5 + len(tried)
        assert {rebuild.stays for rebuild in [*read_rebuilds(tmp_path / "run")][1:]} == {True, False}
        told = [reason for reason in ranks.reasons()[1:] if "visitor" not in reason]
        assert told == ["node2: its worker 0 is gone"]  # nobody else was a reason to begin again
    finally:
        ranks.close()
    found = losses(tmp_path / "run")
    train(alone(tmp_path, config, len(found)))
    assert found == losses(tmp_path / "alone")


@pytest.mark.parametrize(
    ("dies", "tried", "says"),
    [
        ("out of memory", ["OutOfMemoryError: the device is full"], f"1 node is {TOO_FEW} number "),
        pytest.param("broken", ["KeyError: 'of <object "] * 2, f"{FAILS_AGAIN} with KeyError", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_built_is_excluded_and_what_is_finished_is_saved(
    tmp_path: Path, config: dict[str, Any], dies: Dies, tried: list[str], says: str
) -> None:
    """The one node that is left has too little memory for its plan, or fails twice alike; there is no other plan."""
    ranks = Ranks(tmp_path, config, 2, dying={"node0": dies})
    try:
        ranks.await_steps(2)
        ranks.lose("node1")
        stopped = ranks.await_end()
        reasons = ranks.reasons()[1:]
    finally:
        ranks.close()
    found = [reason.partition(": ")[2] for reason in reasons]
    assert len(found) == 1 + len(tried)
    assert all(map(str.startswith, found, ["its worker 0 is gone", *tried]))
    said = re.match(rf"{re.escape(says)}.*; step (\d+) is saved", stopped)
    assert said is not None, stopped
    step = int(said[1])
    assert [each.step for each in list_checkpoints(tmp_path / "run" / "checkpoints")] == [step]
    assert step - steps(tmp_path / "run")[-1] in (0, 1)  # one may be committed, and not logged yet


def in_pairs(planned: TrainingPlan) -> TrainingPlan:
    """Return the plan with costs for which a pipeline takes exactly two nodes: the last layer's state is too much for
    one, and the microbatches that the first layer keeps are too much in a longer pipeline."""
    chain = planned.chain
    assert chain is not None
    count = len(chain.layer_bytes)
    state, kept = [1.0] * (count - 1) + [300.0], [100.0] + [0.0] * (count - 1)
    memory = LayerMemory({1: state}, {1: kept}, 300.0 + count, 1)
    return replace(planned, chain=replace(chain, keeps_layout=False, num_microbatches=8, memory=memory))


@pytest.mark.slow
def test_an_idle_node_takes_the_place_of_a_lost_one(tmp_path: Path, config: dict[str, Any]) -> None:
    ranks = Ranks(tmp_path, config, 5, adapted=in_pairs)
    try:
        ranks.await_steps(2)
        ranks.await_commit(ranks.lose("node1"))  # of four in two pipelines
        ranks.await_commit(ranks.lose("node3"))  # of four again, and no other is left
    finally:
        ranks.close()
    found = losses(tmp_path / "run")
    assert [rebuild.idle for rebuild in read_rebuilds(tmp_path / "run")] == [{"node4": 1}, {}, {"node2": 1}]
    train(alone(tmp_path, config, len(found)))
    assert found == losses(tmp_path / "alone")


@pytest.mark.slow
def test_salvaged_work_of_survivors_counts_exactly_once(tmp_path: Path, config: dict[str, Any]) -> None:
    ranks = Ranks(tmp_path, config, 4)
    try:
        ranks.await_commit(0)
        for name in ("node3", "node0", "node1"):  # the second one had a step to write down, the third more
            ranks.await_commit(ranks.lose_late(name))
    finally:
        ranks.close()
    kept = [rebuild.salvaged_share for rebuild in read_rebuilds(tmp_path / "run")][1:]
    # One may be stopped when it has given all that a step needs of it, so that the others can end that: then none.
    assert any(share > 0 for share in kept), kept
    found = losses(tmp_path / "run")
    train(alone(tmp_path, config, len(found)))
    assert found == losses(tmp_path / "alone")


@pytest.mark.slow
def test_survivors_record_two_steps_that_lost_ranks_never_logged(tmp_path: Path, config: dict[str, Any]) -> None:
    """The first rank dies after its vote, and the next one before it has logged anything."""
    ranks = Ranks(tmp_path, config, 3, dying={"node0": "with its vote out", "node1": "before it catches up"})
    try:
        ranks.await_steps(DYING_STEP + 3)
        assert len(ranks.reasons()) >= 3
    finally:
        ranks.close()
    found = steps(tmp_path / "run")
    assert found == list(range(1, len(found) + 1))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_reconfigurations_leave_nothing_behind(tmp_path: Path, config: dict[str, Any]) -> None:
    """Ranks are lost and replaced and visitors come, with data workers and steps long enough to be interrupted."""
    config["train"] |= {"deterministic": False, "global_batch_size": 32}
    ranks = Ranks(tmp_path, config, 3, workers=1)
    try:
        ranks.await_commit(0)
        last, before = "node2", None
        for stages in itertools.islice(itertools.cycle(STAGES), 25):
            ranks.await_commit(ranks.lose(last))
            committed = ranks.await_commit(ranks.visit(*stages, later=0.05))
            last = ranks.add()
            ranks.await_commit(committed)
            if before is None and len(ranks.reasons()) > 20:
                before = ranks.held()
        assert len(ranks.reasons()) >= 100
        assert before is not None
        # Of some 450 MiB in all, most of which is torch's.
        require_flat(before, ranks.held(), mebibytes=24)
        told = [reason for reason in ranks.reasons() if "Diverged" in reason or "Error" in reason]
        assert not told
    finally:
        ranks.close()
