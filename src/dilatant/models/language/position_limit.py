"""The longest sample of a language model, by the positions that it has or was trained with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.models.language.language import LanguageUnit


def check_positions(language: LanguageUnit, longest: int) -> None:
    """Check that the model has a position for each of the `longest` tokens of a sample. Warns if a model that computes
    its positions (rotary ones) was trained with fewer. Raises UserError for a model that looks them up in a table."""
    config = language.model.config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int) or longest <= known:
        return
    about = f"{language.unit}: samples have up to {longest:,} tokens, and"
    if any(len(table) - offset == known for table, offset in _tables(language.model)):
        raise UserError(
            f"{about} {config.model_type} has {known:,} positions; set data.max_length to {known}, or shorten samples"
        )
    if getattr(config, "rope_parameters", None):
        warnings.warn(
            f"{about} the config of {config.model_type} is for up to {known:,} (max_position_embeddings); set "
            f"data.max_length to {known} if the model is not to learn longer ones",
            stacklevel=3,
        )


def _tables(model: PreTrainedModel) -> Iterator[tuple[Tensor, int]]:
    """Yield the tables of positions, learned (`wpe`) or computed once (`embed_positions` of GPT-J), each [rows, width],
    and the number of their rows before that of position 0 (2 in OPT)."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("pos" in name or name == "wpe"):
            yield module.weight, getattr(module, "offset", 0)
        yield from ((own, 0) for name, own in module.named_buffers(recurse=False) if "pos" in name and own.ndim == 2)
