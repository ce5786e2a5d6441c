"""Model graph of a plan: units in order of data flow, stages as boxes, arrows for rows between units.

Only geometry is computed here; the page's template draws the graph.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from dilatant.config.degrees import Degrees
from dilatant.plan import Plan, UnitPlan
from dilatant.report.plan_report import PlanReport, UnitFacts
from dilatant.report.text.wording import count_text, counted, layers_text, percent_text, ranks_text

_WIDTH = 1120.0
_GAP = 84.0
_PADDING = 16.0
_HEADER = 62.0
_BOX = 44.0
_ROW = 62.0
_BADGE = 52.0
_BETWEEN = 18.0
_SHAPES_SHOWN = 4


Drawn = dict[str, Any]
"""What the macro `graph` of parts.html draws, by name: a whole graph, a unit's card, a stage's box, or an arrow."""


def model_graph(report: PlanReport) -> Drawn:
    """Lay the plan out from left to right; units of equal depth are stacked. A card has the boxes of each distinct kind
    of replica, with the number of equal replicas; a box is filled in proportion to the step that it computes."""
    plan = report.plan
    facts = {unit.name: unit for unit in report.units}
    depth = _depths(plan)
    columns = max(depth.values()) + 1
    width = (_WIDTH - _GAP * (columns - 1)) / columns
    heights = {unit.name: _height(len(_alike(unit))) for unit in plan.units}
    taken = [-_BETWEEN] * columns
    for name, column in depth.items():
        taken[column] += heights[name] + _BETWEEN
    tops = [(max(taken) - own) / 2.0 for own in taken]
    cards: dict[str, Drawn] = {}
    for index, unit in enumerate(plan.units):
        column, height = depth[unit.name], heights[unit.name]
        x, y = column * (width + _GAP), tops[column]
        tops[column] += height + _BETWEEN
        boxes, badges = _boxes(report, unit, x, y, width)
        hidden = len(_alike(unit)) - _SHAPES_SHOWN
        own = facts.get(unit.name)
        cards[unit.name] = {
            "index": index,
            "x": x,
            "y": y,
            "width": width,
            "height": height,
            "name": unit.name,
            "facts": _facts(own),
            "layout": _layout(unit),
            "frozen": own is not None and own.trainable_parameters == 0,
            "boxes": boxes,
            "badges": badges,
            "more": f"and {hidden} more kinds of replica" if hidden > 0 else "",
        }
    arrows = _arrows(plan, facts, cards)
    return {"width": _WIDTH, "height": max(taken), "cards": list(cards.values()), "arrows": arrows}


def _depths(plan: Plan) -> dict[str, int]:
    """Return the length of the longest path from a source to each unit; units come in topological order."""
    depth = {unit.name: 0 for unit in plan.units}
    for unit in plan.units:
        for consumer in unit.feeds:
            depth[consumer] = max(depth[consumer], depth[unit.name] + 1)
    return depth


def _busy_by_stage(report: PlanReport) -> dict[int, float]:
    """Return the fraction of a step that each stage computes."""
    load: dict[int, float] = {}
    for row in report.timeline.rows:
        load[row.stage] = load.get(row.stage, 0.0) + row.seconds
    return {stage: seconds / (report.timeline.seconds or 1.0) for stage, seconds in load.items()}


def _alike(unit: UnitPlan) -> Counter[tuple[tuple[int, int, Degrees], ...]]:
    """Return the distinct kinds of replica, by cuts and degrees, with their numbers."""
    return Counter(replica.shape for replica in unit.replicas)


def _height(shapes: int) -> float:
    return _HEADER + min(shapes, _SHAPES_SHOWN) * _ROW + (18.0 if shapes > _SHAPES_SHOWN else 0.0)


def _boxes(
    report: PlanReport, unit: UnitPlan, x: float, y: float, width: float
) -> tuple[list[Drawn], list[tuple[float, float, str]]]:
    """Return the stages of each kind of replica, and the numbers of equal replicas beside them."""
    stages, load = report.plan.stages(), _busy_by_stage(report)
    place = {(placed.unit, placed.replica, placed.position): placed.index for placed in stages}
    boxes, badges = [], []
    for row, (shape, copies) in enumerate(list(_alike(unit).items())[:_SHAPES_SHOWN]):
        first = next(i for i, replica in enumerate(unit.replicas) if replica.shape == shape)
        top = y + _HEADER + row * _ROW
        wide = (width - 2 * _PADDING - _BADGE) / len(shape)
        for position, stage in enumerate(unit.replicas[first].stages):
            busy = min(load.get(place[unit.name, first, position], 0.0), 1.0)
            layers = layers_text(stage.first, stage.end)
            grid = stage.degrees.without_experts.text(" × ", ("tp",))
            grid += f", ep {stage.ep}" if stage.ep > 1 else ""
            boxes.append(
                {
                    "x": x + _PADDING + position * wide,
                    "y": top,
                    "width": wide - 4.0,
                    "height": _BOX,
                    "busy": busy,
                    "label": layers if wide >= 9.0 * len(layers) + 6.0 else "",
                    "below": grid if wide >= 62.0 else "",
                    "title": f"{unit.name} stage {position}: layers {layers}, "
                    f"rank{'s' * (len(stage.ranks) > 1)} {ranks_text(stage.ranks)}, "
                    f"{grid}, computes {percent_text(busy)} of the step",
                    "colocated": any(len(report.plan.stages_of_rank[rank]) > 1 for rank in stage.ranks),
                }
            )
        badges.append((x + width - _PADDING, top + _BOX / 2.0, f"× {copies}"))
    return boxes, badges


def _layout(unit: UnitPlan) -> str:
    ranks = {rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks}
    depths = {len(replica.stages) for replica in unit.replicas}
    stages = "1 stage" if depths == {1} else f"{_span(depths)} stages"
    for name in Degrees._fields:
        degrees = {getattr(stage, name) for replica in unit.replicas for stage in replica.stages}
        stages += "" if degrees == {1} else f", {name} {_span(degrees)}"
    return f"{counted(len(unit.replicas), 'replica')}, {stages}, {counted(len(ranks), 'rank')}"


def _span(numbers: set[int]) -> str:
    return "–".join(map(str, sorted({min(numbers), max(numbers)})))


def _facts(facts: UnitFacts | None) -> str:
    if facts is None:
        return ""
    if facts.trainable_parameters == 0:
        trained = "frozen"
    elif facts.trainable_parameters == facts.parameters:
        trained = "trained"
    else:
        trained = f"{count_text(facts.trainable_parameters)} trained, the rest frozen"
    return f"{facts.model} · {count_text(facts.parameters)} parameters · {trained}"


def _arrows(plan: Plan, facts: dict[str, UnitFacts], cards: dict[str, Drawn]) -> list[Drawn]:
    arrows = []
    learns = _trainable_upstream(plan, facts)
    for unit in plan.units:
        for order, consumer in enumerate(unit.feeds):
            source, target = cards[unit.name], cards[consumer]
            producers = [other.name for other in plan.units if consumer in other.feeds]
            x1 = source["x"] + source["width"]
            y1 = source["y"] + source["height"] * (order + 1) / (len(unit.feeds) + 1)
            x2 = target["x"]
            y2 = target["y"] + target["height"] * (producers.index(unit.name) + 1) / (len(producers) + 1)
            middle = (x1 + x2) / 2.0
            gradients = learns[unit.name]
            back = "gradients return" if gradients else "nothing to train there, so no gradients return"
            path = f"M{x1 + 7:.1f},{y1:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} {x2 - 7:.1f},{y2:.1f}"
            title = f"{unit.name} → {consumer}: rows of samples travel here; {back}"
            arrows.append({"path": path, "gradients": gradients, "title": title})
    return arrows


def _trainable_upstream(plan: Plan, facts: dict[str, UnitFacts]) -> dict[str, bool]:
    """Return by unit True if anything in the unit or before it trains; unknown units count as trained."""
    learns = {unit.name: unit.name not in facts or facts[unit.name].trainable_parameters > 0 for unit in plan.units}
    for unit in plan.units:
        for consumer in unit.feeds:
            learns[consumer] = learns[consumer] or learns[unit.name]
    return learns
