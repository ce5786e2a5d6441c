"""A rank's share of the run's state: the tensors that it holds, and the part of them that it writes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dilatant.plan.boxes import Box
from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoints.boxes import Tensors
from dilatant.training.optimizers.averages import AVERAGE, Averages
from dilatant.training.optimizers.master_weights import MOMENTS, WithMasters
from dilatant.training.optimizers.optimizer import optimizer_tensors


def local_state(
    runtime: Runtime, masters: Mapping[str, Tensor], optimizer: WithMasters, averages: Averages | None = None
) -> Tensors:
    """Return `masters` with their moments and averages, frozen weights and buffers, by key; not copies.

    masters: the parts of weights that this rank owns and updates, with the keys of `runtime.owned.parameters`. Parts
    that other ranks own come from them, with `OwnedWeights.gather`.
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
    """Return key → kind → what is kept beside a master: moments, once it was updated, and its average, if any."""
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
    """Return the part of the state that this rank writes; over all ranks every number is written once.

    written: logical name → the boxes of frozen weights and buffers that this rank writes.
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
            if "step" in state.get(key, {}) and cell.has_origin:  # one number per weight
                moments[cell.key]["step"] = state[key]["step"]
    return {"model": model, "optimizer": moments}
