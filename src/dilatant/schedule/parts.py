"""Parts: an encoder microbatch is split when its samples go to several consumer microbatches.

Each part is its own autograd graph, so its backward runs as soon as its own gradients are back; a backward over a slice
of one graph would cost the whole graph again. A unit replica is not split if it has no backward or if each of its
microbatches is consumed whole.
"""

from __future__ import annotations

from functools import lru_cache

from dilatant.schedule.packed import Pieces, pieces_of
from dilatant.schedule.plan_arrays import PlanArrays
from dilatant.schedule.schedule import Assignment, Microbatch
from dilatant.schedule.trainability import Trainability


@lru_cache(maxsize=8)  # a few steps under several families
def cut_pieces(arrays: PlanArrays, assignment: Assignment, trainability: Trainability) -> Pieces:
    """Return all pieces of a step. Samples of a microbatch that go to the same consumers form one piece; pieces are
    ordered by their first consumer, samples as in the microbatch. Empty microbatches have no piece, hence no actions.

    Consumers are followed transitively: a part is split further wherever its consumer is split into parts.
    """
    consumers: dict[int, list[int]] = {}
    for source, target in arrays.feeds:
        consumers.setdefault(source, []).append(target)
    place_of: list[dict[int, int]] = [{} for _ in arrays.units]
    parts: list[list[tuple[int, tuple[int, ...] | None]]] = [[] for _ in range(arrays.num_chains)]
    goes_back = {
        unit
        for unit, end in zip(arrays.unit_of.tolist(), arrays.stages_of[:, 1].tolist())
        if trainability.backward[end - 1]
    }
    for unit in reversed(range(len(arrays.units))):
        asked = any(target == unit and source in goes_back for source, target in arrays.feeds)
        places = place_of[unit]
        for chain in arrays.chains_of(unit):
            last = int(arrays.stages_of[chain, 1]) - 1
            by_consumer = [place_of[target] for target in consumers.get(unit, [])]
            cut = trainability.backward[last] and bool(by_consumer)
            batches = assignment.microbatches[arrays.units[unit]][arrays.replica_of[chain]]
            for number, batch in enumerate(batches):
                if not batch:
                    continue
                for part in _parts(batch, by_consumer) if cut else (None,):
                    parts[chain].append((number, part))
                    if asked:
                        places.update(dict.fromkeys(batch if part is None else part, len(places)))
    return pieces_of(arrays, assignment, parts)


def _parts(batch: Microbatch, by_consumer: list[dict[int, int]]) -> list[tuple[int, ...] | None]:
    """Group samples by their places in all consumers, in the order of places; return [None] if there is one group."""
    if len(by_consumer) == 1:
        place = by_consumer[0]
        keys: list[tuple[int, ...]] = [(place.get(sample, -1),) for sample in batch]
    else:
        keys = [tuple(place.get(sample, -1) for place in by_consumer) for sample in batch]
    if keys.count(keys[0]) == len(keys):
        return [None]
    groups: dict[tuple[int, ...], list[int]] = {}
    for sample, key in zip(batch, keys, strict=True):
        groups.setdefault(key, []).append(sample)
    return [tuple(groups[key]) for key in sorted(groups)]
