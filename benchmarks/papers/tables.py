"""A table of a paper next to ours, and what becomes of its claims: the paper's figure, ours, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Verdict = Literal["agrees", "beats", "falls short", "cannot be tested here"]

Basis = Literal["predicted", "calibrated", "fitted", "replayed", "measured", "carried over"]
"""Where our figure is from. predicted: nothing of the paper's results went in. calibrated: some constant is of another
figure of the paper, or set on it, and that figure is not compared. fitted: constants were set on the very figures that
are compared. replayed: computed from the paper's own measurements, so that agreeing says only that the arithmetic is
the same. measured: a clock on this machine. carried over: the paper's figure, as printed."""

UNTESTED: Verdict = "cannot be tested here"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of one claim. `paper` and `ours` are figures in words; `verdict` compares them."""

    claim: str
    paper: str
    ours: str
    verdict: Verdict
    basis: Basis
    note: str = ""


def judged(
    claim: str,
    paper: float,
    ours: float,
    basis: Basis,
    *,
    within: float = 0.1,
    more_is_better: bool | None = None,
    unit: str = "",
    note: str = "",
) -> Outcome:
    """Agrees where ours is within a share of the paper's figure. Beyond that, better beats it and worse falls short; of
    a figure that is neither better nor worse by being larger (`more_is_better` None), any distance falls short."""
    off = ours / paper - 1.0
    verdict: Verdict = "falls short"
    if abs(off) <= within:
        verdict = "agrees"
    elif more_is_better is not None and (off > 0.0) == more_is_better:
        verdict = "beats"
    return Outcome(claim, figure(paper) + unit, figure(ours) + unit, verdict, basis, note)


def in_range(
    claim: str, low: float, high: float, ours: tuple[float, float], basis: Basis, *, slack: float = 0.1, note: str = ""
) -> Outcome:
    """The paper gives a range, larger being better: ours agrees where it lies inside (a share of slack allowed, but no
    more than a third of a gain), beats it where its lower end is above, and falls short otherwise."""
    least, most = ours
    enough = low * (1 - slack)
    if low > 1.0:
        enough = max(enough, 1 + (low - 1) * 2 / 3)
    verdict: Verdict = "falls short"
    if least >= enough:
        verdict = "agrees" if most <= high * (1 + slack) else "beats"
    text = f"{figure(least)} to {figure(most)}"
    return Outcome(claim, f"{figure(low)} to {figure(high)}", text, verdict, basis, note)


def spread(values: Iterable[float], digits: int = 2) -> str:
    """`least to most`."""
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def untested(claim: str, paper: str, why: str) -> Outcome:
    """A claim carried over from the paper that nothing here can check."""
    return Outcome(claim, paper, "", UNTESTED, "carried over", why)


@dataclass(frozen=True, slots=True)
class PaperTable:
    """`columns` name what `rows` hold, in order. `basis` says what our figures are: measured or modelled, on what.

    `outcomes` are the paper's claims with what became of them, `remarks` sentences on why; every figure in either is
    computed from the rows. timed: the figures are times of this machine, which its load spoils.
    """

    name: str
    title: str
    basis: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    outcomes: tuple[Outcome, ...] = ()
    remarks: tuple[str, ...] = field(default=())
    timed: bool = False

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.name

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["rows"] = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        del plain["columns"]
        return plain

    def show(self, console: Console) -> None:
        console.print(f"\n[bold]{escape(self.name)}[/]  {escape(self.title)}", highlight=False)
        console.print(f"[dim]{escape(self.basis)}[/]", highlight=False)
        if self.rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
            for index, column in enumerate(self.columns):
                numeric = all(isinstance(row[index], int | float | None) for row in self.rows)
                table.add_column(column, justify="right" if numeric else "left")
            for row in self.rows:
                table.add_row(*(escape(figure(value)) for value in row))
            console.print(table)
        for one in self.outcomes:
            figures = f"paper {one.paper}" + (f", ours {one.ours}" if one.ours else "")
            text = f"{one.claim}: {one.verdict} ({one.basis}; {figures})" + (f". {one.note}" if one.note else "")
            console.print(f"  • {escape(text)}", highlight=False)
        for sentence in self.remarks:
            console.print(f"    {escape(sentence)}", highlight=False)


def figure(value: Any) -> str:
    """A value in words, numbers to three digits or so."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}"
    return str(value)
