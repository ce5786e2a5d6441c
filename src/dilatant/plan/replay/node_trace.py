"""Node traces: the times at which nodes joined and left a cluster.

Several public collections are read as published: Bamboo's and Oobleck's `milliseconds,add|remove,node`, Parcae's and
Bamboo's counts over time, Parcae's JSON lines and SkyPilot's sampled counts.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dilatant.config.errors import UserError

UNITS = {"ms": "milliseconds", "s": "seconds", "h": "hours"}
_SECONDS = {"ms": 1e-3, "s": 1.0, "h": 3600.0}
# A count file has no unit. 10^7 s are four months, longer than any published trace; 10^7 ms are under three hours.
_SURELY_MILLISECONDS = 1e7
MOST_NODES = 100_000
"""Most nodes at one time; a larger number is a mistake or an attack, since each node takes memory."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """At `seconds`, nodes `joined` and nodes `lost`; no node is in both."""

    seconds: float
    joined: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """Events in time order, at most one at a time; the cluster is empty before the first. Ends at `seconds`. unit: in
    which the file's times were read; empty if the file says them in full."""

    name: str
    events: tuple[NodeEvent, ...]
    seconds: float
    unit: str = ""

    def counts(self) -> tuple[tuple[float, int], ...]:
        """Return (seconds, nodes alive from then on) for each event."""
        alive, counts = 0, []
        for event in self.events:
            alive += len(event.joined) - len(event.lost)
            counts.append((event.seconds, alive))
        return tuple(counts)


def load_node_trace(path: str | Path, seed: int = 0, unit: str | None = None) -> NodeTrace:
    """Read a trace file in any of the known formats.

    Files that only count nodes do not say which were lost: lost nodes are drawn with `seed`. `unit` ("ms", "s" or "h")
    is that of the file's times; the default is milliseconds, and for a `time,count` file what is plausible (see
    `_plausible_unit`). Raises UserError naming the line that does not fit, and for a unit of a file that has its own.
    """
    if unit is not None and unit not in UNITS:
        raise UserError(f"the unit of a trace is one of {', '.join(UNITS)}, not {unit!r}")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"node trace {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"node trace {str(path)!r} is no text; see the plan page's documentation for formats") from None
    try:
        changes, end, unit = _changes(text, seed, unit)
    except _Misfit as misfit:
        raise UserError(f"node trace {str(path)!r}, {misfit}") from None
    except (OverflowError, RecursionError) as error:
        raise UserError(f"node trace {str(path)!r} holds a number or a list without end: {error}") from None
    if not all(math.isfinite(seconds) for seconds, _, _ in changes) or not math.isfinite(end):
        raise UserError(f"node trace {str(path)!r} has a time that is no finite number")
    trace = NodeTrace(path.stem, _merge(changes), end, unit)
    if not any(event.joined for event in trace.events):
        raise UserError(f"node trace {str(path)!r} has no node at any time")
    return trace


class _Misfit(ValueError):
    """A line does not fit its format."""


Change = tuple[float, bool, int]  # seconds, joined rather than lost, node


def _changes(text: str, seed: int, unit: str | None) -> tuple[list[Change], float, str]:
    """Return every change in time order, the end of the trace, and the unit in which its times were read."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise _Misfit("line 1: the file is empty")
    first = lines[0][1]
    is_dated = re.match(r"\d{4}-\d\d-\d\d", first)
    if first.startswith("[") or (first.count(",") == 2 and not is_dated):
        read, unit = (_json_line if first.startswith("[") else _csv_line), unit or "ms"
        return *_named([read(number, line, _SECONDS[unit]) for number, line in lines]), unit
    if first.startswith("{") or first.count(",") == 2:
        if unit is not None:
            raise _Misfit("line 1: the file says its times in full, and takes no unit")
        return *_counted(_sampled(text) if first.startswith("{") else _dated(lines), seed), ""
    counts = _plain_counts(lines)
    unit = unit or _plausible_unit([time for time, _ in counts])
    return *_counted([(time * _SECONDS[unit], count) for time, count in counts], seed), unit


def _named(entries: list[tuple[int, float, str, list[str]]]) -> tuple[list[Change], float]:
    """Return the changes of named nodes; names become numbers in order of appearance."""
    numbers: dict[str, int] = {}
    alive: set[int] = set()
    changes: list[Change] = []
    for line, seconds, action, names in entries:
        for name in names if action in ("add", "remove") else ():
            node = numbers.setdefault(name, len(numbers))
            joined = action == "add"
            if joined == (node in alive):
                raise _Misfit(f"line {line}: {name} {'is already there' if joined else 'is not there'}")
            (alive.add if joined else alive.discard)(node)
            changes.append((seconds, joined, node))
    return changes, entries[-1][1]


def _csv_line(number: int, line: str, scale: float) -> tuple[int, float, str, list[str]]:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3 or parts[1] not in ("add", "remove"):
        raise _Misfit(f"line {number}: expected milliseconds,add|remove,node but found {line!r}")
    return number, _number(number, parts[0]) * scale, parts[1], [parts[2]]


def _json_line(number: int, line: str, scale: float) -> tuple[int, float, str, list[str]]:
    try:
        time, action, detail = json.loads(line)
        return number, time * scale, str(action), [str(name) for name in detail["nodes"]]
    except (ValueError, TypeError, KeyError):
        raise _Misfit(f"line {number}: expected [milliseconds, action, {{nodes: [...]}}]") from None


def _counted(counts: Iterable[tuple[float, int]], seed: int) -> tuple[list[Change], float]:
    """Return changes that produce these counts; nodes that leave are drawn among those alive."""
    draw = random.Random(seed)
    alive: list[int] = []
    changes: list[Change] = []
    made, seconds = 0, 0.0
    for seconds, count in sorted(counts, key=lambda entry: entry[0]):
        if count > MOST_NODES:
            raise _Misfit(f"{count:,} nodes at {seconds:g} s; at most {MOST_NODES:,} can be replayed")
        while len(alive) < count:
            alive.append(made)
            changes.append((seconds, True, made))
            made += 1
        while len(alive) > count:
            changes.append((seconds, False, alive.pop(draw.randrange(len(alive)))))
    return changes, seconds


def _sampled(text: str) -> list[tuple[float, int]]:
    try:
        document = json.loads(text)
        gap, counts = float(document["metadata"]["gap_seconds"]), [int(count) for count in document["data"]]
    except (ValueError, TypeError, KeyError):
        raise _Misfit("line 1: expected {metadata: {gap_seconds}, data: [counts]}") from None
    return [(index * gap, count) for index, count in enumerate(counts)]


def _dated(lines: list[tuple[int, str]]) -> list[tuple[float, int]]:
    entries = []
    for number, line in lines:
        day, clock, count = [part.strip() for part in line.split(",")] if line.count(",") == 2 else ("", "", "")
        try:
            entries.append((datetime.fromisoformat(f"{day} {clock}").timestamp(), int(count)))
        except ValueError:
            raise _Misfit(f"line {number}: expected YYYY-MM-DD, HH:MM:SS, count but found {line!r}") from None
    begin = min(when for when, _ in entries)
    return [(when - begin, count) for when, count in entries]


def _plain_counts(lines: list[tuple[int, str]]) -> list[tuple[float, int]]:
    entries = []
    for number, line in lines:
        parts = line.split(",")
        if len(parts) != 2:
            raise _Misfit(f"line {number}: expected time,count but found {line!r}")
        entries.append((_number(number, parts[0]), int(_number(number, parts[1]))))
    return entries


def _plausible_unit(times: list[float]) -> str:
    """Return the unit that times without one have: milliseconds if seconds would be months, hours if changes would be
    less than a second apart, else seconds."""
    moments = sorted({*times})
    if moments[-1] > _SURELY_MILLISECONDS:
        return "ms"
    return "h" if moments[-1] - moments[0] < len(moments) - 1 else "s"


def _number(line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Misfit(f"line {line}: {text!r} is not a number") from None


def _merge(changes: list[Change]) -> tuple[NodeEvent, ...]:
    """Merge changes into one event per moment; a node that joins and leaves at the same moment is omitted."""
    moments: dict[float, tuple[set[int], set[int]]] = {}
    for seconds, is_join, node in changes:
        joined, lost = moments.setdefault(seconds, (set(), set()))
        mine, other = (joined, lost) if is_join else (lost, joined)
        if node in other:
            other.discard(node)
        else:
            mine.add(node)
    return tuple(
        NodeEvent(seconds, tuple(sorted(joined)), tuple(sorted(lost)))
        for seconds, (joined, lost) in sorted(moments.items())
        if joined or lost
    )
