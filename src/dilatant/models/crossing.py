"""Text models that look at images by cross attention (Mllama): rows of the encoder go to blocks, not into the text.

In a packed row each sample's tokens see the rows of its own images, by the family's own rule: a text between two images
sees the one before it. Samples without images pass by these blocks, as they do alone. Rows that later stages need come
behind the tokens of their sample, so a plan need know nothing of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.data.aspect_image_unit import TILES
from dilatant.data.sample import EncodedSample

STATES = "cross_attention_states"
"""The keyword of the text model."""


@dataclass(frozen=True, slots=True)
class CrossRows:
    """In the place of a batch's rows. lengths: tokens of each sample. seen: of each sample with images its rows,
    [1, rows, hidden], and the family's two masks: what is added to scores, [1, 1, tokens, rows], and which tokens see
    anything, [1, 1, tokens, 1]."""

    lengths: tuple[int, ...]
    seen: tuple[tuple[Tensor, Tensor, Tensor] | None, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Which rows which blocks look at. unit: the encoder. blocks: those that look, of the whole model. rows_of_tile:
    of each tile of an image."""

    unit: str
    placeholder_id: int
    blocks: tuple[int, ...]
    rows_of_tile: int

    def passes(self, block: int) -> bool:
        """Whether rows pass the border before a block."""
        return any(own >= block for own in self.blocks)

    def count(self, sample: EncodedSample) -> int:
        """Rows of a sample."""
        return sample.sizes.get(self.unit, 0)

    def split(self, arrived: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and rows, apart: [tokens + rows, hidden] of samples one behind the other."""
        is_row = _is_row(lengths, rows).to(arrived.device)
        return arrived[~is_row], arrived[is_row]

    def join(self, hidden: Tensor, rows: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The reverse of `split`."""
        order = torch.argsort(_is_row(lengths, counts), stable=True).argsort()
        return torch.cat([hidden, rows])[order.to(hidden.device)]

    def look(self, rows: Tensor, samples: Sequence[EncodedSample]) -> CrossRows:
        """What blocks of a packed row of `samples` see of their `rows`, [rows, hidden]."""
        seen: list[tuple[Tensor, Tensor, Tensor] | None] = []
        for sample, own in zip(samples, rows.split([self.count(sample) for sample in samples]), strict=True):
            if not len(own):
                seen.append(None)
                continue
            tiles = np.asarray(sample.media[self.unit][TILES])
            sees = torch.as_tensor(tiles_seen(sample.input_ids, self.placeholder_id, tiles))
            sees = sees.flatten(1).repeat_interleave(self.rows_of_tile, 1).to(own.device)
            # Who sees no image is not kept from any, and has no second half of the block: as the family has it.
            some = sees.any(1, keepdim=True)
            added = torch.zeros(sees.shape, dtype=own.dtype, device=own.device)
            added.masked_fill_(~sees & some, torch.finfo(own.dtype).min)
            seen.append((own[None], added[None, None], some.to(own.dtype)[None, None]))
        return CrossRows(tuple(len(sample.input_ids) for sample in samples), tuple(seen))

    def prepare(self, decoder: nn.Module, first: int) -> nn.Module:
        """A slice of the text model from block `first` on, which keeps numbers of blocks."""
        model: Any = copy.copy(decoder)
        model.cross_attention_layers = [block - first for block in self.blocks]
        return model


def tiles_seen(ids: NDArray[np.int64], placeholder_id: int, tiles: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which tiles each token sees, [tokens, images, tiles]: those of the last image before it, and of images that
    stand directly before that one. tiles: [images, tiles], 1 at those that there are.

    Raises ValueError where the text has more or fewer images.
    """
    places = np.flatnonzero(ids == placeholder_id)
    if len(places) != len(tiles):
        raise ValueError(f"{len(places)} images in the text, {len(tiles)} that were loaded")
    ends = np.append(places[1:], len(ids))
    for number in range(len(places) - 2, -1, -1):
        if places[number] + 1 == places[number + 1]:
            ends[number] = ends[number + 1]
    at = np.arange(len(ids))[:, None]
    return ((at >= places) & (at < ends))[..., None] & (tiles != 0)


def cross_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that look at rows of an encoder."""
    return [module for module in model.modules() if is_crossing(module)]


def is_crossing(block: nn.Module) -> bool:
    """Whether a block looks at rows of an encoder."""
    return hasattr(block, "cross_attn_attn_gate")


def look_by_sample(model: nn.Module) -> None:
    """Let the cross attention of `model` take `CrossRows`, under transformers' own attention."""
    for module in cross_layers(model):
        module.__class__ = _by_sample(cast(Any, type(module)))
        attention: Any = cast(Any, module).cross_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "sdpa"


class _BySample:
    """Mixed into the class of a block."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        run = cast(Any, super()).forward
        given = kwargs.pop(STATES, None)
        if not isinstance(given, CrossRows):
            return run(hidden_states, **{STATES: given, **kwargs})
        kwargs = {name: each for name, each in kwargs.items() if name not in _OF_ROWS}
        made = []
        for part, seen in zip(hidden_states.split(given.lengths, 1), given.seen, strict=True):
            if seen is None:
                made.append(part)
                continue
            rows, added, some = seen
            made.append(
                run(
                    part,
                    attention_mask=None,
                    cross_attention_mask=added,
                    full_text_row_masked_out_mask=some,
                    **{STATES: rows},
                    **kwargs,
                )
            )
        return torch.cat(made, 1)


_OF_ROWS = ("attention_mask", "cross_attention_mask", "full_text_row_masked_out_mask", PLAN_KEYWORD)


@cache
def _by_sample(own: Any) -> type[nn.Module]:
    if issubclass(own, _BySample):
        return own
    return type(own.__name__, (_BySample, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _is_row(lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    kinds = np.tile([False, True], len(lengths))
    return torch.from_numpy(np.repeat(kinds, np.stack([lengths, counts], 1).ravel()))


def crossing_of(config: Any, unit: str, placeholder_id: int) -> Crossing:
    """From the config of a whole model."""
    vision = config.vision_config
    rows = (vision.image_size // vision.patch_size) ** 2 + 1
    return Crossing(unit, placeholder_id, tuple(config.text_config.cross_attention_layers), rows)
