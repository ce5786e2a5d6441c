"""Pictures of the concept pages: `python website/concept_pictures.py` writes docs/images/*.svg.

Schedules, masks, layouts and bars of memory are computed by the code or read from the page that they illustrate, so a
picture cannot say something else. The background is part of a picture: it is readable on light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
INK, PAPER, LINE = "#1f2933", "#fbfbf8", "#9aa5b1"
BLUE, ORANGE, GREEN, GREY, RED = "#cfe3f7", "#fbdcb8", "#cdebd0", "#e6e8eb", "#f6c9c6"


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    """Return a picture of `parts` on a background of its own."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">'
        f'<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="3.5" orient="auto">'
        f'<path d="M0,0 L8,3.5 L0,7 z" fill="{INK}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = 13, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """Return a box with lines of text in its middle, the first one bold if there are several."""
    middle = y + height / 2 + 5 - 8 * (len(lines) - 1)
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{LINE}"/>'
    texts = (
        text(
            x + width / 2, middle + 16 * place, line, size=13 if place == 0 else 12, bold=len(lines) > 1 and place == 0
        )
        for place, line in enumerate(lines)
    )
    return shape + "".join(texts)


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#tip)"{dash}/>'


def design() -> str:
    values = (
        ("Plan", "which rank holds which layers", "changes when the cluster changes", BLUE),
        ("Assignment", "which samples form which microbatch", "changes every step", ORANGE),
    )
    parts = []
    for place, (name, what, when, fill) in enumerate(values):
        y = 20 + 90 * place
        parts += [
            box(20, y, 250, 70, fill, name, what, when),
            arrow((270, y + 35), (320, y + 35), (320, 100), (345, 100)),
        ]
    parts.append(box(350, 65, 190, 70, GREEN, "Schedule", "in which order", "each rank computes"))
    uses = ("simulated: time, memory", "drawn: timeline", "executed: training")
    for place, use in enumerate(uses):
        y = 15 + 65 * place
        parts += [arrow((540, 100), (575, y + 23)), box(580, y, 180, 46, GREY, use)]
    return svg(780, 200, parts)


def schedules() -> str:
    """Draw the example of the page with actions of one second."""
    from dilatant.plan import Plan, Replica, Stage, UnitPlan
    from dilatant.schedule.families.families import eager
    from dilatant.schedule.schedule import Assignment
    from dilatant.schedule.simulator.simulate import simulate

    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), feeds=("language",)),
            UnitPlan("language", (Replica((Stage(0, 3, (1,)), Stage(3, 6, (2,)))),)),
        )
    )
    assignment = Assignment({"vision": (((0, 1), (2, 3, 5)),), "language": (((0, 4), (1, 2), (3, 5)),)})
    timeline = simulate(eager(plan, assignment), plan, assignment, lambda action: 1.0)
    names = ("vision", "language, stage 0", "language, stage 1")
    scale, left = 560 / timeline.seconds, 150
    parts = []
    for rank in timeline.ranks:
        y = 16 + 44 * rank
        parts += [
            text(12, y + 16, f"rank {rank}", "start", bold=True),
            text(12, y + 31, names[rank], "start", 12),
            f'<rect x="{left}" y="{y}" width="560" height="34" fill="{GREY}"/>',
        ]
        for action, start, end in timeline.of_rank(rank):
            samples = action.samples or assignment.microbatches[plan.units[min(rank, 1)].name][0][action.microbatch]
            fill = BLUE if action.kind == "F" else ORANGE
            parts.append(
                box(left + scale * start, y, scale * (end - start), 34, fill, f"{action.kind}{action.microbatch}")
                + text(left + scale * (start + end) / 2, y + 43, " ".join(map(str, samples)), size=10)
            )
    note = "F forward, B backward, grey: idle; below each action its samples. Sample 4 has no image; 1 is deferred"
    return svg(730, 178, [*parts, text(365, 168, note, size=12)])


def attention() -> str:
    from dilatant.attention import RowLayout, media_mask, visible

    segments = [[("text", 3), ("vision", 5), ("text", 3), ("vision", 4), ("text", 3)], [("audio", 4), ("text", 3)]]
    mask = media_mask(RowLayout.of_samples(segments), "embedded")
    kinds = [kind for sample in segments for kind, count in sample for _ in range(count)]
    positions = [place for sample in segments for place in range(sum(count for _, count in sample))]
    fields, cell, left, top = mask.fields, 11, 130, 34
    fills = {"text": BLUE, "vision": ORANGE, "audio": GREEN}
    parts = [text(left + cell * len(kinds) / 2, 14, "keys", size=12), text(100, 14, "queries", size=12)]
    for query, kind in enumerate(kinds):
        y = top + cell * query
        parts += [
            f'<rect x="{left - 13}" y="{y}" width="10" height="{cell - 1}" fill="{fills[kind]}"/>',
            f'<rect x="{left + cell * query}" y="{top - 13}" width="{cell - 1}" height="10" fill="{fills[kind]}"/>',
        ]
        for key in range(len(kinds)):
            sees = visible(fields[query], fields[key], positions[query], positions[key])
            fill = fills[kinds[key]] if sees else PAPER
            parts.append(
                f'<rect x="{left + cell * key}" y="{y}" width="{cell}" height="{cell}" fill="{fill}" stroke="{LINE}" '
                'stroke-width="0.4"/>'
            )
    row = 0
    for number, sample in enumerate(segments):
        size = sum(count for _, count in sample)
        parts.append(text(left - 20, top + cell * (row + size / 2) + 4, f"sample {number}", "end", 12))
        row += size
    for place, (kind, fill) in enumerate(fills.items()):
        y = 60 + 26 * place
        parts += [f'<rect x="480" y="{y}" width="14" height="14" fill="{fill}"/>', text(502, y + 12, kind, "start")]
    parts += [
        text(480, y + 50, "coloured: the query sees the key", "start"),
        text(480, y + 70, "mask: embedded", "start"),
    ]
    return svg(700, top + cell * len(kinds) + 14, parts)


def parallel() -> str:
    """Draw the layout of the page's example, with 24 layers of each unit."""
    from dilatant.plan.manual import plan_from_specs
    from dilatant.plan.plan import ParallelSpec

    specs = {"vision": ParallelSpec(replicas=2), "language": ParallelSpec(pp=2, cuts=(0, 12))}
    plan = plan_from_specs({"vision": 24, "language": 24}, specs, {"vision": ["language"], "language": []})
    parts, at = [], {}
    for column, unit in enumerate(plan.units):
        stages = [(replica, stage) for replica, each in enumerate(unit.replicas) for stage in each.stages]
        for row, (replica, stage) in enumerate(stages):
            x, y = (40, 20 + 90 * row) if column == 0 else (330 + 220 * row, 65)
            which = f"replica {replica}" if len(unit.replicas) > 1 else f"stage {row}"
            ranks = ", ".join(map(str, stage.ranks))
            fill = ORANGE if unit.name == "vision" else BLUE
            layers = f"layers {stage.first} to {stage.end - 1}"
            parts.append(box(x, y, 170, 70, fill, f"rank {ranks}", f"{unit.name}, {which}", layers))
            at[unit.name, row] = (x, y)
    for row in range(2):
        x, y = at["vision", row]
        parts.append(arrow((x + 170, y + 35), (325, 88 + 24 * row)))
    parts += [arrow((500, 100), (545, 100)), text(415, 158, "rows of samples travel along arrows,", size=12)]
    parts.append(text(415, 175, "their gradients back", size=12))
    return svg(760, 200, parts)


def flow(steps: Sequence[tuple[str, ...]], fills: Sequence[str], width: int = 130) -> list[str]:
    """Return boxes from left to right, with arrows between them."""
    parts = []
    for place, (lines, fill) in enumerate(zip(steps, fills, strict=True)):
        x = 15 + (width + 28) * place
        parts.append(box(x, 30, width, 84, fill, *lines))
        if place:
            parts.append(arrow((x - 28, 72), (x - 4, 72)))
    return parts


def planning() -> str:
    inputs: Sequence[tuple[str, ...]] = (
        ("token counts", "from file headers"),
        ("layer costs", "measured, modelled"),
        ("devices", "memory, links"),
    )
    parts = []
    for place, lines in enumerate(inputs):
        y = 12 + 62 * place
        parts += [box(15, y, 150, 50, ORANGE, *lines), arrow((165, y + 25), (205, 97))]
    steps = (
        ("search", "all layouts"),
        ("simulate", "the best ones, on", "your global batches"),
        ("keep", "the fastest that", "fits memory"),
    )
    for place, lines in enumerate(steps):
        x = 210 + 170 * place
        parts.append(box(x, 62, 142, 70, BLUE if place < 2 else GREEN, *lines))
        if place:
            parts.append(arrow((x - 28, 97), (x - 4, 97)))
    parts += [arrow((692, 97), (716, 97)), box(720, 72, 90, 50, GREY, "plan.json")]
    return svg(825, 200, parts)


def resilience() -> str:
    steps = (
        ("a node is lost", "connection closed,", "or silence"),
        ("fence", "other ranks stop", "computing"),
        ("rebuild", "new plan; missing", "layers are copied"),
        ("run", "only what is missing", "of the step"),
        ("commit", "all members vote,", "then update"),
    )
    parts = flow(steps, (RED, GREY, BLUE, ORANGE, GREEN))
    return svg(
        810, 150, [*parts, text(405, 138, "gradients that survivors had completed are kept; no step is lost", size=12)]
    )


def data() -> str:
    steps = (
        ("records", "files, hub,", "Python objects"),
        ("sizes index", "tokens per unit,", "without decoding"),
        ("assignment", "samples to", "microbatches"),
        ("decode", "each rank only the", "media of its stages"),
        ("packed rows", "samples end to end,", "no padding"),
    )
    return svg(810, 140, flow(steps, (GREY, ORANGE, GREEN, BLUE, BLUE)))


def memory() -> str:
    """Draw the bytes per parameter that the page's table lists, for state that eight ranks share."""
    rows = re.findall(r"^\| (.*?) \| (\d) \| (\d) \| (.*?) \| [\d.]+ \| ([\d.]+) \|$", page("memory.md"), re.MULTILINE)
    parts, left, scale = [], 250, 32
    for place, (name, weight, gradient, _, shared) in enumerate(rows):
        y, x = 12 + 25 * place, float(left)
        parts.append(text(left - 8, y + 15, name.replace("`", ""), "end", 12))
        for value, fill in (
            (float(weight), BLUE),
            (float(gradient), ORANGE),
            (float(shared) - int(weight) - int(gradient), GREEN),
        ):
            if value > 0:
                parts.append(box(x, y, scale * value, 20, fill))
                x += scale * value
        parts.append(text(x + 6, y + 15, shared, "start", 12))
    y = 12 + 25 * len(rows)
    legend = (("weight", BLUE), ("gradient", ORANGE), ("master and moments, an eighth", GREEN))
    for place, (name, fill) in enumerate(legend):
        parts += [
            box(left + 110 * place, y + 4, 14, 14, fill),
            text(left + 20 + 110 * place, y + 16, name, "start", 12),
        ]
    parts.append(text(left, y + 36, "bytes per parameter, state shared by 8 ranks", "start", 12))
    return svg(720, y + 48, parts)


def protocol() -> str:
    """Draw the phases of a node, as the page's table lists them."""
    phases = ("fresh", "fencing", "fenced", "rebuilding", "ready", "running")
    parts = []
    for place, name in enumerate(phases):
        x = 15 + 128 * place
        parts.append(box(x, 70, 96, 40, GREEN if name == "running" else BLUE, name))
        if place:
            label = ("fence", "Stopped", "rebuild", "Made", "run")[place - 1]
            parts += [arrow((x - 32, 90), (x - 3, 90)), text(x - 16, 62, label, size=11)]
    parts += [
        arrow((703, 70), (703, 24), (191, 24), (191, 66)),
        text(447, 18, "a greater generation, from any phase", size=12),
        arrow((690, 110), (690, 140), (716, 140), (716, 114)),
        text(660, 146, "Apply", "end", 12),
    ]
    return svg(780, 160, parts)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


PICTURES: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (design, schedules, attention, parallel, planning, resilience, data, memory, protocol)
}
"""Page of docs/ → its picture."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / "images" / f"{name}.svg").write_text(draw(), encoding="utf-8")
