"""Refusals: the error texts of samples that cannot be trained on, in arrays that can be memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Refusals(Mapping[int, str]):
    """Mapping from sample to the reason why it cannot be trained on, in the order of the samples.

    samples: int64 [refused], ascending. text: all reasons, concatenated as UTF-8 bytes. ends: int64 [refused + 1],
    the boundaries of the reasons in `text`.
    """

    def __init__(self, samples: NDArray[np.int64], ends: NDArray[np.int64], text: NDArray[np.uint8]) -> None:
        self._samples, self._ends, self._text = samples, ends, text

    @staticmethod
    def of(problems: Mapping[int, str]) -> Refusals:
        samples = sorted(problems)
        texts = [problems[sample].encode("utf-8", "backslashreplace") for sample in samples]
        return Refusals(
            np.array(samples, np.int64),
            np.cumsum([0, *map(len, texts)], dtype=np.int64),
            np.frombuffer(b"".join(texts), np.uint8),
        )

    @staticmethod
    def joined(parts: Sequence[Refusals], offsets: Sequence[int]) -> Refusals:
        """Concatenate the refusals of several parts of a data set, which begin at `offsets`."""
        return Refusals(
            np.concatenate([part._samples + offset for part, offset in zip(parts, offsets)]),
            np.cumsum(np.concatenate([[0], *(np.diff(part._ends) for part in parts)]), dtype=np.int64),
            np.concatenate([part._text for part in parts]),
        )

    @property
    def samples(self) -> NDArray[np.int64]:
        return self._samples

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the constructor's arguments by name."""
        return {"samples": self._samples, "ends": self._ends, "text": self._text}

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[int]:
        return iter(self._samples.tolist())

    def __getitem__(self, sample: int) -> str:
        at = int(np.searchsorted(self._samples, sample))
        if at == len(self._samples) or self._samples[at] != sample:
            raise KeyError(sample)
        return self._text[self._ends[at] : self._ends[at + 1]].tobytes().decode()
