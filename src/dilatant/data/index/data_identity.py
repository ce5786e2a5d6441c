"""Identity of training data: digests of the data's content, with which a resumed run detects changed data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.order.blend import Blend, StreamBlend
from dilatant.data.sample import digest_of
from dilatant.data.text.encoding import Encoding


@dataclass(frozen=True)
class DataIdentity:
    """Content digests of a run's data sources. Of streams, whose samples are not known in advance, only the files are
    compared, as far as the stream knows them. sizes: None if nothing is known of the samples."""

    blend: Blend | StreamBlend
    sizes: SizesIndex | None
    encoding: Encoding

    @cached_property
    def processing(self) -> str:
        """Changes with the processors of media and with the pictures to draw."""
        return digest_of([each.fingerprint for each in (*self.encoding.units, *self.encoding.targets)])[:32]

    @cached_property
    def _content(self) -> NDArray[np.int64]:
        """Digests of the samples, which differ for an answer that is marked as bad: int64 [samples]."""
        assert self.sizes is not None
        content, desired = self.sizes.content, self.sizes.desired
        return content if desired is None else content ^ (1 - desired)

    @cached_property
    def by_source(self) -> list[dict[str, Any]]:
        """Describe each source as JSON: name, number of samples, digest of their tokens, labels and marks, digest of
        the blocks in which they are read, which order them, and `processing`. A stream has no samples, and the digest
        of its files."""
        if not isinstance(self.blend, Blend):
            streams = self.blend.streams
            return [{"name": each.name, "samples": 0, "content": each.identity, "blocks": ""} for each in streams]
        if self.sizes is None:
            return []
        ends = np.cumsum(self.blend.lengths).tolist()
        return [
            {
                "name": name,
                "samples": len(reader),
                "content": _digest(self._content[end - len(reader) : end]),
                "blocks": "" if reader.blocks is None else digest_of(reader.blocks)[:32],
                "processing": self.processing,
            }
            for name, reader, end in zip(self.blend.source_names, self.blend.readers, ends)
        ]

    def require(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError naming the changes if the data differ from `before`, an earlier `by_source`. File names and
        locations may differ. Nothing is compared if either side is unknown."""
        if before and self.by_source and (found := self._changes(before)):
            raise UserError(
                f"the training data changed since the checkpoint was written: {'; '.join(found)}. Going on would "
                "repeat some samples and leave out others: restore the data, or start a new run from the weights"
            )

    def _changes(self, before: Sequence[Mapping[str, Any]]) -> list[str]:
        if len(before) != len(self.by_source):
            return [f"there were {len(before)} sources, and now there are {len(self.by_source)}"]
        found = []
        first = 0
        for old, new in zip(before, self.by_source):
            source = f"source {new['name']!r}"
            if self.sizes is None:
                if old["content"] and new["content"] and old["content"] != new["content"]:
                    found.append(f"{source} is a stream of other files")
                continue
            part = self._content[first : first + new["samples"]]
            first += new["samples"]
            if old["samples"] == new["samples"] and old["content"] != new["content"]:
                found.append(
                    f"{source} has {new['samples']:,} samples as before, but other ones, or they become other tokens"
                    + ("" if self.sizes.desired is None else " or have other marks")
                )
            elif old["samples"] != new["samples"]:
                text = f"{source} had {old['samples']:,} samples and now has {new['samples']:,}"
                if old["samples"] < new["samples"]:
                    is_same = _digest(part[: old["samples"]]) == old["content"]
                    text += f", of which the first are {'the same' if is_same else 'others'}"
                found.append(text)
            elif old["blocks"] != new["blocks"]:
                found.append(f"{source} has the same samples in other row groups, so in another order")
            elif old.get("processing", self.processing) != self.processing:
                found.append(f"media of {source} are processed in another way (see the settings of the processor)")
        return found


def _digest(content: NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(content, "<i8").tobytes()).hexdigest()[:32]
