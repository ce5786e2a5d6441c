"""Unused data: lines that list the columns and files of each source that no sample uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from dilatant.data.index.measure import unused_keys
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.order.blend import Blend, StreamBlend
from dilatant.data.sample import Sample
from dilatant.data.text.encoding import Encoding

STREAMED = 64
"""Number of samples read from the start of a stream."""


def unused_by_source(
    blend: Blend | StreamBlend, index: SizesIndex | None, encoding: Encoding
) -> dict[str, tuple[str, ...]]:
    """Return, for each source, the sorted columns and inner keys that no sample uses; for a stream, by its first
    samples. Sources that are fully used are omitted."""
    if isinstance(blend, StreamBlend):
        names: Sequence[str] = [stream.name for stream in blend.streams]
        keys = [
            {key for sample in islice(stream.read(0), STREAMED) if isinstance(sample, Sample)
             for key in unused_keys(sample, encoding)}
            for stream in blend.streams
        ]  # fmt: skip
    else:
        names = blend.source_names
        keys = [set(unused) for unused in index.unused] if index is not None else []
    return {name: tuple(sorted(unused)) for name, unused in zip(names, keys) if unused}


def unused_lines(
    blend: Blend | StreamBlend | None, index: SizesIndex | None, encoding: Encoding
) -> list[str]:
    """Return one line for each source with unused columns, and one for each source with unused files."""
    if blend is None:
        return []
    lines = [
        f"source {name}: columns not used: {', '.join(keys)}"
        for name, keys in unused_by_source(blend, index, encoding).items()
    ]
    if isinstance(blend, Blend):
        lines += [
            f"source {name}: files not used: {', '.join(reader.passed_over)}"
            for name, reader in zip(blend.source_names, blend.readers)
            if reader.passed_over
        ]
    return lines
