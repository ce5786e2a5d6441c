"""What ranks wrote in boxes is read in any other boxes, by brute force over small weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dilatant.config import UserError
from dilatant.plan.boxes import Box
from dilatant.training.checkpoints.checkpoint import load
from dilatant.training.checkpoints.files import stamp_of
from dilatant.training.checkpoints.writer import CheckpointWriter

SHAPES = {"a.weight": (6, 5), "a.norm": (7,), "a.fused": (8, 3)}
WHOLE = {
    name: torch.arange(float(np.prod(shape))).view(shape) + 100 * number
    for number, (name, shape) in enumerate(SHAPES.items())
}

Cuts = dict[str, list[tuple[tuple[tuple[int, int], ...], ...]]]
WHOLES: Cuts = {name: [tuple(((0, n),) for n in shape)] for name, shape in SHAPES.items()}
ROWS: Cuts = {
    "a.weight": [(((0, 1),), ((0, 5),)), (((1, 5),), ((0, 5),)), (((5, 6),), ((0, 5),))],
    "a.norm": [(((0, 3),),), (((3, 7),),)],
    "a.fused": [(((0, 2), (4, 6)), ((0, 3),)), (((2, 4), (6, 8)), ((0, 3),))],
}
GRID: Cuts = {
    "a.weight": [(((r, r + 3),), ((c, min(c + 2, 5)),)) for r in (0, 3) for c in (0, 2, 4)],
    "a.norm": [(((2 * i, min(2 * i + 2, 7)),),) for i in range(4)],
    "a.fused": [(((0, 1), (3, 8)), ((0, 2),)), (((1, 3),), ((0, 2),)), (((0, 8),), ((2, 3),))],
}


def tensor_of(box: Box) -> torch.Tensor:
    indices = [[i for span in spans for i in range(*span)] for spans in box.intervals]
    return torch.from_numpy(WHOLE[box.name].numpy()[np.ix_(*indices)].copy())


def boxes(cuts: Cuts) -> list[Box]:
    return [Box(name, SHAPES[name], intervals) for name, each in cuts.items() for intervals in each]


def write(folder: Path, cuts: Cuts, ranks: int, held: list[Box] | None = None) -> Path:
    """A checkpoint of step 1 that `ranks` wrote, with the boxes dealt out in turn."""
    held = boxes(cuts) if held is None else held
    writers = [CheckpointWriter(folder, 1, "a", rank, ranks) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        own = held[rank::ranks]
        moments = {
            box.key: {"exp_avg": -tensor_of(box)} | ({"step": torch.tensor(3.0)} if box.has_origin else {})
            for box in own
        }
        tensors = {"model": {box.key: tensor_of(box) for box in own}, "optimizer": moments}
        frozen = [box.key for box in own if box.name == "a.fused"]
        writer.save(1, tensors, {"step": 1}, frozen, SHAPES)
        writer.wait()
    writers[0].publish()
    for writer in writers:
        writer.close()
    return folder / "step-00000001"


@pytest.mark.parametrize("wanted", [WHOLES, ROWS, GRID], ids=["whole", "rows", "grid"])
@pytest.mark.parametrize("stored", [WHOLES, ROWS, GRID], ids=["whole", "rows", "grid"])
def test_boxes_are_read_from_any_other_boxes(tmp_path: Path, stored: Cuts, wanted: Cuts) -> None:
    checkpoint = write(tmp_path, stored, 3)
    for box in boxes(wanted):
        state = {
            "model": {box.key: torch.full(box.shape, torch.nan)},
            "optimizer": {box.key: {"exp_avg": torch.full(box.shape, torch.nan), "step": torch.tensor(0.0)}},
        }
        load(checkpoint, state, known=SHAPES, shapes=SHAPES)
        assert torch.equal(state["model"][box.key], tensor_of(box))
        assert torch.equal(state["optimizer"][box.key]["exp_avg"], -tensor_of(box))
        assert state["optimizer"][box.key]["step"] == 3


def test_weight_with_missing_part_or_other_shape_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "part", ROWS, 2, boxes(ROWS)[1:])
    with pytest.raises(UserError, match=r"model\.a\.weight is not all in the checkpoint"):
        load(checkpoint, {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}})
    other = {**SHAPES, "a.weight": (7, 5)}
    checkpoint = write(tmp_path / "all", ROWS, 2)
    with pytest.raises(UserError, match=r"is \[7, 5\] here and \[6, 5\] there"):
        load(checkpoint, {"model": {name: torch.zeros(shape) for name, shape in other.items()}})


def test_numbers_that_two_ranks_wrote_are_damage(tmp_path: Path) -> None:
    twice = Box("a.weight", SHAPES["a.weight"], (((0, 2),), ((0, 5),)))
    checkpoint = write(tmp_path, ROWS, 2, [*boxes(ROWS), twice])
    with pytest.raises(UserError, match=r"a\.weight(\.exp_avg)? is stored twice"):
        load(checkpoint, {"model": dict(WHOLE)})


@pytest.mark.parametrize("shape", ["[4, 5]", "[6]", "[]", "[-1, 5]", '"6x5"', "[6.0, 5]", "[true, 5]"])
def test_a_shape_that_boxes_do_not_fit_is_damage(tmp_path: Path, shape: str) -> None:
    checkpoint = write(tmp_path, ROWS, 1)
    part = checkpoint / "part-00000" / "part.json"
    content = json.loads(part.read_text())
    content["shapes"]["model.a.weight"] = json.loads(shape)
    part.write_text(json.dumps(content))
    seal(checkpoint)
    with pytest.raises(UserError, match="is damaged"):
        load(checkpoint, {"model": dict(WHOLE)})


def test_a_name_with_an_at_sign_is_a_name(tmp_path: Path) -> None:
    saved = {"odd@0:1": torch.ones(3), "odd@x": torch.ones(2)}
    writer = CheckpointWriter(tmp_path, 1, "a")
    writer.save(1, {"model": saved}, {"step": 1})
    writer.publish()
    writer.close()
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load(tmp_path / "step-00000001", {"model": found})
    assert all(bool(tensor.all()) for tensor in found.values())


def seal(checkpoint: Path, **changes: int) -> None:
    """Bind the parts in again, after they were changed."""
    import hashlib

    path = checkpoint / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["checksum"]
    for name in content["parts"]:
        stamp = stamp_of(checkpoint / name / "part.json")
        content["parts"][name] = {"bytes": stamp.bytes, "checksum": stamp.checksum}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


def test_a_file_whose_key_is_no_part_of_its_weight_is_damage(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, ROWS, 1)
    part = checkpoint / "part-00000"
    save_file({"a.norm@3:9": torch.zeros(6)}, part / "model.safetensors")
    content = json.loads((part / "part.json").read_text())
    stamp = stamp_of(part / "model.safetensors")
    content["files"]["model.safetensors"] = {"bytes": stamp.bytes, "checksum": stamp.checksum}
    (part / "part.json").write_text(json.dumps(content))
    seal(checkpoint)
    with pytest.raises(UserError, match=r"is damaged: part-00000/model.safetensors"):
        load(checkpoint, {"model": dict(WHOLE)})
