"""Export of a pretrained VLM: the same class of transformers, with weights under their names on the hub.

Weights that a run never reads (a block after the layer whose output the family takes) come from the source's files, and
everything that was written is read again and compared.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from dilatant.config.errors import as_user_error, list_problems
from dilatant.config.files.exports import read_object, write_object
from dilatant.hf.stored_weights import INDEX, Layout, pretrained_files, tensor_files
from dilatant.models.adapters.lora import main_dtype, tied_keys
from dilatant.models.core.materialize import seeded
from dilatant.models.families.pretrained import PretrainedModel, load_pretrained_weights, stored_keys, weights_of
from dilatant.models.multimodal import MultimodalModel

UNREAD = "model-unread.safetensors"
"""File of an export with weights of the source that transformers does not read."""
_ROTARY = ("rope_theta", "rope_scaling")
_OF_OTHERS = re.compile(r"visual|vision|audio|inv_freq|attn\.(masked_)?bias")
"""Keys of encoders, which are no part of a language model, and of computed tensors."""
_BELOW_VISION_MODEL = ("clip_vision_model", "siglip_vision_model")
_BESIDE = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja", "generation_config.json"),
)
"""Files of a source that are copied unchanged."""


def write_pretrained(model: MultimodalModel, folder: Path, source: str | None) -> None:
    """Write `config.json`, the weights and the tokenizer. source: the id or folder that the model came from. Raises
    UserError, also if reading the files again does not give what was written."""
    whole = model.whole
    assert whole is not None
    if whole.lora is None or whole.lora.merge:
        _write_model(model, whole, folder, source)
    if source is not None:
        copy_settings(source, folder)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(str(folder))


def copy_settings(source: str, folder: Path) -> None:
    """Copy the settings of processors, template and generation that an id or folder has beside a model's config."""
    for name in _BESIDE:
        if (file := _file(source, name)) is not None:
            shutil.copyfile(file, folder / name)


def copy_companion_files(source: str, model: PreTrainedModel, folder: Path) -> None:
    """Copy into a model's export what its source has besides weights and config. These are generation settings, weights
    that transformers leaves unread (for multi-token prediction), and rotary settings under the names of transformers 4,
    without which readers of that version take their own defaults. Raises UserError."""
    before, now = _file(source, "config.json"), folder / "config.json"
    if before is not None:
        old, new = read_object(before), read_object(now)
        for of_source, of_export in ((old, new), (old.get("text_config"), new.get("text_config"))):
            if isinstance(of_source, dict) and isinstance(of_export, dict):
                kept = {key: of_source[key] for key in _ROTARY if key in of_source}
                of_export |= {key: value for key, value in kept.items() if key not in of_export}
        write_object(now, new)
    settings = _file(source, "generation_config.json")
    if settings is not None:
        shutil.copyfile(settings, folder / "generation_config.json")
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    files, written = pretrained_files(source) or {}, tensor_files(folder)
    unread_keys = [
        key
        for key in files
        if key not in written and not _OF_OTHERS.search(key) and any(re.search(pattern, key) for pattern in patterns)
    ]
    unread = dict(Layout(files, {key: key for key in unread_keys}).tensors(unread_keys))
    if not unread:
        return
    save_file(unread, folder / UNREAD, {"format": "pt"})
    weight_map = {key: file.name for key, file in written.items()} | dict.fromkeys(unread, UNREAD)
    size = sum(file.stat().st_size for file in {*written.values(), folder / UNREAD})
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_object(folder / INDEX, index)


def _write_model(model: MultimodalModel, whole: PretrainedModel, folder: Path, source: str | None) -> None:
    trained, frozen = weights_of(model.weights_of_whole(), whole)
    composite = whole.composite()
    expected = composite.state_dict()
    tied = tied_keys(composite)
    lacking = [key for key in expected if key not in trained and key not in tied]
    state = {key: tensor for key, tensor in trained.items() if key not in tied or tied[key] not in trained}
    unread = _source_tensors(whole, source, lacking) if source is not None else _family_initial_values(whole, lacking)
    dtype: Any = main_dtype(trained.values())  # transformers types `to` wrongly
    for key in lacking:
        tensor = unread[key]
        state[key] = tensor.to(dtype) if source is None and tensor.is_floating_point() else tensor
    composite.to(dtype)  # on the meta device; sets the dtype in its config
    composite.save_pretrained(folder, state_dict=state)
    _check(whole, folder, state, source, {*frozen, *lacking})
    if (line := unknown_to_vllm(whole.config, tensor_files(folder))) is not None:
        warnings.warn(line, stacklevel=4)
    if source is not None:
        copy_companion_files(source, composite, folder)


def unknown_to_vllm(config: Any, keys: Iterable[str]) -> str | None:
    """Return a line if vLLM's own classes look for an encoder's weights under other names than these keys; else None.
    Transformers 5 left out a level of the names that vLLM's encoders have."""
    kind = getattr(getattr(config, "vision_config", None), "model_type", None)
    has_no_level = any(re.match(r"(model\.)?vision_tower\.(?!vision_model\.)", key) for key in keys)
    if kind not in _BELOW_VISION_MODEL or not has_no_level:
        return None
    return (
        f"vLLM's own classes (0.32) look for the weights of {kind} under vision_tower.vision_model, but transformers, "
        "and so this export, has them under vision_tower; serve it by `vllm serve --model-impl transformers`"
    )


def _source_tensors(whole: PretrainedModel, source: str, keys: list[str]) -> dict[str, Tensor]:
    found = dict(_layout_of(whole, pretrained_files(source) or {}).tensors(keys))
    if len(found) < len(keys):
        everything = load_pretrained_weights(whole, source)
        found |= {key: everything[key] for key in keys if key not in found}
    return found


@torch.no_grad()
def _family_initial_values(whole: PretrainedModel, keys: list[str]) -> dict[str, Tensor]:
    """Return the family's initial values of the weights `keys`."""
    if not keys:
        return {}
    composite: Any = whole.composite()
    parents = dict.fromkeys(key.rpartition(".")[0] for key in keys)
    for path in parents:
        composite.get_submodule(path).to_empty(device="cpu", recurse=False)
    with seeded(0, "unread"):
        for path in parents:
            composite._init_weights(composite.get_submodule(path))
    state = composite.state_dict()
    return {key: state[key] for key in keys}


def _check(
    whole: PretrainedModel, folder: Path, state: Mapping[str, Tensor], source: str | None, unchanged: set[str]
) -> None:
    """Raise UserError unless the files hold `state` bit for bit, and weights in `unchanged` are as in the source."""
    problems = _differences(whole, tensor_files(folder), state, "was not written as it is")
    if source is not None:
        files = pretrained_files(source) or {}
        kept = {key: tensor for key, tensor in state.items() if key in unchanged}
        problems += _differences(whole, files, kept, "is frozen, but no longer what it was")
    if problems:
        shown = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
        raise list_problems("the export was checked and is not right:", shown)


def _differences(
    whole: PretrainedModel, files: Mapping[str, Path], state: Mapping[str, Tensor], what: str
) -> list[str]:
    return [
        f"{key} {what}"
        for key, read in _layout_of(whole, files).tensors(state)  # others are merged or split when written, or tied
        if read.dtype != state[key].dtype or not torch.equal(read, state[key].cpu())
    ]


def _layout_of(whole: PretrainedModel, files: Mapping[str, Path]) -> Layout:
    """Find the weights of a pretrained VLM by the keys of its own state dict."""
    return Layout(files, stored_keys(whole.composite(), files) if files else {})


def _file(source: str, name: str) -> Path | None:
    with as_user_error(f"{source!r}: {name} cannot be read", OSError):
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(str(found))
