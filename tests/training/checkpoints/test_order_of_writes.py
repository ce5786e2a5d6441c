"""A checkpoint has its name only when all that it vouches for is on disk, and nothing is deleted before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dilatant.training.checkpoints.writer import CheckpointWriter

Event = tuple[str, str, str]
"""What was done, to which path, and the new one of a rename; paths are relative to the run folder."""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The calls that bring files and names to disk, in their order, made as ever."""
    found: list[Event] = []

    def inside(path: Any) -> str:
        return os.path.relpath(os.fspath(path), tmp_path)

    def renamed(call: Any, name: str) -> Any:
        def recorded(source: Any, target: Any, **options: Any) -> None:
            call(source, target, **options)
            found.append((name, inside(source), inside(target)))

        return recorded

    fsync = os.fsync

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        found.append(("fsync", inside(os.readlink(f"/proc/self/fd/{descriptor}")), ""))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed(os.replace, "rename"))
    monkeypatch.setattr(os, "rename", renamed(os.rename, "rename"))
    return found


def _save(writer: CheckpointWriter, step: int) -> None:
    weights = {"a": torch.full((3,), float(step)), "still": torch.ones(2)}
    tensors = {"model": weights, "optimizer": {"a": {"exp_avg": torch.zeros(3)}}}
    writer.save(step, tensors, {"step": step}, {"still"})
    writer.publish()
    writer.wait()


def _on_disk(events: list[Event]) -> tuple[set[str], set[str]]:
    """Files whose content is on disk, and paths whose name in their folder is, after these events: a name is when the
    folder is synced after it was given; content moves along with a name."""
    content: set[str] = set()
    named: set[str] = set()
    waiting: dict[str, set[str]] = {}
    for what, path, target in events:
        if what == "fsync":
            content.add(path)
            named |= waiting.pop(path, set())
            waiting.setdefault(os.path.dirname(path), set()).add(path)  # it is there at the latest now
            continue
        for moved in [one for one in content if one == path or one.startswith(path + os.sep)]:
            content.remove(moved)
            content.add(target + moved[len(path) :])
        for moved in [one for one in named if one.startswith(path + os.sep)]:
            named.remove(moved)
            named.add(target + moved[len(path) :])
        waiting.setdefault(os.path.dirname(target), set()).add(target)
    return content, named


def test_all_is_on_disk_before_it_is_vouched_for(tmp_path: Path, events: list[Event]) -> None:
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, 1, "first")
    for step in (1, 2):
        _save(writer, step)
    writer.close()

    def position(end: str, since: int = 0) -> int:
        return next(n for n, event in enumerate(events[since:], since) if event[2].endswith(end))

    for step in (1, 2):
        since = position("step-00000001") + 1 if step == 2 else 0
        part, manifest = position("part-00000/part.json", since), position("/manifest.json", since)
        final = position(f"step-{step:08d}", since)
        assert part < manifest < final
        writing = os.path.dirname(events[manifest][2])
        files = [f"{writing}/part-00000/{name}.safetensors" for name in ("model", "optimizer")]
        frozen = [str(path.relative_to(tmp_path)) for path in (folder / "frozen").iterdir()]
        assert len(frozen) == 1
        # What part.json vouches for has its content on disk, and a frozen file its name, too.
        content, named = _on_disk(events[:part])
        assert {*files, *frozen} <= content
        assert {*frozen} <= named
        # What the manifest vouches for is there by name; so are the names of all that the rename moves.
        content, named = _on_disk(events[:manifest])
        assert {f"{writing}/part-00000/part.json", *files} <= content & named
        content, named = _on_disk(events[:final])
        assert f"{writing}/manifest.json" in content & named
        assert {f"{writing}/part-00000", writing} <= named
        # The new name is on disk before the checkpoint before it goes.
        gone = [n for n, event in enumerate(events) if ".deleting-" in event[2]]
        if step == 2:
            assert gone
            assert f"checkpoints/step-{step:08d}" in _on_disk(events[: min(gone)])[1]
