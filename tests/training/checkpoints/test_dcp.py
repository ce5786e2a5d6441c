"""Checkpoints of torch (DCP) as sources: read like torch reads them, and harmless if they are a stranger's."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint

from cases.dcp_folders import language, save, source
from cases.tiny_wholes import save_as_the_hub_does
from dilatant.config import UserError
from dilatant.hf.dcp_files import METADATA, DcpTensors
from dilatant.hf.stored_weights import check_sources, read_pretrained, stored_dtypes
from dilatant.models.sources import load_pretrained_config
from dilatant.plan.boxes import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(folder: Path) -> DcpTensors:
    return DcpTensors(folder / METADATA)


STATE = {
    "one.weight": torch.randn(5, 4).bfloat16(),
    "two.weight": torch.randn(3, 2, 2).half(),
    "three.bias": torch.arange(7.0, dtype=torch.float64),
    "four.steps": torch.tensor(3),
    "five.mask": torch.tensor([True, False]),
    "six.empty": torch.zeros(0, 3),
    "seven.last": torch.randn(4, 6, 2, 2).to(memory_format=torch.channels_last),
    "eight.turned": torch.randn(4, 6).t(),
}


def test_tensors_and_boxes_are_those_that_torch_saved(tmp_path: Path) -> None:
    save(tmp_path, STATE)
    tensors = opened(tmp_path)
    assert set(tensors.keys()) == STATE.keys()
    for key, tensor in STATE.items():
        read = tensors.get_tensor(key)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), key
        assert tuple(tensors.get_slice(key).get_shape()) == tuple(tensor.shape)
    part = slice(1, 4), slice(2, 3)
    assert torch.equal(tensors.get_slice("one.weight")[part], STATE["one.weight"][part])
    assert torch.equal(tensors.get_slice("eight.turned")[slice(2, 6), slice(1, 3)], STATE["eight.turned"][2:6, 1:3])


def test_only_the_files_of_the_requested_rows_are_opened(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(8.0).view(4, 2), "b": torch.ones(3)}, single_file_per_rank=False)
    files = {path for path in tmp_path.iterdir() if path.name != METADATA}
    assert len(files) == 4
    tensors = opened(tmp_path)
    for file in files:
        content = file.read_bytes()
        file.unlink()
        lost = []
        for key, rows in (("a", (0, 2)), ("a", (2, 4)), ("b", (0, 1)), ("b", (1, 3))):
            places = (slice(*rows), *[slice(0, 2)] * (key == "a"))
            try:
                tensors.get_slice(key)[places]
            except UserError:
                lost.append((key, rows))
        assert len(lost) == 1
        file.write_bytes(content)


@pytest.mark.parametrize("wrapped", [False, True], ids=["the model", "model and optimizer"])
def test_a_run_starts_from_what_fsdp_users_save(tmp_path: Path, wrapped: bool) -> None:
    plain = language(tmp_path).bfloat16()
    state: dict[str, Any] = plain.state_dict()
    if wrapped:
        optimizer = torch.optim.AdamW(plain.parameters())
        plain(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
        optimizer.step()
        state = {"model": plain.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    save(tmp_path, state)
    model, config, boxes = source(tmp_path)
    check_sources(model, config)
    weights = read_pretrained(model, config, boxes, 1)
    assert weights.keys() == boxes.keys()
    of_name = {weight.name: weight.key for weight in model.language.weights}
    for name, tensor in weights.items():
        assert torch.equal(tensor, plain.state_dict()[of_name[name]]), name
    assert set(stored_dtypes(model, config).values()) == {torch.bfloat16}
    name = "language.layers.1.mlp.up_proj.weight"
    whole = boxes[name].whole
    part = Box(name, whole, (((1, 3), (whole[0] - 2, whole[0])), ((0, whole[1]),)))
    read = read_pretrained(model, config, {name: part}, 1)[name]
    assert torch.equal(read, torch.cat([weights[name][1:3], weights[name][-2:]]))


def test_a_whole_model_starts_from_a_checkpoint_under_keys_of_memory_or_hub(tmp_path: Path) -> None:
    plain = save_as_the_hub_does("llava", tmp_path / "m")
    hub = load_file(tmp_path / "m/model.safetensors")
    (tmp_path / "m/model.safetensors").unlink()
    assert hub.keys() != plain.state_dict().keys()
    found = []
    for number, state in enumerate((plain.state_dict(), hub)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "m", folder)
        save(folder, {"model": state})
        model, config, boxes = source(folder, whole=True)
        check_sources(model, config)
        found.append(read_pretrained(model, config, boxes, 1))
        assert found[-1].keys() == boxes.keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_what_a_checkpoint_lacks_is_one_line(tmp_path: Path) -> None:
    plain = language(tmp_path)
    state = {key: tensor for key, tensor in plain.state_dict().items() if "up_proj" not in key}
    save(tmp_path, {**state, "strange.weight": torch.ones(2)})
    model, config, _ = source(tmp_path)
    says = r"lacks 2 weights of its model, such as 'model.layers.0.mlp.up_proj.weight', and holds .'strange.weight'"
    with pytest.raises(UserError, match=says):
        check_sources(model, config)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="holds weights twice"):
        check_sources(model, config)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"copy config.json and the tokenizer .* beside the checkpoint"):
        load_pretrained_config(str(tmp_path), "model.id")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.place),)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "dcp"
    save(folder, {"a": torch.ones(2)})
    metadata = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(UserError, match=r"posix.mkdir is no class of the format"):
        opened(folder)
    (folder / METADATA).write_bytes(pickle.dumps(torch.nn.Linear(1, 1)))
    with pytest.raises(UserError, match="is no class of the format"):
        opened(folder)
    read = checkpoint.FileSystemReader(folder)
    (folder / METADATA).write_bytes(metadata)
    (file,) = {info.relative_path for info in read.read_metadata().storage_data.values()}
    torch.save(torch.ones(2), folder / file)
    with zipfile.ZipFile(folder / file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / file, "w") as archive:
        for name, content in entries.items():
            evil = pickle.dumps(Evil(ran), protocol=2) if name.endswith("data.pkl") else content
            archive.writestr(name, evil)
    found = read.read_metadata()
    for info in found.storage_data.values():
        info.offset, info.length = 0, (folder / file).stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(UserError, match="it is damaged, or holds more than a tensor"):
        opened(folder).get_tensor("a")
    assert not ran.exists()


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrite the metadata of a checkpoint as a stranger may."""
    found = checkpoint.FileSystemReader(folder).read_metadata()
    change(found)
    (folder / METADATA).write_bytes(pickle.dumps(found))


def test_damaged_and_absurd_checkpoints_are_one_line(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(4, 2)})
    whole = (tmp_path / METADATA).read_bytes()

    def each(do: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda found: [do(info) for info in found.storage_data.values()]

    cases: list[tuple[Callable[[Any], None], str]] = [
        (each(lambda info: setattr(info, "relative_path", "../a")), "is no file beside it"),
        (each(lambda info: setattr(info, "relative_path", "/etc/passwd")), "is no file beside it"),
        (each(lambda info: setattr(info, "offset", -1)), "is no file beside it"),
        (each(lambda info: setattr(info, "transform_descriptors", ["zstd"])), "is compressed"),
        (each(lambda info: setattr(info, "offset", 1 << 50)), "cannot be read"),
        (lambda found: found.storage_data.clear(), "is not read"),
        (lambda found: found.state_dict_metadata["a"].chunks.pop(), "longer than its parts|absent"),
        (lambda found: setattr(found.state_dict_metadata["a"], "size", torch.Size([1 << 40, 2])), "longer"),
        (lambda found: setattr(found.state_dict_metadata["a"].properties, "dtype", torch.float16), "it holds"),
    ]
    for change, says in cases:
        (tmp_path / METADATA).write_bytes(whole)
        changed(tmp_path, change)
        with pytest.raises(UserError, match=says):
            opened(tmp_path).get_tensor("a")
    for content in (b"", b"\x80", pickle.dumps(3), whole[: len(whole) // 2], b"\x80\x02)r\xff\xff\xff\x7f."):
        (tmp_path / METADATA).write_bytes(content)
        with pytest.raises(UserError, match="is not read as the metadata"):
            opened(tmp_path)


@pytest.mark.parametrize("of", [METADATA, "__0_0.distcp"])
def test_flipped_bytes_give_values_or_one_line(tmp_path: Path, of: str) -> None:
    save(tmp_path, {"a": torch.ones(4, 2), "b": torch.ones(3)})
    content = (tmp_path / of).read_bytes()
    drawn = random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        damaged[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        (tmp_path / of).write_bytes(damaged)
        try:
            tensors = opened(tmp_path)
            for key in tensors.keys():  # noqa: SIM118
                assert tensors.get_tensor(key).shape == tensors.get_slice(key).get_shape()
        except UserError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1
