"""The sizes index: the tokens of every sample in every unit, computed without decoding media and cached on disk.

Planning, training, statistics and lint share one index. It is memory-mapped, so opening it takes the same time for
any number of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.cache import Arrays, Cache, open_cache
from dilatant.data.index.measure import SampleMeasurements, SampleSubset, file_state, measure
from dilatant.data.order.blend import Blend, StreamBlend
from dilatant.data.parallel_map import Progress
from dilatant.data.readers.reader import Reader
from dilatant.data.text.encode import too_long
from dilatant.data.text.encoding import Encoding

FORMAT = 8
_COLUMNS = ("tokens", "target_tokens", "content", "desired")
"""Arrays of a cached index, in the order of `SampleMeasurements.columns`."""
_TOOLS = find_spec("av") is not None, version("transformers")
"""Part of the cache key: without PyAV some media are refused, and some sounds get another length; processors may count
otherwise in another version of transformers."""
WATCHED_MEDIA = 1000
"""Most media files of refused samples whose state is compared when the index is opened."""


def _keep(sample: int) -> None:
    """Remove nothing, as nothing is cached."""


@dataclass(frozen=True)
class SizesIndex:
    """The measurements of every sample, in the order of the samples.

    units: "language", then encoders and generators. tokens: int64 [samples, units]; 0 if unknown. target_tokens: int64
    [samples], the tokens that carry loss. content: int64 [samples], the `content_digest` of ids and labels. problems:
    sample → why it cannot be trained on at any length. name: returns a sample's name in messages. unused: for each
    source, the columns and keys that no sample uses. forget: removes the cached measurements of a sample's source, if
    they prove wrong. desired: int64 [samples], 0 for answers that are marked as bad, of samples with marks.
    """

    units: tuple[str, ...]
    tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    content: NDArray[np.int64]
    problems: Mapping[int, str] = field(default_factory=dict)
    name: Callable[[int], str] = field(default="sample {}".format, compare=False)
    unused: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    forget: Callable[[int], None] = field(default=_keep, compare=False)
    desired: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, unit: str) -> NDArray[np.int64]:
        """Tokens of one unit: int64 [samples]."""
        return self.tokens[:, self.units.index(unit)]

    def refused(self, max_length: int | None) -> dict[int, str]:
        """Return sample → the reason why `encode_sample` refuses it with this `max_length`, in order. Errors that only
        decoding finds are not included."""
        found = dict(self.problems)
        if max_length is not None:
            tokens = self.of(LANGUAGE)
            for sample in np.flatnonzero(tokens > max_length).tolist():
                found[sample] = str(too_long(self.name(sample), int(tokens[sample]), max_length))
        return dict(sorted(found.items()))


def blend_sizes(
    blend: Blend | StreamBlend,
    encoding: Encoding,
    *,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> SizesIndex:
    """Return the index of all sources of a blend, concatenated: memory-mapped from the cache, or measured and cached.

    A source is measured again if its files, the tokenizer, the template or a processor changed. Its refused samples
    are also measured again if their media files changed; other media files that a data file names are not watched. If
    several processes call this function, one of them measures and the others wait.
    cache_dir: where the index is stored; default: the user's cache. workers: number of measuring processes; 0 measures
    in this process; None uses all available cores. Raises UserError for a stream, or if `cache_dir` is not writable.
    """
    if not isinstance(blend, Blend):
        raise UserError("the sizes of a streamed data set are not known ahead; do not stream it to measure it")
    cache = open_cache(cache_dir)
    total, done = len(blend), 0
    parts: list[Arrays] = []
    for reader in blend.readers:
        parts.append(_source(reader, encoding, cache, workers, partial(_forward, progress, done, total)))
        done += len(reader)
        progress(done, total)
    return _index(blend, encoding, cache, parts)


def known_sizes(blend: Blend, encoding: Encoding, *, cache_dir: str | Path | None = None) -> SizesIndex | None:
    """Return the index of a blend if all of its parts are cached, else None."""
    cache = open_cache(cache_dir)
    parts: list[Arrays] = []
    for reader in blend.readers:
        found = cache.known(*_entry(reader, encoding))
        if found is None or not _media_unchanged(found):
            return None
        parts.append(found)
    return _index(blend, encoding, cache, parts)


def _forward(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _entry(reader: Reader, encoding: Encoding) -> tuple[str, str]:
    """Return the name and the key of a source's cache entry. The name identifies the files and their use; a changed
    key (the same files in another state) replaces the entry of that name."""
    folder = reader.home and reader.home.resolve()
    own = reader.source
    use = (folder, reader.name, own.prompt, sorted(own.columns.items()), own.limit, reader.split)
    return (
        f"sizes-{_digest(use, encoding.fingerprint)[:16]}",
        _digest(FORMAT, reader.fingerprint, encoding.fingerprint, len(reader), reader.split, _TOOLS),
    )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _source(reader: Reader, encoding: Encoding, cache: Cache, workers: int | None, progress: Progress) -> Arrays:
    name, key = _entry(reader, encoding)

    def make() -> Arrays:
        before = cache.known(name, key)
        if before is not None:  # only the media files of refused samples changed
            return _mended(before, reader, encoding, workers)
        found = measure(reader, encoding, blocks=reader.blocks, name=reader.name, workers=workers, progress=progress)
        return _arrays(found)

    return cache.kept(name, key, make, _media_unchanged)


def _arrays(measured: SampleMeasurements) -> Arrays:
    watched = dict.fromkeys(state for files in measured.media.values() for state in files)
    about = {
        "problems": sorted(measured.problems.items()),
        "media": list(watched)[:WATCHED_MEDIA],
        "unused": list(measured.unused),
    }
    return Arrays(dict(zip(_COLUMNS, measured.columns)), about)


def _media_unchanged(found: Arrays) -> bool:
    """Return True if the media files of refused samples are unchanged; a missing file may have been added."""
    return all(file_state(Path(path)) == (path, size, time) for path, size, time in found.about["media"])


def _mended(before: Arrays, reader: Reader, encoding: Encoding, workers: int | None) -> Arrays:
    """Return the arrays with all refused samples measured again."""
    refused = np.array([sample for sample, _ in before.about["problems"]], np.int64)
    again = measure(SampleSubset(reader, refused), encoding, name=reader.name, workers=workers)
    numbers = np.vstack([before.arrays[name] for name in _COLUMNS])
    numbers[:, refused] = again.numbers
    problems = {int(refused[at]): problem for at, problem in again.problems.items()}
    unused = dict.fromkeys((*before.about["unused"], *again.unused))
    return _arrays(SampleMeasurements(numbers, problems, again.media, unused))


def _together(blend: Blend, encoding: Encoding, cache: Cache, parts: Sequence[Arrays]) -> Arrays:
    """Return the arrays of all sources, concatenated, from the cache if possible."""
    if len(parts) == 1:
        return parts[0]

    def make() -> Arrays:
        return Arrays({name: np.concatenate([part.arrays[name] for part in parts], axis=-1) for name in _COLUMNS})

    digests = [part.digest for part in parts]
    if None in digests:  # the cache cannot be written
        return make()
    names = [_entry(reader, encoding)[0] for reader in blend.readers]
    return cache.kept(f"blend-{_digest(names)[:16]}", _digest(digests), make)


def _index(blend: Blend, encoding: Encoding, cache: Cache, parts: Sequence[Arrays]) -> SizesIndex:
    found = _together(blend, encoding, cache, parts)
    entries = [_entry(reader, encoding)[0] for reader in blend.readers]
    offsets = (np.cumsum(blend.lengths) - blend.lengths).tolist()
    return SizesIndex(
        units=encoding.unit_names,
        tokens=found.arrays["tokens"].T,
        target_tokens=found.arrays["target_tokens"],
        content=found.arrays["content"],
        problems={
            offset + sample: why for part, offset in zip(parts, offsets) for sample, why in part.about["problems"]
        },
        name=blend.name,
        unused=tuple(tuple(part.about["unused"]) for part in parts),
        forget=partial(_forget, blend, cache, entries),
        desired=found.arrays["desired"] if encoding.marks else None,
    )


def _forget(blend: Blend, cache: Cache, entries: Sequence[str], sample: int) -> None:
    cache.forget(entries[blend.source_of(sample)])
