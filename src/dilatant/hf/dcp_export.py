"""Export as checkpoints of torch (DCP), for FSDP and other programs that read and write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.hf.dcp_files import write_dcp
from dilatant.hf.pretrained_export import UNREAD
from dilatant.hf.stored_weights import INDEX, Layout, tensor_files
from dilatant.models.adapters.lora import is_adapter, merged_state, plain_key, tied_keys
from dilatant.models.families.pretrained import stored_keys, weights_of
from dilatant.models.multimodal import MultimodalModel


def convert_to_dcp(model: MultimodalModel, folder: Path) -> None:
    """Replace the safetensors files of the transformers models in an export by checkpoints of torch, under the keys of
    each model's `state_dict()`, tied ones included. Adapters, projectors and generators stay. Raises UserError."""
    for place, module, state in _states(model, folder):
        files = tensor_files(place)
        tied = {plain_key(key): plain_key(first) for key, first in tied_keys(module).items()}
        keys = {plain_key(key) for key in module.state_dict() if not is_adapter(key)}
        lacking = sorted(keys - state.keys() - tied.keys())  # a run does not hold blocks that it never runs
        if lacking:
            state |= Layout(files, stored_keys(module, files)).tensors(lacking)
        if absent := [key for key in lacking if key not in state]:
            raise UserError(f"--format dcp: {absent[0]!r} is stored in parts only; export without --format")
        state |= {key: state[first] for key, first in tied.items() if key not in state}
        if (place / UNREAD).is_file():
            state |= load_file(place / UNREAD)
        for file in {*files.values()}:
            file.unlink()
        (place / INDEX).unlink(missing_ok=True)
        write_dcp(place, state)


def _states(model: MultimodalModel, folder: Path) -> Iterator[tuple[Path, PreTrainedModel, dict[str, Tensor]]]:
    """Yield folder, model, and the weights that the run has of it, for each transformers model of an export."""
    if model.whole is not None:
        yield folder, model.whole.composite(), weights_of(model.weights_of_whole(), model.whole)[0]
        return
    yield folder / LANGUAGE, model.language.model, merged_state(model.language.model)
    for name in model.encoders:
        yield folder / name, model[name].model, merged_state(model[name].model)
