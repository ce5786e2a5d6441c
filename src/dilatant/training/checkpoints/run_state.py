"""What a rank holds of a run's state: all of it to be filled, and what of it this rank writes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dilatant.plan.boxes import Box
from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoints.boxes import Tensors
from dilatant.training.optimizers.averages import AVERAGE, Averages
from dilatant.training.optimizers.master_weights import MOMENTS, WithMasters
from dilatant.training.optimizers.optimizer import optimizer_tensors


def held_state(
    runtime: Runtime, masters: Mapping[str, Tensor], optimizer: WithMasters, averages: Averages | None = None
) -> Tensors:
    """By key: `masters` with their moments and averages, frozen weights and buffers; not copies.

    masters: what this rank updates of every weight that it owns, with the keys of `runtime.owned.parameters`. What
    others own comes from them, with `OwnedWeights.gather`.
    """
    owned = runtime.owned
    fixed = {
        runtime.boxes[name].key: tensor
        for name, tensor in runtime.tensors().items()
        if name not in owned.weights
    }
    own = {key: master.detach() for key, master in masters.items()}
    return {"model": {**fixed, **own}, "optimizer": state_tensors(optimizer, averages)}


def state_tensors(optimizer: WithMasters, averages: Averages | None) -> dict[str, dict[str, Tensor]]:
    """Key → kind → what is kept beside a master: moments, where it was updated, and its average, where there is one."""
    state = optimizer_tensors(optimizer)
    if averages is not None:
        for key, average in averages.tensors.items():
            state[key] = {**state.get(key, {}), AVERAGE: average}
    return state


def written_state(
    runtime: Runtime,
    masters: Mapping[str, Tensor],
    optimizer: WithMasters,
    written: Mapping[str, tuple[Box, ...]],
    averages: Averages | None = None,
) -> Tensors:
    """The part of it that this rank writes; over all ranks every number is written once.

    written: what this rank writes of frozen weights and buffers, by logical name.
    """
    owned = runtime.owned
    model = {
        cell.key: tensor if cell == runtime.boxes[name] else tensor[runtime.boxes[name].place(cell)]
        for name, tensor in runtime.tensors().items()
        if name not in owned.weights
        for cell in written[name]
    }
    weights = {key: master.detach() for key, master in masters.items()}
    model |= {box.key: part for box, part in owned.spoken_parts(weights)}
    state = state_tensors(optimizer, averages)
    moments: Tensors = {}
    for kind in (*MOMENTS, AVERAGE):
        of_kind = {key: tensors[kind] for key, tensors in state.items() if kind in tensors}
        for box, part in owned.spoken_parts(of_kind):
            moments.setdefault(box.key, {})[kind] = part
    for key, cells in owned.spoken.items():
        for cell in cells:
            if "step" in state.get(key, {}) and cell.has_origin:  # one number for all of a weight
                moments[cell.key]["step"] = state[key]["step"]
    return {"model": model, "optimizer": moments}
