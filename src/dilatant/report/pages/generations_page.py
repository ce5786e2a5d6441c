"""Generations page of a resilient run: nodes that left and joined, and the cost of each change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilatant.report.pages.page import render, write_page
from dilatant.report.pages.replay_page import TONES
from dilatant.report.text.wording import counted, listed, seconds_text


@dataclass(frozen=True, slots=True)
class Generation:
    """One membership of the cluster.
    time: when its change was noticed, in seconds since 1970. step: the last step before it. left, joined: nodes,
    compared with the previous membership. lost: cause (as in `plan.replay`) → seconds until the next committed step, as
    far as known; empty for the first generation. phases: the same time by phase, in order. kept, missing: (layer,
    sample) pairs of the interrupted step whose gradients were reused or computed again; None if unknown."""

    number: int
    time: float
    step: int
    members: int
    left: tuple[str, ...]
    joined: tuple[str, ...]
    reason: str
    lost: Mapping[str, float]
    phases: Mapping[str, float] = field(default_factory=dict)
    kept: int | None = None
    missing: int | None = None

    @property
    def seconds(self) -> float:
        return sum(self.lost.values())


def write_generations_page(
    path: Path, generations: Sequence[Generation], title: str, stopped: str = ""
) -> Path:
    """Write the page to `path` and return the path. Raises UserError if it cannot be written."""
    return write_page(path, render_generations_page(generations, title, stopped))


def render_generations_page(generations: Sequence[Generation], title: str, stopped: str = "") -> str:
    """Return the page as text; all values are escaped."""
    longest = max((one.seconds for one in generations), default=0.0) or 1.0
    causes = list(dict.fromkeys(cause for one in generations for cause in one.lost))
    return render(
        "generations.html",
        title=title,
        summary=summarize(generations, stopped),
        rows=[_row(one, longest) for one in generations],
        causes=[{"name": cause, "tone": TONES[cause]} for cause in causes],
    )


def summarize(generations: Sequence[Generation], stopped: str = "") -> tuple[str, ...]:
    """Return the history in sentences."""
    changes = generations[1:]
    left, joined = (
        sum(len(names) for names in nodes) for nodes in zip(*((g.left, g.joined) for g in changes))
    )
    sentences = [
        f"{counted(len(changes), 'change')} of membership: {counted(left, 'node')} left, "
        f"{counted(joined, 'node')} joined."
    ]
    known = sorted(one.seconds for one in changes if one.lost)
    if known:
        sentences.append(
            f"From noticing a change to the next committed step it took {seconds_text(known[len(known) // 2])} "
            f"(median; the longest {seconds_text(known[-1])}), {seconds_text(sum(known))} in all."
        )
    kept, missing = (
        sum(getattr(one, name) or 0 for one in changes if one.left) for name in ("kept", "missing")
    )
    if kept:
        sentences.append(
            f"Of the steps in hand at losses {counted(kept, 'pair')} of a layer and a sample were kept, "
            f"and {missing} computed again."
        )
    if stopped:
        sentences.append(f"The run ended: {stopped}.")
    return tuple(sentences)


def _row(one: Generation, longest: float) -> dict[str, Any]:
    happened = [
        f"{listed(list(names))} {what}"
        for names, what in ((one.left, "left"), (one.joined, "joined"))
        if names
    ]
    return {
        "number": one.number,
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time)),
        "step": one.step,
        "members": one.members,
        "happened": "; ".join(happened),
        "reason": one.reason,
        "phases": ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in one.phases.items()),
        "salvaged": _salvaged(one),
        "seconds": seconds_text(one.seconds) if one.lost else "",
        "parts": [
            {
                "name": cause,
                "percent": round(100 * seconds / longest, 3),
                "tone": TONES[cause],
                "text": seconds_text(seconds),
            }
            for cause, seconds in one.lost.items()
        ],
    }


def _salvaged(one: Generation) -> str:
    if not one.left or one.kept is None or one.missing is None:
        return ""
    if not one.kept:
        return "nothing of the step in hand was kept"
    share = one.kept / (one.kept + one.missing)
    return f"{share:.0%} of the step in hand kept: {one.kept} pairs of a layer and a sample; {one.missing} ran again"
