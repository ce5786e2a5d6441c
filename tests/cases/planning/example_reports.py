"""Plan reports for tests: a small one (the five ranks of the worked example) and one of 1,024 ranks.

Steps are timed here by plain 1F1B over each pipeline, so that the pages have real gaps to show.
"""

from __future__ import annotations

import random

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.report.gantt import GanttChart, GanttRow, Lane
from dilatant.report.plan_report import ComparedPlan, MemoryUse, PlanReport, SizeDistribution, UnitFacts, WorkloadRatio

GIB = 1024**3


def small_report(title: str = "quickstart") -> PlanReport:
    """Five ranks, two unlike replicas, eight samples."""
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)), Replica((Stage(0, 4, (3,)),))), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 3, (1,)), Stage(3, 6, (2,)))), Replica((Stage(0, 6, (4,)),)))),
        )
    )
    chains = [([0, 2, 3], [(0, 4), (1, 2), (3, 5)]), ([1, 4], [(6,), (7,)])]
    seconds = {0: 0.011, 1: 0.013, 2: 0.017, 3: 0.015, 4: 0.021}
    return _report(title, plan, chains, seconds, global_batch=8, seed=1)


def large_report(replicas: int = 128, microbatches: int = 16) -> PlanReport:
    """Vision in 3 stages and language in 5, `replicas` times: 1,024 ranks with the defaults."""
    vision, language = [], []
    for number in range(replicas):
        base = 8 * number
        vision.append(Replica(tuple(Stage(11 * s, 11 * s + 11, (base + s,)) for s in range(3))))
        language.append(Replica(tuple(Stage(6 * s, 6 * s + 6, (base + 3 + s,)) for s in range(5))))
    plan = Plan((UnitPlan("vision", tuple(vision), ("language",)), UnitPlan("language", tuple(language))))
    first_language = 3 * replicas
    chains = [
        (
            [3 * number + s for s in range(3)] + [first_language + 5 * number + s for s in range(5)],
            [
                tuple(range(4 * (number * microbatches + k), 4 * (number * microbatches + k + 1)))
                for k in range(microbatches)
            ],
        )
        for number in range(replicas)
    ]
    seconds = {index: 0.042 if index < first_language else 0.039 for index in range(8 * replicas)}
    return _report("1,024 ranks", plan, chains, seconds, global_batch=4 * replicas * microbatches, seed=2)


def _report(title, plan, chains, seconds, global_batch, seed):
    draw = random.Random(seed)
    stages = plan.stages()
    rows: list[GanttRow] = []
    idle: list[dict[str, float]] = [{} for _ in stages]
    ends = []
    for chain, microbatches in chains:
        factor = {}
        for stage in chain:
            for k in range(len(microbatches)):
                factor[stages[stage].unit, k] = factor.get((stages[stage].unit, k)) or draw.uniform(0.6, 1.5)
        ends.append(_run_chain(chain, microbatches, lambda s, k, f=factor: seconds[s] * f[stages[s].unit, k], rows))
    step = max(ends)
    rows.sort(key=lambda row: (row.lane, row.start))
    for lane in range(len(stages)):
        own = [row for row in rows if row.lane == lane]
        first, last = own[0].start, own[-1].start + own[-1].seconds
        busy = sum(row.seconds for row in own)
        waiting = "waiting for vision" if stages[lane].unit == "language" else "waiting for language"
        idle[lane] = {"warm-up": first, "drain": step - last, waiting: last - first - busy}
    lanes = tuple(Lane(placed.stage.ranks, (placed.index,)) for placed in stages)
    timeline = GanttChart(step, lanes, tuple(rows), tuple(idle))
    memory = tuple(
        MemoryUse(
            placed.stage.ranks,
            (placed.index,),
            {
                "parameters": 3 * GIB,
                "gradients": 3 * GIB if placed.unit == "language" else 0,
                "optimizer": 12 * GIB if placed.unit == "language" else 0,
                "activations": (4 + 3 * (placed.position == 0)) * GIB,
            },
            48 * GIB,
        )
        for placed in stages
    )
    return PlanReport(
        title=title,
        hardware=f"{len(plan.ranks):,} × NVIDIA A40",
        cost_source="measured on this machine (mean error 3.1 %)",
        schedule="1F1B",
        plan=plan,
        units=(
            UnitFacts("vision", "encoder", "SigLIP", 4, 412_000_000, 3_000_000),
            UnitFacts("language", "language model", "Llama 3.2 1B", 6, 1_240_000_000, 1_240_000_000),
        ),
        timeline=timeline,
        global_batch=global_batch,
        sizes=(
            SizeDistribution(
                "vision",
                512,
                tuple(float(64 * i) for i in range(21)),
                (3, 9, 14, 22, 40, 58, 71, 66, 54, 44, 35, 28, 20, 16, 11, 8, 6, 4, 2, 1),
                596.0,
                580.0,
                986.0,
                1276.0,
            ),
            SizeDistribution(
                "language",
                512,
                tuple(float(72 * i) for i in range(21)),
                (1, 5, 14, 22, 46, 58, 71, 66, 56, 44, 35, 28, 20, 16, 11, 8, 6, 3, 1, 1),
                660.0,
                640.0,
                1080.0,
                1390.0,
            ),
        ),
        ratio=WorkloadRatio(
            {"vision": 0.43, "language": 0.57},
            {"vision": 0.418, "language": 0.558},
            {"vision": 0.442, "language": 0.582},
            0.95,
            512,
            global_batch,
            256,
        ),
        memory=memory,
        candidates=(
            ComparedPlan(
                "parallel", "vision 1×1, language 2×1", len(plan.ranks), step, 0.52, timeline.idle_fractions(), True
            ),
            ComparedPlan(
                "colocated",
                "vision inside language's first stage",
                len(plan.ranks),
                step * 1.08,
                0.71,
                {"warm-up": 0.12, "drain": 0.12, "imbalance": 0.15},
            ),
            ComparedPlan(
                "megatron",
                "vision as first stage, frozen-unaware",
                len(plan.ranks),
                step * 1.31,
                1.2,
                {"warm-up": 0.12, "drain": 0.12, "imbalance": 0.3},
            ),
        ),
        lower_bound_seconds=step * 0.93,
        planning_seconds=0.41,
    )


def _run_chain(chain, microbatches, seconds, rows):
    """1F1B over one chain of stages; adds rows, returns when the chain is done."""
    orders = {}
    for place, stage in enumerate(chain):
        warm = min(len(chain) - place, len(microbatches))
        order = [("F", k) for k in range(warm)]
        for k in range(len(microbatches)):
            order.append(("B", k))
            if warm + k < len(microbatches):
                order.append(("F", warm + k))
        orders[stage] = order
    done: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(chain, 0.0)
    while any(orders.values()):
        for place, stage in enumerate(chain):
            while orders[stage]:
                kind, k = orders[stage][0]
                if kind == "F":
                    needed = ("F", chain[place - 1], k) if place else None
                else:
                    needed = ("B", chain[place + 1], k) if place + 1 < len(chain) else ("F", stage, k)
                if needed and needed not in done:
                    break
                orders[stage].pop(0)
                start = max(free[stage], done.get(needed, 0.0))
                lasting = seconds(stage, k) * (1.0 if kind == "F" else 2.0)
                free[stage] = done[kind, stage, k] = start + lasting
                rows.append(GanttRow(stage, stage, kind, k, microbatches[k], start, lasting))
    return max(free.values())
