"""Formatting of numbers and names for readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dilatant.cost.memory import bytes_text as bytes_text
from dilatant.cost.memory import three_digits

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""Kinds of actions in words."""

_LOST = {
    "warm-up": "filling the pipeline",
    "drain": "draining the pipeline",
    "imbalance": "uneven work of stages and microbatches",
    "communication": "moving data between devices",
    "between actions": "bookkeeping between actions",
    "update": "updating weights",
}


def seconds_text(seconds: float) -> str:
    """Return three significant digits and a unit: `1.84 s`, `12.4 ms`, `820 µs`, `2 min 05 s`, `3 h 20 min`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{three_digits(seconds * factor)} {unit}"
    raise AssertionError


def count_text(count: float) -> str:
    """Return a shortened count: `7.24 B`, `630 M`, `48.1 k`, `512`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= factor:
            return f"{three_digits(count / (1e3 if unit == 'k' else factor))} {unit}"
    return f"{count:,.0f}" if count >= 100 or float(count).is_integer() else three_digits(count)


def counted(number: int, noun: str) -> str:
    """Return number and noun: `1 stage`, `2 stages`, `3 microbatches`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith(('h', 's')) else 's'}"


def microbatches_text(count: int, samples: int, row_tokens: int | None) -> str:
    """Return `4 microbatches of 2 samples`, or with a token budget `4 microbatches of about 2 samples and at most 512
    tokens`."""
    text = counted(count, "microbatch")
    if row_tokens is None:
        return f"{text} of {counted(samples, 'sample')}"
    return f"{text} of about {counted(samples, 'sample')} and at most {row_tokens:,} tokens"


def percent_text(fraction: float) -> str:
    """Return `81 %`; below ten with one decimal, so that small shares stay distinguishable."""
    percent = 100.0 * fraction
    return f"{percent:.1f} %" if 0.05 <= abs(percent) < 9.95 else f"{percent:.0f} %"


def origin_text(origin: str) -> str:
    """Return the origin of costs (`CostModel.origin`) for a reader."""
    return origin if origin.startswith("measured") else f"{origin} (not measured)"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ascending ranks with runs joined: `0–7, 12`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)


def layers_text(first: int, end: int) -> str:
    """Return layers `first <= layer < end`: `0–7`, or `7` alone."""
    return str(first) if end - first == 1 else f"{first}–{end - 1}"


def listed(items: Sequence[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def lost_to(cause: str) -> str:
    """Return a cause of idle time in words."""
    return _LOST.get(cause, cause)


def unbroken(sentence: str) -> str:
    """Return the sentence with no-break spaces between figures and units."""
    return re.sub(r"(?<=\d) (?=%|[KMGT]iB|[mµ]?s\b|min\b|h\b)", "\u00a0", sentence)
