"""Random steps for the tests of this room: plans of one to four units, unlike replicas, any microbatch borders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.trainability import Trainability, trainability_of
from oracles.event_simulator import B, F, I, W, needs

GRAPHS = {
    1: ({"language": ()},),
    2: ({"vision": ("language",), "language": ()}, {"language": ("image",), "image": ()}),
    3: (
        {"vision": ("language",), "audio": ("language",), "language": ()},
        {"vision": ("language",), "language": ("image",), "image": ()},
    ),
    4: ({"vision": ("language", "image"), "audio": ("language",), "language": ("image",), "image": ()},),
}


@dataclass(frozen=True)
class Step:
    plan: Plan
    assignment: Assignment
    trainability: Trainability


def random_step(seed: int, *, wide: bool = True, colocated: bool = True) -> Step:
    """A step drawn from `seed`; `wide` allows stages of two ranks, `colocated` stages on the ranks of others."""
    rng = np.random.default_rng(seed)
    graphs = GRAPHS[int(rng.integers(1, 5))]
    graph = graphs[int(rng.integers(len(graphs)))]
    next_rank, groups = 0, []
    units = []
    for name, feeds in graph.items():
        replicas = []
        for _ in range(int(rng.integers(1, 4))):
            stages, first = [], 0
            for _ in range(int(rng.integers(1, 4))):
                width = 2 if wide and rng.random() < 0.2 else 1
                if colocated and groups and rng.random() < 0.25:
                    ranks = groups[int(rng.integers(len(groups)))]
                else:
                    ranks = tuple(range(next_rank, next_rank + width))
                    next_rank += width
                    groups.append(ranks)
                end = first + int(rng.integers(1, 3))
                stages.append(Stage(first, end, ranks, tp=len(ranks)))
                first = end
            last = stages[-1]
            stages[-1] = Stage(last.first, max(last.end, 7), last.ranks, tp=last.tp)
            replicas.append(Replica(tuple(stages)))
        units.append(UnitPlan(name, tuple(replicas), feeds))
    plan = Plan(tuple(units))
    num_samples = int(rng.integers(1, 13))
    microbatches = {}
    for unit in plan.units:
        fed = bool(unit.feeds)
        present = [s for s in range(num_samples) if not fed or rng.random() < 0.8]
        rng.shuffle(present)
        split: list[list[list[int]]] = [[[] for _ in range(int(rng.integers(1, 5)))] for _ in unit.replicas]
        for sample in present:
            replica = split[int(rng.integers(len(split)))]
            replica[int(rng.integers(len(replica)))].append(int(sample))
        microbatches[unit.name] = tuple(tuple(tuple(batch) for batch in replica) for replica in split)
    if plan.units[-1].name == "image":
        # What reaches a generator comes from samples that its feeders have.
        everyone = set(range(num_samples))
        assert everyone == {s for replica in microbatches["image"] for batch in replica for s in batch}
        language = plan.unit("language")
        spread = [[[] for _ in range(3)] for _ in language.replicas]
        for sample in everyone:
            replica = spread[int(rng.integers(len(spread)))]
            replica[int(rng.integers(3))].append(sample)
        microbatches["language"] = tuple(tuple(tuple(batch) for batch in replica) for replica in spread)
    trainable = {
        unit.name: [bool(flag) for flag in rng.random(max(s.end for r in unit.replicas for s in r.stages)) < 0.3]
        for unit in plan.units
    }
    if rng.random() < 0.5:
        trainable = {name: [True] * len(flags) for name, flags in trainable.items()}
    return Step(plan, Assignment(microbatches), trainability_of(plan, trainable))


def random_order(step: Step, actions: list[Action], rng: np.random.Generator) -> Schedule:
    """A schedule without any family: a random order of all actions that respects what each needs."""
    needed = needs(step.plan, step.assignment, actions)
    by_key = {(a.kind, a.stage, a.microbatch, a.samples): a for a in actions}
    before = {action: set(sources) for action, sources in needed.items()}
    for action in actions:
        rest = (action.stage, action.microbatch, action.samples)
        if action.kind in (B, I):
            before[action].add(by_key[(F, *rest)])
        elif action.kind == W:
            before[action].add(by_key[(I, *rest)])
    done: set[Action] = set()
    order: list[Action] = []
    left = list(actions)
    while left:
        ready = [action for action in left if before[action] <= done]
        action = ready[int(rng.integers(len(ready)))]
        left.remove(action)
        done.add(action)
        order.append(action)
    placed = step.plan.stages()
    return Schedule({rank: tuple(a for a in order if rank in placed[a.stage].stage.ranks) for rank in step.plan.ranks})
