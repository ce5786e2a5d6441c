"""Media proof: check on a small copy of a generic family (see `generic`) that it trains as in transformers.

The copy has random weights, and its images come from the family's own processor. The family's own forward computes loss
and all gradients with each sample alone; our units must match them with all samples in one packed row, as whole units
and with a stage for every layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dilatant.config.errors import UserError, one_line
from dilatant.config.files.durable import write_durably
from dilatant.config.model import LANGUAGE
from dilatant.data.media.pixels import concatenate_inputs
from dilatant.data.sample import EncodedSample, MediaMarkup, MediaSize
from dilatant.models.core.materialize import seeded
from dilatant.models.encoders.narrow_encoder import patch_of
from dilatant.models.families.families import MediaAttention
from dilatant.models.families.pretrained import PretrainedModel, composite_of
from dilatant.models.families.pretrained_answers import composite_inputs
from dilatant.models.families.shrink import special_ids
from dilatant.models.families.training_proof import Result, differ, loss_of, proof_path, with_gradients
from dilatant.models.multimodal import MultimodalModel

SAMPLES = ((5, (8.6, 12.1), 3, (10.7, 6.4), 6), (9,), ((9.3, 9.3), 7))
"""The parts of each sample: numbers of text tokens, and heights and widths of images in patches."""


def prove_media(model: MultimodalModel, attend: Callable[[MultimodalModel], None]) -> str | None:
    """Set the first mask of `MASKS` under which the generic family of `model` trains as in transformers. attend: sets
    the attention of a model. Return the reason why samples cannot share a row, or None, and store in the encoder's
    `uncut` the reason why it cannot be cut. Raises UserError if single samples in whole units would train otherwise."""
    assert model.whole is not None
    assert model.whole.family.generic is not None
    path = proof_path(["media", model.whole.family.generic.narrow, model.whole.attn_implementation])
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = _first_right(model.whole, attend)
        with suppress(OSError):  # without a writable cache, the proof is not stored
            path.parent.mkdir(parents=True, exist_ok=True)
            if found[2] is None:
                write_durably(path, json.dumps(found))
    mask, packed, alone, cut = found
    if alone is not None:
        raise UserError(
            f"model: {model.whole.config.model_type!r} is a family that was read from its model, and its small copy "
            f"does not train as in transformers ({alone}); name its encoder and its language model under "
            "model.encoders and model.language_model"
        )
    model.whole = replace(model.whole, family=replace(model.whole.family, media_attention=mask))
    model.media_attention = mask
    for encoder in model.encoders:
        model[encoder].uncut = cut
    return packed


def _first_right(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> tuple[Any, ...]:
    """Return the first mask under which samples alone train correctly, or the first mask; and the problems with it."""
    found: list[tuple[Any, ...]] = []
    for mask in MASKS:
        own = replace(whole, family=replace(whole.family, media_attention=mask))
        try:
            with seeded(0, "media proof"), torch.enable_grad():
                found.append((mask, *_prove(_narrow(own), attend)))
        except Exception as error:
            found.append((mask, *(one_line(error),) * 3))
        if found[-1][2] is None:
            return found[-1]
    return found[0]


MASKS: tuple[MediaAttention, ...] = ("causal", "bidirectional")
"""Masks among the tokens of an image, in the order in which they are tried."""


def _narrow(whole: PretrainedModel) -> PretrainedModel:
    """Return the small copy of a pretrained model: the same family with a narrow config."""
    assert whole.family.generic is not None
    config = type(whole.config).from_dict(json.loads(whole.family.generic.narrow))
    small = PretrainedModel.of(config, "model", attn_implementation=whole.attn_implementation)
    return replace(small, family=replace(small.family, media_attention=whole.family.media_attention))


def _prove(whole: PretrainedModel, attend: Callable[[MultimodalModel], None]) -> tuple[str | None, ...]:
    """Return the problems of packed rows, of each sample alone, and of a stage for every layer; None for no problem."""
    model = MultimodalModel({}, whole, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    attend(model)
    model.eval()
    samples = _samples(model, whole)
    wanted = _of_transformers(model, whole, samples)
    everything = tuple(range(len(samples)))
    alone = [(number,) for number in everything]
    packs = model.language.packs_rows
    problems: list[str | None] = []
    for rows, is_cut in (([everything], False), (alone, False), ([everything], True)):
        try:
            rows = rows if packs and not (is_cut and problems[0]) else alone
            loss = loss_of(model.units, samples, rows, is_cut)
            problems.append(differ(wanted, with_gradients(loss, _trained(model).values()))[0])
        except Exception as error:
            problems.append(one_line(error))
    return tuple(problems)


def _samples(model: MultimodalModel, whole: PretrainedModel) -> list[EncodedSample]:
    (name,) = model.encoders
    unit: Any = whole.family.towers[name].media_unit(whole.host(name), None, MediaMarkup("<image>"))
    noise = np.random.default_rng(0)
    plain = np.setdiff1d(np.arange(100), [*special_ids(whole.config.to_dict())])
    samples = []
    for number, parts in enumerate(SAMPLES):
        ids: list[int] = []
        items, tokens = [], 0
        for part in parts:
            if isinstance(part, int):
                ids += noise.choice(plain, part).tolist()
                continue
            height, width = (round(each * patch_of(whole.config)) for each in part)
            items.append(unit.see(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)))
            size = MediaSize(width, height)
            ids += [unit.placeholder_id] * unit.merged_tokens(size)
            tokens += unit.encoder_tokens(size)
        labels = np.where(np.array(ids) == unit.placeholder_id, -100, ids)
        media = (
            {name: {key: concatenate_inputs([each[key] for each in items]) for key in items[0]}}
            if items
            else {}
        )
        sizes = {LANGUAGE: len(ids), name: tokens}
        samples.append(
            EncodedSample(
                f"{number}", np.array(ids), np.concatenate([[-100], labels[1:]]), media, sizes, number + 1
            )
        )
    return samples


def _of_transformers(model: MultimodalModel, whole: PretrainedModel, samples: list[EncodedSample]) -> Result:
    composite = composite_of(model.weights_of_whole(), whole).eval()
    named = dict(composite.named_parameters())
    loss = torch.zeros(())
    for sample in samples:
        ids, labels = torch.as_tensor(sample.input_ids)[None], torch.as_tensor(sample.labels)[None]
        media = {
            name: {key: torch.as_tensor(np.asarray(each)) for key, each in inputs.items()}
            for name, inputs in sample.media.items()
        }
        logits = composite(**composite_inputs(whole, ids, media, torch.float32), use_cache=False).logits
        loss = loss + functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    weights = {weight.name: (unit, weight) for unit, weight in model.weights_of_whole()}
    wanted = [named[whole.key_of(*weights[name])] for name in _trained(model)]
    return with_gradients(loss / sum(sample.target_tokens for sample in samples), wanted)


def _trained(model: MultimodalModel) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by logical name."""
    named = (entry for unit in model.units.values() for entry in unit.named_logical_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}
