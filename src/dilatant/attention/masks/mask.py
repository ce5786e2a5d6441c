"""Fielded 64-bit encoding of an attention mask: one word per token.

A token's word encodes the token's class, instance and sample and, for its role as a query, the keys that it attends to.
Positions are separate, so that a row may be permuted over context-parallel ranks without changing a word.

| bits  | field                                                                          |
|-------|--------------------------------------------------------------------------------|
| 0-11  | own: the token's class, one-hot, among the classes that are seen differently   |
| 12-23 | attend: classes it attends to                                                  |
| 24    | TOGETHER: it attends to its own instance as a whole, later tokens too          |
| 32-47 | instance: items that see each other as a whole, counted in the sample; 0: text |
| 48-59 | sample                                                                         |
| 60    | WINDOW: the mask's window width applies                                        |
| 61    | LOCAL: it attends only to its own instance                                     |
| 62    | CAUSAL: it attends to no later token                                           |

The encoding replaces the one-hot word of Cornstarch (the thesis, 3.4.2), which separates neither samples nor two
images. TOGETHER is an addition for the mask of Gemma 3, in which an image token attends to everything before it and to
its whole image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.errors import UserError

CLASS_BITS = 12
ATTEND_SHIFT = 12
INSTANCE_SHIFT = 32
SAMPLE_SHIFT = 48

MAX_INSTANCES = 1 << 16
MAX_SAMPLES = 1 << 12

OWN = (1 << CLASS_BITS) - 1
ATTEND = OWN << ATTEND_SHIFT
TOGETHER = 1 << 24
INSTANCE = (MAX_INSTANCES - 1) << INSTANCE_SHIFT
SAMPLE = (MAX_SAMPLES - 1) << SAMPLE_SHIFT
WINDOW = 1 << 60
LOCAL = 1 << 61
CAUSAL = 1 << 62

PADDING = 0
"""The word of a padding token, which neither sees nor is seen by any token."""


class MaskError(UserError):
    """Error for an inconsistent mask or one that the encoding cannot represent, with the limit and the remedy."""


def visible(
    query_field: int, key_field: int, query_position: int, key_position: int, window: int | None = None
) -> bool:
    """Return whether the query token attends to the key token: the reference statement of the rule.

    `window` is the width in positions that applies to WINDOW queries, their own position included; None means
    unlimited, so that layers with and without a sliding window share one mask. The window of a CAUSAL query covers
    earlier positions only; that of other queries, both directions.
    """
    query_field, key_field = int(query_field), int(key_field)
    own, key_own = query_field & OWN, key_field & OWN
    attended = (query_field & ATTEND) >> ATTEND_SHIFT
    same_sample = (query_field ^ key_field) & SAMPLE == 0
    same_instance = (query_field ^ key_field) & INSTANCE == 0
    causal = query_field & CAUSAL != 0
    together = query_field & TOGETHER != 0 and own & key_own != 0 and same_instance

    if not same_sample:
        return False
    if attended & key_own == 0 and not together:
        return False
    if causal and key_position > query_position and not together:
        return False
    if query_field & LOCAL and not same_instance:
        return False
    if query_field & WINDOW and window is not None:
        if query_position - key_position >= window:
            return False
        if not causal and key_position - query_position >= window:
            return False
    return True


def pack_fields(
    own: ArrayLike,
    attend: ArrayLike,
    *,
    instance: ArrayLike = 0,
    sample: ArrayLike = 0,
    causal: ArrayLike = False,
    local: ArrayLike = False,
    window: ArrayLike = False,
    together: ArrayLike = False,
) -> NDArray[np.int64]:
    """Build words from their parts, which broadcast against each other; int64 of the common shape. Raises MaskError
    naming every part that does not fit its field, with the limit."""
    problems = []
    parts = {}
    for name, value, limit in (
        ("own", own, 1 << CLASS_BITS),
        ("attend", attend, 1 << CLASS_BITS),
        ("instance", instance, MAX_INSTANCES),
        ("sample", sample, MAX_SAMPLES),
    ):
        part = parts[name] = np.asarray(value, dtype=np.int64)
        if part.size and (part.min() < 0 or part.max() >= limit):
            worst = int(part.min() if part.min() < 0 else part.max())
            problems.append(f"{name} {worst} is outside [0, {limit})")
    if problems:
        raise MaskError(
            "the 64-bit attention word cannot hold "
            + "; ".join(problems)
            + f". A packed row holds at most {MAX_SAMPLES} samples (pack fewer into one row), "
            f"{MAX_INSTANCES - 1} instances a sample (split it, or number items alike that see each other) and "
            f"{CLASS_BITS} classes of tokens (give one bit to those that are seen alike)"
        )
    word = parts["own"] | parts["attend"] << ATTEND_SHIFT
    word = word | parts["instance"] << INSTANCE_SHIFT | parts["sample"] << SAMPLE_SHIFT
    for flag, bit in ((causal, CAUSAL), (local, LOCAL), (window, WINDOW), (together, TOGETHER)):
        word = word | np.asarray(flag, dtype=np.int64) * bit
    return np.asarray(word, dtype=np.int64)


def _frozen(values: ArrayLike, dtype: type) -> NDArray:
    array: NDArray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class Runs:
    """A row as maximal runs of one word over consecutive positions; each array is int64 `[runs]`.

    Run r covers tokens `start[r] : start[r] + length[r]`, all with word `field[r]`, at positions `position[r]`,
    `position[r] + 1`, ... Everything else is computed from runs, so the cost of a row depends on its samples and
    images, not on its tokens.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    field: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def build(cls, length: ArrayLike, field: ArrayLike, position: ArrayLike) -> Runs:
        """Build runs in row order; empty runs are dropped and neighbours that continue each other are joined."""
        length, field, position = (np.asarray(part, dtype=np.int64) for part in (length, field, position))
        if not length.shape == field.shape == position.shape or length.ndim != 1:
            raise MaskError("length, field and position of runs must be vectors of one size")
        if length.size and length.min() < 0:
            raise MaskError(f"run {int(np.argmin(length))} has negative length {int(length.min())}")
        if field.size and field.min() < 0:
            raise MaskError(f"run {int(np.argmin(field))} has bit 63 set, which belongs to no field")
        if length.size and (position.min() < 0 or (position + length).max() > 1 << 31):
            raise MaskError("positions must lie in [0, 2^31): they are kept as int32")
        if length.size and length.min() == 0:
            kept = length > 0
            length, field, position = length[kept], field[kept], position[kept]
        opens = np.ones(length.size, dtype=bool)
        opens[1:] = (field[1:] != field[:-1]) | (position[1:] != position[:-1] + length[:-1])
        first = np.flatnonzero(opens)
        end = np.cumsum(length)
        start = (end - length)[first]
        total = int(end[-1]) if end.size else 0
        return cls(
            start=_frozen(start, np.int64),
            length=_frozen(np.diff(start, append=total), np.int64),
            field=_frozen(field[first], np.int64),
            position=_frozen(position[first], np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.start[-1] + self.length[-1]) if self.start.size else 0

    @cached_property
    def token_fields(self) -> NDArray[np.int64]:
        """The word of every token: int64 `[tokens]`."""
        return _frozen(np.repeat(self.field, self.length), np.int64)

    @cached_property
    def token_positions(self) -> NDArray[np.int32]:
        """The position of every token: int32 `[tokens]`."""
        offset = np.repeat(self.position - self.start, self.length)
        return _frozen(offset + np.arange(self.num_tokens), np.int32)


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Mask of one packed row, as runs of 64-bit words; compared and hashed by identity.

    `window` is the width that applies to WINDOW tokens; None means unlimited. Per-token arrays are computed on first
    use and cached.
    """

    runs: Runs
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise MaskError(f"window must be at least 1 (a token's own position), got {self.window}")

    @classmethod
    def from_tokens(
        cls, fields: ArrayLike, positions: ArrayLike | None = None, window: int | None = None
    ) -> AttentionMask:
        """Build a mask from one word per token; `positions` default to the index in the row. O(tokens)."""
        fields = np.asarray(fields, dtype=np.int64)
        if fields.ndim != 1:
            raise MaskError(f"fields must be a vector of words, one a token; got shape {fields.shape}")
        index = np.arange(fields.size, dtype=np.int64)
        positions = index if positions is None else np.asarray(positions, dtype=np.int64)
        if positions.shape != fields.shape:
            raise MaskError(f"{fields.size} fields but {positions.size} positions")
        opens = np.ones(fields.size, dtype=bool)
        opens[1:] = (fields[1:] != fields[:-1]) | (positions[1:] != positions[:-1] + 1)
        first = np.flatnonzero(opens)
        runs = Runs.build(np.diff(first, append=fields.size), fields[first], positions[first])
        return cls(runs, window)

    @property
    def num_tokens(self) -> int:
        return self.runs.num_tokens

    @property
    def fields(self) -> NDArray[np.int64]:
        """The word of every token: int64 `[tokens]`, read-only."""
        return self.runs.token_fields

    @property
    def positions(self) -> NDArray[np.int32]:
        """The position of every token, in its sample unless the mask says otherwise: int32 `[tokens]`, read-only."""
        return self.runs.token_positions

    def with_window(self, window: int | None) -> AttentionMask:
        """Return the same row under another window width: for another kind of layer in the same model."""
        return self if window == self.window else AttentionMask(self.runs, window)

    def take(self, tokens: ArrayLike) -> AttentionMask:
        """Return the mask of `tokens`, in that order: the tokens on a context-parallel rank."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return AttentionMask.from_tokens(self.fields[tokens], self.positions[tokens], self.window)
