"""Pipeline templates: for every node count, the best layout of the whole model on that many nodes. A composition says
which of them run side by side, with how many microbatches each."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dilatant.plan.errors import BatchError, PlanError, TooFewDevicesError


@dataclass(frozen=True, slots=True)
class Template:
    """The best pipeline for some number of nodes.

    `stages` are (first layer, end layer, GPUs) in pipeline order; they take the nodes' GPUs in order. `seconds` is the
    paper's T1 + T2 + T3 at `num_microbatches`, `bottleneck` the seconds of the slowest stage for one microbatch,
    forward plus backward. Every further microbatch costs one `bottleneck`.
    """

    stages: tuple[tuple[int, int, int], ...]
    seconds: float
    bottleneck: float
    num_microbatches: int | None = None


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of a template's layers on one GPU, in bytes.

    On d GPUs layer k holds `state_bytes[d][k]` throughout and `activation_bytes[d][k]` for every microbatch between its
    forward and its backward. A GPU has `capacity_bytes`. early: microbatches that a stage keeps in addition to 1F1B's.
    """

    state_bytes: Mapping[int, Sequence[float]]
    activation_bytes: Mapping[int, Sequence[float]]
    capacity_bytes: float
    early: int = 0


def plan_templates(
    layer_seconds: Mapping[int, Sequence[float]],
    nodes: Iterable[int],
    gpus_per_node: int,
    num_microbatches: int,
    memory: LayerMemory | None = None,
    most_kept: int | None = None,
) -> dict[int, Template]:
    """Return the template of every node count in `nodes`; counts that no plan can use in full are absent.

    `layer_seconds[d][k]` is forward plus backward of layer k for one microbatch on d GPUs of a node, for every allowed
    d. A plan is a chain of stages that holds every layer once and uses every GPU of its nodes. Stages take GPUs in
    order, an allowed number each, and none crosses a node. All node counts are searched together; the results are
    optimal over all numbers of stages.

    The objective is that of Oobleck (the thesis, 2.4.1.2), whose text is read as follows. The two halves of eq. 2.1
    meet at layer k (no layer is dropped). In eq. 2.2 the slowest stage runs on its own GPUs and its index counts from
    0. Of equally slow stages the last one is used, which makes the longest path through the schedule (eq. 2.3). The
    number of microbatches is a parameter instead of depending on the number of stages, because four per stage would let
    the amount of work depend on the result. Several subproblem optima need not make an optimal whole, so the search is
    exact over whole plans instead of a memo of best parts. Times become integers of 2**-k seconds, fine enough to be
    exact for integers and for sums of equal layers.

    T1 + T2 + T3 is the length of one path, hence at most the time of 1F1B; rank finalists by simulation. With fewer
    microbatches than stages T2 can be negative, which favours slow first stages: the definition is kept, but plan with
    at least as many microbatches as layers and let `compose_pipelines` convert to the actual number. Noise in the
    seconds of equal layers only enlarges the search.

    With `memory`, every stage fits its GPUs: the s-th stage from the end of a 1F1B pipeline keeps s microbatches, up to
    `most_kept` (default: num_microbatches). Node
    counts whose unconstrained optimum fits cost nothing extra; for the others the search counts stages from the end,
    which multiplies its time by about the largest possible number of stages.

    Raises PlanError for empty or uneven tables, times that are negative or not finite, and counts below 1.
    """
    wanted = sorted(set(nodes))
    widths = sorted(width for width in layer_seconds if 1 <= width <= gpus_per_node)
    _check(layer_seconds, widths, wanted, gpus_per_node, num_microbatches)
    num_layers = len(layer_seconds[widths[0]])
    possible = [n for n in wanted if n <= num_layers]
    seconds = np.array([layer_seconds[width] for width in widths], dtype=np.float64)
    quantum = _exponent(seconds, num_microbatches)
    ticks = np.rint(np.ldexp(seconds, quantum)).astype(np.int64)
    anywhere = np.full((len(widths), 1, num_layers), num_layers, np.int64)
    found = _search(ticks, widths, anywhere, gpus_per_node, possible, num_microbatches)
    if memory is not None:
        levels = 1 + min(num_layers, max(possible, default=0) * gpus_per_node // widths[0])
        fits = _latest_ends(memory, widths, levels, most_kept or num_microbatches)
        tight = [n for n, (_, stages) in found.items() if not _fits(stages, fits)]
        found = {n: answer for n, answer in found.items() if n not in tight}
        found |= _search(ticks, widths, fits, gpus_per_node, tight, num_microbatches)
    templates = {}
    for n, (cost, stages) in sorted(found.items()):
        slowest = max(int(ticks[w, first:end].sum()) for first, end, w in stages)
        templates[n] = Template(
            stages=tuple((first, end, widths[w]) for first, end, w in stages),
            seconds=math.ldexp(cost, -quantum),
            bottleneck=math.ldexp(slowest, -quantum),
            num_microbatches=num_microbatches,
        )
    return templates


def _search(
    ticks: np.ndarray, widths: list[int], fits: np.ndarray, gpus_per_node: int, nodes: list[int], num_microbatches: int
) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """Return {nodes: (cost in ticks, stages as (first, end, width index))}, without node counts that have no plan."""
    if not nodes:
        return {}
    from dilatant.plan.templates._templates_kernel import search

    prefix = np.concatenate([np.zeros((len(widths), 1), np.int64), np.cumsum(ticks, axis=1)], axis=1)
    first, end = np.triu_indices(prefix.shape[1], k=1)
    slowest = np.unique(prefix[:, end] - prefix[:, first])
    slowest = slowest[slowest >= ticks.min(axis=0).max()]  # some stage holds the layer with the largest minimum
    costs, stages, counts, _ = search(
        prefix, np.array(widths, np.int64), fits, gpus_per_node, np.array(nodes, np.int64), num_microbatches, slowest
    )
    return {
        n: (cost, [(first, end, w) for first, end, w in chain[:count]])
        for n, cost, chain, count in zip(nodes, costs.tolist(), stages.tolist(), counts.tolist())
        if count
    }


def _latest_ends(memory: LayerMemory, widths: list[int], levels: int, most_kept: int) -> np.ndarray:
    """Return [widths, levels, layers]: the last end of a stage that begins at a layer, `level` stages from the end."""
    ends = []
    for width in widths:
        state = np.concatenate([[0.0], np.cumsum(memory.state_bytes[width])])
        activation = np.concatenate([[0.0], np.cumsum(memory.activation_bytes[width])])
        held = np.minimum(np.arange(levels) + memory.early, most_kept)[:, None] * activation + state
        ends.append([np.searchsorted(row, row[:-1] + memory.capacity_bytes, side="right") - 1 for row in held])
    return np.array(ends, np.int64)


def _fits(stages: list[tuple[int, int, int]], fits: np.ndarray) -> bool:
    return all(end <= fits[w, len(stages) - k, first] for k, (first, end, w) in enumerate(stages))


def _check(
    layer_seconds: Mapping[int, Sequence[float]],
    widths: list[int],
    wanted: list[int],
    gpus_per_node: int,
    num_microbatches: int,
) -> None:
    problems = []
    if gpus_per_node < 1:
        problems.append(f"a node needs at least one GPU, not {gpus_per_node}")
    if num_microbatches < 1:
        problems.append(f"a pipeline runs at least one microbatch, not {num_microbatches}")
    if wanted and wanted[0] < 1:
        problems.append(f"a pipeline needs at least one node, not {wanted[0]}")
    if not widths:
        problems.append(
            f"layer_seconds allows {sorted(layer_seconds)} GPUs per stage, of which none fits a node of {gpus_per_node}"
        )
    elif len(lengths := {len(layer_seconds[width]) for width in widths}) > 1 or 0 in lengths:
        problems.append(f"layer_seconds describes {sorted(lengths)} layers for different numbers of GPUs")
    for width in widths:
        bad = [k for k, cost in enumerate(layer_seconds[width]) if not 0.0 <= cost < math.inf]
        if bad:
            problems.append(f"seconds of layers {bad} on {width} GPUs are negative or not finite")
    if problems:
        raise PlanError("; ".join(problems))


def _exponent(seconds: np.ndarray, num_microbatches: int) -> int:
    """Return the largest k for which no cost in units of 2**-k seconds reaches 2**60."""
    largest = float(seconds.sum(axis=1).max()) * (num_microbatches + 2 * seconds.shape[1] + 4)
    return 60 - math.frexp(largest)[1] if largest > 0.0 else 0


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
            f"so at least {at_least * sizes[0]} are needed; add nodes or lower the fault tolerance"
        )
    reach = 1  # bit n: n nodes can be used by exactly `number` pipelines
    everything = (1 << num_nodes + sizes[-1] + 1) - 1
    usable = 0
    for number in range(1, num_nodes // sizes[0] + 1):
        reach = functools.reduce(operator.or_, (reach << size for size in sizes)) & everything
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


def most_nodes(sizes: Collection[int], num_nodes: int, pipelines: int) -> int:
    """Return the largest number of nodes, up to `num_nodes`, that at least so many pipelines of these sizes use; 0 if
    there is none."""
    if not sizes:
        return 0
    most = _most_pipelines(tuple(sorted(sizes)), 1 << num_nodes.bit_length())[: num_nodes + 1]
    return int(np.flatnonzero(most >= max(1, pipelines)).max(initial=0))


@lru_cache(maxsize=16)
def _most_pipelines(sizes: tuple[int, ...], num_nodes: int) -> np.ndarray:
    """Return for 0 to `num_nodes` nodes the most pipelines of these sizes that use all of them; negative if none do."""
    most = np.full(sizes[-1] + num_nodes + 1, -num_nodes - 1, np.int64)  # node n is at n + the largest size
    most[sizes[-1]] = 0
    back = sizes[-1] - np.array(sizes)
    for nodes in range(1, num_nodes + 1):
        most[sizes[-1] + nodes] = most[back + nodes].max() + 1
    return most[sizes[-1] :]


def _list(sizes: list[int]) -> str:
    if len(sizes) > 2 and sizes == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(map(str, sizes))
