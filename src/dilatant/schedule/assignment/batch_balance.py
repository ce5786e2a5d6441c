"""Batch balance: how long replicas or microbatches of a data set's batches would wait for the largest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.assignment.assign import NamedPolicy, assign_microbatches


@dataclass(frozen=True, slots=True)
class BatchBalance:
    """Wait fractions of batches that an `assign_microbatches` policy divides into `groups`, if work is proportional to
    tokens.

    `waits[unit]` is the fraction of time that the mean group idles while the largest works on the unit. `step_waits` is
    the same over all devices if each unit has devices in proportion to its work and a step ends with the last of them;
    the policies minimise it, if need be at the cost of a unit that does not end last.
    """

    groups: int
    policy: NamedPolicy
    waits: dict[str, float]
    step_waits: float


def batch_balance(
    units: Sequence[str],
    batches: Sequence[NDArray[np.int64]],
    groups: Sequence[int] = (2, 4, 8, 16),
    policies: Sequence[NamedPolicy] = ("random", "balanced"),
) -> tuple[BatchBalance, ...]:
    """Return the mean over `batches` (tokens `[samples, units]` each) for every number of groups and policy.

    Numbers of groups with fewer than two samples per group are left out, and so are units without any tokens.
    """
    smallest = min((len(batch) for batch in batches), default=0)
    present = [unit for unit in range(len(units)) if any(batch[:, unit].any() for batch in batches)]
    work = [batch[:, present].astype(np.float64) for batch in batches]
    found = []
    for count in (count for count in groups if present and 2 * count <= smallest):
        for policy in policies:
            loads = np.array([_loads(one, count, policy, seed) for seed, one in enumerate(work)])
            waits = 1.0 - loads.mean(axis=1).sum(axis=0) / loads.max(axis=1).sum(axis=0)
            relative = loads / loads.mean(axis=(0, 1))
            found.append(
                BatchBalance(
                    count,
                    policy,
                    {units[unit]: wait for unit, wait in zip(present, waits.tolist(), strict=True)},
                    float(1.0 - len(loads) / relative.max(axis=(1, 2)).sum()),
                )
            )
    return tuple(found)


def _loads(work: NDArray[np.float64], groups: int, policy: NamedPolicy, seed: int) -> NDArray[np.float64]:
    """Return the work of every group: `[groups, units]`."""
    grouped = assign_microbatches(work, groups, policy, seed)
    return np.array([work[list(samples)].sum(axis=0) for samples in grouped[0]])
