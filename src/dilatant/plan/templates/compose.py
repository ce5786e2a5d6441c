"""Composition: choose the templates to run side by side, and the microbatches of each pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dilatant.plan.errors import BatchError, PlanError, TooFewDevicesError
from dilatant.plan.templates.templates import Template


@dataclass(frozen=True, slots=True)
class Composition:
    """Pipelines that train side by side: `pipelines` are (nodes, microbatches), the largest first.

    `seconds` is the time of the slowest pipeline.
    """

    pipelines: tuple[tuple[int, int], ...]
    seconds: float


def compose_pipelines(
    templates: Mapping[int, Template], num_nodes: int, fault_tolerance: int, num_microbatches: int
) -> Composition:
    """Return the fastest composition that uses all `num_nodes` nodes for `num_microbatches` microbatches; exact.

    It has at least fault_tolerance + 1 pipelines, each an instance of `templates[nodes]` with at least one microbatch.
    A pipeline takes seconds + (N - planned) * bottleneck for N microbatches, `planned` being the number at which its
    template's `seconds` hold (`Template.num_microbatches`; num_microbatches if None). The slowest pipeline is as fast
    as possible; the last microbatches go to the pipelines that finish first.

    Raises BatchError, naming the nearest batch that can be spread, when there are fewer microbatches than the smallest
    possible number of pipelines (the batch is never changed silently), TooFewDevicesError when the nodes cannot hold
    fault_tolerance + 1 pipelines, PlanError when no templates add up to num_nodes.

    Source: Oobleck (the thesis, 2.4.2, eq. 2.5 and 2.6), read as min-max over pipelines rather than least variance over
    templates, with fill time and bottleneck instead of N_b * T_i.
    """
    if not templates:
        raise PlanError("there are no pipeline templates to compose")
    if num_microbatches < 1 or fault_tolerance < 0:
        raise PlanError(
            f"num_microbatches ({num_microbatches}) must be at least 1, fault_tolerance ({fault_tolerance}) 0"
        )
    fewest = _fewest_pipelines(templates, num_nodes, fault_tolerance + 1)
    if num_microbatches < fewest:
        raise BatchError(
            f"a batch of {num_microbatches} microbatches cannot be spread over {num_nodes} nodes, which form at "
            f"least {fewest} pipelines of one microbatch each; the nearest batch that can has {fewest} "
            "microbatches",
            (fewest,),
        )
    from dilatant.plan.templates._compose_kernel import compose

    sizes = sorted(templates)
    members, number = compose(
        np.array(sizes, np.int64),
        *lines([templates[size] for size in sizes], num_microbatches),
        num_nodes,
        fault_tolerance + 1,
        num_microbatches,
    )
    pipelines = sorted((sizes[member] for member in members[:number]), reverse=True)
    counts, seconds = share_microbatches([templates[size] for size in pipelines], num_microbatches)
    return Composition(tuple(zip(pipelines, counts)), seconds)


def share_microbatches(pipelines: Sequence[Template], num_microbatches: int) -> tuple[tuple[int, ...], float]:
    """Return (microbatches of each pipeline, seconds of the slowest) for instances of these templates; exact.

    Every pipeline takes at least one microbatch. Raises BatchError when there are fewer microbatches than pipelines.
    """
    if num_microbatches < len(pipelines):
        raise BatchError(
            f"{num_microbatches} microbatches cannot be shared by {len(pipelines)} pipelines; the nearest "
            f"batch that can has {len(pipelines)} microbatches",
            (len(pipelines),),
        )
    from dilatant.plan.templates._compose_kernel import share

    seconds, bottleneck, planned = lines(pipelines, num_microbatches)
    counts = share(seconds, bottleneck, planned, num_microbatches)
    return tuple(counts.tolist()), float((seconds + (counts - planned) * bottleneck).max())


def lines(rows: Sequence[Template], num_microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (seconds, bottleneck, planned) of each template: N microbatches take seconds + (N - planned) *
    bottleneck."""
    planned = [row.num_microbatches or num_microbatches for row in rows]
    return (
        np.array([row.seconds for row in rows], np.float64),
        np.array([row.bottleneck for row in rows], np.float64),
        np.array(planned, np.int64),
    )


def _fewest_pipelines(templates: Mapping[int, Template], num_nodes: int, at_least: int) -> int:
    """Return the smallest number of pipelines, at least `at_least`, that use all nodes. Raises when there is none."""
    sizes = sorted(templates)
    if at_least * sizes[0] > num_nodes:
        raise TooFewDevicesError(
            f"{num_nodes} nodes cannot hold {at_least} pipelines: the smallest template takes {sizes[0]} nodes, "
            f"so at least {at_least * sizes[0]} are needed; add nodes or lower the fault tolerance",
            at_least * sizes[0],
        )
    reach = 1  # bit n: n nodes can be used by exactly `number` pipelines
    everything = (1 << num_nodes + sizes[-1] + 1) - 1
    usable = 0
    for number in range(1, num_nodes // sizes[0] + 1):
        reach = _or_all(reach << size for size in sizes) & everything
        if number >= at_least:
            if reach >> num_nodes & 1:
                return number
            usable |= reach
    near = [n for n in range(num_nodes, 0, -1) if usable >> n & 1][:1]
    near += [n for n in range(num_nodes, num_nodes + sizes[-1] + 1) if usable >> n & 1][:1]
    raise PlanError(
        f"no {at_least} or more pipelines of {_list(sizes)} nodes use all {num_nodes} nodes; "
        f"the nearest usable cluster has {' or '.join(map(str, near))} nodes"
    )


def _or_all(bits: Iterable[int]) -> int:
    total = 0
    for value in bits:
        total |= value
    return total


def _list(sizes: list[int]) -> str:
    if len(sizes) > 2 and sizes == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(map(str, sizes))
