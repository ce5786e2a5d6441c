"""Media proof: check on a small copy of a multimodal model that it trains as in transformers.

The copy has random weights, and its media come from the family's own processor. The family's own forward computes loss
and all gradients with each sample alone; our units must match them with all samples in one packed row, as whole units
and with a stage for every layer.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, cycle
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import nn
from transformers.utils import is_torchvision_available

from dilatant.config.errors import UserError, as_user_error, reason_of
from dilatant.config.model import LANGUAGE, LoraConfig
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import concatenate_inputs
from dilatant.data.media_units.processed_clip_unit import ProcessedClipUnit
from dilatant.data.sample import EncodedSample, Frames, Media, MediaKind, MediaMarkup, MediaUnit
from dilatant.models.core.materialize import seeded
from dilatant.models.core.running_statistics import has_statistics
from dilatant.models.encoders.narrow_encoder import default_processor, forward_of, known_to, patch_of, takes_texts_alone
from dilatant.models.encoders.tower import ClipOptions, Tower
from dilatant.models.families.families import Family, MediaAttention
from dilatant.models.families.generic import refusal
from dilatant.models.families.media_units import named_tokens
from dilatant.models.families.pretrained import PretrainedModel, composite_of
from dilatant.models.families.shrink import narrow_json, special_ids
from dilatant.models.families.training_proof import (
    Result,
    differ,
    loss_in_transformers,
    loss_of,
    proof_path,
    read_proof,
    store_proof,
    with_gradients,
)
from dilatant.models.multimodal import MultimodalModel

SAMPLES = ((5, (8.6, 12.1), 3, (10.7, 6.4), 6), (9,), (4, (6.2, 9.7)), ((9.3, 9.3), 2, (7.1, 11.2), 7), (3,))
"""The parts of each sample: numbers of text tokens; and media: height and width of an image in patches, or two numbers
whose product is the length of a sound in hundredths of a second. In a row, media meet media, text and its ends."""


@dataclass(frozen=True, slots=True)
class MediaProof:
    """Results of training a small copy under `mask`. Each is the first problem (None for none): of packed rows, of
    samples alone in whole units, and of a stage for every layer (also why an encoder is not cut)."""

    mask: MediaAttention
    packed: str | None
    alone: str | None
    cut: str | None
    one_unit: str | None = "not needed"
    """The first problem of samples alone in one unit, which is tried if parts are wrong."""
    clips: str | None = None
    """The first problem of clips, alone in whole units, packed and cut; None if there is none, or none are read."""

    @property
    def is_wrong(self) -> bool:
        """True if neither parts nor one unit train as in transformers."""
        return None not in (self.alone, self.one_unit)


def prove_media(model: MultimodalModel, attend: Callable[[MultimodalModel], None]) -> str | None:
    """Set the first mask of `masks_of` under which the generic family of `model` trains as in transformers. attend:
    sets the attention of a model. Return the reason why samples cannot share a row, or None, and store in the encoders'
    `uncut` the reason why they cannot be cut. Raises UserError if single samples in whole units would train
    otherwise."""
    assert model.whole is not None
    if model.whole.family.one_unit is not None:
        return None
    proof = proof_of(model.whole, attend)
    if proof.alone is not None:
        raise _refused(model.whole, proof)
    model.whole = replace(model.whole, family=replace(model.whole.family, media_attention=proof.mask))
    model.media_attention = proof.mask
    for encoder in model.encoders:
        model[encoder].uncut = proof.cut
    return proof.packed


def proof_of(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> MediaProof:
    """Prove a pretrained multimodal model on its small copy, or read the proof of an earlier run. A family that is
    listed is proven under its own mask."""
    reads = (is_torchvision_available(), whole.family.clips)
    of_media = [_narrow_settings(whole), *whole.family.towers]
    path = proof_path(["media", SAMPLES, *of_media, whole.attn_implementation, reads])
    proof = read_proof(path, MediaProof) or _first_right(whole, attend)
    # A wrong proof of several media decides which are read; a model that opens no way is tried again.
    if not proof.is_wrong or len(whole.family.towers) > 1:
        store_proof(path, proof)
    return proof


def _first_right(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> MediaProof:
    """Return the proof with the first mask under which samples alone train correctly, or with the causal one."""
    found: list[MediaProof] = []
    for mask in masks_of(whole):
        own = replace(whole, family=replace(whole.family, media_attention=mask))
        try:
            with seeded(0, "media proof"), torch.enable_grad():
                small = small_copy(own)
                problems = _prove(small, attend, samples_with_media(small))
                found.append(replace(MediaProof(mask, *problems), clips=_prove_clips(small, attend, problems)))
        except Exception as error:
            why = reason_of(error, "a small copy of it does not run")
            found.append(MediaProof(mask, why, why, why))
        if found[-1].alone is None:
            return found[-1]
    shown = next((each for each in found if each.mask == "causal"), found[0])
    if not whole.family.narrow:
        return replace(shown, one_unit="not tried")
    problem = _prove_one_unit(whole, attend)
    clips = _prove_one_unit(whole, attend, clips=True) if problem is None and proves_clips(whole.family) else None
    return replace(shown, one_unit=problem, clips=clips)


def _prove_one_unit(
    whole: PretrainedModel, attend: Callable[[MultimodalModel], None], clips: bool = False
) -> str | None:
    """Return the problem of samples that run alone through the whole model as one unit; None for no problem."""
    try:
        with seeded(0, "media proof"), torch.enable_grad():
            small = small_copy(whole.as_one_unit("its parts train otherwise"))
            model = drawn(small, attend)
            samples = samples_with_media(small, clips)
            loss = loss_of(model.units, samples, [(number,) for number in range(len(samples))], is_cut=False)
            found = with_gradients(loss, trained_parameters(model).values())
            return differ(_of_transformers(model, small, samples), found)[0]
    except Exception as error:
        return reason_of(error, "it does not run as one unit")


def in_proven_units(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> PretrainedModel:
    """Return a pretrained model in units of its parts, without clips if they would train otherwise than in
    transformers. It is one unit if only the whole would train alike. Raises UserError if both would train otherwise."""
    if not whole.family.narrow:
        return whole
    whole = of_proven_media(whole, attend)
    proof = proof_of(whole, attend)
    if proof.is_wrong:
        raise _refused(whole, proof)
    if proof.clips is not None:
        warnings.warn(
            f"clips are not read: {whole.config.model_type} would train otherwise on them ({proof.clips})", stacklevel=2
        )
        towers = {name: replace(tower, clips=None) for name, tower in whole.family.towers.items()}
        whole = replace(whole, family=replace(whole.family, towers=towers))
    return whole if proof.alone is None else whole.as_one_unit(proof.alone)


def of_proven_media(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> PretrainedModel:
    """Return a pretrained model with the encoders of all media or, if it would train otherwise than in transformers,
    without those of one kind if it trains right without them."""
    proof = proof_of(whole, attend)
    if proof.is_wrong and len(whole.family.towers) > 1:
        for name in reversed([*whole.family.towers]):
            fewer = whole.without(name, proof.alone or "")
            if not proof_of(fewer, attend).is_wrong:
                return fewer
    return whole


def _refused(whole: PretrainedModel, proof: MediaProof) -> UserError:
    why = f"its small copy does not train as in transformers ({proof.alone})"
    return refusal(whole.config, "model", why)


def proves_clips(family: Family) -> bool:
    """Return True if clips of a family are proven: its own processor prepares them, and can do so here."""
    tower = family.towers.get("vision")
    return tower is not None and tower.clips == "processed" and is_torchvision_available()


def masks_of(whole: PretrainedModel) -> tuple[MediaAttention, ...]:
    """Return the masks among the tokens of a sample that are tried, in this order. Masks that the family's forward
    makes from keywords are first: without the keywords its mask is causal."""
    if not whole.family.narrow:
        return (whole.family.media_attention,)
    masks: list[MediaAttention] = ["causal", "bidirectional"]
    if "token_type_ids" in known_to(forward_of(whole.config)):
        masks = ["bidirectional", "prefix", "causal"]
    if getattr(whole.config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        masks.insert(0, "in_windows")
    return tuple(masks)


def _narrow_settings(whole: PretrainedModel) -> str:
    return whole.family.narrow or narrow_json(whole.config, whole.family.spatial)


def small_copy(whole: PretrainedModel, lora: LoraConfig | None = None) -> PretrainedModel:
    """Return the small copy of a pretrained model: the same family with a narrow config, in the same units."""
    config = type(whole.config).from_dict(json.loads(_narrow_settings(whole)))
    small = PretrainedModel.of(config, "model", attn_implementation=whole.attn_implementation, lora=lora)
    as_in = whole.family
    own = replace(
        small.family,
        towers={name: tower for name, tower in small.family.towers.items() if name in as_in.towers},
        spatial=as_in.spatial,
        media_attention=as_in.media_attention,
        unread=as_in.unread,
        one_unit=as_in.one_unit,
    )
    return replace(small, family=own)


def drawn(whole: Any, attend: Callable[[MultimodalModel], None]) -> MultimodalModel:
    """Return the units of a small copy, or of a text model with a small config, with random weights. No weight has a
    special value such as 0 or 1."""
    model = MultimodalModel({}, whole, seed=0)
    with torch.no_grad():
        statistics = (module.buffers(recurse=False) for module in model.modules() if has_statistics(module))
        for tensor in (*model.parameters(), *chain.from_iterable(statistics)):
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn_like(tensor))
    attend(model)
    return model.eval()


def _prove_clips(
    small: PretrainedModel, attend: Callable[[MultimodalModel], None], of_images: Sequence[str | None]
) -> str | None:
    """Return the first problem of samples with clips that those without have not (`of_images`)."""
    if of_images[1] is not None or not proves_clips(small.family):
        return None
    try:
        found = _prove(small, attend, samples_with_media(small, clips=True))
        return next((clip for clip, image in zip(found, of_images, strict=True) if image is None and clip), None)
    except Exception as error:
        return reason_of(error, "clips do not run")


def _prove(
    whole: PretrainedModel, attend: Callable[[MultimodalModel], None], samples: list[EncodedSample]
) -> tuple[str | None, ...]:
    """Return the problems of packed rows, of each sample alone, and of a stage for every layer; None for no problem."""
    model = drawn(whole, attend)
    wanted = _of_transformers(model, whole, samples)
    everything = tuple(range(len(samples)))
    alone = [(number,) for number in everything]
    packs = model.language.packs_rows
    problems: list[str | None] = []
    for what, rows, is_cut in (
        ("packed rows do not run", [everything], False),
        ("its parts do not run", alone, False),
        ("stages of one block do not run", [everything], True),
    ):
        try:
            rows = rows if packs and not (is_cut and problems[0]) else alone
            loss = loss_of(model.units, samples, rows, is_cut)
            problems.append(differ(wanted, with_gradients(loss, trained_parameters(model).values()))[0])
        except Exception as error:
            problems.append(reason_of(error, what))
    uncut = (model[encoder].uncut for encoder in model.encoders)
    problems[-1] = next((why for why in uncut if why is not None), problems[-1])
    return tuple(problems)


def samples_with_media(whole: PretrainedModel, clips: bool = False) -> list[EncodedSample]:
    """Make the samples of `SAMPLES` for a small copy. Their media are of each encoder in turn or, with `clips`, clips
    and images in turn (clips alone if the family's forward does not take both)."""
    units = {name: _media_unit(whole, name, tower) for name, tower in whole.family.towers.items()}
    turns = cycle(units.values())
    if clips:
        options = ClipOptions({}, {}, MediaMarkup(""), dict.fromkeys(named_tokens(whole.config), "a word"))
        tower, image = whole.family.towers["vision"], units["vision"]
        clip = tower.clip_unit(whole.host("vision"), image, options)
        # A forward that gives both the same token takes one of them.
        turns = cycle((clip,) if getattr(tower, "token_of_clips", None) == tower.token else (clip, image))
    borders = {name: borders_of(whole, unit.kind) for name, unit in units.items()}
    noise = np.random.default_rng(0)
    settings = whole.config.to_dict()
    plain = np.setdiff1d(np.arange(100), [*special_ids(settings)])
    samples = []
    numbers = [part for parts in SAMPLES for part in parts if isinstance(part, int) and len(parts) > 1]
    for number, parts in enumerate(SAMPLES):
        if not takes_texts_alone(whole.config) and not any(isinstance(part, tuple) for part in parts):
            continue
        ids: list[int] = []
        sizes = dict.fromkeys(units, 0)
        items: dict[str, list[dict[str, Any]]] = {name: [] for name in units}
        for part in parts:
            if isinstance(part, int):
                ids += noise.choice(plain, part).tolist()
                if part == max(numbers):  # once in all samples
                    ids += embedded_ids(settings)
                continue
            unit = next(turns)
            media = _noise_of(unit.kind, part, patch_of(whole.config), noise)
            opens, closes = borders[unit.name]
            size = media_size(media)
            items[unit.name].append(unit.process(media, size))
            # Texts between the rows of a clip are one token each.
            groups = [each for _, each, _ in unit.pieces(size)] if isinstance(unit, ProcessedClipUnit) else []
            for rows in groups or [unit.merged_tokens(size)]:
                ids += [*opens, *plain[: len(groups) > 1], *[unit.placeholder_id] * rows, *closes]
            sizes[unit.name] += unit.encoder_tokens(size)
        is_text = ~np.isin(ids, [unit.placeholder_id for unit in units.values()])
        labels = np.where(is_text, ids, -100)
        labels[: np.flatnonzero(~is_text)[-1] if number == 0 and not is_text.all() else 1] = -100  # a prompt with media
        inputs = {
            name: {
                key: concatenate_inputs([each[key] for each in own if key in each])
                for key in dict.fromkeys(chain(*own))
            }
            for name, own in items.items()
            if own
        }
        sizes[LANGUAGE] = len(ids)
        samples.append(EncodedSample(f"{number}", np.array(ids), labels, inputs, sizes, number + 1))
    return samples


def _media_unit(whole: PretrainedModel, name: str, tower: Tower) -> MediaUnit:
    """Return the media unit of a tower with the settings of the family's processor, if it needs any."""
    try:
        return tower.media_unit(whole.host(name), None, MediaMarkup(""))
    except UserError:
        settings = default_processor(whole.config).settings
        return tower.media_unit(whole.host(name), settings, MediaMarkup(""))


def borders_of(whole: PretrainedModel, kind: MediaKind) -> tuple[list[int], list[int]]:
    """Return the ids before and behind media, if the family's positions depend on them."""
    model = whole.composite()
    finds = [getattr(type(each), "get_rope_index", None) for each in (model, model.base_model)]
    if not any(each and "start_token_id" in inspect.getsource(inspect.unwrap(each)) for each in finds):
        return [], []
    begin, end = (
        getattr(whole.config, f"{'vision' if kind == 'image' else kind}_{each}_token_id", None)
        for each in ("start", "end")
    )
    return ([], []) if begin is None else ([begin], [end or 0])


def embedded_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the token ids that a multimodal config names itself, but that no row of an encoder replaces. A family may
    have embeddings of its own for them."""
    found: list[int] = []
    for key, value in settings.items():
        if key.endswith(("token_id", "token_ids")) and not key.startswith(_OF_MEDIA) and value is not None:
            found += value if isinstance(value, list) else [value]
    return sorted({*found})


_OF_MEDIA = ("image", "video", "audio", "vision", "pad", "bo", "eo")
"""Prefixes of the names of placeholders, and of the ids around media and texts."""


def _noise_of(kind: MediaKind, shape: tuple[float, float], patch: int, noise: np.random.Generator) -> Media:
    """Return an image, a sound or a clip of noise (see `SAMPLES` for its shape)."""
    file = BytesIO()
    if kind == "video":
        return Media(kind, Frames(tuple(_noise_of("image", shape, patch, noise) for _ in range(4))), "noise")
    if kind == "image":
        height, width = (round(each * patch) for each in shape)
        Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "png")
    else:
        wave = noise.normal(0, 0.1, round(math.prod(shape) * 160)).astype(np.float32)
        soundfile.write(file, wave, 16_000, format="WAV")
    return Media(kind, file.getvalue(), "noise")


def _of_transformers(model: MultimodalModel, whole: PretrainedModel, samples: list[EncodedSample]) -> Result:
    composite = composite_of(model.weights_of_whole(), whole).eval()
    named = dict(composite.named_parameters())
    weights = {weight.name: (unit, weight) for unit, weight in model.weights_of_whole()}
    wanted = [named[whole.key_of(*weights[name])] for name in trained_parameters(model)]
    with as_user_error("transformers' own forward of a small copy does not run"):
        return with_gradients(loss_in_transformers(composite, whole, samples), wanted)


def trained_parameters(model: MultimodalModel) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by logical name."""
    named = (entry for unit in model.units.values() for entry in unit.named_logical_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}
