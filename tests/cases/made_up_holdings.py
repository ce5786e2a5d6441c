"""Weights cut by made-up rules, as tensor parallelism would cut them, of uneven sizes."""

from __future__ import annotations

from dilatant.plan.boxes import BoxIntervals
from dilatant.plan.buckets import HeldWeight
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan

SHAPES = {"rows": (7, 3), "columns": (3, 9), "kv": (8, 2), "fused": (10, 3), "partial": (5,), "whole": (4,)}
WEIGHTS = [HeldWeight(f"u.0.{name}", frozenset({"u.0"}), shape) for name, shape in SHAPES.items()]


def split(weight: HeldWeight, stage: Stage, place: int) -> tuple[BoxIntervals | None, bool]:
    """Rows, columns, a fused weight, key and value heads held twice, a norm; of uneven sizes."""
    tp, index = stage.tp, place % stage.tp
    rows, columns = weight.shape if len(weight.shape) == 2 else (weight.shape[0], 0)

    def cut(length: int, parts: int, part: int, offset: int = 0) -> tuple[int, int]:
        return offset + length * part // parts, offset + length * (part + 1) // parts

    match weight.name.split(".")[-1]:
        case "rows":
            return ((cut(rows, tp, index),), ((0, columns),)), True
        case "columns":
            return (((0, rows),), (cut(columns, tp, index),)), True
        case "kv":  # two heads
            return ((cut(rows, min(tp, 2), index * min(tp, 2) // tp),), ((0, columns),)), True
        case "fused":
            half = rows // 2
            spans = (cut(half, tp, index), cut(rows - half, tp, index, half))
            joined = (spans[0][0], spans[1][1])
            return ((spans if spans[0][1] < spans[1][0] else (joined,)), ((0, columns),)), True
        case "partial":
            return None, True
    return None, False


def plan_of(*degrees: int) -> Plan:
    """One unit of one stage, one replica for each tensor-parallel degree."""
    replicas, first = [], 0
    for tp in degrees:
        replicas.append(Replica((Stage(0, 1, tuple(range(first, first + tp)), tp=tp),)))
        first += tp
    return Plan((UnitPlan("u", tuple(replicas)),))


SHAPES = {"rows": (7, 3), "columns": (3, 9), "kv": (8, 2), "fused": (10, 3), "partial": (5,), "whole": (4,)}
WEIGHTS = [HeldWeight(f"u.0.{name}", frozenset({"u.0"}), shape) for name, shape in SHAPES.items()]
