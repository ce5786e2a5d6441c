"""Validation finds every fault of a schedule and reports all of them at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cases.step_cases import random_step
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.families.families import eager, one_f_one_b
from dilatant.schedule.schedule import Action, ActionKind, Assignment, MeasuredStep, Schedule
from dilatant.schedule.simulator.graph import ScheduleError
from dilatant.schedule.trainability import all_trainable, trainability_of
from dilatant.schedule.validate import schedule_problems, validate
from oracles import event_simulator as oracle

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


def two_stages() -> tuple[Plan, Assignment]:
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)), Stage(1, 2, (1,)))),)),))
    return plan, Assignment({"language": (((0, 1), (2,)),)})


@settings(max_examples=70, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_deadlock_is_found_exactly_when_event_simulator_hangs(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    schedule = one_f_one_b(step.plan, step.assignment, step.trainability)
    rank = int(rng.choice(list(schedule.actions)))
    actions = list(schedule.actions[rank])
    assume(len(actions) > 1)
    for _ in range(int(rng.integers(1, 4))):
        one, other = rng.integers(len(actions), size=2)
        actions[one], actions[other] = actions[other], actions[one]
    changed = Schedule({**schedule.actions, rank: tuple(actions)})
    try:
        done = oracle.simulate(
            step.plan, step.assignment, changed, dict.fromkeys(sum(changed.actions.values(), ()), 1.0)
        )
        runs = all(
            done.end[replace(action, kind=F)] <= done.start[action] for action in done.end if action.kind in (B, I)
        )
    except oracle.Deadlock:
        runs = False
    problems = schedule_problems(step.plan, step.assignment, changed, step.trainability)
    assert (not problems) == runs


def test_all_problems_are_listed_at_once():
    plan, assignment = two_stages()
    schedule = Schedule(
        {
            0: (Action(F, 0, 0), Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 1)),
            1: (Action(B, 1, 0), Action(F, 1, 0), Action(W, 1, 0)),
        }
    )
    with pytest.raises(ScheduleError) as raised:
        validate(plan, assignment, schedule, all_trainable(plan))
    text = str(raised.value)
    for part in (
        "rank 0 runs F of stage 0 microbatch 0 twice",
        "rank 0 runs F of stage 1 microbatch 1, but language replica 0 stage 1 is on ranks [1]",
        "microbatch 1 of language replica 0 stage 0 is never run forward",
        "microbatch 1 of language replica 0 stage 0 is never run backward",
        "microbatch 0 of language replica 0 stage 1 has a whole backward and a weight-gradient half",
        "its forward does not come before it on the same rank",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (((0,),), "has samples [0, 1], but its 1 parts have [0]"),
        (((0,), (1,), (1,)), "runs F of stage 0 microbatch 0 samples [1] twice"),
        (((0, 1), (1,)), "but its 2 parts have [0, 1, 1]"),
    ],
)
def test_parts_must_cover_their_microbatch_once(parts, complaint):
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)),)),)),))
    assignment = Assignment({"language": (((0, 1),),)})
    actions = tuple(Action(kind, 0, 0, part) for kind in (F, B) for part in parts)
    assert any(complaint in problem for problem in schedule_problems(plan, assignment, Schedule({0: actions})))


def test_parts_must_be_the_same_on_all_stages():
    plan, assignment = two_stages()
    whole = eager(plan, assignment)
    halves = [
        Action(a.kind, 0, 0, (s,)) if a.microbatch == 0 else a
        for a in whole.actions[0]
        for s in ((0, 1) if a.microbatch == 0 else (0,))
    ]
    problems = schedule_problems(plan, assignment, Schedule({0: tuple(halves), 1: whole.actions[1]}))
    assert any("parts" in problem for problem in problems)


def test_a_backward_is_wanted_exactly_where_something_trains():
    plan, assignment = two_stages()
    frozen = trainability_of(plan, {"language": [False, True]})
    assert not schedule_problems(plan, assignment, eager(plan, assignment, frozen), frozen)
    too_much = schedule_problems(plan, assignment, eager(plan, assignment), frozen)
    assert len(too_much) == 2
    assert all("is run backward, but nothing on it or before it trains" in problem for problem in too_much)
    too_little = schedule_problems(plan, assignment, eager(plan, assignment, frozen), all_trainable(plan))
    assert len(too_little) == 2
    assert all("is never run backward" in problem for problem in too_little)


def test_every_rank_of_a_stage_must_run_it():
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0, 1), tp=2),)),)),))
    assignment = Assignment({"language": (((0,),),)})
    good = eager(plan, assignment)
    assert good.actions[0] == good.actions[1]
    assert not schedule_problems(plan, assignment, good)
    for lacking in (0, 1):
        changed = Schedule({**good.actions, lacking: good.actions[lacking][:1]})
        assert any(f"rank {lacking} lacks B" in problem for problem in schedule_problems(plan, assignment, changed))


def test_invalid_assignment_is_refused_with_every_reason():
    plan, _ = two_stages()
    assignment = Assignment({"language": (((0, 1), (1,)), ((2,),)), "audio": ()})
    problems = schedule_problems(plan, assignment, Schedule({}), samples={"language": [0, 1, 3]})
    assert problems == [
        "the assignment has unit 'audio', which the plan lacks; it has ['language']",
        "unit 'language' has 1 replicas in the plan, 2 in the assignment",
        "sample 1 is in language replica 0 microbatch 0 and again in replica 0 microbatch 1",
        "no microbatch of language has samples [3]",
        "language has no work for samples [2]",
    ]


def test_actions_on_unknown_stages_or_microbatches_are_named():
    plan, assignment = two_stages()
    problems = schedule_problems(plan, assignment, Schedule({0: (Action(F, 7, 0), Action(F, 0, 5))}))
    assert len(problems) == 2
    assert "stage that the plan lacks" in problems[0]
    assert "microbatch that the assignment lacks" in problems[1]


@pytest.mark.parametrize("wrong", ["a", 1.5, -1, True, 10**30, [], {}])
def test_numbers_in_a_file_of_a_step_are_whole_or_refused(wrong):
    document = {
        "assignment": {"language": [[[0, 1], [2]]]},
        "schedule": {"0": [["F", 0, 0, None], ["F", 0, 1, [2]]]},
        "tokens": {"language": [5, 6, 7]},
        "actions": [],
    }
    assert MeasuredStep.from_json(json.dumps(document)).tokens == {"language": (5, 6, 7)}
    for change in (
        {"assignment": {"language": [[[0, wrong], [2]]]}},
        {"schedule": {"0": [["F", wrong, 0, None]]}},
        {"schedule": {"0": [["F", 0, wrong, None]]}},
        {"schedule": {"0": [["F", 0, 1, [wrong]]]}},
        {"tokens": {"language": [5, 6, wrong]}},
    ):
        with pytest.raises(ValueError, match="not a measured step"):
            MeasuredStep.from_json(json.dumps({**document, **change}))
