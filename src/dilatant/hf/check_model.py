"""Check of a model: prove on a small copy how a model can be trained here, and that it is exported unchanged.

The best of four rungs that is proven counts. 3: each encoder is cut between its blocks, and samples share packed rows.
2: packed rows, but a unit is one stage. 1: a sample is a row of its own. 0: the family's own forward is one unit, a
sample a row. A model on no rung does not open whole.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dilatant.config.errors import reason_of
from dilatant.config.model import LANGUAGE, LoraConfig
from dilatant.hf.pretrained_export import write_pretrained
from dilatant.models.core.materialize import seeded
from dilatant.models.encoders.narrow_encoder import auto_class
from dilatant.models.families.generic import opens_whole
from dilatant.models.families.media_proof import (
    drawn,
    of_proven_media,
    proof_of,
    proves_clips,
    samples_with_media,
    small_copy,
)
from dilatant.models.families.pretrained import PretrainedModel, composite_of
from dilatant.models.families.training_proof import logits_of, loss_in_transformers, loss_of
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import attend_by_default, choose_attention
from dilatant.models.sources import errors_alone, load_language_model, without_bars
from dilatant.runtime.rank_trial import Trial, trial_of

LARGEST_DIFFERENCE = 1e-4
"""Largest difference of logits, relative to the largest, that passes as fp32 rounding; a wrong weight changes parts."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Store what was found in a model, and what its small copy proves.

    family: its `model_type`. found: part → where it is. rung: the best proven rung, or None. refusals: rung → why it is
    not reached. proven: what else works, or why not.
    """

    family: str
    found: Mapping[str, str]
    rung: int | None = None
    refusals: Mapping[int, str] = field(default_factory=dict)
    proven: Mapping[str, str] = field(default_factory=dict)


YES = "yes"


def check_config(config: Any, where: str) -> ModelCheck:
    """Check a model with this config (of transformers)."""
    with errors_alone(), without_bars("."), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _check(config, where)
        except Exception as error:
            return ModelCheck(config.model_type, {}, None, {0: reason_of(error, "it does not open")})


def _check(config: Any, where: str) -> ModelCheck:
    refusals: dict[int, str] = {}
    proven: dict[str, str] = {}
    whole, found = None, {"decoder": config.model_type}
    if opens_whole(config):
        whole = of_proven_media(PretrainedModel.of(config, where), attend_by_default)
        proof = proof_of(whole, attend_by_default)
        found = _found(whole, proof.clips)
        reasons = {1: proof.alone, 2: proof.packed, 3: proof.cut}
        refusals = {rung: why for rung, why in reasons.items() if why is not None}
        if proof.alone is not None:
            if proof.is_wrong:
                return ModelCheck(config.model_type, found, None, refusals)
            whole = whole.as_one_unit(proof.alone)
        proven = {"export": _tried(_export, whole), "LoRA": _tried(_lora, whole)}
    model = MultimodalModel({}, whole or load_language_model(config, where), device="meta")
    choose_attention(model)
    language = model.language
    if not language.packs_rows:
        of_text = language.proof and language.proof.packed
        refusals.setdefault(2, of_text or "samples of a packed row would reach each other")
    if language.uncut is not None:
        refusals.setdefault(3, language.uncut)
    trial = trial_of(model)
    refused = language.without_plans if language.row_attention is None else trial.context
    proven |= {"tp": _shared_by_ranks(trial), "cp": YES if refused is None else f"no: {refused}"}
    return ModelCheck(config.model_type, found, min((3, *(rung - 1 for rung in refusals))), refusals, proven)


def _found(whole: PretrainedModel, clips: str | None) -> dict[str, str]:
    """Return part → where it is. clips: the problem of clips, if any."""
    family, config = whole.family, whole.config
    found = {"read": "by transformers' interface" if family.narrow else "by its declaration", "decoder": family.decoder}
    for name, tower in family.towers.items():
        found[name] = f"{tower.path}, {len(whole.encoder(name).layers)} layers"
        found[f"{name} projector"] = ", ".join(tower.projector) or "inside the encoder"
        found[f"{name} token"] = f"{tower.token} = {getattr(config, tower.token)}"
    if family.clips is not None and clips is None:
        unproven = family.narrow and not proves_clips(family)
        found["clips"] = "not proven: torchvision is absent" if unproven else "yes"
    if family.unread:
        found["not trained"] = ", ".join(family.unread)
    refused = [*family.refused]
    if "vision" in family.towers and "clips" not in found:
        refused.append("clips are not read" if clips is None else f"clips are not read: {clips}")
    if refused:
        found["not read"] = "; ".join(refused)
    return found


def _shared_by_ranks(trial: Trial) -> str:
    """Return the units whose layers two ranks have shared without changing the loss or a gradient."""
    found = f"{YES}, in {', '.join(trial.units)}" if trial.units else "no unit"
    return "; ".join([found, *(f"{name}: {why}" for name, why in trial.problems.items())])


def _tried(proof: Callable[[PretrainedModel], str], whole: PretrainedModel) -> str:
    try:
        with seeded(0, "check"):
            return proof(whole)
    except Exception as error:
        return f"no: {reason_of(error, 'it does not run')}"


@torch.no_grad()
def _export(whole: PretrainedModel) -> str:
    """Export the small copy, read it back by transformers, and compare the logits of samples with media."""
    small = small_copy(whole)
    model = drawn(small, attend_by_default)
    before = composite_of(model.weights_of_whole(), small).eval()
    with tempfile.TemporaryDirectory() as folder:
        write_pretrained(model, Path(folder), None)
        after = auto_class(small.config).from_pretrained(folder).eval()
    worst = 0.0
    for sample in samples_with_media(small):
        old, new = (logits_of(each, small, sample) for each in (before, after))
        worst = max(worst, float((old - new).abs().max() / old.abs().max()))
    return YES if worst <= LARGEST_DIFFERENCE else f"no: logits change by {worst:.1g} of the largest"


@torch.no_grad()
def _lora(whole: PretrainedModel) -> str:
    """Compare the loss of packed units with adapters with transformers' of the model into which they are merged."""
    units = (*whole.family.towers, LANGUAGE)
    small = small_copy(whole, LoraConfig(r=2, lora_alpha=2, units=units))
    model = drawn(small, attend_by_default)
    samples = samples_with_media(small)
    wanted = loss_in_transformers(composite_of(model.weights_of_whole(), small).eval(), small, samples)
    rows = [tuple(range(len(samples)))] if model.language.packs_rows else [(n,) for n in range(len(samples))]
    difference = float(abs(loss_of(model.units, samples, rows, is_cut=False) / wanted - 1))
    right = difference <= LARGEST_DIFFERENCE
    return f"{YES}, in {', '.join(units)}" if right else f"no: the loss changes by {difference:.1g}"
