"""A search told as a report: shares with honest intervals, memory that adds up, plans that can be compared."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cases.search_cases import search
from dilatant.config.degrees import ONE
from dilatant.cost.layer import LayerCost
from dilatant.cost.memory import ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import (
    Cluster,
    EncoderPosition,
    Link,
    Plan,
    PlanScore,
    RankedPlan,
    Replica,
    Stage,
    UnitPlan,
    Workload,
)
from dilatant.plan.costs.stable_batch import minimum_stable_batch
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.report.gantt import predicted_chart
from dilatant.report.pages.plan_page import render_plan_page
from dilatant.report.plan_report import PlanReport
from dilatant.report.search_report import (
    compared_plans,
    memory_use,
    searched_plans,
    size_distribution,
    unit_facts,
    workload_ratio,
)  # fmt: skip
from dilatant.report.text.search_reasons import layout_text, search_reasons
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.predict import predict

RULES = ParameterBytes(2.0, 4.0, 12.0)
BATCH = 16


def layer(seconds):
    one = Quadratic(0.0, seconds, 1e-4)
    return LayerCost(
        one, one, one, one, activation_bytes=Quadratic(0.0, 1e5, 0.0), output_bytes=Quadratic(0.0, 2.0, 0.0)
    )


@pytest.fixture(scope="module")
def report():
    model = ModelSpec(
        (
            UnitSpec("vision", tuple(LayerSpec(f"v{i}", "v", 10**6, i == 3) for i in range(4)), ("language",)),
            UnitSpec("language", tuple(LayerSpec(f"l{i}", "l", 10**7) for i in range(6))),
        )
    )
    costs = CostModel("test", "synthetic", "bf16", {"v": {ONE: layer(1e-5)}, "l": {ONE: layer(2e-5)}})
    cluster = Cluster(2, 3, 8e9, Link(1e10, 1e-6), Link(1e9, 1e-5))
    draw = np.random.default_rng(0)
    tokens = {"vision": draw.integers(100, 900, 64), "language": draw.integers(200, 1200, 64)}
    workload = Workload({name: values.astype(float) for name, values in tokens.items()})
    timelines = {}

    def evaluate(plan, microbatches, *_):
        step = {}
        for unit in plan.units:
            shares = np.array_split(np.arange(BATCH), len(unit.replicas))
            step[unit.name] = tuple(
                tuple(tuple(part.tolist()) for part in np.array_split(share, microbatches)) for share in shares
            )
        assignment = Assignment(step)
        timeline = predict(
            plan, assignment, one_f_one_b(plan, assignment), stage_costs(plan, model, costs, RULES), tokens, cluster
        )
        timelines[plan, microbatches] = timeline
        idle = dict(zip(timeline.causes, timeline.idle.sum(axis=0).tolist()))
        return PlanScore(
            timeline.seconds + 0.01, BATCH / timeline.seconds, timeline.bubble, idle,
            tuple(timeline.peak_bytes.tolist()), sync_seconds=0.01, schedule="1F1B",
        )  # fmt: skip

    result = search(model, costs, cluster, workload, BATCH, evaluate, rules=RULES)
    work = np.stack([tokens["vision"] * 1.2e-4, tokens["language"] * 3.6e-4], axis=1)
    stable = minimum_stable_batch(work, [(1, 3), (2, 2), (3, 1)])
    timeline = timelines[result.winner.plan, result.winner.num_microbatches]
    winner = result.winner
    return PlanReport(
        "test", "6 devices", "synthetic", winner.score.schedule, winner.plan, unit_facts(model, {}),
        predicted_chart(timeline, winner.score.sync_seconds), BATCH,
        sizes=tuple(size_distribution(unit.name, workload.tokens[unit.name]) for unit in model.units),
        ratio=workload_ratio(["vision", "language"], work, BATCH, stable),
        memory=memory_use(winner, model, cluster, RULES), candidates=compared_plans(result, cluster),
        lower_bound_seconds=result.lower_bound, proven=result.proven, planning_seconds=result.wall_seconds,
        allocated_devices=cluster.num_devices, reasons=search_reasons(result, timeline, cluster),
        groups=searched_plans(result), gpus_per_node=cluster.gpus_per_node,
    )  # fmt: skip


def test_sizes_are_in_bins_of_whole_numbers():
    found = size_distribution("language", [256, 256, 40])
    assert all(edge == round(edge) for edge in found.edges)
    spans = {(low, high): count for low, high, count in zip(found.edges, found.edges[1:], found.counts) if count}
    assert sorted(spans.values()) == [1, 2]
    assert all(any(low <= size < high for low, high in spans) for size in (40, 256))


def test_report_shows_searched_step_and_accounts_for_all_time(report):
    assert report.step_seconds == pytest.approx(report.candidates[0].step_seconds)
    total = report.timeline.busy_fraction() + sum(report.timeline.idle_fractions().values())
    assert total == pytest.approx(1.0)  # sums of doubles


def test_the_winner_is_chosen_and_no_other_is_faster(report):
    chosen = [candidate for candidate in report.candidates if candidate.chosen]
    assert len(chosen) == 1
    assert len(report.candidates) > 1
    assert all(candidate.step_seconds >= chosen[0].step_seconds for candidate in report.candidates)
    assert len({(candidate.name, candidate.layout) for candidate in report.candidates}) == len(report.candidates)


def test_memory_by_use_adds_up_to_the_simulated_peak(report):
    parameters = {name: 2.0 * count for name, count in (("vision", 4e6), ("language", 6e7))}
    assert sorted(rank for use in report.memory for rank in use.ranks) == list(report.plan.ranks)
    pipelines = len(report.plan.unit("language").replicas)
    held = sum(use.bytes_by_use["parameters"] * len(use.ranks) for use in report.memory)
    assert held == pytest.approx(
        parameters["language"] * pipelines + parameters["vision"] * len(report.plan.unit("vision").replicas)
    )
    assert all(use.bytes_by_use["activations"] > 0 for use in report.memory if use.bytes_by_use["optimizer"])
    assert all(0.0 < use.fraction <= 1.0 for use in report.memory)


def test_a_weight_at_both_ends_of_a_stage_counts_once_by_use():
    def by_use(stages, tied, trainable=True):
        layers = [LayerSpec("in", "l", 900, trainable), LayerSpec("out", "l", 1000, trainable, tied=tied)]
        model = ModelSpec((UnitSpec("language", tuple(layers)),))
        bounds = [(0, 2)] if stages == 1 else [(0, 1), (1, 2)]
        cut = tuple(Stage(first, end, (rank,)) for rank, (first, end) in enumerate(bounds))
        plan = Plan((UnitPlan("language", (Replica(cut),)),))
        score = PlanScore(1.0, 1.0, 0.0, {}, (1e6,) * stages)
        ranked = RankedPlan(plan, EncoderPosition.PARALLEL, 1, 1, 1, 0, 0.0, score)
        uses = memory_use(ranked, model, Cluster(1, stages, 2e6, Link(1e10, 1e-6), Link(1e9, 1e-5)), RULES)
        return [(use.bytes_by_use["parameters"], use.bytes_by_use["optimizer"]) for use in uses]

    assert by_use(1, 0) == [(2 * 1900, 12 * 1900)]
    assert by_use(1, 900) == [(2 * 1000, 12 * 1000)]
    assert by_use(1, 900, trainable=False) == [(2 * 1000, 0)]
    assert by_use(2, 900) == [(2 * 900, 12 * 900), (2 * 1000, 12 * 1000)]


def test_the_report_round_trips_and_becomes_a_page(report):
    assert PlanReport.from_json(report.to_json()) == report
    page = render_plan_page(report)
    assert layout_text(report.plan) in page
    assert "1.00 M trained, the rest frozen" in page


def test_distributions_count_every_sample_once():
    found = size_distribution("vision", [0, 10, 10, 480])
    assert sum(found.counts) == 4
    assert found.edges[0] == 0.0
    assert found.edges[-2] <= found.largest == 480.0 < found.edges[-1]
    assert found.median == 10.0


def test_share_intervals_cover_the_truth_at_their_stated_rate():
    draw = np.random.default_rng(5)
    population = np.stack([draw.lognormal(0.0, 0.8, 200_000), draw.lognormal(0.5, 0.6, 200_000)], axis=1)
    truth = population[:, 0].mean() / population.sum(axis=1).mean()
    hits = 0
    for _ in range(400):
        ratio = workload_ratio(("a", "b"), population[draw.integers(len(population), size=300)], 300)
        hits += ratio.low["a"] <= truth <= ratio.high["a"]
        assert sum(ratio.shares.values()) == pytest.approx(1.0)
    assert 0.91 <= hits / 400 <= 0.985  # 95 % within three standard errors of 400 trials, and a little skew


def test_reasons_name_slowest_stage_and_search_certainty(report):
    text = " ".join(report.reasons)
    assert "Summing gradients and updating weights add 10.0 ms" in text
    assert re.search(
        r"(slowest stage, (vision|language) stage \d,|One stage) takes [\d.]+ m?s for a mean microbatch", text
    )
    assert "; no other of them can be faster" in text


def test_each_candidate_is_counted_as_simulated_cut_off_or_left(report):
    text = " ".join(report.reasons).replace(",", "")
    simulated, candidates = map(int, re.search(r"(\d+) of (\d+) candidates were simulated", text).groups())
    others = [int(number) for number in re.findall(r"(\d+) (?:cut off by their bounds|left because)", text)]
    assert simulated + sum(others) == candidates == sum(group.candidates for group in report.groups)


def test_chunks_of_a_rank_are_said_with_the_stages():
    cut = tuple(Stage(number, number + 1, (2 * (number % 2), 2 * (number % 2) + 1), tp=2) for number in range(8))
    assert layout_text(Plan((UnitPlan("language", (Replica(cut),)),))) == "language 1 × 8 stages (4 a rank) tp 2"
