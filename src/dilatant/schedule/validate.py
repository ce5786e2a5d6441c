"""Schedule validation: list everything that is wrong with a schedule before any process starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from dilatant.config.errors import UserError, list_problems
from dilatant.plan.plan import Plan
from dilatant.schedule.packed import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    PackedActions,
    PlanArrays,
    pack,
    plan_arrays,
)
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.simulator.graph import ScheduleError, try_build
from dilatant.schedule.trainability import Trainability


def validate(
    plan: Plan,
    assignment: Assignment,
    schedule: Schedule,
    trainability: Trainability | None = None,
    *,
    samples: Mapping[str, Collection[int]] | None = None,
) -> None:
    """Raise ScheduleError listing every problem if the schedule cannot run.

    Checked: the assignment fits the plan and puts no sample into a unit twice (exactly `samples[unit]`, if given); the
    parts of every microbatch cover it once and are the same on all stages of its replica; every rank of a stage runs
    every action exactly once, with a backward exactly where `trainability` has one (without `trainability`: for all
    microbatches of a stage or none); and some order of all actions respects rank order and data edges, else the cycle
    of waits is printed.
    """
    problems = schedule_problems(plan, assignment, schedule, trainability, samples=samples)
    if problems:
        raise ScheduleError(str(list_problems("this schedule cannot run:", problems)))


def schedule_problems(
    plan: Plan,
    assignment: Assignment,
    schedule: Schedule,
    trainability: Trainability | None = None,
    *,
    samples: Mapping[str, Collection[int]] | None = None,
) -> list[str]:
    """Return every problem that `validate` would raise."""
    problems = assignment_problems(plan, assignment, samples)
    if problems:
        return problems
    arrays = plan_arrays(plan)
    try:
        packed = pack(arrays, assignment, schedule)
    except UserError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    presence = [
        *_part_problems(arrays, assignment, packed),
        *_rank_problems(arrays, packed),
        *_presence_problems(arrays, packed, trainability),
    ]
    _, missing, disorder = try_build(plan, assignment, schedule)
    return [*presence, *([] if presence else missing), *disorder]


def assignment_problems(
    plan: Plan, assignment: Assignment, samples: Mapping[str, Collection[int]] | None = None
) -> list[str]:
    """List how an assignment fails to fit a plan: units, replicas, duplicated samples, missing or extra samples."""
    problems = []
    names = [unit.name for unit in plan.units]
    for name in sorted(set(assignment.microbatches) - set(names)):
        problems.append(f"the assignment has unit {name!r}, which the plan lacks; it has {names}")
    for unit in plan.units:
        if unit.name not in assignment.microbatches:
            problems.append(f"the assignment says nothing about unit {unit.name!r}")
            continue
        replicas = assignment.microbatches[unit.name]
        if len(replicas) != len(unit.replicas):
            problems.append(
                f"unit {unit.name!r} has {len(unit.replicas)} replicas in the plan, {len(replicas)} in the assignment"
            )
        seen: dict[int, str] = {}
        for index, replica in enumerate(replicas):
            for number, batch in enumerate(replica):
                place = f"replica {index} microbatch {number}"
                for sample in batch:
                    if sample in seen:
                        problems.append(f"sample {sample} is in {unit.name} {seen[sample]} and again in {place}")
                    seen.setdefault(sample, place)
        if samples is not None and unit.name in samples:
            wanted = set(samples[unit.name])
            if wanted - seen.keys():
                problems.append(f"no microbatch of {unit.name} has samples {sorted(wanted - seen.keys())}")
            if seen.keys() - wanted:
                problems.append(f"{unit.name} has no work for samples {sorted(seen.keys() - wanted)}")
    return problems


def _part_problems(arrays: PlanArrays, assignment: Assignment, packed: PackedActions) -> Iterator[str]:
    """List microbatches whose parts do not cover them exactly once, and empty microbatches that are run."""
    pieces = packed.pieces
    for chain in range(arrays.num_chains):
        unit, replica = arrays.units[arrays.unit_of[chain]], arrays.replica_of[chain]
        batches = assignment.microbatches[unit][replica]
        parts: dict[int, list[int]] = {}
        count: dict[int, int] = {}
        for piece in range(int(pieces.first[chain]), int(pieces.first[chain + 1])):
            number = int(pieces.microbatch[piece])
            parts.setdefault(number, []).extend(pieces.samples_of(piece))
            count[number] = count.get(number, 0) + 1
        for number, batch in enumerate(batches):
            place = f"{unit} replica {replica} microbatch {number}"
            if not batch and number in parts:
                yield f"{place} is empty and must not be run"
            elif batch and number not in parts:
                yield f"{place} is never run"
            elif batch and sorted(parts[number]) != sorted(batch):
                yield f"{place} has samples {list(batch)}, but its {count[number]} parts have {parts[number]}"


def _rank_problems(arrays: PlanArrays, packed: PackedActions) -> Iterator[str]:
    """List actions on ranks that do not hold their stage, twice on a rank, or missing on some rank of a stage."""
    row_rank = np.repeat(np.asarray(packed.ranks, dtype=np.int64), np.diff(packed.offsets))
    num_pieces = max(len(packed.pieces.microbatch), 1)
    code = (packed.stage.astype(np.int64) * 4 + packed.kind) * num_pieces + packed.piece
    if all(len(entry.stage.ranks) == 1 for entry in arrays.placed):
        held = np.asarray([entry.stage.ranks[0] for entry in arrays.placed])[packed.stage] == row_rank
    else:
        holders = {(entry.index, rank) for entry in arrays.placed for rank in entry.stage.ranks}
        pairs = zip(packed.stage.tolist(), row_rank.tolist(), strict=True)
        held = np.fromiter((pair in holders for pair in pairs), dtype=bool, count=len(row_rank))
    for row in np.flatnonzero(~held).tolist():
        rank = int(row_rank[row])
        entry = arrays.placed[int(packed.stage[row])]
        yield (
            f"rank {rank} runs {_action(packed, row)}, but {entry.unit} replica {entry.replica} stage "
            f"{entry.position} is on ranks {list(entry.stage.ranks)}"
        )
    order = np.lexsort((code, row_rank))
    again = order[1:][(code[order][1:] == code[order][:-1]) & (row_rank[order][1:] == row_rank[order][:-1])]
    for row in again.tolist():
        yield f"rank {int(row_rank[row])} runs {_action(packed, row)} twice"
    for entry in arrays.placed:
        if len(entry.stage.ranks) > 1:
            mine = packed.stage == entry.index
            everything = set(code[mine].tolist())
            for rank in entry.stage.ranks:
                for lacking in sorted(everything - set(code[mine & (row_rank == rank)].tolist())):
                    row = int(np.flatnonzero(code == lacking)[0])
                    yield f"rank {rank} lacks {_action(packed, row)} of its stage"


def _presence_problems(arrays: PlanArrays, packed: PackedActions, trainability: Trainability | None) -> Iterator[str]:
    """List actions that a stage lacks for a piece, and kinds of action that a stage must not have."""
    pieces = packed.pieces
    there = np.zeros((len(arrays.placed), 4, len(pieces.microbatch)), dtype=bool)
    there[packed.stage, packed.kind, packed.piece] = True
    for entry in arrays.placed:
        chain = int(arrays.chain[entry.index])
        own = slice(int(pieces.first[chain]), int(pieces.first[chain + 1]))
        has = there[entry.index, :, own]
        backward = has[BACKWARD] | has[INPUT_GRADIENT]
        place = f"{entry.unit} replica {entry.replica} stage {entry.position}"
        wants = bool(backward.any()) if trainability is None else trainability.backward[entry.index]
        weights = (
            bool(has[WEIGHT_GRADIENT].any()) if trainability is None else trainability.weight_gradient[entry.index]
        )
        complaints = [(~has[FORWARD], "is never run forward")]
        if wants:
            complaints.append((~backward, "is never run backward"))
            complaints.append((has[BACKWARD] & has[INPUT_GRADIENT], "has a whole backward and an input-gradient half"))
            if weights:
                halved = has[INPUT_GRADIENT] & ~has[WEIGHT_GRADIENT]
                complaints.append((halved, "has no weight-gradient half"))
            else:
                complaints.append((has[WEIGHT_GRADIENT], "has a weight-gradient half, but nothing on it trains"))
            complaints.append((has[WEIGHT_GRADIENT] & has[BACKWARD], "has a whole backward and a weight-gradient half"))
        else:
            complaints.append((has[1:].any(axis=0), "is run backward, but nothing on it or before it trains"))
        for wrong, complaint in complaints:
            for local in np.flatnonzero(wrong).tolist():
                piece = own.start + local
                part = pieces.part[piece]
                named = "" if part is None else f" samples {list(part)}"
                yield f"microbatch {int(pieces.microbatch[piece])}{named} of {place} {complaint}"


def _action(packed: PackedActions, row: int) -> str:
    piece = int(packed.piece[row])
    part = packed.pieces.part[piece]
    named = "" if part is None else f" samples {list(part)}"
    return f"{KINDS[packed.kind[row]]} of stage {packed.stage[row]} microbatch {packed.pieces.microbatch[piece]}{named}"
