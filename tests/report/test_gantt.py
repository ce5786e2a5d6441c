"""The drawn timeline is the simulated one: same actions, same seconds, every rank once, idle time accounted for."""

from __future__ import annotations

import pytest

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.report.gantt import GanttChart, GanttRow, Lane, measured_chart, predicted_chart
from dilatant.report.text.gantt_summary import by_lane, data_waits
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Action, Assignment, DataWait, MeasuredAction
from dilatant.schedule.simulator.simulate import simulate

PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)), Replica((Stage(0, 4, (3,)),))), ("language",)),
        UnitPlan(
            "language", (Replica((Stage(0, 3, (1, 5), tp=2), Stage(3, 6, (2, 6), tp=2))), Replica((Stage(0, 6, (4,)),)))
        ),
    )
)
ASSIGNMENT = Assignment(
    {"vision": (((0, 1), (2, 3), (5,)), ((6, 7),)), "language": (((0, 4), (1, 2), (3, 5)), ((6,), (7,)))}
)


@pytest.fixture(scope="module")
def pair():
    schedule = one_f_one_b(PLAN, ASSIGNMENT)
    seconds = {"F": 1.0, "B": 2.0}
    timeline = simulate(
        schedule, PLAN, ASSIGNMENT, lambda a: seconds[a.kind] * (1 + 0.1 * a.stage + 0.01 * a.microbatch)
    )
    return timeline, predicted_chart(timeline)


def test_each_rank_has_one_lane_shared_by_tensor_parallel_ranks(pair):
    _, drawn = pair
    assert sorted(rank for lane in drawn.lanes for rank in lane.ranks) == list(PLAN.ranks)
    assert (1, 5) in [lane.ranks for lane in drawn.lanes]


def test_actions_and_seconds_are_those_of_the_simulation(pair):
    timeline, drawn = pair
    assert drawn.seconds == timeline.seconds
    for number, lane in enumerate(drawn.lanes):
        rows = [row for row in drawn.rows if row.lane == number]
        for rank in lane.ranks:
            expected = [
                (action.stage, str(action.kind), action.microbatch, start, end - start)
                for action, start, end in timeline.of_rank(rank)
            ]
            assert [(row.stage, row.kind, row.microbatch, row.start, row.seconds) for row in rows] == expected


def test_rows_name_their_samples_whole_microbatch_or_part(pair):
    _, drawn = pair
    parts = {row.samples for row in drawn.rows if row.stage == 0 and row.kind == "F"}
    assert parts == {(0,), (1,), (2,), (3,), (5,)}
    language = {row.samples for row in drawn.rows if PLAN.stages()[row.stage].unit == "language"}
    assert language == {(0, 4), (1, 2), (3, 5), (6,), (7,)}


def test_busy_and_idle_add_up_to_the_step_on_every_lane(pair):
    _, drawn = pair
    for busy, idle in zip(drawn.busy_seconds(), drawn.idle, strict=True):
        assert busy + sum(idle.values()) == pytest.approx(drawn.seconds)  # sums of doubles


def as_measured(timeline, epoch=1.7e9):
    """The simulated step as a runtime would write it down: gaps within a step are waits for the rows' maker."""
    placed = PLAN.stages()
    made = {}
    for message, (source, target) in enumerate(timeline.arrows.tolist()):
        made.setdefault(target, []).append((timeline.end[source], source, message))
    rank_of_row = [
        rank for i, rank in enumerate(timeline.ranks) for _ in range(timeline.offsets[i], timeline.offsets[i + 1])
    ]
    found = []
    for index, rank in enumerate(timeline.ranks):
        before = None
        for row, (action, start, end) in enumerate(timeline.of_rank(rank), int(timeline.offsets[index])):
            turned = start if before is None else before
            latest = max(made.get(row, []), default=None)
            samples = (
                action.samples
                or ASSIGNMENT.microbatches[placed[action.stage].unit][placed[action.stage].replica][action.microbatch]
            )
            maker = None if latest is None else rank_of_row[latest[1]]
            found.append(
                MeasuredAction(
                    rank, placed[action.stage].unit, action, samples, epoch + turned, start - turned, maker, end - start
                )
            )
            before = end
    return found


def test_a_measured_step_is_drawn_as_the_simulated_one_it_equals(pair):
    timeline, drawn = pair
    measured = measured_chart(as_measured(timeline), PLAN)
    # Seconds since the epoch leave doubles a resolution of 2.4e-7 s.
    assert measured.seconds == pytest.approx(timeline.seconds, abs=1e-5)
    assert [lane.ranks for lane in measured.lanes] == [(rank,) for rank in PLAN.ranks]
    for lane, entry in enumerate(measured.lanes):
        like = next(i for i, one in enumerate(drawn.lanes) if entry.ranks[0] in one.ranks)
        mine = [row for row in measured.rows if row.lane == lane]
        theirs = [row for row in drawn.rows if row.lane == like]
        assert [row[1:5] for row in mine] == [row[1:5] for row in theirs]
        assert [row.start for row in mine] == pytest.approx([row.start for row in theirs], abs=1e-5)


def test_measured_idle_time_adds_up_and_names_the_unit_awaited(pair):
    timeline, _ = pair
    measured = measured_chart(as_measured(timeline), PLAN)
    for busy, idle in zip(measured.busy_seconds(), measured.idle, strict=True):
        assert busy + sum(idle.values()) == pytest.approx(measured.seconds, abs=1e-4)
    causes = set().union(*measured.idle)
    assert {"warm-up", "drain", "waiting for language"} <= causes
    with pytest.raises(ValueError, match="nothing was measured"):
        measured_chart([], PLAN)


def test_a_rank_that_holds_whole_pipelines_fills_none():
    """One rank alone, and replicas beside each other whose first actions do not begin together."""
    replicas = tuple(Replica((Stage(0, 2, (rank,)),)) for rank in range(2))
    for plan in (Plan((UnitPlan("vision", replicas[:1]),)), Plan((UnitPlan("vision", replicas),))):
        actions = [
            MeasuredAction(rank, "vision", Action("F", rank, 0), (rank,), 100.0 + rank, 0.0, None, 2.0)
            for rank in plan.ranks
        ]
        waits = [DataWait(0, 99.0, 0.5)]
        idle = measured_chart(actions, plan, waits).idle
        assert not any("warm-up" in causes for causes in idle)
        assert idle[0]["between actions"] == pytest.approx(0.5)


def test_waiting_for_data_is_a_cause_of_its_own(pair):
    timeline, _ = pair
    actions = as_measured(timeline)
    begin, rank = min(one.start for one in actions), PLAN.ranks[0]
    alone = measured_chart(actions, PLAN)
    waits = (DataWait(rank, begin - 2.0, 1.5, (("big.png", 1.2),)),)
    measured = measured_chart(actions, PLAN, waits)
    assert measured.seconds == pytest.approx(alone.seconds + 2.0)
    lane = [entry.ranks[0] for entry in measured.lanes].index(rank)
    assert measured.idle[lane]["waiting for data"] == pytest.approx(1.5)
    assert [index for index, idle in enumerate(measured.idle) if "waiting for data" in idle] == [lane]
    for busy, idle in zip(measured.busy_seconds(), measured.idle, strict=True):
        assert busy + sum(idle.values()) == pytest.approx(measured.seconds, abs=1e-4)
    said, remedy = data_waits(waits, 3.0)
    assert said.startswith(f"Rank {rank} waited 1.50 s for samples")
    assert "big.png (1.20 s)" in said
    assert "data.workers" in remedy
    assert data_waits(waits, 200.0) == []


def test_a_lane_weighs_its_ranks():
    lanes = (Lane((0,), (0,)), Lane((1, 2, 3), (1,)))
    rows = (GanttRow(0, 0, "F", 0, (0,), 0.0, 8.0), GanttRow(1, 1, "F", 0, (0,), 6.0, 4.0))
    drawn = GanttChart(10.0, lanes, rows, ({"drain": 2.0}, {"warm-up": 6.0}))
    assert drawn.busy_fraction() == pytest.approx((8 + 3 * 4) / 40)
    assert drawn.idle_fractions() == pytest.approx({"warm-up": 18 / 40, "drain": 2 / 40})


def test_every_lane_is_told_by_what_it_computes_and_loses():
    plan = Plan((UnitPlan("vision", (Replica((Stage(0, 1, (0,)), Stage(1, 2, (1,)))),)),))
    rows = (GanttRow(0, 0, "F", 0, (0,), 0.0, 1.0), GanttRow(1, 1, "F", 0, (0,), 1.0, 3.0))
    drawn = GanttChart(4.0, (Lane((0,), (0,)), Lane((1,), (1,))), rows, ({"drain": 3.0}, {"warm-up": 1.0}))
    assert by_lane(drawn, plan).splitlines() == [
        "step 4.00 s",
        "rank 0 (vision 0): computes 25 %, draining the pipeline 75 %",
        "rank 1 (vision 1): computes 75 %, filling the pipeline 25 %",
    ]
