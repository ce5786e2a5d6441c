"""Searches of small cases, with steps scored in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

import dilatant.plan.search.search as search_room
from cases.model_cases import cluster, model, unit
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan import EncoderPosition, PlanScore, SearchProblem, SearchSettings, Workload
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.search.enumeration import enumerate_candidates
from dilatant.schedule.families.families import path_depths

RULES = ParameterBytes(1.0, 1.0, 2.0)


def search(
    spec, costs, machine, workload, batch, scorer, sizes=(1, 2, 4, 8), rules=BF16, finalists=24,
    others=None, rescored=None, only=None, **asked,
):  # fmt: skip
    """The search of a case; what else is asked goes into its settings."""
    settings = SearchSettings(sizes, **asked)
    problem = SearchProblem(spec, costs, machine, workload, batch, rules, settings)
    return search_room.search(problem, scorer, finalists, others or {}, rescored or {}, only)


def open_space(spec, costs, machine, workload, batch, rules=BF16, **asked):
    """The only space of a case on equal devices."""
    settings = SearchSettings(**asked)
    (space,) = SearchProblem(spec, costs, machine, workload, batch, rules, settings).spaces()
    return space


def encoders_apart(space):
    """The candidates whose encoders have devices of their own, in as many pipelines as the language model."""
    return [
        one
        for one in enumerate_candidates(space)
        if one.encoders_at is not EncoderPosition.IN_LANGUAGE and len(set(one.counts)) == 1
    ]


def polynomial(coefficients, tokens):
    """The value of a coefficient triple for one packed row of samples."""
    return coefficients @ [sum(x * x for x in tokens), sum(tokens), 1.0 if sum(tokens) else 0.0]


def closed_form(spec, costs, tokens, batch, rules=RULES):
    """A scorer for samples of equal tokens: fill along the chain plus the slowest rank, memory by path depth."""

    def evaluate(plan, microbatches, row_tokens=None, *_):
        table = stage_costs(plan, spec, costs, rules)
        depths = path_depths(plan)
        busy, held, seen = {}, {}, 0.0
        for placed in plan.stages():
            rows = len(plan.unit(placed.unit).replicas) * microbatches
            samples = [tokens[placed.unit]] * -(-batch // rows)  # of the fullest row
            seconds = polynomial(table.seconds[placed.index], samples)
            kept = polynomial(table.kept_bytes[placed.index], samples)
            running = table.transient_bytes, table.forward_bytes
            transient = max(polynomial(one[placed.index], samples) for one in running)
            for rank in placed.stage.ranks:
                busy[rank] = busy.get(rank, 0.0) + seconds[0] + seconds[1]
                held[rank] = held.get(rank, 0.0) + table.static_bytes[placed.index] + transient
                held[rank] += kept * min(depths[placed.index], microbatches)
            if placed.replica == 0:
                seen += seconds[0] + seconds[1]
        total = seen + (microbatches - 1) * max(busy.values())
        return PlanScore(total, batch / total, 0.0, {}, tuple(held[rank] for rank in plan.ranks))

    return evaluate


def dearer(scorer, times):
    """The scorer where steps take so many times as long."""

    def evaluate(plan, microbatches, row_tokens=None, schedule=None, most_seconds=math.inf):
        score = scorer(plan, microbatches, row_tokens, schedule, most_seconds / times)
        return replace(score, seconds=score.seconds * times, least_seconds=score.least_seconds * times)

    return evaluate


def find(spec, costs, tokens, devices, batch, only=None, sizes=(1, 2), finalists=10_000, **kwargs):
    machine = kwargs.pop("machine", None) or cluster(1, devices)
    rules = kwargs.pop("rules", RULES)
    zeros = kwargs.pop("zeros", {rules.zero: 1.0})  # who shares state → how many times as long steps take then
    rules, *others = [replace(rules, zero=zero) for zero in zeros]
    scorers = {
        own.zero: dearer(closed_form(spec, costs, tokens, batch, own), zeros[own.zero]) for own in (rules, *others)
    }
    workload = Workload({name: np.full(batch, float(count)) for name, count in tokens.items()})
    return search(
        spec,
        costs,
        machine,
        workload,
        batch,
        scorers.pop(rules.zero),
        sizes,
        rules,
        finalists,
        others=scorers,
        only=only,
    )


def random_vlm(draw):
    trains = [draw.random() < 0.5 for _ in range(draw.randint(1, 3))]
    vision = unit("vision", len(trains), ("language",))
    vision = type(vision)(
        "vision",
        tuple(type(one)(one.name, one.kind, 0, flag) for one, flag in zip(vision.layers, trains)),
        ("language",),
    )
    language = unit("language", draw.randint(1, 4), trainable=draw.random() < 0.5, parameters=0)
    return model(vision, language), trains
