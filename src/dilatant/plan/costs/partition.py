"""Layer partitioning: cut a unit's layers into consecutive stages, the slowest of which is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dilatant.plan.errors import PlanError

Numbers = Sequence[float] | np.ndarray


def partition_layers(costs: Numbers, num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each of `num_stages` stages, beginning with 0: a contiguous min-max partition.

    `costs[k]` is one forward plus one backward of layer k in any unit of measure. Costs that follow the frozen rule
    (`dilatant.cost`) make the cut respect frozen layers. Every stage gets a layer. The largest stage sum is the
    smallest possible (exact for integers below 2**53, else up to the rounding of prefix sums); among such cuts, each is
    as near to the even split as that bottleneck allows.

    Raises PlanError when there are fewer layers than stages or a cost is negative or not finite.

    Source: Cornstarch (the thesis, 3.4.1, eq. 3.5); a bisection between sums of consecutive layers replaces the dynamic
    program.
    """
    from dilatant.plan.costs._partition_kernel import min_max_cuts

    array = np.ascontiguousarray(costs, dtype=np.float64)
    if not 1 <= num_stages <= array.size:
        raise PlanError(_stages_message(num_stages, array.size))
    cuts = tuple(min_max_cuts(array, num_stages).tolist())
    if not cuts:
        bad = [k for k, cost in enumerate(array.tolist()) if not 0.0 <= cost < float("inf")]
        raise PlanError(f"layer costs must be finite and at least 0; those of layers {bad} are not")
    return cuts


def partition_layers_in_memory(
    costs: Numbers, state_bytes: Numbers, activation_bytes: Numbers, in_flight: Numbers, capacity_bytes: float | Numbers
) -> tuple[int, ...] | None:
    """Partition as `partition_layers` does, into `len(in_flight)` stages of which each fits its memory; exact.

    Per layer, `state_bytes` is static memory (parameters, gradients, optimizer state) and `activation_bytes` the memory
    of one microbatch until its backward, both on one device. Stage s keeps `in_flight[s]` microbatches: its distance to
    the end along its own path (Cornstarch v3 4.4). `capacity_bytes` is one number or one per stage. Returns None when
    no cut fits.
    """
    from dilatant.plan.costs._partition_kernel import min_max_cuts_in_memory

    time, state, activation = (
        np.ascontiguousarray(array, dtype=np.float64) for array in (costs, state_bytes, activation_bytes)
    )
    held = np.ascontiguousarray(in_flight, dtype=np.float64)
    if not 1 <= held.size <= time.size:
        raise PlanError(_stages_message(held.size, time.size))
    if not state.size == activation.size == time.size:
        raise PlanError(
            f"costs, state and activation bytes describe {time.size}, {state.size} and {activation.size} layers"
        )
    capacity = np.broadcast_to(np.asarray(capacity_bytes, dtype=np.float64), held.shape).copy()
    return tuple(min_max_cuts_in_memory(time, state, activation, held, capacity).tolist()) or None


def missing_bytes(state_bytes: Numbers, activation_bytes: Numbers, in_flight: Numbers, capacity_bytes: float) -> float:
    """Return the additional memory that every stage needs for some cut to fit; 0 if one fits. Arguments as in
    `partition_layers_in_memory`."""
    costs, held = np.zeros(len(state_bytes)), (state_bytes, activation_bytes, in_flight)
    if partition_layers_in_memory(costs, *held, capacity_bytes) is not None:
        return 0.0
    low, high = 0.0, float(np.sum(state_bytes) + np.max(in_flight) * np.sum(activation_bytes))
    for _ in range(32):
        middle = (low + high) / 2
        if partition_layers_in_memory(costs, *held, capacity_bytes + middle) is not None:
            high = middle
        else:
            low = middle
    return high


def _stages_message(num_stages: int, num_layers: int) -> str:
    return f"{num_layers} layers cannot be cut into {num_stages} stages: each stage needs at least one layer"
