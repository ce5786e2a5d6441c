"""The page of a run that goes on when nodes are lost: who left and came, and what each change cost."""

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
    """One membership. time: when its change was noticed, in seconds since 1970. step: that it began after. left,
    joined: nodes, beside the membership before. lost: cause (those of `plan.replay`) → seconds until the next step was
    committed, so far as they are known; empty of the first. phases: the same time otherwise, phase → seconds, in order.
    kept, missing: pairs of a layer and a sample of the step in hand whose gradients were kept, and which ran again;
    None where that is not known."""

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
    """Write the page to `path` and return it. Raises UserError where it cannot be written."""
    return write_page(path, render_generations_page(generations, title, stopped))


def render_generations_page(generations: Sequence[Generation], title: str, stopped: str = "") -> str:
    """The page as text; everything given is escaped."""
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
    """The history in sentences."""
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
