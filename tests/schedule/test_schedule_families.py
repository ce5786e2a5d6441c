"""Every schedule family gives a schedule that runs for every plan and assignment, and the textbook one for a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cases.step_cases import random_step
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import (
    eager,
    interleaved,
    one_f_one_b,
    split_backward,
    zero_bubble_h1,
    zero_bubble_h2,
)
from dilatant.schedule.packed import plan_arrays
from dilatant.schedule.schedule import ActionKind, Assignment, MeasuredStep, Schedule
from dilatant.schedule.simulator.simulate import simulate
from dilatant.schedule.trainability import all_trainable, trainability_of
from dilatant.schedule.validate import schedule_problems, validate

HALVES = {ActionKind.F: 1.0, ActionKind.I: 1.0, ActionKind.W: 1.0, ActionKind.B: 2.0}
GENERAL = [name for name in FAMILIES if name != "interleaved"]


def chain(stages: int, microbatches: int, groups: int | None = None) -> tuple[Plan, Assignment]:
    groups = groups or stages
    plan = Plan((UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s % groups,)) for s in range(stages))),)),))
    return plan, Assignment({"language": (tuple((k,) for k in range(microbatches)),)})


def words(schedule: Schedule, rank: int) -> str:
    parts = ["" if a.samples is None else "." + "".join(map(str, a.samples)) for a in schedule.actions[rank]]
    actions = zip(schedule.actions[rank], parts, strict=True)
    return " ".join(f"{action.kind}{action.microbatch}{part}" for action, part in actions)


def most_in_flight(schedule: Schedule, rank: int, freed_by: str) -> int:
    held = most = 0
    for action in schedule.actions[rank]:
        held += (action.kind == "F") - (action.kind == freed_by)
        most = max(most, held)
    return most


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(GENERAL))
def test_every_family_gives_a_valid_schedule_for_every_step(seed, name):
    step = random_step(seed)
    schedule = FAMILIES[name](step.plan, step.assignment, step.trainability)
    validate(step.plan, step.assignment, schedule, step.trainability)
    again = MeasuredStep.from_json(MeasuredStep(step.assignment, schedule, {}, ()).to_json())
    assert (again.assignment, again.schedule) == (step.assignment, schedule)


def test_the_worked_example_is_reproduced_action_by_action():
    # Vision on ranks 0 and 3, language on ranks 1-2 and 4; sample 1 deferred, sample 4 without an image.
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)), Replica((Stage(0, 4, (3,)),))), feeds=("language",)),
            UnitPlan("language", (Replica((Stage(0, 3, (1,)), Stage(3, 6, (2,)))), Replica((Stage(0, 6, (4,)),)))),
        )
    )
    assignment = Assignment(
        {"vision": (((0, 1), (2, 3, 5)), ((6, 7),)), "language": (((0, 4), (1, 2), (3, 5)), ((6,), (7,)))}
    )
    schedule = eager(plan, assignment)
    assert {rank: words(schedule, rank) for rank in schedule.actions} == {
        0: "F0.0 F0.1 F1.2 F1.35 B0.0 B0.1 B1.2 B1.35",
        1: "F0 F1 F2 B0 B1 B2",
        2: "F0 B0 F1 B1 F2 B2",
        3: "F0.6 F0.7 B0.6 B0.7",
        4: "F0 B0 F1 B1",
    }
    validate(plan, assignment, schedule, all_trainable(plan))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 9), (8, 20)])
def test_chain_has_the_microbatches_in_flight_of_its_family(stages, microbatches):
    plan, assignment = chain(stages, microbatches)
    for s in range(stages):
        depth = stages - s
        for family, wanted in ((one_f_one_b, depth), (eager, 2 * depth - 1)):
            assert most_in_flight(family(plan, assignment), s, "B") == min(wanted, microbatches)
        assert most_in_flight(zero_bubble_h1(plan, assignment), s, "W") <= stages
        assert most_in_flight(zero_bubble_h2(plan, assignment), s, "W") <= 2 * stages - 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=14), st.integers(1, 2))
def test_texts_without_images_add_no_microbatches_in_flight(stages, has_image, replicas):
    # The generator has no microbatch for them; all the language model's forwards ran first where the last was one.
    language = tuple(tuple(Stage(s, s + 1, (r * stages + s,)) for s in range(stages)) for r in range(replicas))
    plan = Plan(
        (
            UnitPlan("language", tuple(map(Replica, language)), ("generator",)),
            UnitPlan("generator", (Replica((Stage(0, 1, (stages * replicas,)),)),)),
        )
    )
    count = len(has_image)
    texts = tuple(tuple((r * count + k,) for k in range(count)) for r in range(replicas))
    images = (tuple(tuple(r * count + k for r in range(replicas) if has_image[k]) for k in range(count)),)
    assignment = Assignment({"language": texts, "generator": images})
    for name, ahead in (("1f1b", 1), ("eager", 2)):
        schedule = FAMILIES[name](plan, assignment)
        validate(plan, assignment, schedule, all_trainable(plan))
        for replica in range(replicas):
            held = [most_in_flight(schedule, replica * stages + s, "B") for s in range(stages)]
            # The generator's own stage is one more to the end of the path.
            assert all(most <= ahead * (stages - s) + 1 for s, most in enumerate(held)), (name, held)


def test_1f1b_on_a_chain_is_the_textbook_order():
    plan, assignment = chain(3, 5)
    schedule = one_f_one_b(plan, assignment)
    assert words(schedule, 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert words(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert words(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zero_bubble_h1_leaves_a_third_of_the_bubble(stages):
    plan, assignment = chain(stages, 3 * stages)
    seconds = {
        family: simulate(family(plan, assignment), plan, assignment, lambda a: HALVES[a.kind]).seconds
        for family in (one_f_one_b, zero_bubble_h1, zero_bubble_h2)
    }
    work = 3 * 3 * stages
    assert seconds[one_f_one_b] - work == 3 * (stages - 1)
    assert seconds[zero_bubble_h1] - work == stages - 1


def test_zero_bubble_h2_ranks_never_idle_between_their_actions():
    plan, assignment = chain(6, 20)
    timeline = simulate(zero_bubble_h2(plan, assignment), plan, assignment, lambda a: HALVES[a.kind])
    for rank in timeline.ranks:
        actions = timeline.of_rank(rank)
        assert actions[-1][2] - actions[0][1] == 3 * 20


@pytest.mark.parametrize(("groups", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(groups, per_rank, microbatches):
    plan, assignment = chain(groups * per_rank, microbatches, groups)
    timeline = simulate(interleaved(plan, assignment), plan, assignment, 1 / per_rank)
    # Sums of up to a hundred times 1/3.
    assert timeline.seconds == pytest.approx(2 * (microbatches + (groups - 1) / per_rank), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 13), st.booleans(), st.booleans())
def test_interleaving_never_deadlocks(groups, per_rank, microbatches, encoder, generator):
    ranks = [(r,) for r in range(groups)]
    stages = tuple(Stage(s, s + 1, ranks[s % groups]) for s in range(groups * per_rank))
    batches = (tuple((k,) for k in range(microbatches)),)
    units = [UnitPlan("language", (Replica(stages),), ("image",) if generator else ())]
    assignment = {"language": batches}
    if encoder:
        units.insert(0, UnitPlan("vision", (Replica((Stage(0, 1, (groups,)),)),), ("language",)))
        assignment["vision"] = ((tuple(range(microbatches)),),)
    if generator:
        units.append(UnitPlan("image", (Replica((Stage(0, 1, (groups + 1,)),)),)))
        assignment["image"] = (tuple((k,) for k in reversed(range(microbatches))),)
    plan = Plan(tuple(units))
    validate(plan, Assignment(assignment), interleaved(plan, Assignment(assignment)), all_trainable(plan))


def test_a_replica_that_does_not_go_round_is_refused():
    stages = (Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (1,)), Stage(3, 4, (0,)))
    plan = Plan((UnitPlan("language", (Replica(stages),)),))
    with pytest.raises(ValueError, match="cannot be interleaved"):
        interleaved(plan, Assignment({"language": (((0,),),)}))


def test_depth_counts_the_stages_to_the_end_of_a_stages_own_path():
    # A deep vision encoder and a shallow audio one beside it, in front of two language stages.
    plan = Plan(
        (
            UnitPlan("vision", (Replica(tuple(Stage(s, s + 1, (s,)) for s in range(3))),), ("language",)),
            UnitPlan("audio", (Replica((Stage(0, 1, (3,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 1, (4,)), Stage(1, 2, (5,)))),)),
        )
    )
    batches = (tuple((k,) for k in range(12)),)
    assignment = Assignment({"vision": batches, "audio": batches, "language": batches})
    schedule = one_f_one_b(plan, assignment)
    assert [most_in_flight(schedule, rank, "B") for rank in range(6)] == [5, 4, 3, 3, 2, 1]
    uniform = simulate(schedule, plan, assignment, 1.0)
    # Both encoders run side by side: the time is that of a chain of five stages, not of six.
    assert uniform.seconds == 2 * (12 + 4)


def depths_within(wanted: Sequence[int], limits: Sequence[int], plan: Plan) -> tuple[int, ...]:
    """Return the largest depths within `wanted` and `limits` that cannot deadlock: none exceeds an earlier stage's."""
    arrays = plan_arrays(plan)
    depth = np.minimum(wanted, limits)
    for unit in range(len(arrays.units)):
        chains = arrays.chains_of(unit)
        for chain in chains:
            first, end = arrays.stages_of[chain]
            depth[first:end] = np.minimum.accumulate(depth[first:end])
        smallest = min(int(depth[arrays.stages_of[chain, 1] - 1]) for chain in chains)
        for source, target in arrays.feeds:
            if source == unit:
                for chain in arrays.chains_of(target):
                    first = arrays.stages_of[chain, 0]
                    depth[first] = min(depth[first], smallest)
    return tuple(depth.tolist())


def test_too_small_a_depth_deadlocks_and_the_cycle_is_reported():
    plan = Plan(
        (
            UnitPlan("audio", (Replica((Stage(0, 1, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s + 1,)) for s in range(3))),)),
        )
    )
    batches = (tuple((k,) for k in range(8)),)
    assignment = Assignment({"audio": batches, "language": batches})
    problems = schedule_problems(plan, assignment, eager(plan, assignment, depths=[1, 3, 2, 1]))
    assert len(problems) == 1
    assert problems[0].startswith("deadlock: ")
    assert "audio" in problems[0]
    assert not schedule_problems(plan, assignment, eager(plan, assignment, depths=[3, 3, 2, 1]))
    assert depths_within([7, 5, 3, 1], [2, 9, 9, 9], plan) == (2, 2, 2, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 6), min_size=40, max_size=40))
def test_depths_within_limits_never_deadlock(seed, limits):
    step = random_step(seed, colocated=False)
    stages = step.plan.stages()
    wanted = [2 * 40] * len(stages)
    depths = depths_within(wanted, limits[: len(stages)] + [3] * (len(stages) - len(limits)), step.plan)
    schedule = eager(step.plan, step.assignment, step.trainability, depths=depths)
    validate(step.plan, step.assignment, schedule, step.trainability)


def test_frozen_encoder_runs_forward_only_and_is_not_split():
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 2, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 2, (1,)),)),)),
        )
    )
    assignment = Assignment({"vision": (((0, 1), (2, 3)),), "language": (((0, 2), (1, 3)),)})
    frozen = trainability_of(plan, {"vision": [False, False], "language": [True, True]})
    assert words(eager(plan, assignment, frozen), 0) == "F0 F1"
    projector = trainability_of(plan, {"vision": [False, True], "language": [False, False]})
    schedule = zero_bubble_h1(plan, assignment, projector)
    # A frozen language model after a trainable projector: input gradients only, so its backward is not split.
    assert "W" not in words(schedule, 1)
    assert words(schedule, 0).count("I") == words(schedule, 0).count("W") == 4


@pytest.mark.parametrize("family", [zero_bubble_h1, zero_bubble_h2])
def test_weight_gradients_run_in_order_of_input_gradients(family):
    """The oldest runs first, since it has held its activations longest."""
    plan, assignment = chain(4, 12)
    for actions in family(plan, assignment).actions.values():
        halves = {kind: [a.microbatch for a in actions if a.kind == kind] for kind in "IW"}
        assert halves["W"] == halves["I"]
        assert len(halves["W"]) == 12


def halved(actions, splits, limits):
    """Return the `actions` of a rank with split backwards, by a direct reading of the rule."""
    found = []

    def waiting():
        """Return the input gradients whose weight gradients have not run, oldest first."""
        done = [(a.stage, a.microbatch, a.samples) for a in found if a.kind == "W"]
        return [a for a in found if a.kind == "I" and (a.stage, a.microbatch, a.samples) not in done]

    def held(stage):
        ended = sum(a.kind == "W" and a.stage == stage for a in found)
        return sum(a.kind == "F" and a.stage == stage for a in found) - ended

    for place, action in enumerate(actions):
        stage = action.stage
        if not splits[stage]:
            found.append(action)
        elif action.kind == "F":
            while held(stage) >= limits[stage] and any(a.stage == stage for a in waiting()):
                found.append(replace(waiting()[0], kind=ActionKind.W))
            found.append(action)
        else:
            found.append(replace(action, kind=ActionKind.I))
            if all(later.kind != "F" for later in actions[place:]):
                found.append(replace(waiting()[0], kind=ActionKind.W))
    return (*found, *(replace(one, kind=ActionKind.W) for one in waiting()))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["gpipe", "1f1b", "eager"]), st.data())
def test_weight_gradients_come_where_the_rule_says(seed, name, data):
    step = random_step(seed)
    whole = FAMILIES[name](step.plan, step.assignment, step.trainability)
    limits = [data.draw(st.integers(0, 4)) for _ in step.plan.stages()]
    schedule = split_backward(step.plan, step.assignment, whole, step.trainability, limits)
    for rank, actions in whole.actions.items():
        assert schedule.actions[rank] == halved(actions, step.trainability.weight_gradient, limits)
