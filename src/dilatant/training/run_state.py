"""What a rank holds of a run's state: all of it to be filled, and what of it this rank writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoint_boxes import Tensors
from dilatant.training.optimizer import MOMENTS, optimizer_tensors


def held_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> Tensors:
    """By key: the weights that this rank owns with their moments, frozen weights and buffers; not copies.

    What others own comes from them, with `OwnedWeights.gather`.
    """
    owned = runtime.owned
    fixed = {name: tensor for name, tensor in runtime.tensors().items() if name not in owned.weights}
    own = {key: parameter.detach() for key, parameter in owned.parameters.items()}
    return {"model": {**fixed, **own}, "optimizer": optimizer_tensors(optimizer)}


def written_state(runtime: Runtime, optimizer: torch.optim.Optimizer, writers: Mapping[str, int]) -> Tensors:
    """The part of it that this rank writes; over all ranks every number is written once.

    writers: the rank that writes a frozen weight or buffer, by logical name.
    """
    owned, rank = runtime.owned, runtime.comm.rank
    model = {
        name: tensor
        for name, tensor in runtime.tensors().items()
        if name not in owned.weights and writers[name] == rank
    }
    weights = {key: parameter.detach() for key, parameter in owned.parameters.items()}
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
