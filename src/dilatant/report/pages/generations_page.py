"""Generations page of a resilient run: nodes that left and joined, and the cost of each change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dilatant.report.pages.page import render
from dilatant.report.pages.replay_page import TONES
from dilatant.report.parts import Cell, Column, PageSection, Table, bar_part, legend, number, summary
from dilatant.report.text.wording import counted, listed, seconds_text


@dataclass(frozen=True, slots=True)
class Generation:
    """One membership of the cluster.
    time: when its change was noticed, in seconds since 1970. step: the last step before it. left, joined: nodes,
    compared with the previous membership. lost: cause (as in `plan.replay`) → seconds until the next committed step, as
    far as known; empty for the first generation. phases: the same time by phase, in order. kept, missing: (layer,
    sample) pairs of the interrupted step whose gradients were reused or computed again; None if unknown. copies: of the
    scarcest layer, on different nodes; shortage: why they are too few, if they are. idle: nodes with ranks in no
    pipeline. pipelines: of the plan, in words."""

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
    copies: int | None = None
    shortage: str = ""
    idle: tuple[str, ...] = ()
    pipelines: str = ""

    @property
    def seconds(self) -> float:
        return sum(self.lost.values())


def render_generations_page(generations: Sequence[Generation], title: str, stopped: str = "") -> str:
    """Return the page as text; all values are escaped."""
    longest = max((one.seconds for one in generations), default=0.0) or 1.0
    causes = list(dict.fromkeys(cause for one in generations for cause in one.lost))
    columns = (
        number("Generation", ""), Column("Noticed", label="noticed"), number("After step", "after step"),
        number("Nodes", "nodes"), number("Copies", "copies"), Column("What happened", label="what happened"),
        Column("Time lost", "wide"), Column("", "number", "lost"),
    )  # fmt: skip
    entries = legend({cause: TONES[cause] for cause in causes})
    return render(
        f"{title} · Dilatant generations",
        title,
        "Who took part in the run, and what each change of that cost",
        [
            summary(summarize(generations, stopped)),
            (
                "section",
                PageSection(
                    "generations",
                    "Generations",
                    "A generation is one membership of the run. The bar is the time from when a change was noticed to "
                    "the next step that all committed; below it are its phases. Copies are those of the scarcest "
                    "layer on different nodes: as many nodes must be lost at once to lose it. Perfetto "
                    "(ui.perfetto.dev) opens generations.json, which lies beside this page.",
                    [("table", Table(columns, [_row(one, longest) for one in generations], legend=entries))],
                ),
            ),
        ],
        "Measured by the run itself; clocks are those of the coordinator and of the first rank.",
    )


def summarize(generations: Sequence[Generation], stopped: str = "") -> tuple[str, ...]:
    """Return the history in sentences."""
    changes = generations[1:]
    left, joined = (sum(len(names) for names in nodes) for nodes in zip(*((g.left, g.joined) for g in changes)))
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
    kept, missing = (sum(getattr(one, name) or 0 for one in changes if one.left) for name in ("kept", "missing"))
    if kept:
        sentences.append(
            f"Of the steps in hand at losses {counted(kept, 'pair')} of a layer and a sample were kept, "
            f"and {missing} computed again."
        )
    if stopped:
        sentences.append(f"The run ended: {stopped}.")
    return tuple(sentences)


def _row(one: Generation, longest: float) -> tuple[str | Cell, ...]:
    changes = ((one.left, "left"), (one.joined, "joined"))
    happened = [f"{listed(list(names))} {what}" for names, what in changes if names]
    plan = f"pipelines: {one.pipelines}" if one.pipelines else ""
    spare = f"idle until the next change: {listed(list(one.idle))}" if one.idle else ""
    phases = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in one.phases.items())
    parts = [
        bar_part(cause, seconds / longest, TONES[cause], seconds_text(seconds)) for cause, seconds in one.lost.items()
    ]
    return (
        str(one.number),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time)),
        str(one.step),
        str(one.members),
        "" if one.copies is None else str(one.copies),
        Cell("; ".join(happened), notes=[note for note in (one.reason, plan, one.shortage, spare) if note]),
        Cell(parts=parts, notes=[note for note in (phases, _salvaged(one)) if note]),
        seconds_text(one.seconds) if one.lost else "",
    )


def _salvaged(one: Generation) -> str:
    if not one.left or one.kept is None or one.missing is None:
        return ""
    if not one.kept:
        return "nothing of the step in hand was kept"
    share = one.kept / (one.kept + one.missing)
    return f"{share:.0%} of the step in hand kept: {one.kept} pairs of a layer and a sample; {one.missing} ran again"
