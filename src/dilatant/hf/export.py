"""Export of the trained model: every unit in the Hugging Face layout, and how to talk to it.

`MultimodalModel.save_pretrained` writes the units. Beside them are each encoder's `preprocessor_config.json`, the chat
template and `conversation.json` with the markers of media. `dilatant generate` needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from dilatant.config import ModelConfig, UserError
from dilatant.config.files.exports import CONVERSATION, read_object
from dilatant.config.model import LANGUAGE
from dilatant.data.media_units.anyres_image_unit import AnyresClipUnit, AnyresImageUnit
from dilatant.data.media_units.aspect_image_unit import AspectImageUnit
from dilatant.data.media_units.audio_unit import AudioUnit
from dilatant.data.media_units.framed_clip_unit import FramedClipUnit
from dilatant.data.media_units.image_target import ImageTarget, image_target
from dilatant.data.media_units.image_unit import ImageUnit
from dilatant.data.media_units.native_clip_unit import NativeClipUnit
from dilatant.data.media_units.native_image_unit import NativeImageUnit
from dilatant.data.media_units.processor_settings import clip_limits, processor_settings, size_limits
from dilatant.data.media_units.processors import clip_settings
from dilatant.data.media_units.sound_unit import SoundUnit
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit
from dilatant.data.media_units.usm_sound_unit import UsmSoundUnit
from dilatant.data.sample import MediaUnit
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import generation_ends, load_tokenizer
from dilatant.hf.adapter_files import ADAPTERS, adapted_models, adapter_settings, write_adapter
from dilatant.hf.export_folder import check_target, replacing
from dilatant.hf.pretrained_export import copy_companion_files, write_pretrained
from dilatant.hf.stored_weights import read_pretrained_vlm
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS
from dilatant.models.core.materialize import allocate
from dilatant.models.families.media_units import media_unit, units_of_patch_merger, units_of_pretrained
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_answers import PretrainedGeneration
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.models.saving_generators import load_generators, read_connectors, save_generators
from dilatant.models.sources import load_pretrained_config, without_bars
from dilatant.plan.boxes import Box

GENERATORS = "generators.json"
"""File beside a pretrained VLM with what `save_generators` returned for its generators."""
_PROCESSOR = "preprocessor_config.json"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An exported model, ready to answer."""

    model: MultimodalModel | PretrainedGeneration
    tokenizer: Any
    encoding: Encoding


def export_model(
    model: MultimodalModel,
    encoding: Encoding,
    folder: Path,
    run: Path | None = None,
    source: str | None = None,
    config: ModelConfig | None = None,
) -> None:
    """Write the model into `folder`; an earlier export there is replaced once the new one is complete.

    run: the run folder, which is never replaced. source: the id or folder of a pretrained VLM, None if it began from
    scratch. config: the model's section; without it, adapters are not written. Raises UserError if `folder` holds
    anything else (see `check_target`, which can be called before the work begins) or the disk cannot take the export.
    """
    check_target(folder, run)
    generation = getattr(model.language.model, "generation_config", None)
    if config is not None and config.text.id is None and generation is not None:
        generation.eos_token_id = list(encoding.chat.stop_ids) or None
    try:
        with replacing(folder) as writing:
            with without_bars(writing):
                if model.whole is None:
                    model.save_pretrained(writing)
                    if config is not None and config.text.id is not None:
                        copy_companion_files(config.text.id, model.language.model, writing / "language")
                else:
                    write_pretrained(model, writing, source)
                    if model.generators:
                        drawn = save_generators(writing, model.language, model.drawing)
                        _write_json(writing / GENERATORS, drawn)
                for adapted in adapted_models(model, config) if config is not None else ():
                    assert config is not None
                    assert config.lora is not None
                    place = writing / ADAPTERS / adapted.folder if config.lora.merge else writing
                    write_adapter(adapted, config.lora, place)
            for unit in encoding.units:
                place = writing if model.whole else writing / unit.name
                if isinstance(unit, NativeClipUnit | FramedClipUnit | AnyresClipUnit):
                    # The source's settings for clips, with the limits that the run changed.
                    before = clip_settings(str(place))
                    limits = clip_limits(unit, before)
                    if {**before, **limits} != before:
                        name = "video_preprocessor_config.json"
                        _write_settings(place, name, "video_processor", before, limits)
                    continue
                is_sound = isinstance(unit, AudioUnit | SoundUnit | UsmSoundUnit)
                part = "feature_extractor" if is_sound else "image_processor"
                assert isinstance(
                    unit,
                    ImageUnit
                    | AudioUnit
                    | TiledImageUnit
                    | NativeImageUnit
                    | SoundUnit
                    | UsmSoundUnit
                    | AnyresImageUnit
                    | AspectImageUnit,
                )
                before = _settings(place, part)
                if isinstance(unit, NativeImageUnit) and "image_processor_type" in before:
                    # The source's settings, with the size limits that the run changed.
                    _write_settings(place, _PROCESSOR, part, before, size_limits(unit.processor))
                elif (
                    not before
                    or (config is not None and config.processor is not None and not is_sound)
                    or (isinstance(unit, SoundUnit | UsmSoundUnit) and "feature_extractor_type" not in before)
                ):  # one file for all units of a pretrained VLM
                    _write_settings(place, _PROCESSOR, part, before, processor_settings(unit.processor))
            _write_json(
                writing / CONVERSATION,
                {
                    "encoders": {
                        unit.name: {"kind": unit.kind, "marker": unit.marker}
                        for unit in encoding.units
                        if unit.kind != "video"  # a second input of the same unit
                    },
                    "generators": {
                        target.name: {"kind": target.kind, "marker": target.marker, "start": target.start}
                        for target in encoding.targets
                    },
                },
            )
            (writing / _TEMPLATE).write_text(encoding.chat.template.text, encoding="utf-8")
            _use_template(writing if model.whole else writing / LANGUAGE, encoding.chat.template.text)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the export to {str(folder)!r} could not be written: {error}") from None


def _settings(place: Path, part: str) -> dict[str, Any]:
    """Return the settings of an image processor or feature extractor in a folder; empty if there are none."""
    if (place / _PROCESSOR).is_file():
        return read_object(place / _PROCESSOR)
    file = place / "processor_config.json"
    return (read_object(file).get(part) or {}) if file.is_file() else {}


def _write_settings(
    place: Path, name: str, part: str, before: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    """Write a processor's settings into its own file, and the changes also into `processor_config.json` if that has
    such settings: transformers reads them there."""
    _write_json(place / name, {**before, **changes})
    file = place / "processor_config.json"
    content = read_object(file) if file.is_file() else {}
    if isinstance(content.get(part), dict):
        _write_json(file, {**content, part: {**content[part], **changes}})


def load_exported(folder: Path) -> ExportedModel:
    """Read what `export_model` wrote. Raises UserError."""
    if (folder / "config.json").is_file():
        _, drawn = _read_conversation(folder)
        return _load_vlm_with_generators(folder, drawn) if drawn else _load_pretrained_vlm(folder)
    if (folder / "adapter_config.json").is_file():
        _read_conversation(folder)
        return _load_adapter(folder)
    markers, drawn = _read_conversation(folder)
    with without_bars(folder):
        model = MultimodalModel.from_pretrained(folder)
    if markers.keys() != model.encoders.keys() or drawn.keys() != model.generators.keys():
        raise UserError(f"{str(folder)!r} is not a whole export: {CONVERSATION} is of other units")
    if model.media_attention != "causal":
        use_row_attention(model)
    units: list[MediaUnit] = []
    for name, marker in markers.items():
        common: dict[str, Any] = {
            "processor": str(folder / name),
            "placeholder_id": model.placeholder_ids[name],
            "marker": marker,
        }
        tower = model[name].model.config
        if tower.model_type in PATCH_MERGER_ENCODERS:
            units += units_of_patch_merger(name, tower, **common)
        else:
            units.append(media_unit(name, model[name].geometry, merge=model.encoders[name].merge, **common))
    ends = generation_ends(str(folder / LANGUAGE))
    chat = chat_tokenizer(model.tokenizer, str(folder / _TEMPLATE), ends=ends)
    encoding = Encoding(chat=chat, units=tuple(units), targets=_targets(model, drawn))
    return ExportedModel(model, model.tokenizer, encoding)


def _targets(model: MultimodalModel, drawn: Mapping[str, Mapping[str, str]]) -> tuple[ImageTarget, ...]:
    return tuple(
        image_target(
            name,
            placeholder_id=model.output_ids[name],
            tokens_per_item=model.generators[name].tokens_per_item,
            start=entry["start"],
            marker=entry["marker"],
            pixels=cast(Diffusion, model[name].model).pixels,
        )
        for name, entry in drawn.items()
    )


def _load_vlm_with_generators(folder: Path, drawn: Mapping[str, Mapping[str, str]]) -> ExportedModel:
    """Load a pretrained VLM with generators into units of our own, as transformers' class does not know generators."""
    where = str(folder)
    tokenizer = load_tokenizer(where)
    try:
        entries = json.loads((folder / GENERATORS).read_text(encoding="utf-8"))
        if entries.keys() != drawn.keys():
            raise ValueError
        with without_bars(folder):
            generators = load_generators(folder, entries, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{where!r} is not a whole export: {GENERATORS} does not fit {CONVERSATION}; make it again with "
            "`dilatant export RUN`"
        ) from None
    whole = PretrainedModel.of(load_pretrained_config(where, where), where)
    model = MultimodalModel({}, whole, tokenizer=tokenizer, seed=0, device="meta", generators=generators)
    weights = allocate(model.units)
    own = {weight.canonical for _, weight in model.weights_of_whole()}
    held = {name: Box.of(name, tuple(weights[name].shape)) for name in own}
    with torch.no_grad():
        for name, tensor in read_pretrained_vlm(model, where, held).items():
            weights[name].copy_(tensor)
    read_connectors(folder, model.language, {name: model[name] for name in generators})
    use_row_attention(model)
    units = units_of_pretrained(whole, where, tokenizer)
    chat = chat_tokenizer(tokenizer, processed=bool(units), ends=generation_ends(where))
    encoding = Encoding(chat=chat, units=units, targets=_targets(model, drawn))
    return ExportedModel(model, tokenizer, encoding)


def _load_adapter(folder: Path) -> ExportedModel:
    """Load an export of an adapter alone, on the pretrained model that it names."""
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{str(folder)!r} is an adapter that names no model to lie on; export the merged model (model.lora.merge)"
        )
    return _load_pretrained_vlm(folder, base)


def _load_pretrained_vlm(folder: Path, base: str | None = None) -> ExportedModel:
    """Load an exported pretrained VLM. base: the model that the folder is an adapter of."""
    where = str(folder)
    whole = PretrainedModel.of(load_pretrained_config(base or where, where), where)
    tokenizer = load_tokenizer(where)
    with without_bars(folder):
        model = PretrainedGeneration.open(base or where, whole, folder if base else None)
    units = units_of_pretrained(whole, where, tokenizer)
    ends = generation_ends(where) or generation_ends(base)
    chat = chat_tokenizer(tokenizer, processed=bool(units), ends=ends)
    encoding = Encoding(chat=chat, units=units)
    return ExportedModel(model, tokenizer, encoding)


def _read_conversation(folder: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return encoder → the text that stands for its media in a prompt; generator → its marker and start text."""
    try:
        content = json.loads((folder / CONVERSATION).read_text(encoding="utf-8"))
        markers = {name: entry["marker"] for name, entry in content["encoders"].items()}
        drawn = {
            name: {key: entry[key] for key in ("marker", "start")}
            for name, entry in content.get("generators", {}).items()
        }
        texts = [*markers.values(), *(text for entry in drawn.values() for text in entry.values())]
        if all(isinstance(text, str) for text in texts):
            return markers, drawn
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"{str(folder)!r} is not an export: it has no readable {CONVERSATION}; make one with `dilatant export RUN`"
    )


def _use_template(folder: Path, template: str) -> None:
    """Write the training chat template wherever the tokenizer and the processor in a folder look for one."""
    (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        file = folder / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if "chat_template" in settings:
            _write_json(file, {**settings, "chat_template": template})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
