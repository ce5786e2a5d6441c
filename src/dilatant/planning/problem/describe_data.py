"""Report of a run's training data, for a reader, with samples as the model sees them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, takewhile
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from dilatant.config import Config, UserError
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.index.stats import BlendSource, describe
from dilatant.data.media.clip import decode_clip
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.media_header import media_size
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.order.blend import Blend
from dilatant.data.sample import Example, ExampleSpan, Media, Sample
from dilatant.data.text.encode import encode_sample, media_of
from dilatant.data.text.encoding import NO_LOSS, TOKENS, Encoding
from dilatant.planning.assemble import Samples
from dilatant.report.text.stats_summary import StatsReport
from dilatant.schedule.assignment.batch_balance import batch_balance

BATCHES = 64
"""Number of batches that show, within a few percent, how evenly batches divide."""


def describe_data(
    config: Config, samples: Samples, index: SizesIndex, title: str, examples: bool = False
) -> StatsReport:
    """Return the report of the training data, from their index; with `examples` a few samples are decoded. Raises
    UserError for streamed data."""
    blend, encoding, batch = samples.train, samples.encoding, config.train.global_batch_size
    if not isinstance(blend, Blend):
        raise UserError("a streamed data set has no index; do not stream it to describe it")
    sources = tuple(
        BlendSource(name, length, weight)
        for name, length, weight in zip(
            _short([reader.name for reader in blend.readers]), blend.lengths, blend.weights, strict=True
        )
    )
    return StatsReport(
        title=title,
        stats=describe(index, sources, encoding.max_length),
        batch_size=batch,
        balance=batch_balance(index.units, _batches(blend, index, batch, config.seed)),
        examples=show_examples(blend, index, encoding) if examples else (),
    )


def _batches(blend: Blend, index: SizesIndex, size: int, seed: int) -> list[NDArray[np.int64]]:
    """Return the tokens of the first global batches of training: `[samples, units]` each."""
    sampler = blend.sampler(seed, size)
    bad = np.fromiter(index.problems, np.int64, len(index.problems))
    drawn = (np.asarray(indices) for indices, _ in islice(sampler.batches(sampler.start()), BATCHES))
    return [index.tokens[indices[~np.isin(indices, bad)]] for indices in drawn]


def _short(names: Sequence[str]) -> list[str]:
    """Return the names of sources without the folders that all share; a path keeps at least a folder and a name."""
    parts = [PurePath(name).parts for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*parts)))
    return ["/".join(part[min(shared, max(len(part) - 2, 0)) :]) for part in parts]


PIXELS = 176
"""Longest side of a thumbnail in pixels."""
PEAKS = 120
SAMPLING_RATE = 8_000
"""Hz; enough to draw the loudness of a sound."""


def show_examples(blend: Blend, index: SizesIndex, encoding: Encoding) -> tuple[Example, ...]:
    """Return, for the first three sources, the usable sample of nearly median length, and the longest usable sample.
    Media are decoded; an example whose media cannot be decoded carries the error text instead."""
    language = index.tokens[:, 0]
    usable = (index.target_tokens > 0) & (language > 0)
    if encoding.max_length is not None:
        usable &= language <= encoding.max_length
    chosen: dict[int, str] = {}
    start = 0
    for reader, length in list(zip(blend.readers, blend.lengths))[:3]:
        own = start + np.flatnonzero(usable[start : start + length])
        if len(own):
            nearest = own[np.argmin(np.abs(language[own] - np.median(language[own])))]
            chosen[int(nearest)] = f"typical of {PurePath(reader.name).name}"
        start += length
    if usable.any():
        chosen.setdefault(int(np.argmax(np.where(usable, language, 0))), "the longest")
    return tuple(_example(blend, at, why, encoding) for at, why in chosen.items())


def _example(blend: Blend, at: int, why: str, encoding: Encoding) -> Example:
    name = f"sample {at}"
    try:
        sample = blend[at]
        name = sample.id
        return Example(name, why, tuple(spans(sample, encoding)))
    except UserError as error:
        return Example(name, why, problem=str(error))


def spans(sample: Sample, encoding: Encoding) -> Iterator[ExampleSpan]:
    """Yield the runs of a sample's tokens, in order. Raises UserError for a sample that cannot be trained on."""
    encoded = encode_sample(sample, encoding, frozenset({TOKENS}))
    ids, learned = encoded.input_ids, encoded.labels != NO_LOSS
    at = 0
    for start, length, media, unit in media_of(sample, encoding):
        yield from _text(ids[at:start], learned[at:start], encoding)
        yield _media(media, unit, length, bool(learned[start : start + length].any()))
        at = start + length
    yield from _text(ids[at:], learned[at:], encoding)


def _text(ids: NDArray[np.int64], learned: NDArray[np.bool_], encoding: Encoding) -> Iterator[ExampleSpan]:
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        if end > start:
            text = encoding.chat.backend.decode(ids[start:end].tolist(), skip_special_tokens=False)
            yield ExampleSpan(text, end - start, bool(learned[start]))


def _media(media: Media, unit: str, tokens: int, learned: bool) -> ExampleSpan:
    if media.kind == "image":
        pixels = decode_image(media, 3)
        height, width = pixels.shape[:2]
        return ExampleSpan(f"{media.name}, {width} × {height} pixels", tokens, learned, unit, picture=_small(pixels))
    if media.kind == "video":
        size = media_size(media)
        (frame,) = decode_clip(media, [0], np.asarray)
        about = f"{size.frames} frames of {size.width} × {size.height} pixels"
        return ExampleSpan(f"{media.name}, {about}", tokens, learned, unit, picture=_small(frame))
    wave = decode_audio(media, SAMPLING_RATE)
    loud = [float(np.abs(part).max(initial=0.0)) for part in np.array_split(wave, PEAKS)]
    top = max(loud, default=0.0) or 1.0
    seconds = len(wave) / SAMPLING_RATE
    return ExampleSpan(f"{media.name}, {seconds:.1f} s", tokens, learned, unit, peaks=tuple(one / top for one in loud))


def _small(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((PIXELS, PIXELS))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return stream.getvalue()
