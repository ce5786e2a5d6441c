"""A rank reads its own weights from disk, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from dilatant.comm.comm import Comm
from dilatant.config import ModelConfig
from dilatant.models.build import build_model as build_model_from
from dilatant.runtime.holders import holdings_of
from dilatant.runtime.runtime import Runtime
from dilatant.training import stored_weights
from dilatant.training.stored_weights import read_pretrained
from drawn_steps import CASE, PLAN, build_model
from worker_pool import Worker, WorkerPool


def test_only_what_was_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    read: list[str] = []

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
            read.append(key)
            return self._file.get_tensor(key)

    monkeypatch.setattr(stored_weights, "safe_open", Spy)
    name = "language.layers.1.mlp.up_proj.weight"
    read_pretrained(build_model(CASE, "meta"), _pretrained_config(tmp_path), [name], seed=1)
    assert read == ["model.layers.1.mlp.up_proj.weight"]


def test_a_stored_prefix_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(CASE)
    model.save_pretrained(tmp_path)
    file = tmp_path / "language" / "model.safetensors"
    save_file({f"text_model.{key}": tensor for key, tensor in load_file(file).items()}, file)
    monkeypatch.setattr(stored_weights, "load_language_model", None)  # that would read all of it
    name = "language.layers.0.mlp.up_proj.weight"
    weights = read_pretrained(build_model(CASE, "meta"), _pretrained_config(tmp_path), [name], seed=1)
    assert torch.equal(weights[name], dict(model.language.named_logical_parameters())[name])


def _pretrained_config(folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "encoders": {
                "vision": {"kind": "image", "projector": "linear", "id": str(folder / "vision")},
            },
            "language_model": {"tokenizer": "bytes", "id": str(folder / "language")},
        }
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_pretrained_id_is_read_by_name_and_gives_what_transformers_reads(
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
    weights = read_pretrained(hollow, config, expected.keys(), seed=1)
    assert weights.keys() == {name for name in expected if not name.startswith("vision.projector")}
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    some = ["language.layers.1.mlp.up_proj.weight"]
    assert list(read_pretrained(hollow, config, some, seed=1)) == some


def test_a_checkpoint_with_other_names_is_read_by_transformers(tmp_path: Path) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    file = tmp_path / "language" / "model.safetensors"
    tensors = load_file(file)
    missing = tensors.pop("lm_head.weight")  # transformers draws it, by the seed
    save_file(tensors, file, {"format": "pt"})
    config = _pretrained_config(tmp_path)
    whole = dict(build_model_from(config, seed=1)["language"].named_logical_parameters())
    hollow = build_model_from(config, seed=1, hollow={"vision", "language"})
    weights = read_pretrained(hollow, config, whole.keys(), seed=1)
    assert weights.keys() == whole.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, whole[name]), name
    assert not torch.equal(weights["language.head.lm_head.weight"], missing)


def _held_pretrained(worker: Worker, folder: Path) -> dict[str, torch.Tensor]:
    comm = Comm(worker.store, worker.rank, worker.size)
    config = _pretrained_config(folder)
    model = build_model_from(config, seed=1, hollow={"vision", "language"})
    own = [name for name, held in holdings_of(PLAN, model.units).items() if worker.rank in held.boxes]
    runtime = Runtime(model, PLAN, comm, seed=1, weights=read_pretrained(model, config, own, seed=1))
    comm.close()
    return {name: parameter.detach().clone() for name, parameter in runtime.parameters.items()}


def test_ranks_hold_their_layers_of_a_pretrained_model_and_the_projector_of_the_seed(
    workers: WorkerPool, tmp_path: Path
) -> None:
    build_model(CASE).save_pretrained(tmp_path)
    whole = build_model_from(_pretrained_config(tmp_path), seed=1)
    expected = {name: p for unit in whole.units.values() for name, p in unit.named_logical_parameters()}
    held: dict[str, torch.Tensor] = {}
    for of_rank in workers.run(_held_pretrained, 3, tmp_path):
        held |= of_rank
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name
