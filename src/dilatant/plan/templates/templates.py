"""Pipeline templates: for every node count, the best layout of the whole model on that many nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dilatant.plan.errors import PlanError


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

    With `memory`, every stage fits its GPUs: the s-th stage from the end of a 1F1B pipeline keeps s microbatches. Node
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
        fits = _latest_ends(memory, widths, levels, num_microbatches)
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
    ticks: np.ndarray,
    widths: list[int],
    fits: np.ndarray,
    gpus_per_node: int,
    nodes: list[int],
    num_microbatches: int,
) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """Return {nodes: (cost in ticks, stages as (first, end, width index))}, without node counts that have no plan."""
    if not nodes:
        return {}
    from dilatant.plan.templates._templates_kernel import search

    prefix = np.concatenate([np.zeros((len(widths), 1), np.int64), np.cumsum(ticks, axis=1)], axis=1)
    first, end = np.triu_indices(prefix.shape[1], k=1)
    slowest = np.unique(prefix[:, end] - prefix[:, first])
    slowest = slowest[
        slowest >= ticks.min(axis=0).max()
    ]  # some stage holds the layer with the largest minimum
    costs, stages, counts, _ = search(
        prefix,
        np.array(widths, np.int64),
        fits,
        gpus_per_node,
        np.array(nodes, np.int64),
        num_microbatches,
        slowest,
    )
    return {
        n: (cost, [(first, end, w) for first, end, w in chain[:count]])
        for n, cost, chain, count in zip(nodes, costs.tolist(), stages.tolist(), counts.tolist())
        if count
    }


def _latest_ends(memory: LayerMemory, widths: list[int], levels: int, num_microbatches: int) -> np.ndarray:
    """Return [widths, levels, layers]: the last end of a stage that begins at a layer, `level` stages from the end."""
    ends = []
    for width in widths:
        state = np.concatenate([[0.0], np.cumsum(memory.state_bytes[width])])
        activation = np.concatenate([[0.0], np.cumsum(memory.activation_bytes[width])])
        held = np.minimum(np.arange(levels) + memory.early, num_microbatches)[:, None] * activation + state
        ends.append(
            [np.searchsorted(row, row[:-1] + memory.capacity_bytes, side="right") - 1 for row in held]
        )
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
            f"layer_seconds allows {sorted(layer_seconds)} GPUs per stage, of which none fits a node of "
            f"{gpus_per_node}"
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
