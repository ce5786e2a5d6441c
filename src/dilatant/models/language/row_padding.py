"""Rows of a multiple of some tokens: kernels are faster on aligned lengths, and allocators on fewer different ones.

Padding follows the samples of a row while the blocks of a stage run. No token sees it, and stages do not send it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.attention.masks.packing import with_padding
from dilatant.config.errors import UserError
from dilatant.models.language.embedding_noise import EmbeddingNoise
from dilatant.models.language.extension import Extension, LanguageForward
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.queries import Queries


class RowPadding(Extension):
    """Pad packed rows to a multiple of so many tokens. Context-parallel ranks hold whole blocks of tokens anyway."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple

    def enter(self, forward: LanguageForward) -> None:
        assert forward.hidden is not None
        count = -forward.hidden.shape[1] % self._multiple
        if not count or forward.row is None or forward.row.share is not None:
            return
        keywords = forward.keywords
        forward.hidden = functional.pad(forward.hidden, (0, 0, 0, count))
        keywords["position_ids"] = functional.pad(keywords["position_ids"], (0, count))
        keywords[PLAN_KEYWORD] = keywords[PLAN_KEYWORD].derived(partial(with_padding, count=count))
        forward.state[self] = count

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        return hidden[:, : hidden.shape[1] - forward.state.get(self, 0)]


def pad_rows(language: LanguageUnit, multiple: int) -> None:
    """Pad the rows of a language model (`train.row_multiple`). Raises UserError for one that counts their tokens."""
    counting = [each for each in language.extensions if not isinstance(each, EmbeddingNoise | Queries)]
    reason = ""
    if language.row_attention is None:
        reason = "its attention does not know padding"
    elif counting:
        reason = f"its {type(counting[0]).__name__} is computed from the tokens of a row"
    elif any(isinstance(module, nn.Dropout) and module.p > 0 for module in language.model.modules()):
        reason = "its dropout is drawn for the tokens of samples"
    if reason:
        raise UserError(f"train.row_multiple: rows of {language.family} cannot be padded: {reason}; leave it out")
    language.extensions.append(RowPadding(multiple))
