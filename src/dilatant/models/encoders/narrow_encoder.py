"""Narrow encoders: small copies of generic encoders, run on a CPU to count tokens and to find structure.

A copy has all blocks and the family's own patches, but small widths: numbers of tokens do not depend on widths.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from dilatant.config.errors import UserError
from dilatant.data.media_units.processed_unit import IS_CLIP, SHAPE
from dilatant.data.media_units.processors import HuggingFaceImageProcessor, HuggingFaceSoundProcessor, of_family
from dilatant.models.core.materialize import seeded
from dilatant.models.core.slicing import capturing_hooks, held_blocks, keep_output, run_slice, slice_model
from dilatant.models.core.structure import Structure, find_structure, leaves_of

Layout = tuple[tuple[str, tuple[int, ...], tuple[str, bytes] | None], ...]
"""For each array of an item: its name, its shape and, if it holds integers, its dtype and values; otherwise None."""


def items_of(arrays: Mapping[str, NDArray]) -> list[dict[str, NDArray]]:
    """Split the flattened arrays of all items by item. Arrays of which only the shape is given become ones."""
    items: dict[int, dict[str, NDArray]] = {}
    for name in sorted(key.removesuffix(SHAPE) for key in arrays if key.endswith(SHAPE)):
        at = 0
        kinds = arrays.get(IS_CLIP, np.zeros(len(arrays[name + SHAPE])))
        having = np.flatnonzero(kinds == is_of_clip((name,))) if IS_CLIP in arrays else np.arange(len(kinds))
        for number, padded in zip(having.tolist(), arrays[name + SHAPE], strict=True):
            shape = tuple(padded[padded >= 0].tolist())
            end = at + int(np.prod(shape))
            own = arrays[name][at:end].reshape(shape) if name in arrays else np.ones(shape, np.float32)
            items.setdefault(number, {})[name] = own
            at = end
    return [items[number] for number in sorted(items)]


def join_items(arrays: list[Tensor], axis: int, padding: int = 0) -> Tensor:
    """Concatenate arrays of items along an axis, padded to one shape in the others, as processors do."""
    shape = torch.tensor([each.shape for each in arrays]).amax(0).tolist()
    shape[axis] = sum(each.shape[axis] for each in arrays)
    whole = arrays[0].new_full(shape, padding)
    begin = 0
    for each in arrays:
        place = [slice(size) for size in each.shape]
        place[axis] = slice(begin, begin + each.shape[axis])
        whole[tuple(place)] = each
        begin += each.shape[axis]
    return whole


def is_of_clip(names: Iterable[str]) -> bool:
    """Return True if these arrays of an item are those of a clip (see `IS_CLIP`)."""
    return any("video" in name for name in names)


def layout_of(item: Mapping[str, NDArray]) -> Layout:
    """Return the layout of an item."""
    return tuple(
        (name, each.shape, None if np.issubdtype(each.dtype, np.floating) else (each.dtype.str, each.tobytes()))
        for name, each in sorted(item.items())
    )


def method_of(kind: str) -> str:
    """Return the name of the method of transformers' models that encodes media of a kind."""
    return f"get_{kind}_features"


def known_to(method: Any) -> frozenset[str]:
    """Return the names of the parameters of a method of transformers' models."""
    return frozenset(inspect.signature(inspect.unwrap(method)).parameters)


def rows_by(kind: str, model: nn.Module, inputs: Mapping[str, Tensor], *_: Tensor) -> Tensor:
    """Return the rows of the text that the family's own method computes from media: [rows, width]."""
    name = method_of("video" if is_of_clip(inputs) else kind)
    known = known_to(getattr(type(model), name))
    found = getattr(model, name)(**{key: each for key, each in inputs.items() if key in known})
    rows = getattr(found, "pooler_output", found)
    if rows is None:
        rows = found.last_hidden_state
    # Padding that the family's forward leaves out.
    masks = [each for key, each in inputs.items() if key.endswith("_mask") and key not in known]
    for mask in (getattr(found, "attention_mask", None), *masks):
        if mask is not None and isinstance(rows, Tensor) and mask.shape == rows.shape[:-1]:
            rows = rows[mask.bool()]
    # Rows for inner blocks of the text model; some families name the block of each.
    deep = getattr(found, "deepstack_features", None) or ()
    deep = [each[1] if isinstance(each[0], int) else each for each in deep]
    return torch.cat([_in_one(each) for each in (rows, *deep) if each is not None], dim=-1)


def _in_one(rows: Any) -> Tensor:
    """Concatenate the rows of all items: [rows, width]."""
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])


class UncutError(UserError):
    """Error of an encoder that cannot be cut between its blocks."""


@dataclass(frozen=True, slots=True)
class FeatureShapes:
    """Counts the tokens of items with a narrow copy of the encoder. settings: config of the narrow model, as JSON.
    holder, path, projector, blocks: places in it (see `GenericTower`). kind: of the media. An encoder without blocks
    has as many tokens as rows."""

    settings: str
    holder: str
    path: str
    projector: tuple[str, ...]
    kind: str
    blocks: str | None

    def __call__(self, item: Mapping[str, NDArray]) -> tuple[int, int]:
        """Return the number of tokens of an item in the encoder's blocks, and of its rows in the text."""
        return self.tokens(layout_of(item))

    def tokens(self, layout: Layout) -> tuple[int, int]:
        """Return these two numbers for an item with this layout."""
        return _counted(self, layout)

    def inner_rows(self, item: Mapping[str, NDArray]) -> int:
        """Return the number of further rows of the text's width in a row of an item (DeepStack)."""
        model, _ = narrow_encoder(self)
        return _seen(self, layout_of(item))[1].shape[-1] // model.config.get_text_config().hidden_size - 1

    def rows(self, model: nn.Module, layout: Layout) -> Tensor:
        """Return the rows of the text that a model computes for an item of ones with this layout."""
        ones = {
            name: torch.ones(shape) if own is None else torch.from_numpy(np.ndarray(shape, own[0], bytearray(own[1])))
            for name, shape, own in layout
        }
        return rows_by(self.kind, model, ones)


@lru_cache(maxsize=4096)
def _counted(shapes: FeatureShapes, layout: Layout) -> tuple[int, int]:
    hidden, rows = _seen(shapes, layout)
    return hidden.shape[:-1].numel(), len(rows)


@lru_cache(maxsize=2)
@torch.no_grad()
def _seen(shapes: FeatureShapes, layout: Layout) -> tuple[Tensor, Tensor]:
    """Run the narrow encoder on ones, without blocks; return the hidden states before them and the rows of the text."""
    model, structure = narrow_encoder(shapes)
    if structure is None:
        rows = shapes.rows(model, layout)
        return rows, rows

    def run(first: int, hidden: Tensor) -> Tensor:
        part = slice_model(model, structure, first, first, keep_before=True, keep_after=True)
        blocks = part.get_submodule(structure.blocks)
        return run_slice(lambda _: shapes.rows(part, layout), hidden, blocks, enters=first > 0, ends=first == 0)

    hidden = run(0, torch.zeros(1))
    return hidden, run(structure.num_blocks, hidden)


@lru_cache(maxsize=4)
@torch.no_grad()
def taps_of(shapes: FeatureShapes, layout: Layout) -> tuple[int, ...]:
    """Return the blocks of the narrow encoder whose outputs are read by more than the next block."""
    model, _ = narrow_encoder(shapes)
    return find_taps(model, in_order(shapes, layout), lambda part, *_: shapes.rows(part, layout))


def find_taps(model: PreTrainedModel, structure: Structure, forward: Callable[..., Tensor]) -> tuple[int, ...]:
    """Return the blocks whose outputs are read by more than the next block. Noise in such an output changes what a
    later stage computes even though its input stays the same. forward(slice, input): runs the model."""
    depth = structure.num_blocks
    outputs: dict[int, Tensor] = {}
    with ExitStack() as closing:
        for number, block in enumerate(model.get_submodule(structure.blocks).children()):
            closing.callback(block.register_forward_hook(partial(keep_output, outputs, number)).remove)
        forward(model)
    if len({output.shape for output in outputs.values()}) > 1:
        raise UncutError("the hidden states of its encoder change their shape between blocks")
    found: set[int] = set()
    for first in range(2, depth + 1):  # a stage of each block, and the last stage of none
        earlier = [number for number in range(first - 1) if number not in found]
        run = partial(_with_noise, model, structure, forward, first, outputs)
        same = run(())
        if earlier and not run(earlier).equal(same):
            found |= {number for number in earlier if not run((number,)).equal(same)}
    return tuple(sorted(found))


def _with_noise(
    model: PreTrainedModel,
    structure: Structure,
    forward: Callable[..., Tensor],
    first: int,
    outputs: Mapping[int, Tensor],
    changed: Collection[int],
) -> Tensor:
    """Return the output of block `first`, or of the model behind its blocks, run as a stage of its own. It reads the
    earlier blocks' `outputs`, to which noise is added at the blocks `changed`."""
    depth = structure.num_blocks
    part = slice_model(model, structure, first, min(first + 1, depth), True, keep_after=first == depth)
    noise = torch.Generator().manual_seed(0)
    taps = {
        number: outputs[number] + (number in changed) * torch.randn(outputs[number].shape, generator=noise)
        for number in range(first - 1)
    }
    blocks = part.get_submodule(structure.blocks)
    arrived = outputs[first - 1]
    return run_slice(partial(forward, part), arrived, blocks, enters=True, ends=first < depth, taps=taps)


@torch.no_grad()
def in_order(shapes: FeatureShapes, layout: Layout) -> Structure:
    """Return the narrow encoder's structure; modules that run, or whose weights are read (a table of positions), before
    the first block are `before`, others `after`."""
    model, structure = narrow_encoder(shapes)
    assert structure is not None
    around = (*structure.before, *structure.after)
    modules = {path: getattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in around}
    modules = {path: module for path, module in modules.items() if isinstance(module, nn.Module)}
    before: set[str] = set()
    entered: list[Any] = []  # what the first block gets
    frozen = [each for module in modules.values() for each in module.parameters() if not each.requires_grad]
    with ExitStack() as closing:
        for each in frozen:  # tables of sines are, and no graph shows who reads them
            each.requires_grad_(each.is_floating_point())
            closing.callback(each.requires_grad_, False)
        for path, module in modules.items():
            hook = module.register_forward_pre_hook(lambda *_, path=path: None if entered else before.add(path))
            closing.callback(hook.remove)
        first = model.get_submodule(f"{structure.blocks}.0")
        hook = first.register_forward_pre_hook(lambda _, *given: entered.extend(given), with_kwargs=True)
        closing.callback(hook.remove)
        with torch.enable_grad():
            shapes.rows(model, layout)
        read = leaves_of(*_tensors_in(entered))
    before |= {path for path, each in modules.items() if read & {id(weight) for weight in each.parameters()}}
    return replace(
        structure,
        before=tuple(path for path in around if path in before),
        after=tuple(path for path in around if path not in before),
    )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inside for tensor in _tensors_in(each)]


def unused_keys(shapes: FeatureShapes, layout: Layout) -> frozenset[str]:
    """Return the keys of the encoder's weights on which no row depends (in blocks after a feature layer)."""
    model, _ = narrow_encoder(shapes)
    with torch.enable_grad():
        reached = leaves_of(shapes.rows(model, layout))
    inside = f"{shapes.path}."
    return frozenset(
        key for key, each in model.named_parameters() if key.startswith(inside) and id(each) not in reached
    )


@lru_cache(maxsize=4)
def narrow_encoder(shapes: FeatureShapes) -> tuple[PreTrainedModel, Structure | None]:
    """Build the narrow encoder with random weights; return it and its structure, None for one without blocks."""
    settings = json.loads(shapes.settings)
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    with seeded(0, "narrow encoder"):
        model = auto_class(config).from_config(config).eval()
    return encoder_in(model, shapes.holder, shapes.path, shapes.projector, shapes.blocks)


def encoder_in(
    model: PreTrainedModel, holder: str, path: str, projector: tuple[str, ...], blocks: str | None
) -> tuple[PreTrainedModel, Structure | None]:
    """Return the module at `holder` with its `path` and `projector` alone, and the structure of the encoder there. The
    structure has its list of blocks at `blocks`; None if there is none."""
    base = cast(PreTrainedModel, model.get_submodule(holder))
    encoder = base.get_submodule(path)
    if isinstance(encoder, PreTrainedModel):  # here once, for all slices
        maybe_install_capturing_hooks(encoder)
    keeps = {path, *projector}
    for name in [name for name, _ in base.named_children() if name not in keeps]:
        setattr(base, name, None)
    if blocks is None:
        return base, None
    inner = find_structure(encoder, blocks)
    for block in held_blocks(encoder.get_submodule(inner.blocks)):
        for module in (one for one in block.modules() if one is not block):
            for key in capturing_hooks(module):  # of attention weights: nobody asks for them, and they end graphs
                del module._forward_hooks[key]
    return base, Structure(
        f"{path}.{inner.blocks}",
        tuple(f"{path}.{each}" for each in inner.before),
        (*(f"{path}.{each}" for each in inner.after), *projector),
        inner.num_blocks,
    )


_KINDS: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)


def auto_class(config: Any) -> Any:
    """Return the Auto class of transformers that builds and loads multimodal models of such a config, or None."""
    return next((kind for kind in _KINDS if type(config) in kind._model_mapping), None)


def forward_of(config: Any) -> Any:
    """Return transformers' own forward of a multimodal model with such a config."""
    return auto_class(config)._model_mapping[type(config)].forward


def takes_texts_alone(config: Any) -> bool:
    """Return True if transformers' forward of such a model runs without media."""
    return needed_by(forward_of(config)) <= {"self", "input_ids"}


def needed_by(method: Any) -> frozenset[str]:
    """Return the names of the parameters of a method that have no default."""
    parameters = inspect.signature(inspect.unwrap(method)).parameters.values()
    return frozenset(each.name for each in parameters if each.default is each.empty and each.kind not in _ANY)


_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def token_key(config: Any, kind: str) -> str | None:
    """Return the config key that names the token that one row of the media replaces."""
    keys = (f"{kind}_token_id", f"{kind}_token_index")
    return next((key for key in keys if isinstance(getattr(config, key, None), int)), None)


def hidden_size(shapes: FeatureShapes, item: Mapping[str, NDArray], model: nn.Module) -> int:
    """Return the hidden size of the encoder in `model`: the number in a config around its blocks whose counterpart in
    the narrow model is the width there. Raises UncutError."""
    narrow, structure = narrow_encoder(shapes)
    assert structure is not None
    width = _seen(shapes, layout_of(item))[0].shape[-1]
    inner = structure.blocks.removeprefix(shapes.path).split(".")[1:]
    for path in (*(".".join((shapes.path, *inner[:depth])) for depth in range(len(inner))), ""):
        own, wide = (getattr(each.get_submodule(path), "config", None) for each in (narrow, model))
        for key in _HIDDEN_SIZES:
            if getattr(own, key, None) == width:
                return int(getattr(wide, key))
    raise UncutError("no config around its encoder's blocks names the width of the hidden states")


_HIDDEN_SIZES = ("hidden_size", "embed_dim", "d_model", "width", "hidden_dim")


def patch_of(config: Any) -> int:
    """Return the side of a patch in pixels, by default 14."""
    side = getattr(getattr(config, "vision_config", None), "patch_size", None) or 14
    return side if isinstance(side, int) else side[0]


def default_sound_processor(config: Any, names: tuple[str, ...] = ()) -> HuggingFaceSoundProcessor:
    """Return a family's processor of sounds with default settings, but the encoder's mel bins. names: of the outputs
    that its model reads. Raises UserError."""
    kind = of_family(FEATURE_EXTRACTOR_MAPPING_NAMES, config.model_type)
    if kind is None:
        raise UserError(f"{config.model_type}: transformers names no feature extractor of sounds for it")
    settings: dict[str, Any] = {"feature_extractor_type": kind}
    encoder = getattr(config, "audio_config", None)
    parts = (encoder, *(getattr(encoder, key) for key in getattr(encoder, "sub_configs", ())))
    bins = [each.num_mel_bins for each in parts if isinstance(getattr(each, "num_mel_bins", None), int)]
    if bins:
        settings["feature_size"] = bins[0]
    return HuggingFaceSoundProcessor(json.dumps(settings, sort_keys=True), config.model_type, names)


def reads_clips(config: Any) -> bool:
    """Return True if transformers has a processor of clips for a family, even one that needs an absent package."""
    return of_family(dict.fromkeys(VIDEO_PROCESSOR_MAPPING_NAMES, True), config.model_type) is not None


def default_clip_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a family's processor of clips that its encoder's config decides."""
    vision = getattr(config, "vision_config", None)
    found = {name: getattr(vision, of_encoder, None) for name, of_encoder in _PATCHES.items()}
    return {name: own for name, own in found.items() if isinstance(own, int)}


def default_processor(config: Any, names: tuple[str, ...] = ()) -> HuggingFaceImageProcessor:
    """Return a family's image processor with default settings, but the encoder's patches and size. names: of the
    outputs that its model reads. Raises UserError."""
    kinds = of_family(IMAGE_PROCESSOR_MAPPING_NAMES, _PROCESSED_AS.get(config.model_type, config.model_type))
    kinds = kinds if isinstance(kinds, dict) else {}
    kind = kinds.get("pil") or (kinds.get("torchvision") if is_torchvision_available() else None)
    if kind is None:
        needs = "needs torchvision (`pip install 'dilatant[torchvision]'`)"
        needs = needs if kinds.get("torchvision") else "is not known to transformers"
        raise UserError(f"{config.model_type}: its image processor {needs}")
    settings: dict[str, Any] = {"image_processor_type": kind.removesuffix("Pil")}
    made: Any = HuggingFaceImageProcessor(json.dumps(settings)).made
    vision = getattr(config, "vision_config", None)
    for name, of_encoder in _PATCHES.items():
        own = getattr(vision, of_encoder, None)
        default = getattr(made, name, None)
        if isinstance(own, int) and isinstance(default, int) and default <= _LARGEST_PATCH:
            settings[name] = own
    for name in _AS_IN_CONFIG:
        if getattr(made, name, None) is not None and getattr(config, name, None) is not None:
            settings[name] = getattr(config, name)
    for name, encoder in _SIDES.items():
        own = getattr(getattr(config, encoder, None), "image_size", None)
        if isinstance(own, int) and (known := getattr(made, name, None)) is not None:
            settings[name] = own if isinstance(known, int) else {"height": own, "width": own}
    sides = (getattr(each, "image_size", None) for each in (vision, getattr(vision, "sam_config", None)))
    side, size = next(filter(None, sides), None), dict(getattr(made, "size", None) or {})
    side = side[0] if isinstance(side, list | tuple) else side
    is_fixed = "height" in size or "shortest_edge" in size
    is_cropped = getattr(made, "crop_size", None) is not None
    is_native = {*made.model_input_names} & _OF_NATIVE_SIZES and not is_cropped
    if isinstance(side, int) and is_fixed and not is_native:
        settings["size"] = {"height": side, "width": side}
        if is_cropped:
            settings["crop_size"] = settings["size"]
    return HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True), names=names)


_OF_NATIVE_SIZES = {"image_grid_thw", "image_sizes", "spatial_shapes", "image_grid_hw"}
_LARGEST_PATCH = 64
"""Largest side of a patch in pixels: what some processors call a patch is a crop of hundreds of pixels."""
_PROCESSED_AS = {"fast_vlm": "llava", "glm_ocr": "glm46v"}
"""Families for which transformers names no image processor → the one whose processor they have."""
_AS_IN_CONFIG = ("image_grid_pinpoints",)
_SIDES = {"max_image_size": "vision_config", "high_res_size": "high_res_vision_config"}
"""Settings of processors: the sides of images → the encoder that takes them."""
_PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
