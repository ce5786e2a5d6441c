"""Generic encoders: encoders of images and sounds in multimodal models that `families.FAMILIES` does not list.

A stage runs the family's own `get_image_features` or `get_audio_features` (see `core.slicing`). Stages after the first
have no pixels or frames: their input is ones of the same shape, and `ShapePlaceholder`s replace the modules before the
blocks. The last layer holds all modules after the blocks: the rest of the encoder, and those that project its rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.hook import attend_to_items, passes_borders
from dilatant.data.media.pixels import EncoderInput, as_array
from dilatant.data.media_units.processed_unit import (
    ProcessedImageUnit,
    ProcessedSoundUnit,
    flatten,
    is_layout,
)
from dilatant.data.media_units.processors import HuggingFaceImageProcessor, HuggingFaceSoundProcessor
from dilatant.data.sample import EncodedSample, MediaMarkup, MediaUnit
from dilatant.models.adapters.lora import adapted_key, plain_key
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import ShapePlaceholder, keep_output, slice_model
from dilatant.models.core.stage import Boundary, StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.core.structure import Structure
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_weights
from dilatant.models.encoders.encoder import Callbacks, EncoderStage
from dilatant.models.encoders.narrow_encoder import (
    FeatureShapes,
    Layout,
    default_processor,
    default_sound_processor,
    encoder_in,
    in_order,
    items_of,
    layout_of,
    narrow_encoder,
    patch_of,
    rows_by,
    taps_of,
    token_key,
    unused_keys,
    width_of_blocks,
)
from dilatant.models.encoders.packed_encoder import PackedEncoderUnit, rows_of_items, rows_of_unit
from dilatant.models.encoders.tower import HostModel, Settings, Tensors, Tower
from dilatant.models.parallel.shared_samples import SampleParallel

TYPICAL_PATCHES, TYPICAL_SECONDS = 32, 10
"""Patches on each side of the typical image, and length of the typical sound (see `EncoderGeometry`)."""


class GenericStage(SampleParallel, EncoderStage):
    """Layers of a generic encoder, run on groups of items with the same layout. shapes: see `FeatureShapes`.

    The columns of hidden states between stages are followed by those of the outputs of earlier `taps`.
    """

    runs_blocks_once = False
    shapes: FeatureShapes
    taps: tuple[int, ...] = ()
    """The blocks of the whole encoder whose outputs are read by more than the next block."""
    first_block = 0
    end_block = 0

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        samples = self.chosen(data, samples)
        if not samples:
            return StageOutput()
        media_of(data, samples, self, names=())  # refuses samples whose media were not loaded
        loaded = [data.samples[sample].media[self.unit] for sample in samples]
        arrays = {name: np.concatenate([as_array(each[name]) for each in loaded]) for name in loaded[0]}
        hidden = None if self.is_first else inbound[self.unit]
        return StageOutput(self._encode_items(arrays, hidden, data.device))

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode items. inputs: their flattened arrays and shapes; hidden: [tokens, width]. Returns hidden states or,
        on the last stage, rows of the text: [rows, width]."""
        inputs = inputs or {}
        device = next(iter(inputs.values())).device
        return self._encode_items({name: each.cpu().numpy() for name, each in inputs.items()}, hidden, device)

    def _encode_items(
        self, arrays: Mapping[str, NDArray], hidden: Tensor | None, device: torch.device
    ) -> Tensor:
        items = items_of(arrays)
        groups: dict[Layout, list[int]] = {}
        for number, item in enumerate(items):
            groups.setdefault(layout_of(item), []).append(number)
        lengths = {layout: self.shapes.tokens(layout) for layout in groups}
        arrived: list[Tensor] = []
        if hidden is not None:
            arrived = list(hidden.split([lengths[layout_of(item)][0] for item in items]))
        rows: dict[int, Tensor] = {}
        for layout, numbers in groups.items():
            inputs = {
                name: torch.cat([torch.as_tensor(items[number][name]) for number in numbers]).to(device)
                for name, _, _ in layout
            }
            given = None if hidden is None else torch.cat([arrived[number] for number in numbers])
            encoded = self._through(inputs, given)
            rows |= dict(zip(numbers, encoded.chunk(len(numbers)), strict=True))
        return torch.cat([rows[number] for number in range(len(items))])

    def _through(self, inputs: Mapping[str, Tensor], given: Tensor | None) -> Tensor:
        model = cast(nn.Module, self.model)
        with self.recording(model, [*inputs.values()] if given is None else [given]):
            inputs = {name: in_dtype_of(model, each) for name, each in inputs.items()}
            if given is None:
                taps: dict[int, Tensor] = {}
                first = next(iter(inputs.values()))
            else:
                parts = in_dtype_of(model, given).split(self.geometry.width, dim=-1)
                first, *carried = (part.contiguous() for part in parts)
                taps = dict(zip(sent_with(self.taps, self.first_block), carried, strict=True))
            seen = {**taps, self.first_block - 1: first}
            with ExitStack() as closing:
                for number in self.taps:
                    block = model.get_submodule(f"{self.blocks_path}.{number}")
                    if self.first_block <= number < self.end_block:
                        closing.callback(
                            block.register_forward_hook(partial(keep_output, seen, number)).remove
                        )
                hidden = self.run_slice(
                    partial(rows_by, self.shapes.kind, model, inputs), first, taps
                ).flatten(0, -2)
            if self.is_through:
                return hidden
            return torch.cat([hidden, *(seen[tap] for tap in sent_with(self.taps, self.end_block))], dim=-1)


def sent_with(taps: Iterable[int], block: int) -> tuple[int, ...]:
    """Return the taps whose outputs are sent with the hidden states before `block`."""
    return tuple(tap for tap in taps if tap < block - 1)


class GenericEncoderUnit(PackedEncoderUnit):
    """A generic encoder: layers `embedding`, `layers.<i>`, and `projector`, which is all that follows the blocks."""

    stage_type = GenericStage
    stand_in = ShapePlaceholder
    undivided = "of a family that is not listed, no proof says that ranks may share them"
    structure: Structure
    shapes: FeatureShapes
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        structure: Structure,
        projector: tuple[str, ...],
        geometry: EncoderGeometry,
        width_out: int,
        placeholder_id: int,
        typical: Mapping[str, NDArray],
    ) -> None:
        weights = name_weights(name, model, structure, "projector", None)
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        EncoderStage.__init__(
            self,
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in ("embedding", *blocks, "projector")),
            weights=tuple(_in_part(weight, projector) for weight in weights),
            model=model,
            projector=model,
            geometry=geometry,
            callbacks=Callbacks(),
        )
        self.structure = structure
        self.blocks_path = structure.blocks
        self.width, self.width_out = geometry.width, width_out
        self.placeholder_id = placeholder_id
        self.typical = typical
        self._freeze_at_start()

    def pieces(self) -> Iterator[tuple[str, str]]:
        held = dict(self.model.named_modules())
        return (entry for entry in Unit.pieces(self) if entry[1].removeprefix("model.") in held)

    @property
    def config(self) -> Any:
        path, _, _ = self.structure.blocks.partition(".")
        return getattr(self.model.get_submodule(path), "config", self.model.config)

    def boundary(self, end: int, consumer: str) -> Boundary:
        if end < len(self.layers):
            rows_of = partial(rows_of_unit, self.unit, 1)
            return Boundary(self._width_before(end), self.row_dtype, rows_of)
        rows_of = partial(rows_of_items, self.unit, self.placeholder_id, self._rows_of_text)
        return Boundary(self.width_out, self.row_dtype, rows_of)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make items of the typical size."""
        count = max(1, round(tokens / self.geometry.encoder_tokens))
        item = {k: torch.as_tensor(as_array(v)) for k, v in flatten(self.typical).items()}
        inputs = {name: torch.cat([each] * count).to(device) for name, each in item.items()}
        if layer == 0:
            return inputs.pop(self.geometry.input_name), inputs
        rows = count * self.geometry.encoder_tokens
        return torch.randn(rows, self._width_before(layer), device=device), inputs

    def _width_before(self, layer: int) -> int:
        return self.geometry.width * (1 + len(sent_with(self.taps, layer - 1)))

    def stage(self, first: int, end: int) -> EncoderStage:
        stage = super().stage(first, end)
        assert isinstance(stage, GenericStage)
        if stage.model is None:
            stage.model = self._slice(self.model, first, end)
        stage.projector = None if stage.projector is None else stage.model
        stage.shapes, stage.is_through, stage.taps = self.shapes, end == len(self.layers), self.taps
        stage.first_block, stage.end_block = self._blocks(first, end)
        return stage

    def _slice(self, model: nn.Module, first: int, end: int) -> nn.Module:
        first_block, end_block = self._blocks(first, end)
        ends = {"keep_before": first == 0, "keep_after": end == len(self.layers)}
        whole = cast(PreTrainedModel, model)
        return slice_model(whole, self.structure, first_block, end_block, **ends, stand_in=self.stand_in)

    def _rows_of_text(self, media: Mapping[str, EncoderInput]) -> int:
        items = items_of({name: as_array(each) for name, each in media.items()})
        return sum(self.shapes.tokens(layout_of(item))[1] for item in items)


def _in_part(weight: Weight, projector: tuple[str, ...]) -> Weight:
    is_projector = any(weight.key == path or weight.key.startswith(f"{path}.") for path in projector)
    return replace(weight, part="projector") if is_projector else weight


def positions_of(
    shapes: FeatureShapes, unit: str, placeholder_id: int, sample: EncodedSample
) -> NDArray[np.int64]:
    """Return the positions of a sample's tokens, int64 [4, tokens]: the index in the sample, then time, height and
    width by the family's `get_rope_index`."""
    model: Any = narrow_encoder(shapes)[0]
    is_media = sample.input_ids == placeholder_id
    token = getattr(model.config, str(token_key(model.config, shapes.kind)))
    given: dict[str, Any] = {
        "input_ids": torch.as_tensor(np.where(is_media, token, 0))[None],
        "mm_token_type_ids": torch.as_tensor(is_media.astype(np.int64))[None],
    }
    if sample.sizes.get(unit, 0) and unit in sample.media:
        items = items_of({name: as_array(each) for name, each in sample.media[unit].items()})
        given |= {name: torch.cat([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
    known = inspect.signature(inspect.unwrap(type(model).get_rope_index)).parameters
    places, *_ = model.get_rope_index(**{name: each for name, each in given.items() if name in known})
    return np.concatenate([np.arange(len(is_media))[None], places[:, 0].numpy()])


@dataclass(frozen=True)
class GenericTower(Tower):
    """An encoder that `families.generic` found in a model. holder: path of the module whose method runs it (see
    `narrow_encoder.method_of`). narrow: config of the narrow model that counts tokens, as JSON. inner: path of the
    blocks in the encoder."""

    holder: str = "model"
    narrow: str = ""
    inner: str = ""

    @property
    def shapes(self) -> FeatureShapes:
        """Counts the tokens of items."""
        return FeatureShapes(self.narrow, self.holder, *self._inside(), self.kind, self.inner)

    def _inside(self) -> tuple[str, tuple[str, ...]]:
        prefix = f"{self.holder}." if self.holder else ""
        return self.path.removeprefix(prefix), tuple(each.removeprefix(prefix) for each in self.projector)

    def build(self, host: HostModel) -> GenericEncoderUnit:
        path, projector = self._inside()
        model, _ = encoder_in(host.build(), self.holder, path, projector, self.inner)
        encoder = model.get_submodule(path)
        if passes_borders(encoder) and getattr(encoder, "config", model.config) is not model.config:
            attend_to_items(encoder)
        typical = self.typical(host.config)
        tokens, rows = self.shapes(typical)
        structure = in_order(self.shapes, layout_of(typical))
        config = getattr(encoder, "config", model.config)
        geometry = EncoderGeometry(
            kind=self.kind,
            input_name=next(name for name, each in typical.items() if not is_layout(each)),
            tokens_per_row=rows,
            encoder_tokens=tokens,
            width=width_of_blocks(self.shapes, typical, config),
        )
        narrow, _ = narrow_encoder(self.shapes)
        width = self.shapes.rows(narrow, layout_of(typical)).shape[-1]
        width = width // narrow.config.get_text_config().hidden_size * host.text_width
        unit = GenericEncoderUnit(
            host.name, model, structure, projector, geometry, width, host.placeholder_id, typical
        )
        unit.shapes = self.shapes
        unit.taps = taps_of(self.shapes, layout_of(typical))
        keys = unused_keys(self.shapes, layout_of(typical))
        unit.unused = frozenset(weight.name for weight in unit.weights if adapted_key(weight.key) in keys)
        unit.freeze_names(unit.unused)
        return unit

    def key_of(self, weight: Weight) -> str:
        key = plain_key(weight.key)
        return f"{self.holder}.{key}" if self.holder else key

    def typical(self, config: Any) -> Mapping[str, NDArray]:
        """Return a blank item as the family's processor prepares it. Raises UserError if no processor can be made."""
        processor, side = default_processor(config), TYPICAL_PATCHES * patch_of(config)
        return processor(np.full((side, side, processor.channels), 128, np.uint8))

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        processor = default_processor(host.config)
        if settings is not None and "image_processor_type" in settings:
            processor = HuggingFaceImageProcessor(json.dumps(dict(settings), sort_keys=True))
        return ProcessedImageUnit(host.name, host.placeholder_id, processor, self.shapes, written=written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        items = items_of({name: each.cpu().numpy() for name, each in inputs.items()})
        return {
            name: _padded([torch.as_tensor(item[name]) for item in items]).to(ids.device) for name in items[0]
        }


@dataclass(frozen=True)
class GenericSoundTower(GenericTower):
    """An encoder of sounds."""

    kind = "audio"

    def typical(self, config: Any) -> Mapping[str, NDArray]:
        processor = default_sound_processor(config)
        return processor(np.zeros(TYPICAL_SECONDS * processor.sampling_rate, np.float32))

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        processor = default_sound_processor(host.config)
        if settings is not None and "feature_extractor_type" in settings:
            saved = json.dumps(dict(settings), sort_keys=True)
            processor = HuggingFaceSoundProcessor(saved, host.config.model_type)
        return ProcessedSoundUnit(host.name, host.placeholder_id, processor, self.shapes, written=written)


def _padded(arrays: list[Tensor]) -> Tensor:
    """Concatenate arrays of items along the first dimension, padded to one shape in the others, as processors do."""
    most = torch.tensor([each.shape[1:] for each in arrays]).amax(0).tolist()
    whole = arrays[0].new_zeros(sum(map(len, arrays)), *most)
    begin = 0
    for each in arrays:
        whole[(slice(begin, begin + len(each)), *map(slice, each.shape[1:]))] = each
        begin += len(each)
    return whole
