"""Zero-bubble schedules: split the backward and move its weight-gradient half into idle time.

These are templates, not a search: greedy list scheduling of the halves costs 10 ms and is 2-7 % worse at 1F1B's memory.
Any schedule of whole backwards can be split; the order of forwards and input gradients is unchanged, so the result is
free of deadlock, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dilatant.plan.costs.depth import path_depths
from dilatant.plan.plan import Plan
from dilatant.schedule.families.families import eager, one_f_one_b
from dilatant.schedule.packed import PackedActions, pack
from dilatant.schedule.plan_arrays import plan_arrays
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import Trainability, all_trainable


def zero_bubble_h1(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Build ZB-H1: 1F1B with delayed weight gradients, where no stage holds more than 1F1B's first stage does."""
    limit = max(path_depths(plan), default=1)
    schedule = one_f_one_b(plan, assignment, trainability)
    return split_backward(plan, assignment, schedule, trainability, [limit] * len(plan.stages()))


def zero_bubble_h2(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Build ZB-H2: eager 1F1B with delayed weight gradients; twice 1F1B's memory, no bubble between equal stages."""
    limit = 2 * max(path_depths(plan), default=1) - 1
    schedule = eager(plan, assignment, trainability)
    return split_backward(plan, assignment, schedule, trainability, [limit] * len(plan.stages()))


def split_backward(
    plan: Plan,
    assignment: Assignment,
    schedule: Schedule,
    trainability: Trainability | None,
    limits: Sequence[int],
) -> Schedule:
    """Split every backward of `schedule` that has weight gradients into halves.

    A rank runs pending weight gradients, oldest first: before a forward that would leave more than `limits[stage]`
    pieces without their weight or input gradient; one after each input gradient once the rank has no more forwards; and
    the rest at the end. Backwards without weight gradients stay whole.
    """
    from dilatant.schedule.rank_kernels import split_rows

    trainability = trainability or all_trainable(plan)
    packed = pack(plan_arrays(plan), assignment, schedule)
    offsets, kind, stage, piece = split_rows(
        packed.offsets,
        packed.kind,
        packed.stage,
        packed.piece,
        np.asarray(trainability.weight_gradient),
        np.asarray(limits, dtype=np.int64),
    )
    return Schedule(PackedActions(packed.ranks, offsets, kind, stage, piece, packed.pieces))
