"""Disaggregated candidates: DistTrain's search, which gives every unit separate replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

from benchmarks.papers.disttrain.orchestrate import ModuleAllocation, ModuleCost, Orchestration, orchestrate
from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import ParallelChains, PlanCandidate
from dilatant.plan.layouts.option_table import ChainRequest
from dilatant.plan.layouts.space import Space
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.search.closed_form import bound, chain_times

MEMORY_SHARES = (1.0, 0.8, 0.6, 0.4)
"""Fractions of device memory that DistTrain's search may use, tried in turn."""


def disaggregated(space: Space) -> Iterator[PlanCandidate]:
    """Yield DistTrain's optimum for every microbatch size, with separate replicas for every unit.
    DistTrain's model assumes equal layers, so a result whose totals fit may not fit after cutting or in simulation.
    Optima for less memory follow, and optima with more recomputation where the model leaves recomputation open."""
    for size in space.settings.microbatch_sizes:
        found: dict[tuple[ModuleAllocation, ...], Orchestration] = {}
        for level, share in itertools.product(space.table.units.levels(space.roles.units), MEMORY_SHARES):
            modules = {name: _module(space, name, level) for name in space.roles.units}
            with suppress(PlanError):
                answer = orchestrate(
                    [modules[name] for name in space.roles.encoders],
                    modules[space.roles.language],
                    [modules[name] for name in space.roles.generators],
                    space.cluster.num_devices,
                    space.global_batch,
                    size,
                    share * space.cluster.bytes_per_device,
                )
                found.setdefault(answer.modules, answer)
        for answer in found.values():
            candidate = _as_candidate(space, answer, size)
            if candidate is not None and space.settings.num_microbatches in (None, candidate.num_microbatches):
                yield candidate


def _as_candidate(space: Space, answer: Orchestration, size: int) -> PlanCandidate | None:
    """Cut a DistTrain result along the real layers; return None if memory forbids."""
    table, roles = space.table, space.roles
    allocations = {module.name: module for module in answer.modules}
    language = allocations[roles.language]
    last = max((allocations[name].pp for name in roles.generators), default=0)
    options = []
    for name in roles.units:
        own = allocations[name]
        behind = 0 if name in roles.generators else last + (language.pp if name in roles.encoders else 0)
        samples = size * language.replicas / own.replicas
        held = table.shared_by(own.replicas, own.tp * own.pp)
        request = ChainRequest(name, Degrees(own.tp), own.pp, samples, answer.num_microbatches)
        options.append(held.chain(request, behind))
    if None in options:
        return None
    chains = tuple(option for option in options if option is not None)
    count = answer.num_microbatches
    times = [chain_times(space, allocations[name].replicas, count, one) for name, one in zip(roles.units, chains)]
    return PlanCandidate(
        encoders_at=EncoderPosition.PARALLEL,
        replicas=language.replicas,
        microbatch_size=size,
        num_microbatches=count,
        options=chains,
        counts=tuple(allocations[name].replicas for name in roles.units),
        estimate=answer.seconds,
        bound=bound(ParallelChains(chains[: len(roles.encoders)]), chains[len(roles.encoders)], chains, times),
    )


def _module(space: Space, name: str, level: Recompute) -> ModuleCost:
    """Model a unit as equal layers under the mean sample, without context parallelism."""
    degrees = [one.tp for one in space.table.units.degrees([name]) if one.copies == 1]
    if not degrees:
        raise PlanError(f"unit {name!r} has no costs without context parallelism, which DistTrain's search needs")
    by_degree = {tp: space.table.units.layers(name, Degrees(tp), 1, level) for tp in degrees}
    one = by_degree[degrees[0]]
    return ModuleCost(
        name=name,
        layers=len(one.seconds),
        seconds={tp: float(layers.seconds.sum()) for tp, layers in by_degree.items()},
        state_bytes=float(one.static.sum()) * degrees[0],
        activation_bytes=float(one.kept.sum()) * degrees[0],
    )
