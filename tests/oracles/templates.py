"""Every pipeline of a model on some nodes, timed by the definition of T1, T2 and T3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction


def gpu_splits(gpus: int, node: int, widths: Sequence[int], used: int = 0) -> Iterator[tuple[int, ...]]:
    """All ways to hand out `gpus` GPUs in order, an allowed number at a time, never across a node."""
    if used == gpus:
        yield ()
        return
    for width in widths:
        if used // node == (used + width - 1) // node and used + width <= gpus:
            for rest in gpu_splits(gpus, node, widths, used + width):
                yield (width, *rest)


def layer_cuts(first: int, layers: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut layers first.. into consecutive non-empty stages."""
    if stages == 1:
        yield ((first, layers),)
        return
    for end in range(first + 1, layers - stages + 2):
        for rest in layer_cuts(end, layers, stages - 1):
            yield ((first, end), *rest)


def pipeline_time(times: Sequence[Fraction | int], num_microbatches: int) -> Fraction | int:
    """T1 + T2 + T3, thesis 2.4.1.2, with k* the last of the slowest stages."""
    slowest = max(times)
    position = max(k for k, t in enumerate(times) if t == slowest)
    t1 = sum(times)
    t2 = (num_microbatches - len(times) + position - 1) * slowest
    t3 = sum(times[position:])
    return t1 + t2 + t3


def fits(split, cuts, num_microbatches: int, memory) -> bool:
    """Whether every stage of a 1F1B pipeline fits: stage s of S keeps S - s microbatches, if there are as many."""
    for s, (width, (a, b)) in enumerate(zip(split, cuts)):
        in_flight = min(len(split) - s, num_microbatches)
        held = sum(memory.state_bytes[width][a:b]) + in_flight * sum(memory.activation_bytes[width][a:b])
        if held > memory.capacity_bytes:
            return False
    return True


def best_pipeline(
    layer_seconds: Mapping[int, Sequence[Fraction | int]], nodes: int, node: int, num_microbatches: int, memory=None
) -> Fraction | int | None:
    """The least time over all pipelines on `nodes` nodes (that fit `memory`), None if there is none."""
    layers = len(next(iter(layer_seconds.values())))
    best = None
    for split in gpu_splits(nodes * node, node, sorted(layer_seconds)):
        if len(split) > layers:
            continue
        for cuts in layer_cuts(0, layers, len(split)):
            if memory is not None and not fits(split, cuts, num_microbatches, memory):
                continue
            times = [sum(layer_seconds[width][a:b]) for width, (a, b) in zip(split, cuts)]
            time = pipeline_time(times, num_microbatches)
            if best is None or time < best:
                best = time
    return best
