"""Attention masks as dense booleans, by double loops over rules written for people.

Two independent views. `Token` and the functions over it speak of samples, modalities and images and know nothing of
words; `word_matrix` reads the 64-bit words digit by digit. Neither shares code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Token:
    """One token of a packed row. index: its number in the sample; place: its number in the row."""

    sample: int
    modality: str
    instance: object
    index: int
    place: int


def tokens_of(samples: Sequence[Sequence[tuple]]) -> list[Token]:
    """Return the tokens of a row of samples, each a list of (modality, length[, instance]) segments."""
    tokens = []
    for number, sample in enumerate(samples):
        index = 0
        for place, segment in enumerate(sample):
            modality, length = segment[:2]
            named = segment[2] if len(segment) == 3 else None
            instance = ("named", named) if named is not None else ("segment", place)
            for _ in range(length):
                tokens.append(Token(number, modality, instance, index, len(tokens)))
                index += 1
    return tokens


Rule = Callable[[Token, Token], bool]


def causal(q: Token, k: Token) -> bool:
    return k.place <= q.place


def document_causal(q: Token, k: Token) -> bool:
    return k.sample == q.sample and k.index <= q.index


def full(q: Token, k: Token) -> bool:
    return k.sample == q.sample


def sliding(window: int) -> Rule:
    return lambda q, k: document_causal(q, k) and q.index - k.index < window


def bidirectional_window(window: int) -> Rule:
    return lambda q, k: full(q, k) and abs(q.index - k.index) < window


def prefix_lm(prefix: Sequence[int]) -> Rule:
    def rule(q: Token, k: Token) -> bool:
        both_inside = q.index < prefix[q.sample] and k.index < prefix[q.sample]
        return q.sample == k.sample and (both_inside or (q.index >= prefix[q.sample] and k.index <= q.index))

    return rule


def _same_image(q: Token, k: Token) -> bool:
    return q.modality == k.modality and q.instance == k.instance


def embedded(across: bool) -> Rule:
    def rule(q: Token, k: Token) -> bool:
        if q.sample != k.sample:
            return False
        if q.modality == "text":
            return k.index <= q.index
        return q.modality == k.modality and (across or q.instance == k.instance)

    return rule


def bidirectional_instances(across: bool, window: int | None = None) -> Rule:
    def rule(q: Token, k: Token) -> bool:
        if q.sample != k.sample:
            return False
        if window is not None and q.index - k.index >= window:
            return False
        if q.modality == "text":
            return k.index <= q.index
        if _same_image(q, k):
            return True
        return k.index <= q.index and (across or k.modality == "text")

    return rule


def matrix(tokens: Sequence[Token], rule: Rule) -> np.ndarray:
    """Return `[tokens, tokens]` booleans; padding sees no token and is seen by none."""
    return np.array(
        [[q.modality != "padding" and k.modality != "padding" and rule(q, k) for k in tokens] for q in tokens],
        dtype=bool,
    ).reshape(len(tokens), len(tokens))


def _word_sees(q_bits: str, k_bits: str, query_position: int, key_position: int, window: int | None) -> bool:
    if q_bits[48:60] != k_bits[48:60]:
        return False
    same_instance = q_bits[32:48] == k_bits[32:48]
    attended = any(a == o == "1" for a, o in zip(q_bits[12:24], k_bits[0:12]))
    alike = any(a == o == "1" for a, o in zip(q_bits[0:12], k_bits[0:12]))
    causal, local, windowed, together = (q_bits[bit] == "1" for bit in (62, 61, 60, 24))
    own_instance = together and alike and same_instance
    ahead = key_position > query_position
    if not attended and not own_instance:
        return False
    if causal and ahead and not own_instance:
        return False
    if local and not same_instance:
        return False
    if windowed and window is not None:
        distance = abs(query_position - key_position)
        if distance >= window and not (causal and ahead):
            return False
    return True


def word_matrix(
    query_fields: Sequence[int],
    key_fields: Sequence[int],
    query_positions: Sequence[int],
    key_positions: Sequence[int],
    window: int | None = None,
) -> np.ndarray:
    """Return `[queries, keys]` booleans from words, positions and a window width."""
    # Digits from the lowest bit up, so that [12:24] are bits 12 to 23.
    queries = [(f"{int(word):064b}"[::-1], int(at)) for word, at in zip(query_fields, query_positions)]
    keys = [(f"{int(word):064b}"[::-1], int(at)) for word, at in zip(key_fields, key_positions)]
    seen = [[_word_sees(q, k, at, key_at, window) for k, key_at in keys] for q, at in queries]
    return np.array(seen, dtype=bool).reshape(len(queries), len(keys))


def block_kinds(dense: np.ndarray, block: int, key_block: int) -> np.ndarray:
    """0 for blocks without a visible pair, 2 for blocks without a hidden one, 1 for the rest: int `[rows, columns]`."""
    rows, columns = -(-dense.shape[0] // block), -(-dense.shape[1] // key_block)
    kinds = np.zeros((rows, columns), dtype=int)
    for r in range(rows):
        for c in range(columns):
            part = dense[r * block : (r + 1) * block, c * key_block : (c + 1) * key_block]
            kinds[r, c] = 2 if part.all() else 1 if part.any() else 0
    return kinds
