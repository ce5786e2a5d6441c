"""Of all checkpoints the right ones stay: the run's own branch, whole ones, and what they refer to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cases.checkpoint_steps import at, flip, steps_in, tensors, write_steps
from dilatant.config import UserError
from dilatant.training.checkpoints.checkpoint import damage, load, newest_valid
from dilatant.training.checkpoints.writer import CheckpointWriter

FROZEN = ["language.layers.0.weight"]


def weights_of(path: Path) -> float:
    state = tensors(-1)
    load(path, state)
    return state["model"]["language.layers.0.weight"][0, 0].item()


def frozen_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "frozen").iterdir()}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert steps_in(tmp_path) == [4, 3]


@pytest.mark.parametrize(("best", "left"), [(None, [6, 5]), (2, [6, 5, 2]), (6, [6, 5])])
def test_the_best_stays_besides_the_newest(tmp_path: Path, best: int | None, left: list[int]) -> None:
    writer = CheckpointWriter(tmp_path, 2, "first")
    for step in range(1, 7):
        writer.save(step, tensors(step), {"step": step, "best": {"step": best, "value": 0.5, "since": 0}})
        writer.publish()
    writer.close()
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_resume_from_older_step_keeps_new_over_abandoned_ones(tmp_path: Path, keep: int) -> None:
    write_steps(tmp_path, 10, 20, 30, keep=3)
    write_steps(tmp_path, 11, 12, keep=keep, session="second", after=at(tmp_path, 10))
    assert steps_in(tmp_path) == [12, 11, 10][:keep]
    found, warnings = newest_valid(tmp_path)
    assert (found and found.step, warnings) == (12, [])


def test_abandoned_checkpoints_stay_aside_until_enough_are_new(tmp_path: Path) -> None:
    write_steps(tmp_path, 10, 20, 30)
    write_steps(tmp_path, session="second", after=at(tmp_path, 10))  # killed before its first save
    found, _ = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 10
    aside = [tmp_path / f"abandoned-step-000000{step}" for step in (20, 30)]
    assert all(damage(path) is None for path in aside)
    write_steps(tmp_path, 11, session="third", after=at(tmp_path, 10), keep=2)
    assert all(path.exists() for path in aside)
    write_steps(tmp_path, 12, 13, session="fourth", after=at(tmp_path, 11), keep=2)
    assert not any(path.exists() for path in aside)


def test_an_abandoned_checkpoint_can_be_gone_back_to(tmp_path: Path) -> None:
    write_steps(tmp_path, 10, 20)
    write_steps(tmp_path, 15, session="second", after=at(tmp_path, 10))
    write_steps(tmp_path, 25, session="third", after=tmp_path / "abandoned-step-00000020")
    assert steps_in(tmp_path) == [25, 20, 10]
    assert (tmp_path / "abandoned-step-00000015").is_dir()
    assert weights_of(at(tmp_path, 20)) == 20


def test_the_same_step_of_two_branches_is_two_checkpoints(tmp_path: Path) -> None:
    write_steps(tmp_path, 10, 20)
    for session in ("second", "third"):
        write_steps(tmp_path, 20, session=session, after=at(tmp_path, 10))
    names = sorted(path.name for path in tmp_path.glob("abandoned-*"))
    assert names == ["abandoned-step-00000020", "abandoned-step-00000020.2"]
    assert all(damage(tmp_path / name) is None for name in names)


def test_checkpoint_of_same_step_is_set_aside_and_not_deleted(tmp_path: Path) -> None:
    write_steps(tmp_path, 5)
    write_steps(tmp_path, 5, session="second")
    assert damage(tmp_path / "abandoned-step-00000005") is None
    assert steps_in(tmp_path) == [5]


def test_crash_before_first_save_resumes_from_the_other_run(tmp_path: Path) -> None:
    write_steps(tmp_path / "other", 40)
    mine = tmp_path / "mine"
    write_steps(mine, 10)
    write_steps(mine, session="second", after=at(tmp_path / "other", 40))
    found, warnings = newest_valid(mine)
    assert found is not None
    assert (found.path, found.step, warnings) == (at(tmp_path / "other", 40), 40, [])
    write_steps(mine, 41, session="third", after=found.path)
    found, _ = newest_valid(mine)
    assert found is not None
    assert found.path == at(mine, 41)
    assert weights_of(at(tmp_path / "other", 40)) == 40


def test_a_damaged_checkpoint_never_costs_a_whole_one(tmp_path: Path) -> None:
    write_steps(tmp_path, 5, 10)
    flip(at(tmp_path, 10) / "part-00000/model.safetensors", -1)
    found, warnings = newest_valid(tmp_path)
    assert found is not None
    assert (found.step, len(warnings)) == (5, 1)
    write_steps(tmp_path, 6, 7, 8, 9, keep=1, session="second", after=found.path)
    assert steps_in(tmp_path) == [9]
    assert damage(at(tmp_path, 9)) is None


def test_one_that_is_cut_short_later_is_not_counted(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    (at(tmp_path, 2) / "part-00000/model.safetensors").write_bytes(b"")
    writer = CheckpointWriter(tmp_path, 2, "first")
    writer.save(3, tensors(3), {})
    writer.publish()
    writer.close()
    assert steps_in(tmp_path) == [3, 2, 1]
    assert newest_valid(tmp_path)[0] is not None


def test_frozen_weights_are_stored_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, "first")
    weight, trained = torch.full((1000, 100), 3.0), torch.zeros(10)
    for step in (1, 2, 3):
        trained += 1
        writer.save(step, {"model": {"w": weight, "t": trained}}, {}, frozen=["w"])
        writer.publish()
    writer.close()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1.1 * 400_000  # one copy of 400 kB, with two checkpoints of a few hundred bytes
    assert len(frozen_files(tmp_path)) == 1
    state = {"model": {"w": torch.zeros(1000, 100), "t": torch.zeros(10)}}
    load(at(tmp_path, 2), state)
    assert torch.equal(state["model"]["w"], weight)
    assert state["model"]["t"].unique().tolist() == [2]


def test_frozen_weights_that_somebody_wrote_to_are_stored_again(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1, "first")
    weight = torch.nn.Parameter(torch.zeros(10), requires_grad=False)
    for step in (1, 2):
        writer.save(step, {"model": {"w": weight.detach()}}, {}, frozen=["w"])
        writer.publish()
        writer.wait()
        state = {"model": {"w": torch.full((10,), -1.0)}}
        load(at(tmp_path, step), state)
        assert torch.equal(state["model"]["w"], weight)
        assert len(frozen_files(tmp_path)) == 1  # that of step 1 went with it
        weight += 1
    writer.close()


def test_frozen_weights_stay_while_anything_names_them(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, keep=2, frozen=FROZEN)  # the weight differs from step to step
    assert len(frozen_files(tmp_path)) == 2
    write_steps(tmp_path, 3, keep=2, session="second", after=at(tmp_path, 1))
    assert damage(tmp_path / "abandoned-step-00000002") is None  # it needs its own
    assert len(frozen_files(tmp_path)) == 2
    write_steps(tmp_path, 4, 5, keep=2, session="third", after=at(tmp_path, 3), frozen=FROZEN)
    assert len(frozen_files(tmp_path)) == 2
    assert [weights_of(at(tmp_path, step)) for step in (4, 5)] == [4, 5]


def test_frozen_weights_of_an_unfinished_save_go_at_next_start(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, frozen=FROZEN)
    kept = frozen_files(tmp_path)
    writer = CheckpointWriter(tmp_path, 1, "second")
    writer.save(2, tensors(2), {}, FROZEN)
    writer.wait()  # and is killed
    assert len(frozen_files(tmp_path)) == 2
    CheckpointWriter(tmp_path, 1, "third")
    assert frozen_files(tmp_path) == kept
    assert damage(at(tmp_path, 1)) is None


def test_frozen_weights_stay_while_a_checkpoint_is_unreadable(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, frozen=FROZEN)
    (at(tmp_path, 1) / "manifest.json").rename(tmp_path / "mislaid")
    CheckpointWriter(tmp_path, 1, "second").close()
    (tmp_path / "mislaid").rename(at(tmp_path, 1) / "manifest.json")
    assert damage(at(tmp_path, 1)) is None


def test_frozen_weights_are_part_of_what_is_checked(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, frozen=FROZEN)
    (file,) = (tmp_path / "frozen").iterdir()
    flip(file, -1)
    assert damage(at(tmp_path, 1)) == f"frozen/{file.name} differs from what was written"
    file.unlink()
    assert damage(at(tmp_path, 1), contents=False) == f"frozen/{file.name} is missing"
    with pytest.raises(UserError, match="is missing"):
        load(at(tmp_path, 1), tensors(0))


def test_copied_checkpoint_loads_with_frozen_weights_beside_it(tmp_path: Path) -> None:
    write_steps(tmp_path / "run", 1, frozen=FROZEN)
    shutil.copytree(at(tmp_path / "run", 1), tmp_path / "copy" / "best")
    shutil.copytree(tmp_path / "run" / "frozen", tmp_path / "copy" / "frozen")
    assert weights_of(tmp_path / "copy" / "best") == 1
