"""Export as checkpoints of torch (DCP), for FSDP and other programs that read and write them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from dilatant.config import OptimizerConfig
from dilatant.config.errors import UserError
from dilatant.hf.dcp_files import write_dcp
from dilatant.hf.pretrained_export import UNREAD
from dilatant.hf.stored_weights import INDEX, Layout, tensor_files
from dilatant.models.adapters.lora import is_adapter, merged_state, plain_key, tied_keys
from dilatant.models.families.pretrained import stored_keys, weights_of
from dilatant.models.multimodal import MultimodalModel


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of AdamW by the logical name of a weight and by kind, and its settings."""

    of_weights: Mapping[str, Mapping[str, Tensor]]
    settings: OptimizerConfig

    def as_torchtitan(self, name_of: Mapping[str, str]) -> dict[str, Any]:
        """Return the flat state of torch.distributed.checkpoint.state_dict, which has settings for each parameter.
        name_of: parameter → logical name."""
        how, any_weight = self.settings, [torch.zeros(1)]
        group = torch.optim.AdamW(any_weight, how.learning_rate, how.betas, how.eps, how.weight_decay).param_groups[0]
        found: dict[str, Any] = {}
        for parameter, name in name_of.items():
            if (moments := self.of_weights.get(name)) is not None:
                found |= {f"state.{parameter}.{kind}": tensor for kind, tensor in moments.items()}
                found |= {f"param_groups.{parameter}.{key}": group[key] for key in group.keys() - {"params"}}
        return found


def convert_to_dcp(model: MultimodalModel, folder: Path, moments: Moments | None) -> None:
    """Replace the safetensors files of the transformers models in an export by checkpoints of torch, under the keys of
    each model's `state_dict()`, tied ones included. Adapters, projectors and generators stay. moments: written beside
    the weights, as `optimizer`. Raises UserError."""
    left = set() if moments is None else {*moments.of_weights}
    for place, module, state, name_of in _states(model, folder):
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
        write_dcp(place, state if moments is None else {**state, "optimizer": moments.as_torchtitan(name_of)})
        left -= {*name_of.values()}
    if left:
        warnings.warn(
            f"the moments of {len(left)} weights outside these checkpoints, such as {min(left)!r}, are not written",
            stacklevel=4,
        )


def _states(
    model: MultimodalModel, folder: Path
) -> Iterator[tuple[Path, PreTrainedModel, dict[str, Tensor], dict[str, str]]]:
    """Yield folder, model, the weights that the run has of it, and parameter → logical name, for each transformers
    model of an export."""
    if (whole := model.whole) is not None:
        names = {whole.key_of(unit, weight): weight.name for unit, weight in model.weights_of_whole()}
        yield folder, whole.composite(), weights_of(model.weights_of_whole(), whole)[0], names
        return
    for unit in (model.language, *map(model.__getitem__, model.encoders)):
        names = {plain_key(weight.key): weight.name for weight in unit.weights if weight.part == "model"}
        yield folder / unit.unit, unit.model, merged_state(unit.model), names
