"""Narrow encoders: small copies of generic encoders, run on a CPU to count tokens and to find structure.

A copy has all blocks and the family's own patches, but small widths: numbers of tokens do not depend on widths.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.auto_mappings import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from dilatant.config.errors import UserError
from dilatant.data.media_units.processed_image_unit import SHAPE
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.models.core.materialize import seeded
from dilatant.models.core.slicing import keep_output, run_slice, slice_model
from dilatant.models.core.structure import Structure, find_structure, leaves_of

FEATURES = "get_image_features"
Layout = tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None], ...]
"""For each array of an item: its name, its shape and, if it holds integers, its values; otherwise None."""


def items_of(arrays: Mapping[str, NDArray]) -> list[dict[str, NDArray]]:
    """Split the flattened arrays of all items by item. Arrays of which only the shape is given become ones."""
    items: dict[int, dict[str, NDArray]] = {}
    for name in sorted(key.removesuffix(SHAPE) for key in arrays if key.endswith(SHAPE)):
        at = 0
        for number, padded in enumerate(arrays[name + SHAPE]):
            shape = tuple(padded[padded >= 0].tolist())
            end = at + int(np.prod(shape))
            own = arrays[name][at:end].reshape(shape) if name in arrays else np.ones(shape, np.float32)
            items.setdefault(number, {})[name] = own
            at = end
    return list(items.values())


def layout_of(item: Mapping[str, NDArray]) -> Layout:
    """Return the layout of an item."""
    return tuple(
        (
            name,
            each.shape,
            None if np.issubdtype(each.dtype, np.floating) else tuple(each.ravel().tolist()),
        )
        for name, each in sorted(item.items())
    )


def features(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of the text that the family's `get_image_features` computes from images: [rows, width]."""
    method = getattr(model, FEATURES)
    known = inspect.signature(inspect.unwrap(cast(Any, type(model)).get_image_features)).parameters
    found = method(**{name: each for name, each in inputs.items() if name in known})
    deep = getattr(found, "deepstack_features", None) or ()  # rows for inner blocks of the text model
    return torch.cat([_in_one(rows) for rows in (getattr(found, "pooler_output", found), *deep)], dim=-1)


def rows_by(model: nn.Module, inputs: Mapping[str, Tensor], _: Tensor) -> Tensor:
    return features(model, inputs)


def _in_one(rows: Any) -> Tensor:
    """Concatenate the rows of all items: [rows, width]."""
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])


@dataclass(frozen=True, slots=True)
class FeatureShapes:
    """Counts the tokens of items with a narrow copy of the encoder. settings: config of the narrow model, as JSON.
    holder, path, projector: places in it (see `GenericTower`)."""

    settings: str
    holder: str
    path: str
    projector: tuple[str, ...]

    def __call__(self, item: Mapping[str, NDArray]) -> tuple[int, int]:
        """Return the number of tokens of an item in the encoder's blocks, and of its rows in the text."""
        return self.tokens(layout_of(item))

    def tokens(self, layout: Layout) -> tuple[int, int]:
        """Return these two numbers for an item with this layout."""
        hidden, rows = _seen(self, layout)
        return hidden.shape[:-1].numel(), len(rows)


@lru_cache(maxsize=4096)
@torch.no_grad()
def _seen(shapes: FeatureShapes, layout: Layout) -> tuple[Tensor, Tensor]:
    """Run the narrow encoder on ones, without blocks; return the hidden states before them and the rows of the text."""
    model, structure = narrow_encoder(shapes)
    inputs = _ones(layout)
    depth, hidden = structure.num_blocks, torch.zeros(1)
    for first in (0, depth):
        part = slice_model(model, structure, first, first, keep_before=True, keep_after=True)
        blocks = part.get_submodule(structure.blocks)
        is_last = first == depth
        run = run_slice(partial(rows_by, part, inputs), hidden, blocks, enters=is_last, ends=not is_last)
        if is_last:
            return hidden, run
        hidden = run
    raise AssertionError("both ends have run")


def rows_of_text(shapes: FeatureShapes, layout: Layout) -> Tensor:
    """Return the rows of the text that the narrow encoder computes for an item: [rows, width]."""
    return _seen(shapes, layout)[1]


@lru_cache(maxsize=4)
@torch.no_grad()
def taps_of(shapes: FeatureShapes, layout: Layout) -> tuple[int, ...]:
    """Return the blocks whose outputs are read by more than the next block: noise in such an output changes the rows
    even though the last block's output stays the same."""
    model, structure = narrow_encoder(shapes)
    inputs, depth = _ones(layout), structure.num_blocks
    outputs: dict[int, Tensor] = {}
    with ExitStack() as closing:
        for number, block in enumerate(model.get_submodule(structure.blocks).children()):
            closing.callback(block.register_forward_hook(partial(keep_output, outputs, number)).remove)
        features(model, inputs)
    part = slice_model(model, structure, depth, depth, keep_before=True, keep_after=True)
    blocks = part.get_submodule(structure.blocks)

    def run(taps: Mapping[int, Tensor]) -> Tensor:
        last = outputs[depth - 1]
        return run_slice(partial(rows_by, part, inputs), last, blocks, enters=True, ends=False, taps=taps)

    earlier = {number: outputs[number] for number in range(depth - 1)}
    same = run(earlier)
    noise = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    return tuple(
        number
        for number, output in earlier.items()
        if not run({**earlier, number: output + noise}).equal(same)
    )


def _ones(layout: Layout) -> dict[str, Tensor]:
    return {
        name: torch.ones(shape) if own is None else torch.tensor(own).reshape(shape)
        for name, shape, own in layout
    }


@torch.no_grad()
def in_order(shapes: FeatureShapes, layout: Layout) -> Structure:
    """Return the narrow encoder's structure; modules that run before the first block are `before`, others `after`."""
    model, structure = narrow_encoder(shapes)
    around = (*structure.before, *structure.after)
    modules = {
        path: getattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
        for path in around
    }
    ran: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: ran.append(path))
        for path, module in {**modules, _BLOCK: model.get_submodule(f"{structure.blocks}.0")}.items()
        if isinstance(module, nn.Module)
    ]
    features(model, _ones(layout))
    for handle in handles:
        handle.remove()
    before = {*ran[: ran.index(_BLOCK)]}
    return replace(
        structure,
        before=tuple(path for path in around if path in before),
        after=tuple(path for path in around if path not in before),
    )


_BLOCK = "a block"


def unused_keys(shapes: FeatureShapes, layout: Layout) -> frozenset[str]:
    """Return the keys of the encoder's weights on which no row depends (in blocks after a feature layer)."""
    model, _ = narrow_encoder(shapes)
    with torch.enable_grad():
        reached = leaves_of(features(model, _ones(layout)))
    inside = f"{shapes.path}."
    return frozenset(
        key for key, each in model.named_parameters() if key.startswith(inside) and id(each) not in reached
    )


@lru_cache(maxsize=4)
def narrow_encoder(shapes: FeatureShapes) -> tuple[PreTrainedModel, Structure]:
    """Build the narrow encoder with random weights; return it and its structure."""
    settings = json.loads(shapes.settings)
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    with seeded(0, "narrow encoder"):
        model = AutoModelForImageTextToText.from_config(config).eval()
    return encoder_in(model, shapes.holder, shapes.path, shapes.projector)


def encoder_in(
    model: PreTrainedModel, holder: str, path: str, projector: tuple[str, ...]
) -> tuple[PreTrainedModel, Structure]:
    """Return the module at `holder` with its `path` and `projector` alone, and the structure of the encoder there."""
    base = cast(PreTrainedModel, model.get_submodule(holder))
    encoder = base.get_submodule(path)
    if isinstance(encoder, PreTrainedModel):  # here once, for all slices
        maybe_install_capturing_hooks(encoder)
    keeps = {path, *projector}
    for name in [name for name, _ in base.named_children() if name not in keeps]:
        setattr(base, name, None)
    inner = find_structure(encoder)
    return base, Structure(
        f"{path}.{inner.blocks}",
        tuple(f"{path}.{each}" for each in inner.before),
        (*(f"{path}.{each}" for each in inner.after), *projector),
        inner.num_blocks,
    )


TOKENS = ("image_token_id", "image_token_index")
"""Config keys that may name the token that one row replaces."""


def width_of_blocks(shapes: FeatureShapes, item: Mapping[str, NDArray], config: Any) -> int:
    """Return the hidden size in `config`, by the key that holds it in the narrow one. Raises UserError."""
    narrow, _ = narrow_encoder(shapes)
    own = getattr(narrow.get_submodule(shapes.path), "config", narrow.config)
    width = _seen(shapes, layout_of(item))[0].shape[-1]
    keys = [
        key for key in ("hidden_size", "embed_dim", "d_model", "width") if getattr(own, key, None) == width
    ]
    if not keys:
        raise UserError(f"the hidden size of {type(narrow).__name__} is not known")
    return int(getattr(config, keys[0]))


def patch_of(config: Any) -> int:
    """Return the side of a patch in pixels, by default 14."""
    side = getattr(config.vision_config, "patch_size", None) or 14
    return side if isinstance(side, int) else side[0]


def default_processor(config: Any) -> HuggingFaceImageProcessor:
    """Return a family's image processor with default settings, but the encoder's patches and size. Raises UserError."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    kind = names.get("pil") if isinstance(names, dict) else None
    if kind is None:
        raise UserError(
            f"{config.model_type}: its image processor needs torchvision, and only those that need no more than "
            "Pillow prepare images here"
        )
    settings: dict[str, Any] = {"image_processor_type": kind.removesuffix("Pil")}
    made: Any = HuggingFaceImageProcessor(json.dumps(settings)).made
    vision = getattr(config, "vision_config", None)
    for name, of_encoder in _PATCHES.items():
        own = getattr(vision, of_encoder, None)
        if isinstance(own, int) and isinstance(getattr(made, name, None), int):
            settings[name] = own
    side, size = getattr(vision, "image_size", None), dict(getattr(made, "size", None) or {})
    is_fixed = "height" in size or "shortest_edge" in size
    if isinstance(side, int) and is_fixed and not {*made.model_input_names} & _OF_NATIVE_SIZES:
        settings["size"] = {"height": side, "width": side}
        if getattr(made, "crop_size", None) is not None:
            settings["crop_size"] = settings["size"]
    return HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True))


_OF_NATIVE_SIZES = {"image_grid_thw", "image_sizes", "spatial_shapes", "image_grid_hw"}
_PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
