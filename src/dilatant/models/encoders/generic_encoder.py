"""Generic encoders: encoders of images and sounds that run by the family's own method, as of most families that
`families.FAMILIES` does not list.

A stage runs the family's own `get_image_features` or `get_audio_features` (see `core.slicing`). Stages after the first
have no pixels or frames: their input is ones of the same shape, and `ShapePlaceholder`s replace the modules before the
blocks. The last layer holds all modules after the blocks: the rest of the encoder, and those that project its rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.hook import attend_to_items, passes_borders
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError, reason_of
from dilatant.data.media.pixels import EncoderInput, as_array
from dilatant.data.media_units.frame_choice import FRAME_TEXTS, FramedClipUnit
from dilatant.data.media_units.processed_clip_unit import HuggingFaceClipProcessor, ProcessedClipUnit
from dilatant.data.media_units.processed_unit import ProcessedImageUnit, ProcessedSoundUnit, flatten, is_layout
from dilatant.data.media_units.processors import SOFT_TOKENS, HuggingFaceImageProcessor
from dilatant.data.sample import EncodedSample, MediaMarkup, MediaUnit
from dilatant.models.adapters.lora import adapted_key, plain_key
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import ShapePlaceholder, keep_output, slice_model
from dilatant.models.core.stage import Boundary, RowCount, StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.core.structure import Structure
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_module_weights, name_weights
from dilatant.models.encoders.encoder import Callbacks, EncoderStage
from dilatant.models.encoders.media import COUNTS, SOFT_TOKENS_OF_FRAMES, frame_choice
from dilatant.models.encoders.narrow_encoder import (
    FeatureShapes,
    Layout,
    default_clip_settings,
    default_processor,
    default_sound_processor,
    encoder_in,
    hidden_size,
    in_order,
    is_of_clip,
    items_of,
    join_items,
    known_to,
    layout_of,
    method_of,
    narrow_encoder,
    needed_by,
    patch_of,
    rows_by,
    taps_of,
    unused_keys,
)
from dilatant.models.encoders.packed_encoder import PackedEncoderUnit, rows_of_items
from dilatant.models.encoders.tower import ClipOptions, HostModel, Settings, Tensors, Tower
from dilatant.models.parallel.shared_samples import SampleParallel
from dilatant.models.parallel.tensor_rules import ENCODER_RULES

TYPICAL_PATCHES, TYPICAL_SECONDS = 32, 10
"""Patches on each side of the typical image, and length of the typical sound (see `EncoderGeometry`)."""
SOFT_TOKENS_OF_FRAME = 70
"""Default of `SOFT_TOKENS` for a frame of a clip."""
TOKENS_AT_ONCE = 16_384
"""Maximum number of tokens in one pass of the blocks; a larger item runs alone."""


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
    axes: Mapping[str, int] = MappingProxyType({})
    """The axis along which items are concatenated, where it is not the first one."""

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        samples = self.chosen(data, samples)
        if not samples:
            return StageOutput()
        media_of(data, samples, self, names=())  # refuses samples whose media were not loaded
        loaded = [data.samples[sample].media[self.unit] for sample in samples]
        names = dict.fromkeys(name for each in loaded for name in each)
        arrays = {name: np.concatenate([as_array(each[name]) for each in loaded if name in each]) for name in names}
        hidden = None if self.is_first else inbound[self.unit]
        return StageOutput(self._encode_items(arrays, hidden, data.device))

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode items. inputs: their flattened arrays and shapes; hidden: [tokens, width]. Returns hidden states or,
        on the last stage, rows of the text: [rows, width]."""
        inputs = inputs or {}
        device = next(iter(inputs.values())).device
        return self._encode_items({name: each.cpu().numpy() for name, each in inputs.items()}, hidden, device)

    def _encode_items(self, arrays: Mapping[str, NDArray], hidden: Tensor | None, device: torch.device) -> Tensor:
        items = items_of(arrays)
        groups: dict[Layout, list[int]] = {}
        for number, item in enumerate(items):
            groups.setdefault(layout_of(item), []).append(number)
        lengths = {layout: self.shapes.tokens(layout) for layout in groups}
        arrived: list[Tensor] = []
        if hidden is not None:
            arrived = list(hidden.split([lengths[layout_of(item)][0] for item in items]))
        rows: dict[int, Tensor] = {}
        most = {layout: max(1, TOKENS_AT_ONCE // max(1, tokens)) for layout, (tokens, _) in lengths.items()}
        batches = (
            (layout, numbers[at : at + most[layout]])
            for layout, numbers in groups.items()
            for at in range(0, len(numbers), most[layout])
        )
        for layout, numbers in batches:
            inputs = {
                name: to_device(
                    torch.cat([torch.as_tensor(items[n][name]) for n in numbers], self.axes.get(name, 0)), device
                )
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
                        closing.callback(block.register_forward_hook(partial(keep_output, seen, number)).remove)
                hidden = self.run_slice(partial(rows_by, self.shapes.kind, model, inputs), first, taps).flatten(0, -2)
            if self.is_through:
                return hidden
            return torch.cat([hidden, *(seen[tap] for tap in sent_with(self.taps, self.end_block))], dim=-1)


def sent_with(taps: Iterable[int], block: int) -> tuple[int, ...]:
    """Return the taps whose outputs are sent with the hidden states before `block`."""
    return tuple(tap for tap in taps if tap < block - 1)


class GenericEncoderUnit(PackedEncoderUnit):
    """A generic encoder: layers `embedding`, `layers.<i>`, and `projector`, which is all that follows the blocks; or
    the one layer `encoder`, if it has no structure."""

    stage_type = GenericStage
    stand_in = ShapePlaceholder
    undivided: str | None = "no proof says that ranks may share them"
    tensor_rules = ENCODER_RULES
    shapes: FeatureShapes
    axes: Mapping[str, int] = MappingProxyType({})
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        structure: Structure | None,
        projector: tuple[str, ...],
        geometry: EncoderGeometry,
        width_out: int,
        placeholder_id: int,
        typical: Mapping[str, NDArray],
    ) -> None:
        layers: tuple[str, ...] = ("encoder",)
        if structure is None:
            weights = name_module_weights(name, {"encoder": ("model", model)})
        else:
            weights = name_weights(name, model, structure, "projector", None)
            layers = ("embedding", *(f"layers.{i}" for i in range(structure.num_blocks)), "projector")
        EncoderStage.__init__(
            self,
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in layers),
            weights=tuple(_in_part(weight, projector) for weight in weights),
            model=model,
            projector=model,
            geometry=geometry,
            callbacks=Callbacks(),
        )
        self.structure = structure
        self.blocks_path = None if structure is None else structure.blocks
        self.width, self.width_out = geometry.width, width_out
        self.placeholder_id = placeholder_id
        self.typical = typical
        self._freeze_at_start()

    def pieces(self) -> Iterator[tuple[str, str]]:
        held = {"model", *(f"model.{path}" for path, _ in self.model.named_modules())}
        return (entry for entry in Unit.pieces(self) if entry[1] in held)

    @property
    def config(self) -> Any:
        if self.structure is None:
            return None
        path, _, _ = self.structure.blocks.partition(".")
        return getattr(self.model.get_submodule(path), "config", self.model.config)

    def boundary(self, end: int, consumer: str) -> Boundary:
        if end < len(self.layers):
            return Boundary(self._width_before(end), self.row_dtype, RowCount(self.unit))
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
        stage.axes = self.axes
        stage.first_block, stage.end_block = self._blocks(first, end)
        inside = range(stage.first_block, stage.end_block)
        # What an encoder that cannot be cut reads is not known.
        stage.read_blocks = [n - inside.start for n in inside if self.uncut is not None or n in self.taps]
        return stage

    def _slice(self, model: nn.Module, first: int, end: int) -> nn.Module:
        if self.structure is None:
            return model
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


@dataclass(frozen=True)
class RopePositions:
    """Computes positions in time, height and width by the family's `get_rope_index` on the narrow model. units: name,
    kind and placeholder id of each encoder. ids: token ids that the config names, as (id, id in the narrow model)."""

    shapes: FeatureShapes
    units: tuple[tuple[str, str, int], ...]
    ids: tuple[tuple[int, int], ...]

    def __call__(self, sample: EncodedSample) -> NDArray[np.int64]:
        """Return the positions of a sample's tokens, int64 [1 + kinds, tokens]: the index in the sample, then the
        family's."""
        model: Any = narrow_encoder(self.shapes)[0]
        known = known_to(type(model).get_rope_index)
        tokens, kinds = np.zeros_like(sample.input_ids), np.zeros_like(sample.input_ids)
        for own, narrow in self.ids:
            tokens[sample.input_ids == own] = narrow
        given: dict[str, Any] = {}
        for name, kind, placeholder in self.units:
            if sample.sizes.get(name, 0) and name in sample.media:
                items = items_of({key: as_array(each) for key, each in sample.media[name].items()})
                if kind == "image":
                    has_clips = any(map(is_of_clip, items))
                    kinds[sample.input_ids == placeholder] = kinds_of_rows(self.shapes, items) if has_clips else 1
                if kind == "audio" and _FRAMES in items[0]:
                    given["audio_seqlens"] = torch.tensor([int(item[_FRAMES].sum()) for item in items])
                for key in known & {*chain(*items)}:
                    given[key] = torch.cat([torch.as_tensor(item[key]) for item in items if key in item])
        given |= {"input_ids": torch.as_tensor(tokens)[None], "mm_token_type_ids": torch.as_tensor(kinds)[None]}
        if "mm_token_type_ids" not in known:  # finds media by the ids around them
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        found, *_ = model.get_rope_index(**{key: each for key, each in given.items() if key in known})
        places = found[:, 0].long().numpy()
        # A family with a fourth axis counts the tokens on it, and takes no further one.
        return places if len(places) > 3 else np.concatenate([np.arange(len(tokens))[None], places])


def kinds_of_rows(shapes: FeatureShapes, items: Iterable[Mapping[str, NDArray]]) -> NDArray[np.int64]:
    """Return the kind of the item of each row, as in transformers' `mm_token_type_ids`: 1 for images, 2 for clips."""
    return np.concatenate([np.full(shapes(item)[1], 1 + is_of_clip(item)) for item in items])


_FRAMES = "feature_attention_mask"
"""The input whose sum is the number of frames of a sound."""


@dataclass(frozen=True)
class GenericTower(Tower):
    """An encoder that `families.generic` found in a model. holder: path of the module whose method runs it (see
    `narrow_encoder.method_of`). narrow: config of the narrow model that counts tokens, as JSON. inner: path of the
    blocks in the encoder; None if it is one layer, because of `uncut`. inputs: names of the processor's outputs that
    the model reads. token_of_clips: config key of the token that a row of a clip replaces in transformers' own
    forward. is_listed: the family is listed, so tests say which ranks may share the layers."""

    holder: str = "model"
    narrow: str = ""
    inner: str | None = ""
    uncut: str | None = None
    inputs: tuple[str, ...] = ()
    token_of_clips: str = "video_token_id"
    is_listed: bool = False

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
        _, blocks = narrow_encoder(self.shapes)
        width = (1 + self.inner_rows(host.config)) * host.text_width
        structure = None if blocks is None else in_order(self.shapes, layout_of(typical))
        geometry = EncoderGeometry(
            kind=self.kind,
            input_name=next(name for name, each in typical.items() if not is_layout(each)),
            tokens_per_row=rows,
            encoder_tokens=tokens,
            width=width if structure is None else hidden_size(self.shapes, typical, model),
        )
        unit = GenericEncoderUnit(host.name, model, structure, projector, geometry, width, host.placeholder_id, typical)
        unit.shapes, unit.axes, unit.uncut = self.shapes, self.axes(host.config), self.uncut
        if self.is_listed:
            unit.undivided = None
        if structure is not None:
            try:
                unit.taps = taps_of(self.shapes, layout_of(typical))
            except Exception as error:  # the proof runs cuts again
                unit.uncut = reason_of(error, "its encoder does not run in stages")
        keys = unused_keys(self.shapes, layout_of(typical))
        unit.unused = frozenset(weight.name for weight in unit.weights if adapted_key(weight.key) in keys)
        unit.freeze_names(unit.unused)
        return unit

    def inner_rows(self, config: Any) -> int:
        return self.shapes.inner_rows(self.typical(config))

    def key_of(self, weight: Weight) -> str:
        key = plain_key(weight.key)
        return f"{self.holder}.{key}" if self.holder else key

    def typical(self, config: Any) -> Mapping[str, NDArray]:
        """Return a blank item as the family's processor prepares it. Raises UserError if no processor can be made."""
        processor = default_processor(config, self.inputs)
        side = TYPICAL_PATCHES * patch_of(config)
        return processor(np.full((side, side, processor.channels), 128, np.uint8))

    def elongated(self, config: Any) -> Mapping[str, NDArray] | None:
        """Return a blank image four times as wide as high, which some families encode in more parts than one; None if
        the processor takes none."""
        processor = default_processor(config, self.inputs)
        side = TYPICAL_PATCHES * patch_of(config)
        try:
            return processor(np.full((side, 4 * side, processor.channels), 128, np.uint8))
        except Exception:  # that images of other shapes are refused says nothing about these
            return None

    def axes(self, config: Any) -> Mapping[str, int]:
        """Return the axis along which the arrays of items are concatenated, by name, if it is not the first one."""
        return _axes(default_processor(config, self.inputs), TYPICAL_PATCHES * patch_of(config))

    def check(self, config: Any) -> None:
        """Raise the error that stops the encoder from being built."""
        item = self.typical(config)
        if not any(not is_layout(each) for each in item.values()):
            raise UserError("its processor makes none of the inputs that its model reads")
        method = method_of(self.kind)
        lacking = needed_by(getattr(type(narrow_encoder(self.shapes)[0]), method)) - {"self", *item}
        if lacking:
            raise UserError(f"{method} needs {', '.join(sorted(lacking))}, which are not made from the media alone")
        self.shapes(item)
        if self.inner is not None:
            in_order(self.shapes, layout_of(item))
            hidden_size(self.shapes, item, narrow_encoder(self.shapes)[0])
            if (other := self.elongated(config)) is not None:
                self.shapes(other)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        processor = default_processor(host.config, self.inputs)
        if settings:
            saved = {**({} if "image_processor_type" in settings else processor.settings), **settings}
            processor = replace(processor, settings_json=json.dumps(saved, sort_keys=True))
        about: dict[str, Any] = {"written": written, "beside_clips": self.clips == "processed"}
        return ProcessedImageUnit(host.name, host.placeholder_id, processor, self.shapes, **about)

    @property
    def clip_settings(self) -> tuple[str, ...]:
        if self.clips in FRAME_TEXTS:
            return (*COUNTS, SOFT_TOKENS_OF_FRAMES)
        return ("num_frames", "fps") if self.clips is not None else ()

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> MediaUnit:
        if self.clips is not None and self.clips in FRAME_TEXTS:
            tokens = options.requested.get(SOFT_TOKENS_OF_FRAMES) or options.saved.get(SOFT_TOKENS)
            settings = {**image.processor.settings, SOFT_TOKENS: tokens or SOFT_TOKENS_OF_FRAME}
            processor = replace(image.processor, settings_json=json.dumps(settings, sort_keys=True))
            choice = frame_choice(self.clips, options.saved, options.requested)
            frame = replace(image, processor=processor)
            return FramedClipUnit(frame, choice, self.clips, written=options.written)
        limits = {key: options.requested[key] for key in self.clip_settings if key in options.requested}
        if limits:  # processors take one of both
            limits = {**dict.fromkeys(self.clip_settings), "do_sample_frames": True, **limits}
        settings = {**default_clip_settings(host.config), **options.saved, **limits}
        names = tuple(name for name in self.inputs if is_of_clip((name,)))
        saved, words = json.dumps(settings, sort_keys=True), tuple(options.words.items())
        processor = HuggingFaceClipProcessor(saved, host.config.model_type, names, words)
        return ProcessedClipUnit(host.name, host.placeholder_id, processor, self.shapes, written=options.written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        items = items_of({name: each.cpu().numpy() for name, each in inputs.items()})
        axes = self.axes(host.config)
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(chain(*items)):
            own = [torch.as_tensor(item[name]) for item in items if name in item]
            padding = -1 if name.endswith("position_ids") else 0
            found[name] = join_items(own, axes.get(name, 0), padding).to(ids.device)
        if any(map(is_of_clip, items)):
            kinds = torch.zeros_like(ids)
            kinds[ids == host.placeholder_id] = torch.as_tensor(kinds_of_rows(self.shapes, items)).to(ids.device)
            clip = getattr(host.config, self.token_of_clips)
            found |= {"input_ids": torch.where(kinds == 2, clip, ids), "mm_token_type_ids": kinds}
        return found


@dataclass(frozen=True)
class GenericSoundTower(GenericTower):
    """An encoder of sounds."""

    kind = "audio"

    def typical(self, config: Any) -> Mapping[str, NDArray]:
        processor = default_sound_processor(config, self.inputs)
        return processor(np.zeros(TYPICAL_SECONDS * processor.sampling_rate, np.float32))

    def elongated(self, config: Any) -> None:
        return None

    def axes(self, config: Any) -> Mapping[str, int]:
        return {}

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        processor = default_sound_processor(host.config, self.inputs)
        if settings:
            saved = {**({} if "feature_extractor_type" in settings else processor.settings), **settings}
            processor = replace(processor, settings_json=json.dumps(saved, sort_keys=True))
        return ProcessedSoundUnit(host.name, host.placeholder_id, processor, self.shapes, written=written)


@lru_cache(maxsize=8)
def _axes(processor: HuggingFaceImageProcessor, side: int) -> Mapping[str, int]:
    return processor.axes(np.full((side, side, processor.channels), 128, np.uint8))
