"""Refusals: errors for searches that find no plan (batch, devices, memory), each with a remedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dilatant.cost.memory import bytes_text
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.errors import BatchError, DoesNotFitError, PlanError, TooFewDevicesError
from dilatant.plan.layouts.option import Option, PlanCandidate
from dilatant.plan.layouts.option_table import ChainRequest
from dilatant.plan.layouts.space import Space
from dilatant.plan.plan import Plan


def microbatch_sizes_for(global_batch: int, sizes: Sequence[int], pipelines: int = 1) -> list[int]:
    """Return the sizes that divide the global batch among pipelines. Raises BatchError, naming the nearest batches, if
    none does."""
    dividing = sorted({size for size in sizes if size > 0 and global_batch % (pipelines * size) == 0})
    if dividing and global_batch > 0:
        return dividing
    wanted = sorted({size for size in sizes if size > 0}) or [1]
    steps = [pipelines * size for size in wanted]
    low = max(global_batch // step * step for step in steps)
    high = min(global_batch // step * step + step for step in steps)
    nearest = tuple(batch for batch in (low, high) if batch > 0)
    among = f" among {pipelines} pipelines" if pipelines > 1 else ""
    raise BatchError(
        f"a global batch of {global_batch} does not divide{among} into microbatches of "
        f"{' or '.join(map(str, wanted))}; the nearest batches that do are {' and '.join(map(str, nearest))}",
        nearest,
    )


def check_devices(space: Space) -> None:
    """Raise TooFewDevicesError if the smallest degrees with costs need more devices than there are."""
    roles = space.roles

    def least(units: Sequence[str]) -> int:
        return min((degrees.ranks for degrees in space.table.units.degrees(units)), default=1 << 30)

    generators = sum(least([unit]) for unit in roles.generators)
    together = least([*roles.encoders, roles.language])
    needed = generators + min(together, sum(least([unit]) for unit in (*roles.encoders, roles.language)))
    if space.cluster.num_devices < needed:
        raise TooFewDevicesError(
            f"{space.cluster.num_devices} devices are fewer than the {needed} that units {', '.join(roles.units)} need "
            "(smallest degrees with costs)"
        )


def does_not_fit(space: Space, samples: int) -> PlanError:
    """Return the error that names the unit with the largest overflow, with one pipeline and the smallest microbatches.
    If each unit fits by itself, the error says that only all units together do not fit."""
    excess = excess_by_unit(space, samples, space.global_batch // samples)
    capacity, reserve = bytes_text(space.cluster.bytes_per_device), space.cluster.reserve.total
    if reserve:
        capacity += f" beside the reserve of {bytes_text(reserve)}"
    devices = space.cluster.num_devices
    unit = max(excess, key=lambda name: excess[name])
    remedy = f"add devices, {_savings(space)}, or freeze more layers"
    if 0.0 < excess[unit] < math.inf:
        return DoesNotFitError(
            f"no plan fits memory: unit {unit!r} needs about {bytes_text(excess[unit])} more than a device's "
            f"{capacity}{f', spread over {devices} devices as thinly as it can be' * (devices > 1)}; {remedy}"
        )
    return DoesNotFitError(
        f"no plan fits memory on {devices} device{'s' * (devices > 1)} of {capacity}: each unit fits, all "
        f"together do not; {remedy}"
    )


def excess_by_unit(space: Space, samples: int, microbatches: int) -> dict[str, float]:
    """Return each unit's missing bytes per device under its most frugal chain on all devices the others can spare.

    The largest possible number of stages is tried, then half as many, and so on.
    """
    table, roles = space.table, space.roles
    least = {unit: min(degrees.ranks for degrees in table.units.degrees([unit])) for unit in roles.units}
    excess = {}
    for unit in roles.units:
        extra = roles.encoders if unit == roles.language else ()
        others = sum(least[other] for other in roles.units if other != unit and other not in extra)
        behind = (unit in roles.encoders) + (unit not in roles.generators and bool(roles.generators))
        excess[unit] = min(
            (
                table.excess(ChainRequest(unit, degrees, stages, samples, microbatches, extra), behind)
                for degrees in table.units.degrees([unit, *extra])
                for stages in _halving(
                    min((space.cluster.num_devices - others) // degrees.ranks, space.model.unit(unit).most_stages)
                )
            ),
            default=0.0,
        )
    return excess


def _halving(number: int) -> Iterator[int]:
    while number > 0:
        yield number
        number //= 2


def rejection(
    plan: Plan, candidate: PlanCandidate, score: PlanScore, cluster: Cluster, excess: float
) -> tuple[Option, str]:
    """Return (the option that overflows, text for the user) for a plan that does not fit in simulation."""
    rank = plan.ranks[int(np.argmax(score.peak_bytes - cluster.bytes_of(plan.ranks)))]
    held = [placed for placed in plan.stages() if rank in placed.stage.ranks]
    where = " and ".join(f"{placed.unit} stage {placed.position}" for placed in held)
    encoders = f", encoders {candidate.encoders_at.replace('-', ' ')}" if len(plan.units) > 1 else ""
    culprit = next(
        option
        for option, group in itertools.zip_longest(candidate.options, candidate.groups)
        if held[0].unit in option.chain.cuts and group in (None, cluster.group_of(rank))
    )
    return culprit, (
        f"{candidate.replicas} pipeline{'s' * (candidate.replicas > 1)}{encoders}: rank {rank} ({where}) overflows by "
        f"{bytes_text(excess)}"
    )


def no_plan_fits(rejected: Sequence[tuple[float, str]], space: Space) -> PlanError:
    if not rejected:
        per_node = space.cluster.gpus_per_node
        return PlanError(f"no plan keeps its tensor groups inside nodes of {per_node} devices; profile other degrees")
    _, text = min(rejected)
    return DoesNotFitError(
        f"no plan fits memory once its largest microbatches are simulated; the nearest, {text}. Add devices, "
        f"{_savings(space)}, or freeze more layers"
    )


def _savings(space: Space) -> str:
    """Return what else saves memory: recomputation only where the search does not choose it."""
    prescribed = not all(space.table.units.is_free(unit) for unit in space.roles.units)
    return "use recomputation or smaller microbatches" if prescribed else "use smaller microbatches"
