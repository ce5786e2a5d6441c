"""A checkpoint is whole or absent, damage of any kind is noticed, and another model's checkpoint is refused."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cases.checkpoint_steps import at, flip, steps_in, tensors, write_steps
from dilatant.config import UserError
from dilatant.training.checkpoints.checkpoint import (
    damage,
    identity,
    list_checkpoints,
    load,
    newest_valid,
    stored_shapes,
)
from dilatant.training.checkpoints.files import stamp_of
from dilatant.training.checkpoints.writer import CheckpointWriter
from harness.patience import wait_until


def reseal(checkpoint: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest and give it the checksum it would have had: SHA-256 of its sorted, compact JSON."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    write_steps(tmp_path, 5)
    state = tensors(0)
    values = load(at(tmp_path, 5), state)
    assert values == {"step": 5, "position": {"epoch": 0, "offset": 5}}
    assert torch.equal(state["model"]["language.layers.0.weight"], torch.full((64, 32), 5.0))
    assert state["optimizer"]["language.layers.0.weight"]["step"] == 5
    assert stored_shapes(at(tmp_path, 5), "optimizer")["language.layers.0.weight.step"] == ()


def test_tensors_of_every_form_come_back_bit_by_bit(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    saved = {
        "bf16": torch.randn(5, 3, generator=drawn).bfloat16(),
        "transposed": torch.randn(4, 6, generator=drawn).T,
        "view": torch.randn(10, generator=drawn)[2:7:2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float("nan")),
        "whole": torch.arange(5),
        "flags": torch.tensor([True, False]),
    }
    writer = CheckpointWriter(tmp_path, 1, "a")
    writer.save(1, {"model": saved}, {"big": 2**80, "text": "é\ud800"})
    writer.publish()
    writer.close()
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    assert load(at(tmp_path, 1), {"model": found}) == {"big": 2**80, "text": "é\ud800"}
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor) or (name == "scalar" and found[name].isnan())


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, frozen=["vision.norm.bias"])
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as reader:
                assert list(reader.keys())


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    weight = torch.zeros(1000, 1000)
    writer = CheckpointWriter(tmp_path, 1, "a")
    writer.save(1, {"model": {"w": weight}}, {})
    weight += 1
    writer.publish()
    writer.close()
    state = {"model": {"w": torch.empty(1000, 1000)}}
    load(at(tmp_path, 1), state)
    assert not state["model"]["w"].any()


def garble(path: Path, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_text(text)  # type: ignore[func-returns-value]


HARMS: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda f: (f / "part-00000/model.safetensors").write_bytes(
        (f / "part-00000/model.safetensors").read_bytes()[:-1]
    ),
    "flipped": lambda f: flip(f / "part-00000/model.safetensors", -1),
    "flipped early": lambda f: flip(f / "part-00000/optimizer.safetensors", 100),
    "file gone": lambda f: (f / "part-00000/model.safetensors").unlink(),
    "part gone": lambda f: shutil.rmtree(f / "part-00000"),
    "manifest gone": lambda f: (f / "manifest.json").unlink(),
    "manifest a folder": lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()),
    **{
        f"{file} is {name}": garble(Path(file), text)
        for file in ("manifest.json", "part-00000/part.json")
        for name, text in {
            "cut": "{",
            "a list": "[]",
            "null": "null",
            "empty": "",
            "deep": "[" * 200_000,
            "long number": '{"format": ' + "9" * 5000 + "}",
            "markup": '{"format": "[/red]"}',
            "not text": "\x00\x7f",
        }.items()
    },
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, harm: str) -> None:
    write_steps(tmp_path, 1, 2)
    HARMS[harm](at(tmp_path, 2))
    found, warnings = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step-00000002" in warnings[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(parts=None),
        lambda m: m.update(parts={}),
        lambda m: m.update(parts=[1, 2]),
        lambda m: m.update(parts={"../step-00000001/part-00000": m["parts"]["part-00000"]}),
        lambda m: m.update(parts={"part-00000\n": m["parts"]["part-00000"]}),
        lambda m: m["parts"].update({"part-00000": None}),
        lambda m: m["parts"].update({"part-00000": {"bytes": -1, "checksum": 3}}),
        lambda m: m.update(step=-5),
        lambda m: m.update(step=True),
        lambda m: m.update(step=1),
        lambda m: m.update(session=None),
        lambda m: m.update(session="other"),
        lambda m: m.update(branch=[[1, 2, 3]]),
        lambda m: m.update(branch={}),
        lambda m: m.update(values=None),
        lambda m: m["values"].update(step=1),
        lambda m: m.update(format=99),
    ],
)
def test_invalid_manifest_is_damage_even_with_a_valid_checksum(tmp_path: Path, change: Callable[[dict], None]) -> None:
    write_steps(tmp_path, 1, 2)
    reseal(at(tmp_path, 2), change)
    assert damage(at(tmp_path, 2)) is not None
    with pytest.raises(UserError, match="damaged"):
        load(at(tmp_path, 2), tensors(0))
    found, _ = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1


def test_what_belongs_to_different_steps_is_never_put_together(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    manifest = at(tmp_path, 2) / "manifest.json"
    own = manifest.read_bytes()
    manifest.write_bytes((at(tmp_path, 1) / "manifest.json").read_bytes())
    assert damage(at(tmp_path, 2)) is not None
    manifest.write_bytes(own)
    assert damage(at(tmp_path, 2)) is None
    shutil.rmtree(at(tmp_path, 2) / "part-00000")
    shutil.copytree(at(tmp_path, 1) / "part-00000", at(tmp_path, 2) / "part-00000")
    assert damage(at(tmp_path, 2)) is not None
    at(tmp_path, 1).rename(at(tmp_path, 99_999_999))
    assert damage(at(tmp_path, 99_999_999)) is not None


def stamp(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "checksum": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_part_of_other_step_or_start_is_damage_despite_checksum(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    write_steps(tmp_path / "other", 2, session="other")
    for source, says in ((at(tmp_path, 1), "is of step 1"), (at(tmp_path / "other", 2), "another start")):
        shutil.rmtree(at(tmp_path, 2) / "part-00000")
        shutil.copytree(source / "part-00000", at(tmp_path, 2) / "part-00000")
        seal = stamp(source / "part-00000" / "part.json")
        reseal(at(tmp_path, 2), lambda m, seal=seal: m["parts"].update({"part-00000": seal}))
        assert says in str(damage(at(tmp_path, 2)))


def test_a_manifest_vouches_for_parts_and_for_itself(tmp_path: Path) -> None:
    write_steps(tmp_path, 12)
    manifest, part = at(tmp_path, 12) / "manifest.json", at(tmp_path, 12) / "part-00000" / "part.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"offset": 12', '"offset": 13'))
    assert damage(at(tmp_path, 12), contents=False) == "manifest.json differs from what was written"
    manifest.write_text(text)
    flip(part.parent / "model.safetensors", -1)
    content = json.loads(part.read_text())
    content["files"]["model.safetensors"] = stamp(part.parent / "model.safetensors")
    part.write_text(json.dumps(content, indent=1) + "\n")
    assert damage(at(tmp_path, 12), contents=False) == "part-00000/part.json differs from what was written"


def test_the_checksum_is_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(10_000_000))
    found = stamp_of(path)
    assert {"bytes": found.bytes, "checksum": found.checksum} == stamp(path)


def test_a_name_that_two_parts_hold_is_damage(tmp_path: Path) -> None:
    writers = [CheckpointWriter(tmp_path, 1, "a", rank, 2) for rank in (0, 1)]
    for writer in writers:
        writer.save(1, {"model": {"w": torch.zeros(2)}}, {})
        writer.wait()
    writers[0].publish()
    for writer in writers:
        writer.close()
    with pytest.raises(UserError, match=r"model\.w is stored twice"):
        load(at(tmp_path, 1), {"model": {"w": torch.ones(2)}})


def test_a_part_that_lies_in_the_way_is_not_bound_in(tmp_path: Path) -> None:
    writers = two_parts(tmp_path, 2)
    (part,) = tmp_path.glob(".writing-*/part-00001/part.json")
    part.write_text(part.read_text().replace('"session": "a"', '"session": "z"'))
    writers[0].publish()
    with pytest.raises(UserError, match="another step or start"):
        writers[0].close()
    writers[1].close()
    assert list(tmp_path.iterdir()) == []


def test_no_changed_bit_goes_unnoticed(tmp_path: Path) -> None:
    write_steps(tmp_path, 2, frozen=["vision.norm.bias"])
    state = tensors(0)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    drawn = random.Random(0)
    for number in range(120):
        path = drawn.choice(files)
        before = path.read_bytes()
        place = drawn.randrange(len(before))
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << drawn.randrange(8)]) + before[place + 1 :])
        found, warnings = newest_valid(tmp_path)
        if found is not None:
            # Only what JSON ignores may differ: spaces.
            assert path.suffix == ".json", (number, path, place)
            assert load(found.path, state) == {"step": 2, "position": {"epoch": 0, "offset": 2}}
            assert torch.equal(state["model"]["language.layers.0.weight"], torch.full((64, 32), 2.0))
        else:
            assert len(warnings) == 1
        path.write_bytes(before)


def test_quick_check_skips_contents_but_notices_missing_files(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    flip(at(tmp_path, 1) / "part-00000/model.safetensors", -1)
    assert damage(at(tmp_path, 1), contents=False) is None
    assert damage(at(tmp_path, 1)) == "part-00000/model.safetensors differs from what was written"
    seen = identity(at(tmp_path, 1))
    (at(tmp_path, 1) / "part-00000/optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"optimizer.safetensors is missing; all machines must see"):
        identity(at(tmp_path, 1))
    assert seen.startswith("1 first ")


def two_parts(folder: Path, step: int, session: str = "a") -> list[CheckpointWriter]:
    """Two ranks' writers, each with its half of `tensors` on disk, unpublished."""
    whole = tensors(step)
    writers = [CheckpointWriter(folder, 1, session, rank, 2) for rank in (0, 1)]
    for writer, name in zip(writers, whole["model"]):
        writer.save(step, {"model": {name: whole["model"][name]}}, {"a": 1})
        writer.wait()
    return writers


def test_parts_of_several_ranks_load_as_one(tmp_path: Path) -> None:
    writers = two_parts(tmp_path, 7)
    assert all(writer.ready() for writer in writers)
    assert list_checkpoints(tmp_path) == []
    writers[0].publish()
    for writer in writers:
        writer.close()
    state = {"model": tensors(0)["model"]}
    assert load(at(tmp_path, 7), state) == {"a": 1}
    assert torch.equal(state["model"]["language.layers.0.weight"], torch.full((64, 32), 7.0))
    part = {"model": {"vision.norm.bias": torch.zeros(7)}}
    load(at(tmp_path, 7), part, known=state["model"])
    assert part["model"]["vision.norm.bias"].all()
    assert writers[0].published == list_checkpoints(tmp_path)[0]


def test_missing_part_is_named_and_leaves_no_files(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 1, "b", 0, 2)
    writer.save(2, tensors(2), {})
    writer.publish(patience_seconds=0.2)
    with pytest.raises(UserError, match=r"rank 0 does not see the part of rank 1; .*step-00000001 is still"):
        writer.wait()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_part_of_an_earlier_start_is_never_bound_in(tmp_path: Path) -> None:
    stale = CheckpointWriter(tmp_path, 1, "stale", 1, 2)
    writer = CheckpointWriter(tmp_path, 1, "fresh", 0, 2)
    writer.save(2, tensors(2), {})
    stale.save(2, {"model": {"w": torch.ones(1)}}, {})  # a process that outlived its run
    stale.wait()
    writer.publish(patience_seconds=0.2)
    with pytest.raises(UserError, match="does not see the part of rank 1"):
        writer.close()
    stale.close()
    assert list_checkpoints(tmp_path) == []


def test_a_rank_that_cannot_write_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path, 1, "a", 0, 2)
    monkeypatch.setattr("dilatant.training.checkpoints.writer.save_file", full)
    writer.save(1, tensors(1), {})
    writer.publish(patience_seconds=1e6)
    with pytest.raises(UserError, match="the disk is full"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_unpublished_saves_are_removed_at_close_and_after_a_kill(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, frozen=["vision.norm.bias"])
    for writer in two_parts(tmp_path, 2, "b"):
        writer.close()
    assert steps_in(tmp_path) == [1]
    assert not list(tmp_path.glob(".*"))
    (tmp_path / ".writing-00000002-gone").mkdir()
    (tmp_path / ".deleting-step-00000002").mkdir()
    (tmp_path / "frozen" / ".writing-gone-1").write_text("")
    found, warnings = newest_valid(tmp_path)
    assert (found and found.step, warnings) == (1, [])
    CheckpointWriter(tmp_path, 1, "c").close()
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("frozen/.*")]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from dilatant.training.checkpoints.writer import CheckpointWriter\n"
        "writer = CheckpointWriter(Path(sys.argv[1]), 2, sys.argv[2])\n"
        "for step in range(1, 100_000):\n"
        "    writer.save(step, {'model': {'w': torch.full((100_000,), float(step))}}, {'step': step})\n"
        "    writer.publish()\n"
    )
    drawn = random.Random(1)
    for number in range(3):
        folder = tmp_path / str(number)
        process = subprocess.Popen([sys.executable, "-c", code, folder, "s"])
        wait_until(lambda: list_checkpoints(folder))  # noqa: B023  # it is called here
        time.sleep(drawn.random())
        process.kill()
        process.wait()
        found, warnings = newest_valid(folder)
        assert warnings == []
        assert found is not None
        state = {"model": {"w": torch.zeros(100_000)}}
        assert load(found.path, state) == {"step": found.step}
        assert torch.equal(state["model"]["w"], torch.full((100_000,), float(found.step)))


def test_full_disk_is_one_error_and_keeps_previous_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    # A limit on file size makes writes fail in the middle of a file, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        writer = CheckpointWriter(tmp_path, 1, "b")
        writer.save(2, tensors(2), {})
        writer.publish()
        with pytest.raises(UserError, match=r"disk is full; step-00000001 is still valid"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert damage(at(tmp_path, 1)) is None


def test_file_in_place_of_folder_is_no_checkpoint_nor_full_disk(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    writer = CheckpointWriter(tmp_path / "checkpoints", 1, "a")
    writer.save(1, tensors(1), {})
    writer.publish()
    with pytest.raises(UserError, match=r"(?!.*Free space).*there is no earlier one") as error:
        writer.close()
    assert "Free space" not in str(error.value)
    (tmp_path / "step-00000060").write_text("")
    assert list_checkpoints(tmp_path) == []


def test_failed_write_is_reported_once_and_cancels_queued_writes(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1, "a")
    failed, behind = Future[None](), Future[None]()
    failed.set_exception(OSError("the cable is out"))
    writer._pending = [failed, behind]
    with pytest.raises(UserError, match="the cable is out"):
        writer.wait()
    assert behind.cancelled()
    writer.close()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"model": {"language.layers.0.weight": torch.zeros(8, 32), "vision.norm.bias": torch.ones(7)}},
            "is [8, 32] here and [64, 32] there",
        ),
        (
            {"model": {**tensors(0)["model"], "vision.norm.bias": torch.zeros(3, 7)}},  # would broadcast
            "is [3, 7] here and [7] there",
        ),
        (
            {"model": {**tensors(0)["model"], "vision.norm.bias": torch.zeros(7).half()}},
            "is float16 here and float32 there",
        ),
        ({"model": {"vision.norm.bias": torch.ones(7)}}, "is in the checkpoint only"),
        ({"model": {**tensors(0)["model"], "audio.norm": torch.ones(1)}}, "is not in the checkpoint"),
    ],
)
def test_checkpoint_of_another_model_is_refused_without_changes(tmp_path: Path, other: dict, says: str) -> None:
    write_steps(tmp_path, 1)
    before = {name: tensor.clone() for name, tensor in other["model"].items()}
    with pytest.raises(UserError, match="another model") as error:
        load(at(tmp_path, 1), other)
    assert says in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other["model"].items())
