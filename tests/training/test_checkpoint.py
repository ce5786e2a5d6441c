"""A checkpoint is whole or absent, damage is noticed, and another model's checkpoint is refused."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch

from dilatant.config import UserError
from dilatant.training.checkpoint import CheckpointWriter, damage, list_checkpoints, load, newest_valid


def tensors(fill: float) -> dict:
    return {
        "model": {"language.layers.0.weight": torch.full((64, 32), fill), "vision.norm.bias": torch.ones(7)},
        "optimizer": {
            "language.layers.0.weight": {"step": torch.tensor(fill), "exp_avg": torch.ones(64, 32)}
        },
    }


def write_steps(folder: Path, *steps: int, keep: int = 3) -> None:
    writer = CheckpointWriter(folder, keep)
    for step in steps:
        writer.save(step, tensors(step), {"position": {"epoch": 0, "offset": step}})
    writer.close()


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    write_steps(tmp_path, 5)
    state = tensors(0)
    values = load(tmp_path / "step-00000005", state)
    assert values == {"position": {"epoch": 0, "offset": 5}}
    assert torch.equal(state["model"]["language.layers.0.weight"], torch.full((64, 32), 5.0))
    assert state["optimizer"]["language.layers.0.weight"]["step"] == 5


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    weight = torch.zeros(1000, 1000)
    writer = CheckpointWriter(tmp_path, 1)
    writer.save(1, {"model": {"w": weight}}, {})
    weight += 1
    writer.close()
    state = {"model": {"w": torch.empty(1000, 1000)}}
    load(tmp_path / "step-00000001", state)
    assert not state["model"]["w"].any()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [4, 3]


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove file", "remove manifest", "garble manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, harm: str) -> None:
    write_steps(tmp_path, 1, 2)
    newest = tmp_path / "step-00000002"
    data = max(newest.glob("part-*/*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    if harm == "truncate":
        data.write_bytes(content[:-1])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif harm == "remove file":
        data.unlink()
    elif harm == "remove manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    found, warnings = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step-00000002" in warnings[0]


def test_parts_of_several_ranks_load_as_one(tmp_path: Path) -> None:
    whole = tensors(5)
    writers = [CheckpointWriter(tmp_path, 1, rank, 2) for rank in (0, 1)]
    writers[0].save(7, {"model": {"vision.norm.bias": whole["model"]["vision.norm.bias"]}}, {"a": 1})
    assert list_checkpoints(tmp_path) == []
    writers[1].save(
        7, {"model": {"language.layers.0.weight": whole["model"]["language.layers.0.weight"]}}, {"a": 1}
    )
    for writer in writers:
        writer.close()
    state = {"model": tensors(0)["model"]}
    assert load(tmp_path / "step-00000007", state) == {"a": 1}
    assert torch.equal(state["model"]["language.layers.0.weight"], torch.full((64, 32), 5.0))
    part = {"model": {"vision.norm.bias": torch.zeros(7)}}
    load(tmp_path / "step-00000007", part, known=whole["model"])
    assert part["model"]["vision.norm.bias"].all()


@pytest.mark.parametrize("last", [0, 1])
def test_nobody_waits_for_a_part_that_never_comes_and_the_last_one_completes_the_rest(
    tmp_path: Path, last: int
) -> None:
    writers = [CheckpointWriter(tmp_path, 1, rank, 2) for rank in (0, 1)]
    first = writers[1 - last]
    first.save(1, tensors(1), {})
    first.save(2, tensors(2), {})
    first.close()
    assert list_checkpoints(tmp_path) == []
    writers[last].save(2, tensors(2), {})
    writers[last].close()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2]
    assert damage(tmp_path / "step-00000002") is None


def test_half_a_checkpoint_of_a_killed_run_is_never_found(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    (tmp_path / ".writing-00000002").mkdir()
    found, warnings = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    assert warnings == []
    CheckpointWriter(tmp_path, 1).close()
    assert not (tmp_path / ".writing-00000002").exists()


def test_a_full_disk_is_one_clear_error_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    # A limit on file size makes writes fail in the middle of a file, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        writer = CheckpointWriter(tmp_path, 1)
        writer.save(2, tensors(2), {})
        with pytest.raises(UserError, match=r"disk is full; step-00000001 is still valid"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert damage(tmp_path / "step-00000001") is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"model": {"language.layers.0.weight": torch.zeros(8, 32), "vision.norm.bias": torch.ones(7)}},
            "here and",
        ),
        ({"model": {"vision.norm.bias": torch.ones(7)}}, "is in the checkpoint only"),
        ({"model": {**tensors(0)["model"], "audio.norm": torch.ones(1)}}, "is not in the checkpoint"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: dict, says: str) -> None:
    write_steps(tmp_path, 1)
    with pytest.raises(UserError, match="another model") as error:
        load(tmp_path / "step-00000001", other)
    assert says in str(error.value)
