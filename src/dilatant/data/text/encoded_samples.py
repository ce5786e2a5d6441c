"""Samples that the user encoded: check them, and reduce them to the parts that a rank needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dilatant.config.model import LANGUAGE
from dilatant.data.errors import SampleError
from dilatant.data.media.pixels import Pixels
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import NO_LOSS, QUESTION, TOKENS, Encoding, grid_part


def encoded_problems(sample: EncodedSample, name: str, encoding: Encoding) -> Iterator[SampleError]:
    """Yield the errors of a user's sample, apart from its length."""
    if encoding.pairs or sample.branch is not None:
        yield SampleError(name, "is encoded, and pairs are read from records alone", "give 'chosen' and 'rejected'")
        return
    ids, labels = np.asarray(sample.input_ids), np.asarray(sample.labels)
    if ids.ndim != 1 or ids.shape != labels.shape or {ids.dtype.kind, labels.dtype.kind} - {"i", "u"}:
        shown = f"input_ids {ids.dtype}{list(ids.shape)} and labels {labels.dtype}{list(labels.shape)}"
        yield SampleError(name, f"has {shown}", "give integers, [tokens] each")
        return
    if (ids < 0).any():
        yield SampleError(name, f"has the token {ids.min()}", "ids are 0 or more")
    if sample.sizes.get(LANGUAGE, len(ids)) != len(ids):
        yield SampleError(name, f"has {len(ids)} tokens, and {sample.sizes[LANGUAGE]} in its sizes", "correct them")
    encoders = {unit.name for unit in encoding.units}
    for unit in sorted({*sample.media, *sample.sizes} - {LANGUAGE}):
        if unit not in encoders:
            known = ", ".join(sorted(encoders)) or "none"
            yield SampleError(name, f"has inputs of {unit!r}, which is no encoder", f"there are {known}")
        elif (sample.sizes.get(unit, 0) > 0) != (unit in sample.media):
            yield SampleError(
                name,
                f"has media of {unit!r} without sizes[{unit!r}], or the reverse",
                "give the inputs and how many tokens the encoder processes",
            )
    if not (labels[1:] != NO_LOSS).any():
        yield SampleError(name, "has no label that carries loss, so nothing to learn", "add one or remove it")


def complete(sample: EncodedSample, name: str, encoding: Encoding) -> EncodedSample:
    """Return a user's sample under the name of its place, with int64 ids and labels, and the sizes of all units."""
    labels = np.array(sample.labels, np.int64)
    labels[:1] = NO_LOSS
    sizes = {unit: int(sample.sizes.get(unit, 0)) for unit in encoding.unit_names}
    media = {
        unit: {key: value if isinstance(value, Pixels) else np.asarray(value) for key, value in inputs.items()}
        for unit, inputs in sample.media.items()
    }
    return EncodedSample(name, np.asarray(sample.input_ids, np.int64), labels, media, {**sizes, LANGUAGE: len(labels)})


def reduced(sample: EncodedSample, encoding: Encoding, parts: frozenset[str] | None) -> EncodedSample:
    """Return the requested parts of a complete sample; see `encode_sample`. A unit's `grid_part` is all of its inputs:
    which of them are sizes is unknown."""
    if parts is None:
        return sample
    ids, labels = sample.input_ids, sample.labels
    if QUESTION in parts:  # the last run of targets, up to the token that ends an answer
        carries = np.flatnonzero(labels != NO_LOSS)
        run = carries[max(np.flatnonzero(np.diff(carries) > 1) + 1, default=0) :]
        ends = np.flatnonzero(np.isin(labels[run], encoding.chat.stop_ids))
        run = run[: ends[0] + 1] if len(ends) else run
        labels = np.full_like(labels, NO_LOSS)
        labels[run] = sample.labels[run]
    elif TOKENS not in parts:
        ids, labels = ids[:0], labels[:0]
    media = {unit: own for unit, own in sample.media.items() if not parts.isdisjoint((unit, grid_part(unit)))}
    return replace(sample, input_ids=ids, labels=labels, media=media)
