"""A rank reads its own weights from disk, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from cases.engine_case import CASE, PLAN, build_model
from dilatant.comm.comm import Comm
from dilatant.config import ModelConfig, UserError
from dilatant.hf import stored_weights
from dilatant.hf.stored_weights import read_pretrained
from dilatant.models.build import build_model as build_model_from
from dilatant.models.core import weight_files
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import boxes_held_on, holdings_of
from harness.worker_pool import Worker, WorkerPool


def whole_boxes(model: MultimodalModel, *names: str) -> dict[str, Box]:
    """All of the weights, of all that there are if none is named."""
    held = {name: p for unit in model.units.values() for name, p in unit.named_logical_parameters()}
    return {name: Box.of(name, held[name].shape) for name in names or held}


def test_only_what_was_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    read: list[tuple[str, object]] = []

    class View:
        def __init__(self, key: str, view: Any) -> None:
            self._key, self._view = key, view
            self.get_shape = view.get_shape

        def __getitem__(self, places: object) -> torch.Tensor:
            read.append((self._key, places))
            return self._view[places]

    class Spy:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self) -> Spy:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_tensor(self, key: str) -> torch.Tensor:
            read.append((key, None))
            return self._file.get_tensor(key)

        def get_slice(self, key: str) -> View:
            return View(key, self._file.get_slice(key))

    monkeypatch.setattr(weight_files, "safe_open", Spy)
    name, stored = "language.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    model = build_model(CASE, "meta")
    config = _pretrained_config(tmp_path)
    read_pretrained(model, config, whole_boxes(model, name), seed=1)
    assert read == [(stored, None)]
    read.clear()
    part = Box(name, (24, 16), (((3, 5), (20, 24)), ((0, 16),)))
    weights = read_pretrained(model, config, {name: part}, seed=1)
    assert read == [(stored, (slice(3, 5), slice(0, 16))), (stored, (slice(20, 24), slice(0, 16)))]
    whole = dict(build_model(CASE).language.named_logical_parameters())[name]
    assert torch.equal(weights[name], torch.cat([whole[3:5], whole[20:24]]))


def test_a_stored_prefix_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(CASE)
    model.save_pretrained(tmp_path)
    file = tmp_path / "language" / "model.safetensors"
    save_file({f"text_model.{key}": tensor for key, tensor in load_file(file).items()}, file)
    monkeypatch.setattr(stored_weights, "load_language_model", None)  # that would read all of it
    name = "language.layers.0.mlp.up_proj.weight"
    held = whole_boxes(model, name)
    weights = read_pretrained(build_model(CASE, "meta"), _pretrained_config(tmp_path), held, seed=1)
    assert torch.equal(weights[name], dict(model.language.named_logical_parameters())[name])


def _pretrained_config(folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "encoders": {"vision": {"kind": "image", "projector": "linear", "id": str(folder / "vision")}},
            "language_model": {"tokenizer": "bytes", "id": str(folder / "language")},
        }
    )


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    name, stored = "language.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    file = tmp_path / "language" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {stored: weights[stored].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    model = build_model(CASE, "meta")
    with pytest.raises(UserError, match=rf"{stored}' is quantized \(torch.float8_e4m3fn\)"):
        read_pretrained(model, _pretrained_config(tmp_path), whole_boxes(model, name), seed=1)


@pytest.mark.parametrize("tied", [False, True])
def test_pretrained_weights_read_by_name_match_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    build_model(replace(CASE, tied=tied)).save_pretrained(tmp_path)
    config = _pretrained_config(tmp_path)
    whole = build_model_from(config, seed=1)
    hollow = build_model_from(config, seed=1, hollow={"vision", "language"})
    assert all(parameter.is_meta for parameter in hollow.parameters())
    expected = {name: p for unit in whole.units.values() for name, p in unit.named_logical_parameters()}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit was read whole")

    monkeypatch.setattr(stored_weights, "load_language_model", refuse)
    monkeypatch.setattr(stored_weights, "load_encoder", refuse)
    weights = read_pretrained(hollow, config, whole_boxes(hollow), seed=1)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    some = whole_boxes(hollow, "language.layers.1.mlp.up_proj.weight")
    assert read_pretrained(hollow, config, some, seed=1).keys() == some.keys()


def test_weights_encoder_checkpoint_lacks_are_drawn_by_seed(tmp_path: Path) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    config = _pretrained_config(tmp_path)
    hollow = build_model_from(config, seed=1, hollow={"vision", "language"})
    name, key = next((w.name, w.key) for w in hollow["vision"].weights if w.key.endswith("q_proj.weight"))
    file = tmp_path / "vision" / "model.safetensors"
    tensors = load_file(file)
    missing = tensors.pop(key)
    save_file(tensors, file, {"format": "pt"})
    with pytest.warns(UserWarning, match="lacks 1 weights of its encoder"):
        whole = dict(build_model_from(config, seed=1)["vision"].named_logical_parameters())
    weights = read_pretrained(hollow, config, whole_boxes(hollow, *whole), seed=1)
    assert weights.keys() <= whole.keys()
    for found, tensor in weights.items():
        assert torch.equal(tensor, whole[found]), found
    assert not torch.equal(weights[name], missing)
    rows = Box(name, tuple(missing.shape), (((1, 5),), ((0, missing.shape[1]),)))
    assert torch.equal(read_pretrained(hollow, config, {name: rows}, seed=1)[name], whole[name][1:5])


TWO_RANKS = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 3, (0, 1), tp=2), Stage(3, 5, (2,)))),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 1, (2,)), Stage(1, 4, (0, 1), tp=2))),)),
    )
)


def _held_pretrained(worker: Worker, folder: Path, plan: Plan) -> dict[Box, torch.Tensor]:
    comm = Comm(worker.store, worker.rank, worker.size)
    config = _pretrained_config(folder)
    model = build_model_from(config, seed=1, hollow={"vision", "language"})
    own = boxes_held_on(holdings_of(plan, model.units), worker.rank)
    runtime = Runtime(model, plan, comm, seed=1, weights=read_pretrained(model, config, own, seed=1))
    comm.close()
    return {own[name]: parameter.detach().clone() for name, parameter in runtime.parameters.items()}


@pytest.mark.parametrize("plan", [PLAN, TWO_RANKS], ids=["one rank a stage", "tp 2"])
def test_ranks_load_pretrained_layers_and_seed_the_projector(workers: WorkerPool, tmp_path: Path, plan: Plan) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    whole = build_model_from(_pretrained_config(tmp_path), seed=1)
    expected = {name: p for unit in whole.units.values() for name, p in unit.named_logical_parameters()}
    held: dict[str, set[int]] = {}
    for of_rank in workers.run(_held_pretrained, 3, tmp_path, plan):
        for box, tensor in of_rank.items():
            indices = torch.arange(expected[box.name].numel()).view(box.whole)
            for dim, spans in enumerate(box.intervals):
                indices = torch.cat([indices.narrow(dim, a, b - a) for a, b in spans], dim)
            assert torch.equal(tensor, expected[box.name].flatten()[indices]), box.key
            held.setdefault(box.name, set()).update(indices.flatten().tolist())
    assert {name: len(numbers) for name, numbers in held.items()} == {name: p.numel() for name, p in expected.items()}
