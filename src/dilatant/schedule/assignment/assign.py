"""Microbatch policies: which samples share a microbatch of one pipeline, and in which order microbatches run.

Every policy is deterministic: ranks that know the sizes of all samples derive the same microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.errors import UserError
from dilatant.plan.costs.workload import pack_rows, rows_of
from dilatant.schedule.assignment.pipeline_shape import (
    ByUnit,
    MicrobatchProblem,
    PipelineShape,
    default_shape,
    shape_seconds,
)
from dilatant.schedule.schedule import Assignment, Microbatch

NamedPolicy = Literal["random", "entrain", "balanced", "searched"]
POLICIES: tuple[NamedPolicy, ...] = ("random", "entrain", "balanced", "searched")
Policy = NamedPolicy | Callable[[MicrobatchProblem], ByUnit]
"""A named policy, or a function that returns the microbatches of every unit; units may group samples differently."""


def assign_microbatches(
    seconds: ArrayLike,
    num_microbatches: int,
    policy: Policy = "balanced",
    seed: int = 0,
    *,
    shape: PipelineShape | None = None,
    evaluations: int | None = None,
    weight: ArrayLike | None = None,
    capacity: float = np.inf,
) -> ByUnit:
    """Group samples into microbatches: for each unit, one tuple of sample numbers per requested microbatch, in
    execution order (more if a policy's microbatches were split to fit the capacity). Each sample occurs once in every
    unit. Empty microbatches (fewer samples than microbatches, or Entrain's K_eff) are not run.

    `seconds[sample, unit]` is the time of a sample on each stage of a unit, forward plus backward, 0 where it has no
    work. `shape` describes the pipeline, by default four stages per unit, all feeding the last, backward twice the
    forward, eager 1F1B. In each microbatch the sum of `weight[sample]` (for example row tokens) is at most `capacity`.
    Policies:

    - `random`: equal counts, in an order drawn from `seed`.
    - `entrain`: Alg. 4 of Entrain (the thesis, 4.5), with pairwise deferral: units group samples differently.
    - `balanced`: each sample, largest first, to the microbatch whose largest load grows least.
    - `searched`: the best of all of the above, improved by a search over membership and order with `evaluations`
      simulated steps.

    `balanced` groups samples within `capacity`; the other policies split a microbatch that exceeds it into several that
    are neighbours in execution order. Raises UserError for seconds that are not a finite non-negative array
    `[samples, units]`, a microbatch count below 1, an unknown policy, or samples that do not fit `capacity`.
    """
    table = np.array(seconds, dtype=np.float64)
    _check(table, num_microbatches, policy)
    num_samples, num_units = table.shape
    weights = np.zeros(num_samples) if weight is None else np.array(weight, dtype=np.float64)
    limit = np.inf if weight is None else capacity
    problem = MicrobatchProblem(table, num_microbatches, shape or default_shape(num_units), weights, limit, seed)
    if callable(policy):
        return _cut(problem, policy(problem))
    if policy == "balanced":
        return _shared(problem, _balanced(problem))
    if policy == "random":
        return _cut(problem, _shared(problem, random_slots(problem)))
    if policy == "entrain":
        return _cut(problem, _entrain(problem))
    return _searched(problem, evaluations)


def _check(table: NDArray[np.float64], num_microbatches: int, policy: Policy) -> None:
    if table.ndim != 2 or table.shape[1] == 0:
        raise UserError(f"seconds must be an array [samples, units], got shape {list(table.shape)}")
    if not (np.isfinite(table.sum()) and table.min(initial=0.0) >= 0):
        wrong = np.flatnonzero((~np.isfinite(table) | (table < 0)).any(axis=1))
        raise UserError(f"seconds must be finite and not negative; samples {wrong[:10].tolist()} are not")
    if num_microbatches < 1:
        raise UserError(f"num_microbatches must be at least 1, got {num_microbatches}")
    if not callable(policy) and policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}; there are {', '.join(POLICIES)}")


def split_by_pattern(assignment: Assignment, pattern_of: Mapping[int, int]) -> Assignment:
    """Return the assignment with every microbatch split so that all its samples have the same pattern. Microbatches
    split from one number stay neighbours in all units, since schedules pair microbatches by their order."""
    depth = max((len(own) for replicas in assignment.microbatches.values() for own in replicas), default=0)
    patterns: list[list[int]] = []
    for number in range(depth):
        here = {
            pattern_of[sample]
            for replicas in assignment.microbatches.values()
            for own in replicas
            for sample in (own[number] if number < len(own) else ())
        }
        patterns.append(sorted(here))

    def cut(own: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        return tuple(
            tuple(sample for sample in batch if pattern_of[sample] == pattern)
            for number, batch in enumerate(own)
            for pattern in patterns[number]
        )

    return Assignment({unit: tuple(map(cut, own)) for unit, own in assignment.microbatches.items()})


def _cut(problem: MicrobatchProblem, found: ByUnit) -> ByUnit:
    """Split each of the anchor's microbatches that exceeds the capacity into the fewest that hold its samples.
    Microbatches with the same number are split alike in all units, since schedules pair them by number. Raises
    UserError for a sample that exceeds the capacity alone."""
    # A sum of a few hundred weights may exceed the limit by rounding alone.
    limit = problem.capacity * (1 + 1e-12)
    anchor = found[problem.shape.anchor]
    if np.isinf(limit) or all(problem.weight[list(batch)].sum() <= limit for batch in anchor):
        return found
    if problem.weight.max() > limit:
        sample = int(problem.weight.argmax())
        raise UserError(
            f"sample {sample} (weight {problem.weight[sample]:g}) fits no microbatch of {problem.capacity:g}"
        )
    row_of = {
        batch[place]: number
        for batch in anchor
        for number, row in enumerate(pack_rows(problem.weight[list(batch)].tolist(), limit))
        for place in row
    }
    whole = Assignment({str(unit): (batches,) for unit, batches in enumerate(found)})
    cut = split_by_pattern(whole, row_of).microbatches
    return tuple(cut[str(unit)][0] for unit in range(problem.shape.num_units))


def _shared(problem: MicrobatchProblem, slot_of: NDArray[np.int64]) -> ByUnit:
    """Return the same microbatches for every unit: samples ascending within each, empty microbatches last."""
    count = problem.num_microbatches
    sizes = np.bincount(slot_of, minlength=count)
    if not sizes.all():
        renumber = np.empty(count, dtype=np.int64)
        renumber[np.argsort(sizes == 0, kind="stable")] = np.arange(count)
        slot_of = renumber[slot_of]
        sizes = np.bincount(slot_of, minlength=count)
    order = tuple(order_of(slot_of, count).tolist())
    bounds = [0, *np.cumsum(sizes).tolist()]
    batches = tuple(order[first:end] for first, end in pairwise(bounds))
    return (batches,) * problem.shape.num_units


def order_of(numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the stable order of numbers below `count`; small ones are sorted in linear time."""
    return np.argsort(numbers.astype(np.uint16) if count < 1 << 16 else numbers, kind="stable")


def random_slots(problem: MicrobatchProblem) -> NDArray[np.int64]:
    """Return the slots of samples dealt in equal counts, in an order drawn from the seed."""
    num_samples = len(problem.seconds)
    slot_of = np.empty(num_samples, dtype=np.int64)
    order = np.random.default_rng(problem.seed).permutation(num_samples)
    slot_of[order] = np.arange(num_samples) * problem.num_microbatches // max(num_samples, 1)
    return slot_of


EVEN = 0.002
"""Samples are swapped only while a unit's largest microbatch exceeds its bound by more than this fraction."""
SWAPS_TRIED = 2_000_000


def _balanced(problem: MicrobatchProblem) -> NDArray[np.int64]:
    """Return the slots of `kernels.balance`: with a dozen samples per microbatch, the greedy alone leaves 5 %."""
    from dilatant.schedule.assignment import assign_kernels as kernels

    count, weight, capacity = problem.num_microbatches, problem.weight, float(problem.capacity)
    slot_of, packed = np.zeros((2, len(problem.seconds)), dtype=np.int64)
    fits = weight.max(initial=0.0) <= capacity
    packed = rows_of(weight, capacity) if fits and capacity < np.inf else packed + count * (not fits)
    seconds = np.ascontiguousarray(problem.seconds)
    refused = kernels.balance(seconds, weight, capacity, slot_of, count, EVEN, SWAPS_TRIED, packed)
    if refused >= 0:
        raise UserError(
            f"sample {refused} (weight {weight[refused]:g}) fits no microbatch: {count} microbatches of {capacity:g} "
            f"hold {weight.sum():g} only in a tighter packing; use more microbatches"
        )
    return slot_of


def balanced_replicas(
    seconds: NDArray[np.float64],
    scale: NDArray[np.float64],
    samples: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    weight: NDArray[np.float64],
    capacity: float,
    packed: NDArray[np.int64],
) -> list[list[Microbatch]] | None:
    """Return the `balanced` microbatches of all replicas; None where `assign_microbatches` refuses them. Replica r has
    `samples[first[r]:first[r + 1]]` in `counts[r]` microbatches; `scale [replicas, units]` multiplies `seconds
    [samples, units]`; `packed` has the row of each entry of `samples`, by `rows_of`. Raises UserError like
    `assign_microbatches`."""
    from dilatant.schedule.assignment import assign_kernels as kernels

    _check(seconds, int(counts.min()), "balanced")
    how = EVEN, SWAPS_TRIED, packed
    slots, fits = kernels.balance_replicas(seconds, scale, weight, float(capacity), samples, first, counts, *how)
    if not fits:
        return None
    ends = np.cumsum(counts)
    slots += np.repeat(ends - counts, np.diff(first))
    order = tuple(samples[order_of(slots, int(ends[-1]))].tolist())
    bounds = [0, *np.cumsum(np.bincount(slots, minlength=int(ends[-1]))).tolist()]
    batches = [order[start:end] for start, end in pairwise(bounds)]
    return [batches[start:end] for start, end in pairwise([0, *ends.tolist()])]


def _loads(problem: MicrobatchProblem, slot_of: NDArray[np.int64]) -> NDArray[np.float64]:
    count = problem.num_microbatches
    return np.stack([np.bincount(slot_of, column, count) for column in problem.seconds.T])


def _entrain(problem: MicrobatchProblem) -> ByUnit:
    from dilatant.schedule.assignment.entrain import entrain

    if problem.shape.num_units == 1:
        return _shared(problem, _balanced(problem))
    return entrain(problem)


def _searched(problem: MicrobatchProblem, evaluations: int | None) -> ByUnit:
    """Return the best of all policies, improved by a search over membership and order."""
    from dilatant.schedule.assignment.joint_search import joint_search, step_model

    model = step_model(problem.shape, problem.num_microbatches)
    starts = [_balanced(problem)]
    if np.isinf(problem.capacity):
        starts.append(random_slots(problem))
    start = min(starts, key=lambda slot_of: model.seconds(_loads(problem, slot_of)))
    slots = (joint_search(model, problem, start, evaluations), *starts)
    groups = dict.fromkeys([*(_shared(problem, slot_of) for slot_of in slots), _cut(problem, _entrain(problem))])
    return min(groups, key=lambda found: shape_seconds(problem.shape, problem.seconds, found))
