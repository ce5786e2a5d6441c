"""What a rank holds of a run's state: all of it to be filled, and what of it this rank writes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dilatant.plan.boxes import Box
from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoint_boxes import Tensors
from dilatant.training.master_weights import MOMENTS, WithMasters
from dilatant.training.optimizer import optimizer_tensors


def held_state(runtime: Runtime, masters: Mapping[str, Tensor], optimizer: WithMasters) -> Tensors:
    """By key: `masters` with their moments, frozen weights and buffers; not copies.

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
    return {"model": {**fixed, **own}, "optimizer": optimizer_tensors(optimizer)}


def written_state(
    runtime: Runtime,
    masters: Mapping[str, Tensor],
    optimizer: WithMasters,
    written: Mapping[str, tuple[Box, ...]],
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
    state = optimizer_tensors(optimizer)
    moments: Tensors = {}
    for kind in MOMENTS:
        of_kind = {key: tensors[kind] for key, tensors in state.items()}
        for box, part in owned.spoken_parts(of_kind):
            moments.setdefault(box.key, {})[kind] = part
    for key, cells in owned.spoken.items():
        for cell in cells:
            if key in state and cell.has_origin:  # one number for all of a weight
                moments[cell.key]["step"] = state[key]["step"]
    return {"model": model, "optimizer": moments}
