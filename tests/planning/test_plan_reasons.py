"""A plan says by itself what experts ask first: why not plain data parallelism, how right such figures were, and which
part of the memory is buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases.planning.drawn_hardware import SLOW, problem_on
from dilatant.cost.hardware import load_hardware
from dilatant.cost.memory import bytes_text
from dilatant.cost.published_runs import mean_errors
from dilatant.plan.search.why_not import parse_asked_layout
from dilatant.planning.data_parallelism import why_not_data_parallelism
from dilatant.planning.planned_run import _compared, _nearest, plan_report
from dilatant.planning.planning import plan_like, plan_run, planned_as
from dilatant.report.plan_report import PlanReport
from dilatant.report.text.wording import percent_text, seconds_text


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A pipeline of two devices as the result of a search that had also timed two whole replicas."""
    problem = problem_on(tmp_path_factory.mktemp("run"), 1, 2, inside=SLOW)
    asked = ("language: {replicas: 1, pp: 2}", "language: {replicas: 2, pp: 1}")
    chosen, whole = (plan_like(problem, parse_asked_layout(one, ["vision", "language"])).result.winner for one in asked)
    result = plan_run(problem).result
    return planned_as(problem, replace(result, winner=chosen, runners_up=(whole,), seconds=chosen.score.seconds), ())


def test_a_layout_without_zero_is_planned_under_each(tmp_path):
    """Two whole replicas on slow links: it depends on the links which variant is the fastest."""
    problem, asked, units = problem_on(tmp_path, 1, 2, inside=SLOW), "language: {replicas: 2}", ["vision", "language"]
    best = plan_like(problem, parse_asked_layout(asked, units)).result
    each = [plan_like(problem, parse_asked_layout(f"{asked}, zero: {zero}", units)).result for zero in ("none", "node")]
    assert len({one.seconds for one in each}) == 2
    assert best.seconds == min(one.seconds for one in each)


def test_why_not_data_parallelism_is_answered_unasked(pipeline):
    found, sharded = why_not_data_parallelism(pipeline)
    (whole,) = pipeline.result.runners_up
    more = 100.0 * (whole.score.seconds / pipeline.result.seconds - 1.0)
    assert found.startswith("Data parallelism alone takes ")
    assert f" {more:.0f} % more. " in found or f" {more:.1f} % more. " in found
    assert not why_not_data_parallelism(replace(pipeline, result=replace(pipeline.result, winner=whole, runners_up=())))
    alone = parse_asked_layout("language: {replicas: 2, pp: 1}, vision: {replicas: 2, pp: 1}", ["vision", "language"])
    by_hand = plan_like(pipeline.problem.sharing("node", {"": "weights"}), alone).result.seconds
    more = by_hand / pipeline.result.seconds - 1.0
    assert sharded == (
        f"Sharded data parallelism (FSDP, train.shard: weights) takes {seconds_text(by_hand)}, "
        f"{percent_text(abs(more))} {'more' if more >= 0 else 'less'}."
    )
    filled = replace(whole, replicas=1)  # as if its second replica were the one on devices that pipelines left idle
    again = why_not_data_parallelism(replace(pipeline, result=replace(pipeline.result, runners_up=(filled,))))
    assert again == [found, sharded]


@pytest.mark.parametrize(
    ("gib", "begins"), [(1e-6, "Data parallelism alone does not fit: "), (80, "No plan with data ")]
)
def test_memory_of_data_parallelism_that_was_not_timed_is_said(pipeline, gib, begins):
    target = pipeline.problem.target
    target = replace(target, cluster=replace(target.cluster, bytes_per_device=gib * 2.0**30))
    problem, result = replace(pipeline.problem, target=target), replace(pipeline.result, runners_up=())
    found, sharded = why_not_data_parallelism(replace(pipeline, problem=problem, result=result))
    assert found.startswith(begins)
    uses = plan_report(replace(pipeline, result=replace(result, winner=pipeline.result.runners_up[0])), "test").memory
    state = sum(uses[0].bytes_by_use[use] for use in ("parameters", "gradients", "optimizer"))
    assert f"weights and their state take {bytes_text(state)} of " in found
    assert ("does not fit either: its parts" in sharded) == (gib < 1)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"shard": "none"}, "is ruled out by train.shard: none."),
        ({"zero": "none"}, "is ruled out by train.zero: none."),
        ({"deterministic": True}, "is ruled out by train.deterministic or resilience.enabled."),
        ({"global_batch_size": 1}, "Data parallelism alone would leave devices idle: a step has 1 sample for 2."),
    ],
)
def test_what_rules_out_sharded_data_parallelism_is_named(pipeline, train, says):
    config = pipeline.problem.config
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    *_, last = why_not_data_parallelism(replace(pipeline, problem=replace(pipeline.problem, config=config)))
    assert last.endswith(says)


def test_stages_take_what_their_devices_are_busy_for(pipeline):
    """Each of the two devices runs one stage, the first of them the encoder, too."""
    count, timeline = pipeline.result.winner.microbatches[0], pipeline.typical
    slowest, fastest = sorted((busy / count for busy in timeline.busy.tolist()), reverse=True)
    reasons = plan_report(pipeline, "test").reasons
    (found,) = (one for one in reasons if one.startswith("The slowest stage, language stage "))
    assert f" takes {seconds_text(slowest)} for a mean microbatch, the fastest, language stage " in found
    assert found.endswith(f", {seconds_text(fastest)}.")


def test_how_right_predictions_were_is_said_by_source(pipeline):
    (unknown,) = _compared(pipeline)
    assert unknown.startswith("No published run on drawn was compared")
    known = load_hardware("GB300")
    problem = replace(pipeline.problem, target=replace(pipeline.problem.target, hardware=known))
    planned = replace(pipeline, problem=problem)
    (found,) = _compared(planned)
    assert found.startswith("Mean errors of modelled steps of published runs on GB300: ")
    assert len(mean_errors("GB300")) > 3
    assert all(source in found for source in mean_errors("GB300"))
    nearest = _nearest(planned)
    assert len(nearest) == 3
    assert all(str(run) in found for run in nearest)
    report = replace(plan_report(pipeline, "test"), nearest=nearest)
    assert PlanReport.from_json(report.to_json()).nearest == nearest


def test_buffers_are_apart_from_what_activations_keep(pipeline):
    winner = pipeline.result.winner
    peaks = dict(zip(winner.plan.ranks, winner.score.peak_bytes, strict=True))
    for use in plan_report(pipeline, "test").memory:
        assert use.bytes_by_use["buffers"] > 0
        assert use.bytes_by_use["activations"] > 0
        reserve = use.bytes_by_use.get("reserve", 0)
        assert use.peak_bytes - reserve == pytest.approx(peaks[use.ranks[0]], abs=4)  # rounded use by use


def test_a_single_device_updates_and_sends_nothing(tmp_path):
    """A step of one device ends with its update, which reads and writes 50 bytes of each weight."""
    planned = plan_run(problem_on(tmp_path, 1, 1, bandwidth=2e9, memory_efficiency=0.5))
    report = plan_report(planned, "test")
    trained = sum(unit.trainable_parameters for unit in report.units)
    idle = report.timeline.idle_fractions()
    assert idle["update"] * report.step_seconds == pytest.approx(50 * trained / 1e9)
    assert "communication" not in idle
    (said,) = (one for one in report.reasons if "after the last backward" in one)
    assert said.startswith("Updating weights adds ")
    assert report.reasons[0].endswith("language model's first stage.")
