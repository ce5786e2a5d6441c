"""Export of the trained model: every unit in the Hugging Face layout, and how to talk to it.

`MultimodalModel.save_pretrained` writes the units. Beside them are each encoder's `preprocessor_config.json`, the chat
template and `conversation.json` with the markers of media. `dilatant generate` needs nothing else.
Only a new folder, an empty one or an earlier export is ever replaced, and never in part.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from dilatant.config import ModelConfig, UserError
from dilatant.config.files.durable import sync, sync_tree, write_durably
from dilatant.config.files.exports import CONVERSATION, read_object, write_object
from dilatant.config.model import LANGUAGE
from dilatant.data.media_units.image_target import ImageTarget, image_target
from dilatant.data.sample import MediaUnit
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import generation_ends, load_tokenizer
from dilatant.hf.adapter_files import ADAPTERS, adapted_models, adapter_settings, write_adapter
from dilatant.hf.dcp_export import Moments, convert_to_dcp
from dilatant.hf.dcp_files import METADATA
from dilatant.hf.pretrained_export import copy_companion_files, write_pretrained
from dilatant.hf.stored_weights import read_pretrained_vlm
from dilatant.models.core.materialize import allocate
from dilatant.models.families.media_units import units_of_encoder, units_of_pretrained
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_answers import PretrainedGeneration
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.models.saving import load_generators, read_connectors, save_generators
from dilatant.models.sources import load_pretrained_config, without_bars
from dilatant.plan.boxes import Box

GENERATORS = "generators.json"
"""File beside a pretrained VLM with what `save_generators` returned for its generators."""
_PROCESSORS = {
    "image": ("preprocessor_config.json", "image_processor"),
    "audio": ("preprocessor_config.json", "feature_extractor"),
    "video": ("video_preprocessor_config.json", "video_processor"),
}
"""Kind of media → the file of its processor's settings, and their key in `processor_config.json`."""
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
    dcp: bool = False,
    card: str = "",
    moments: Moments | None = None,
) -> None:
    """Write the model into `folder`; an earlier export there is replaced once the new one is complete.

    run: the run folder, which is never replaced. source: the id or folder of a pretrained VLM, None if it began from
    scratch. config: the model's section; without it, adapters are not written. dcp: write the weights as checkpoints of
    torch (see `convert_to_dcp`), with `moments`, if any. card: the model card. Raises UserError if `folder` holds
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
                        write_object(writing / GENERATORS, drawn)
                for adapted in adapted_models(model, config) if config is not None else ():
                    assert config is not None
                    assert config.lora is not None
                    place = writing / ADAPTERS / adapted.folder if config.lora.merge else writing
                    write_adapter(adapted, config.lora, place)
                if dcp:
                    convert_to_dcp(model, writing, moments)
            for unit in encoding.units:
                place = writing if model.whole else writing / unit.name
                _save_settings(unit, place, config is not None and config.processor is not None)
            write_object(
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
            if card:
                (writing / "README.md").write_text(card, encoding="utf-8")
            _use_template(writing if model.whole else writing / LANGUAGE, encoding.chat.template.text)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the export to {str(folder)!r} could not be written: {error}") from None


def _save_settings(unit: MediaUnit, place: Path, is_requested: bool) -> None:
    """Write what a media unit changes in the settings of its processor: into the processor's own file, and also into
    `processor_config.json` if that has such settings, where transformers reads them. There is one file for all units of
    a pretrained VLM."""
    name, part = _PROCESSORS[unit.kind]
    together = place / "processor_config.json"
    content = read_object(together) if together.is_file() else {}
    before = read_object(place / name) if (place / name).is_file() else content.get(part) or {}
    changes = unit.saved_settings(before, is_requested)
    if not changes or (unit.kind == "video" and {**before, **changes} == before):
        return
    write_object(place / name, {**before, **changes})
    if isinstance(content.get(part), dict):
        write_object(together, {**content, part: {**content[part], **changes}})


def load_exported(folder: Path) -> ExportedModel:
    """Read what `export_model` wrote. Raises UserError."""
    markers, drawn = _read_conversation(folder)
    if any((place / METADATA).is_file() for place in (folder, folder / LANGUAGE)):
        raise UserError(
            f"{str(folder)!r} holds its weights as a checkpoint of torch, for training; export the run again without "
            "--format dcp to ask the model"
        )
    if (folder / "config.json").is_file():
        return _load_pretrained_vlm(folder, drawn)
    if not (folder / "adapter_config.json").is_file():
        return _load_parts(folder, markers, drawn)
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{str(folder)!r} is an adapter that names no model to lie on; export the merged model (model.lora.merge)"
        )
    return _load_pretrained_vlm(folder, {}, base)


def _load_parts(folder: Path, markers: Mapping[str, str], drawn: Mapping[str, Mapping[str, str]]) -> ExportedModel:
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
        units += units_of_encoder(model[name], model.encoders[name].merge, **common)
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
            pixels=cast(Diffusion, model[name].model).targets.pixels,
        )
        for name, entry in drawn.items()
    )


def _load_pretrained_vlm(
    folder: Path, drawn: Mapping[str, Mapping[str, str]], base: str | None = None
) -> ExportedModel:
    """Load an exported pretrained VLM. base: the model that the folder is an adapter of."""
    where = str(folder)
    tokenizer = load_tokenizer(where)
    whole = PretrainedModel.of(load_pretrained_config(base or where, where), where)
    model: MultimodalModel | PretrainedGeneration
    targets: tuple[ImageTarget, ...] = ()
    if drawn:
        model = _vlm_with_generators(folder, whole, tokenizer, drawn)
        targets = _targets(model, drawn)
    else:
        with without_bars(folder):
            model = PretrainedGeneration.open(base or where, whole, folder if base else None)
    units = units_of_pretrained(whole, where, tokenizer)
    ends = generation_ends(where) or generation_ends(base)
    chat = chat_tokenizer(tokenizer, processed=bool(units), ends=ends)
    return ExportedModel(model, tokenizer, Encoding(chat=chat, units=units, targets=targets))


def _vlm_with_generators(
    folder: Path, whole: PretrainedModel, tokenizer: Any, drawn: Mapping[str, Mapping[str, str]]
) -> MultimodalModel:
    """Load a pretrained VLM with generators into units of our own, as transformers' class does not know generators."""
    try:
        entries = read_object(folder / GENERATORS)
        if entries.keys() != drawn.keys():
            raise ValueError
        with without_bars(folder):
            generators = load_generators(folder, entries, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{str(folder)!r} is not a whole export: {GENERATORS} does not fit {CONVERSATION}; make it again with "
            "`dilatant export RUN`"
        ) from None
    model = MultimodalModel({}, whole, tokenizer=tokenizer, seed=0, device="meta", generators=generators)
    weights = allocate(model.units)
    held = {
        weight.canonical: Box.of(weight.canonical, tuple(weights[weight.canonical].shape))
        for _, weight in model.weights_of_whole()
    }
    with torch.no_grad():
        for name, tensor in read_pretrained_vlm(model, str(folder), held).items():
            weights[name].copy_(tensor)
    read_connectors(folder, model.language, {name: model[name] for name in generators})
    use_row_attention(model)
    return model


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
    """Write the training chat template wherever the tokenizer and the processor in a folder look for one, and remove
    others (`tool_use`), which they would prefer for conversations with tools."""
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        file = folder / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if "chat_template" in settings:
            write_object(file, {**settings, "chat_template": template})


FILES = "files.json"
"""File that lists what an export wrote, so that the next one knows what it may replace."""

_FORMAT = "dilatant export 1"
_TOKEN = "[0-9a-f]" * 8


def check_target(folder: Path, run: Path | None = None) -> None:
    """Raise UserError unless `folder` may become an export: it is absent, empty, or an earlier export and no more.

    run: the run folder that is exported; neither it nor a folder above it is replaced.
    """
    try:
        problem = _problem(folder, run)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    if problem is not None:
        raise UserError(
            f"the export cannot go to {str(folder)!r}: {problem}; name a new folder, an empty one or an earlier export"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which replaces it when the block ends without an error.

    The old content goes only then: a crash at any moment leaves the old content or the new, under its name or, between
    two renames, beside it, where the next `replacing` finds it. Raises OSError.
    """
    place = folder.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place)
    token = secrets.token_hex(4)
    writing, old = _beside(place, "writing", token), _beside(place, "old", token)
    writing.mkdir()
    try:
        yield writing
        write_durably(writing / FILES, json.dumps({"format": _FORMAT, "files": sorted(_files(writing))}, indent=1))
        sync_tree(writing)
        had = place.exists()
        if had:
            place.rename(old)
        try:
            writing.rename(place)
        except OSError:
            if had:
                old.rename(place)
            raise
        sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _problem(folder: Path, run: Path | None) -> str | None:
    place, here = folder.resolve(), Path.cwd().resolve()
    if folder.is_symlink():
        return f"it is a link to {str(place)!r}"
    if place in (here, *here.parents):
        return "the command runs in it"
    if run is not None:
        run = run.resolve()
        if place in (run, *run.parents):
            return "it holds the run itself"
        if place.is_relative_to(run / "checkpoints"):
            return "it is among the run's checkpoints"
    if not place.exists():
        return None
    if not place.is_dir():
        return "it is a file"
    found = _files(place)
    if not found and not any(place.iterdir()):
        return None
    foreign = sorted(found - _listed(place))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        return f"no export wrote {foreign[0]!r}{more} there"
    return None


def _files(folder: Path) -> set[str]:
    """Return the relative paths of everything below `folder`: files, links, and empty folders."""
    found = set()
    for parent, folders, files in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found |= {str(inside / name) for name in [*files, *links]}
        if not files and not folders and inside != Path("."):
            found.add(str(inside))
    return found


def _listed(folder: Path) -> set[str]:
    """Return the files that an earlier export lists, without links; none if it has no readable list."""
    try:
        content = json.loads((folder / FILES).read_bytes())
        if content["format"] != _FORMAT:
            return set()
        return {FILES, *(name for name in content["files"] if not (folder / name).is_symlink())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _recover(place: Path) -> None:
    """Clean up after a crash: rename the old content back, delete half-written folders."""
    for path in place.parent.glob(f".{glob.escape(place.name)}.old-{_TOKEN}"):
        if place.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(place)
    for path in place.parent.glob(f".{glob.escape(place.name)}.writing-{_TOKEN}"):
        shutil.rmtree(path, ignore_errors=True)


def _beside(place: Path, what: str, token: str) -> Path:
    return place.with_name(f".{place.name}.{what}-{token}")
