"""Cost of dense attention over packed rows: attention that does not skip pairs of different samples. It comes from
measurements of blocks, and is the same for planners, the simulator and runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from dilatant.cost.dense import DenseRows
from dilatant.cost.model import CostModel
from dilatant.planning.problem.describe_model import BLOCK, LayerType, ModelDescription


def dense_tokens(model: ModelDescription, entry: LayerType, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the row lengths at which a layer type is measured with several samples, given those of one sample. They
    are the longest, its half, its quarter, and its double, since several samples make longer rows, unless the model has
    no such positions. Empty if attention computes no more for several samples than for one."""
    if entry.role != BLOCK or model.dense.get(entry.unit.unit, 1.0) <= 1.0:
        return ()
    longest = max(tokens)
    positions = getattr(entry.unit.config, "max_position_embeddings", None)
    doubled = (2 * longest,) if positions is None or 2 * longest <= positions else ()
    return tuple(sorted({max(2, longest // part) for part in (1, 2, 4)})) + doubled


def dense_rows(model: ModelDescription, costs: CostModel) -> dict[str, DenseRows]:
    """Return unit → the factor on its rows of several samples, see `Workload.dense`: as these costs' layers were
    measured, else the same at every length. Of unlike devices the largest counts, since a row has one cost on all."""
    if costs.groups:
        each = [dense_rows(model, own) for own in costs.groups.values()]
        return {unit: reduce(DenseRows.or_dearer, (own[unit] for own in each)) for unit in model.dense}
    return {unit: _measured(model, unit, costs) or DenseRows.always(times) for unit, times in model.dense.items()}


def is_assumed(model: ModelDescription, costs: CostModel) -> bool:
    """Return True if measured costs lack rows of several samples, so that their factor is an assumption."""
    if costs.groups:
        return any(is_assumed(model, own) for own in costs.groups.values())
    return costs.origin == "measured" and any(
        times > 1.0 and _measured(model, unit, costs) is None for unit, times in model.dense.items()
    )


def _measured(model: ModelDescription, unit: str, costs: CostModel) -> DenseRows | None:
    """Return the measured factors, or None. They multiply the squares of all the unit's layers, so what blocks took
    longer is spread over those squares."""
    by_degrees = [costs.layers[layer.kind] for layer in model.spec.unit(unit).layers]
    layers = [own[min(own, key=lambda one: (one.ranks, one))] for own in by_degrees]
    blocks = {entry.kind for entry in model.types if entry.role == BLOCK}
    of_blocks = [
        dict(cost.dense_seconds)
        for cost, layer in zip(layers, model.spec.unit(unit).layers, strict=True)
        if layer.kind in blocks
    ]
    tokens = sorted(set.intersection(*({*more} for more in of_blocks))) if of_blocks else []
    square = sum(cost.forward.a + cost.input_gradient.a for cost in layers)
    if not tokens or square <= 0.0:
        return None
    times = [1.0 + sum(more[count] for more in of_blocks) / (square * count**2) for count in tokens]
    return DenseRows.nearest(tokens, times)
