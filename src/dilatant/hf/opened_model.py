"""A model that the user opened in Python: written into the run folder, from which every process reads its part."""

from __future__ import annotations

import filecmp
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dilatant.config.errors import UserError, as_user_error
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.hf.export import check_target, replacing
from dilatant.hf.pretrained_export import copy_settings
from dilatant.models.sources import errors_alone, without_bars

SHARD = "2GB"
"""Size of a file: at most this much of a model on a GPU is copied to the host at a time."""


def check_opened(model: PreTrainedModel) -> None:
    """Raise UserError for a model whose weights cannot be written as they are; warn of frozen ones."""
    kind, weights = type(model).__name__, dict(model.named_parameters())
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model is a {kind} with adapters of peft; save these, and name their folder: model.lora.adapter"
        )
    for name, weight in weights.items():
        if weight.dtype.itemsize == 1 or getattr(model, "hf_quantizer", None) is not None:
            raise UserError(f"model is a {kind} with quantized weights ({name!r}); open it in bf16 or fp32")
        if weight.is_meta:
            raise UserError(f"model is a {kind} without values for {name!r}; open it without offloading (device_map)")
    if frozen := [name for name, weight in weights.items() if not weight.requires_grad]:
        warnings.warn(
            f"requires_grad=False of {frozen[0]!r} is not read; name what is frozen: model.freeze", stacklevel=6
        )


def write_opened(model: PreTrainedModel, processor: Any, tokenizer: str | None, folder: Path, is_resumed: bool) -> None:
    """Write the weights, config, processor and tokenizer of a model into `folder` below a run folder, in the layout of
    Hugging Face.

    processor: processor or tokenizer of transformers; None: those of the source that the model was opened from, without
    the tokenizer if the user named one (`tokenizer`). is_resumed: the model must have the weights that `folder` has, if
    any. Raises UserError.
    """
    check_target(folder, folder.parent)
    source = model.name_or_path
    with (
        as_user_error(f"model: a {type(model).__name__} cannot be written to {str(folder)!r}"),
        replacing(folder) as new,
    ):
        with without_bars(new), errors_alone():
            model.save_pretrained(new, max_shard_size=SHARD)
        if processor is not None:
            processor.save_pretrained(new)
        elif source:
            copy_settings(source, new)
            if tokenizer is None:
                load_tokenizer(source).save_pretrained(new)
        names = [file.name for file in new.glob("*.safetensors")]
        if is_resumed and folder.exists() and filecmp.cmpfiles(new, folder, names, shallow=False)[0] != names:
            raise UserError(
                f"the run began with other weights than those of model=..., see {str(folder)!r}; leave model out to go "
                "on with it, or choose another output_dir"
            )
