"""Training proof: check on a small copy of a language model that packed rows and stages train as in transformers.

The copy has the family and the settings of the user's model (see `shrink`) and random weights. The family's own forward
computes loss and all gradients of a few samples, each run alone; one packed row of the samples, and single-layer
stages, must match them. Proofs are cached in the cache folder, by settings and versions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from dilatant.config.environment import cache_folder
from dilatant.config.errors import UserError, reason_of, type_and_text
from dilatant.config.files.durable import write_durably
from dilatant.config.model import LANGUAGE
from dilatant.data.sample import EncodedSample
from dilatant.models.core.materialize import materialize, seeded
from dilatant.models.core.stage import StepData
from dilatant.models.core.structure import on_meta
from dilatant.models.core.unit import Unit
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_answers import inputs_of_sample
from dilatant.models.families.shrink import shrink, special_ids
from dilatant.models.language.language import LanguageUnit, Proof
from dilatant.models.sources import errors_alone

Result = tuple[Tensor, list[Tensor | None]]
"""A loss and its gradients, None for a parameter that has no influence."""
LENGTHS = (13, 5, 9)
"""Tokens of the samples: two are longer than a window of the small model."""
Kept = TypeVar("Kept")
_LARGEST = 50_000_000
"""Maximum number of parameters of a copy. If a family's width settings are unknown, the copy may stay wide."""
_CHECKS = 13
"""Version of the checks of a proof; another version makes cached proofs invalid."""
_NOT_CAUSAL = "its logits depend on later tokens; is_decoder or a similar key of its config may forbid that"
_LOSS, _GRADIENT, _OF_LARGEST = 1e-4, 1e-2, 1e-4
"""Relative differences that pass as fp32 rounding: of the loss, and of a gradient relative to its own largest element
or to that of all gradients. A wrong mask, position or scale causes changes of order 1."""


def prove(
    unit: LanguageUnit, whole: PretrainedModel | None, how: str, attach: Callable[[LanguageUnit], None] | None = None
) -> Proof:
    """Test packed rows and stages of a language model on a small copy, under its current attention or that set by
    `attach`. whole: the multimodal model that contains it. how: name of that attention in the cache key."""
    begin = time.perf_counter()
    try:
        settings = shrink(unit.model.config, has_encoders=whole is None)
        path = _path(unit, settings, how)
        kept = read_proof(path, Proof)
        if kept is not None:
            return replace(kept, is_kept=True)
        with errors_alone(), seeded(0, "proof"), torch.enable_grad():
            proof = _prove(unit, whole, settings, attach)
    except Exception as error:
        why = type_and_text(error)
        said = reason_of(error, "a small copy of its text model does not run")
        return Proof(said, said, alone=None, unproven=why, seconds=time.perf_counter() - begin)
    proof = replace(proof, seconds=time.perf_counter() - begin)
    store_proof(path, proof)
    return proof


def _prove(
    unit: LanguageUnit,
    whole: PretrainedModel | None,
    settings: Mapping[str, Any],
    attach: Callable[[LanguageUnit], None] | None,
) -> Proof:
    small = _copy_of(unit, whole, settings)
    head = cast(Any, small.model.get_output_embeddings() or small.model.get_input_embeddings())
    samples = text_samples(head.weight.shape[0], [*special_ids(settings)])
    wanted = with_gradients(loss_in_transformers(small.model, whole, samples), _trained(small))
    if whole is None:
        ids = torch.as_tensor(samples[0].input_ids)[None]
        with torch.no_grad():
            early, later = (small.model(input_ids=each, use_cache=False).logits for each in (ids[:, :-1], ids))
        if (early - later[:, :-1]).abs().max() > _GRADIENT * early.abs().max():
            return Proof(_NOT_CAUSAL, _NOT_CAUSAL, alone=_NOT_CAUSAL)
    if attach is not None:
        attach(small)
    small.streams = streams_of(small, samples[0])
    one_row, one_each = [tuple(range(len(samples)))], [(number,) for number in range(len(samples))]
    largest = [(0.0, 0.0)]

    def problem_of(rows: Sequence[tuple[int, ...]], is_cut: bool) -> str | None:
        try:
            found = with_gradients(loss_of({small.unit: small}, samples, rows, is_cut), _trained(small))
        except Exception as error:
            return reason_of(error, "stages of one block do not run" if is_cut else "packed rows do not run")
        problem, differences = differ(wanted, found)
        if problem is None:
            largest.append(differences)
        return problem

    packed = problem_of(one_row, is_cut=False)
    alone = None if packed is None else problem_of(one_each, is_cut=False)
    cut = problem_of(one_row if packed is None else one_each, is_cut=True)
    loss, gradient = (max(each) for each in zip(*largest, strict=True))
    return Proof(packed, cut, alone, differences=(loss, gradient), streams=small.streams)


@torch.no_grad()
def streams_of(unit: LanguageUnit, sample: EncodedSample) -> int:
    """Return the number of vectors that pass between the blocks of a language model for each token."""
    try:
        sent = unit.stage(0, 1).eval().run(StepData.of([sample], unit.losses), (0,), {}).rows_for(unit.unit)
        return 1 if sent is None else (sent.shape[-1] - unit.boundary(1, unit.unit).width) // unit.width + 1
    except Exception:  # stages do not run, which the proof says
        return 1


def _copy_of(unit: LanguageUnit, whole: PretrainedModel | None, settings: Mapping[str, Any]) -> LanguageUnit:
    """Build the small model with random weights, perturbed so that no weight has a special value such as 0 or 1."""
    config = type(unit.model.config).from_dict(dict(settings))
    if whole is None:
        with on_meta():
            _refuse_large(cast(Any, type(unit.model))(config))
        # Not on the meta device: some families draw weights only in their constructors.
        model = cast(Any, type(unit.model))(config)
        model.set_attn_implementation(_attention(unit))
        small = LanguageUnit(unit.unit, model, {})
    else:
        named = whole.attn_implementation if whole.attn_implementation in ("eager", "sdpa") else None
        part = replace(whole, config=config, attn_implementation=named, dtype=torch.float32, lora=None)
        small = LanguageUnit(unit.unit, part.language_model(), part.placeholder_ids, **part.of_language)
        _refuse_large(small.model)
    materialize(small, 0, len(small.layers), 0)
    with torch.no_grad():
        for parameter in small.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    small.loss_chunk = 8
    return small.eval()


def _refuse_large(model: nn.Module) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _LARGEST:
        raise ValueError(f"its small copy still has {count:,} parameters")


def _attention(unit: LanguageUnit) -> str:
    own = unit.generating_attention or unit.model.config._attn_implementation
    return own if own in ("eager", "sdpa") else "sdpa" if unit.model._supports_sdpa else "eager"


def text_samples(vocabulary: int, special: Collection[int]) -> list[EncodedSample]:
    """Make samples of random texts without `special` ids."""
    plain = np.setdiff1d(np.arange(vocabulary), [*special])
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = plain[torch.randint(len(plain), (length,)).numpy()]
        labels = np.concatenate([[-100], ids[1:]])
        samples.append(EncodedSample(f"{number}", ids, labels, sizes={LANGUAGE: length}, draw=number + 1))
    return samples


def logits_of(model: Any, whole: PretrainedModel | None, sample: EncodedSample) -> Tensor:
    """Return logits [tokens, vocabulary] of transformers' own forward of one sample. whole: None for a text model."""
    inputs = {"input_ids": torch.as_tensor(sample.input_ids)[None]}
    if whole is not None:
        inputs = inputs_of_sample(replace(whole, dtype=torch.float32), sample, torch.device("cpu"))
    return model(**inputs, use_cache=False).logits[0]


def loss_in_transformers(model: Any, whole: PretrainedModel | None, samples: Sequence[EncodedSample]) -> Tensor:
    """Return the mean loss of the samples' targets by transformers' own forward of each alone."""
    loss = torch.zeros(())
    for sample in samples:
        logits, labels = logits_of(model, whole, sample), torch.as_tensor(sample.labels)
        loss = loss + functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    return loss / sum(sample.target_tokens for sample in samples)


def loss_of(
    units: Mapping[str, Unit], samples: Sequence[EncodedSample], rows: Sequence[tuple[int, ...]], is_cut: bool
) -> Tensor:
    """Compute the loss of packed `rows` of samples as in training. It runs through whole units or, if `is_cut`, through
    a stage for every layer of the units that may be cut."""
    *_, anchor = units
    data = StepData.of(samples, units[anchor].losses)
    loss = torch.zeros(())
    for row in rows:
        inbound: dict[str, Tensor] = {}
        for name, unit in units.items():
            count, arrived = len(unit.layers), dict(inbound)
            for first, end in pairwise(range(count + 1) if is_cut and unit.uncut is None else (0, count)):
                output = unit.stage(first, end).eval().run(data, row, arrived)
                sent = output.rows_for(name)
                width = unit.boundary(end, name).width
                if sent is not None and end < count and (numbers := sent.shape[1:].numel()) != width:
                    raise UserError(f"several streams pass between its blocks: {numbers} numbers a token, not {width}")
                arrived = {} if sent is None else {name: sent}
            inbound |= arrived
        loss = loss + output.losses[anchor]
    return loss


def with_gradients(loss: Tensor, parameters: Iterable[Tensor]) -> Result:
    """Return the loss, and its gradients with respect to `parameters`."""
    return loss.detach(), list(torch.autograd.grad(loss, [*parameters], allow_unused=True))


def _trained(small: LanguageUnit) -> list[nn.Parameter]:
    return [parameter for parameter in small.model.parameters() if parameter.requires_grad]


def differ(wanted: Result, found: Result) -> tuple[str | None, tuple[float, float]]:
    """Describe a difference above the limits, or None; and return the relative differences of loss and gradients."""
    loss = float(abs(wanted[0] - found[0]) / abs(wanted[0]))
    nothing = torch.zeros(1)
    pairs = [
        (nothing if theirs is None else theirs, nothing if ours is None else ours)
        for theirs, ours in zip(wanted[1], found[1], strict=True)
    ]
    least = _OF_LARGEST / _GRADIENT * max(theirs.abs().max() for theirs, _ in pairs)
    each = [(theirs - ours).abs().max() / theirs.abs().max().clamp(min=least) for theirs, ours in pairs]
    worst = float(torch.stack(each).max())  # NaN, if any is
    if not loss < _LOSS:
        return f"the loss changes from {float(wanted[0]):.5f} to {float(found[0]):.5f}", (loss, worst)
    if not worst < _GRADIENT:
        return f"a gradient changes by {worst:.2g} of its largest number", (loss, worst)
    return None, (loss, worst)


def _path(unit: LanguageUnit, settings: Mapping[str, Any], how: str) -> Path:
    about = [type(unit.model).__qualname__, how, _attention(unit)]
    return proof_path([*about, json.dumps(settings, sort_keys=True, default=str)])


def proof_path(about: Sequence[Any]) -> Path:
    """Return the path of the cached proof of what `about` describes, under the installed versions."""
    about = [*about, _CHECKS, transformers.__version__, torch.__version__]
    return cache_folder() / "proofs" / f"{sha256(repr(about).encode()).hexdigest()[:24]}.json"


def read_proof(path: Path, kind: type[Kept]) -> Kept | None:
    """Return the proof of an earlier run; None without a readable one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def store_proof(path: Path, proof: Any) -> None:
    """Store a proof for later runs, if the cache folder is writable."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, msgspec.json.encode(proof).decode())
