"""Charts of samples by tokens: bars or cells, with axes at round numbers, for the macro `charts` of parts.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dilatant.report.text.wording import count_text, counted

WIDTH, HEIGHT, LEFT, TOP = 480.0, 150.0, 44.0, 14.0
_FOOT = 22.0
_WIDEST = 28.0
"""Maximum width of a bar: two distinct lengths appear as two bars, not as blocks."""
_LOWEST = 1.5
"""Minimum height of a bar: a single sample beside a thousand stays visible."""


def histogram(edges: Sequence[float], counts: Sequence[int], medians: Mapping[str, float]) -> dict[str, Any]:
    """Return samples by tokens, with both axes at round numbers. medians: name → tokens that are marked."""
    top = _round_up(max(counts))
    x, y = scale(edges[0], edges[-1], LEFT, WIDTH), scale(0.0, top, TOP + HEIGHT, TOP)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            wide = min(max(x(right) - x(left) - 1.0, 0.5), _WIDEST)
            bars.append(
                {
                    "x": round((x(left) + x(right) - wide) / 2, 2),
                    "width": wide,
                    "y": min(y(count), TOP + HEIGHT - _LOWEST),
                    "height": max(TOP + HEIGHT - y(count), _LOWEST),
                    "title": f"{span_text(left, right)} tokens: {counted(count, 'sample')}",
                }
            )
    # A bin of width 1 stands for one number, which is marked at the middle of its bar.
    middle = 0.5 if edges[1] - edges[0] == 1.0 else 0.0
    last = edges[-1] - 2 * middle
    marks = [{"x": x(value + middle), "name": name, "top": TOP} for name, value in medians.items()]
    return {
        **frame("F"),
        "bars": bars,
        "heights": counts,
        "marks": marks,
        "rows": [{"y": y(value), "text": count_text(value)} for value in ticks(0.0, top)],
        "columns": [{"x": x(value + middle), "text": count_text(value)} for value in ticks(edges[0], last)],
    }


def frame(tone: str) -> dict[str, Any]:
    return {
        "tone": tone,
        "text": "",
        "width": WIDTH,
        "height": TOP + HEIGHT + _FOOT,
        "left": LEFT,
        "floor": TOP + HEIGHT,
    }


def scale(low: float, high: float, start: float, end: float) -> Any:
    span = (high - low) or 1.0
    return lambda value: round(start + (value - low) / span * (end - start), 2)


def ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers from `low` to `high`."""
    step = _round_up((high - low) / 5.0 or 1.0)
    first = -(-low // step)
    return [(first + number) * step for number in range(int((high - first * step) // step) + 1)]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ...; at least 1, because samples and tokens are whole numbers."""
    power = 1.0
    while 10.0 * power <= value:
        power *= 10.0
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value)


def span_text(low: float, high: float) -> str:
    """Return the whole numbers `low <= n < high` as text."""
    return f"{low:,.0f}" if high - low <= 1.0 else f"{low:,.0f} to {high - 1:,.0f}"
