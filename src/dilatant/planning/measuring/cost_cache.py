"""Cost cache: measured layer costs, kept for later runs of the same layers on the same hardware."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

from dilatant.config import UserError
from dilatant.config.degrees import Degrees
from dilatant.config.environment import cache_folder
from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import is_trusted_cache_file
from dilatant.cost.layer import LayerCost
from dilatant.cost.model import CostModel, load_costs
from dilatant.planning.measuring.layer_costs import misfits
from dilatant.planning.problem.describe_model import ModelDescription
from dilatant.planning.problem.planned_hardware import Target
from dilatant.planning.problem.searched_settings import degrees_by_kind

REACH = 2
"""Factor by which a row may exceed the longest measured one: beyond that, a fit (above all attention's square) is
hardly supported by measurements."""


def store_costs(costs: CostModel, model: ModelDescription, known: CostModel | None = None) -> None:
    """Keep measured costs, however rough, with those that were `known` before at other degrees. If the cache cannot be
    written, nothing is kept."""
    if costs.groups or costs.origin != "measured":
        return
    if known is not None:
        layers = {kind: {**known.layers.get(kind, {}), **own} for kind, own in costs.layers.items()}
        costs = replace(costs, layers=layers)
    path = _path(costs.hardware, costs.dtype, model)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, costs.to_yaml())  # never through a link in a shared cache


def cached_costs(model: ModelDescription, target: Target, degrees: Iterable[Degrees], longest: int) -> CostModel | None:
    """Return the cached costs of this model's layers, on this hardware in this dtype, at all of `degrees`. They must be
    from rows not much shorter than `longest` tokens; else None."""
    path = _path(target.hardware.name, target.dtype, model)
    if not is_trusted_cache_file(path):
        return None
    try:
        costs = load_costs(path, target.hardware.name)
    except (OSError, UserError):
        return None
    if costs.dtype != target.dtype or costs.longest * REACH < longest or misfits(costs, model):
        return None
    wanted = degrees_by_kind(model, degrees)
    return costs if all({*own} <= costs.layers[kind].keys() for kind, own in wanted.items()) else None


def _path(hardware: str, dtype: str, model: ModelDescription) -> Path:
    layers = sorted({(layer.kind, layer.parameters) for unit in model.spec.units for layer in unit.layers})
    # Costs have another name if they come from a version that measured less of a layer, or whose seconds included the
    # host's on GPUs, or from layers that attend in another way.
    known = [field.name for field in fields(LayerCost)], sorted(model.dense.items()), "host apart"
    key = sha256(repr((hardware, dtype, layers, known)).encode()).hexdigest()[:24]
    return cache_folder() / "costs" / f"{key}.yaml"
