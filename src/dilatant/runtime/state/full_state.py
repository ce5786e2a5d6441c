"""Full state of a model that is divided among ranks: weights under Hugging Face keys, gathered or loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config.errors import UserError, list_problems
from dilatant.models.adapters.lora import plain_key
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box, atoms
from dilatant.plan.buckets import Holdings
from dilatant.runtime.state.holders import slice_of


def full_keys(model: MultimodalModel) -> dict[str, str]:
    """Return key → logical name of all weights and persistent buffers. Keys are those of the transformers model for a
    pretrained VLM and for a language model alone; otherwise they begin with the unit, and the part if it is another
    than the unit's model (`vision.projector.0.weight`). Raises UserError for weights in four bits."""
    found: dict[str, str] = {}
    for name, unit in model.units.items():
        if unit.four_bit:
            raise UserError(f"{name} holds weights in four bits, which have no state to gather or to load")
        for weight in unit.weights:
            key = plain_key(weight.key)
            if model.whole is not None and name not in model.generators and weight.part != "queries":
                key = model.whole.key_of(unit, weight)
            elif len(model.units) > 1 or weight.part != "model":
                key = f"{name}.{key}" if weight.part == "model" else f"{name}.{weight.part}.{key}"
            found[key] = weight.canonical
    return found


@torch.no_grad()
def gather_weights(
    model: MultimodalModel, holdings: Holdings, comm: Comm, held: Mapping[str, Tensor], everywhere: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, whole weight on the host) one after the other, on rank 0 or `everywhere`; other ranks get nothing.
    All ranks iterate to the end. held: logical name → what this rank holds of it. Tied weights share a tensor."""
    keys: dict[str, list[str]] = {}
    for key, name in full_keys(model).items():
        keys.setdefault(name, []).append(key)
    dtypes: dict[str, str] = {}
    for of_rank in all_gather_object(comm, {name: str(tensor.dtype) for name, tensor in held.items()}):
        dtypes |= of_rank
    for name, holding in holdings.items():
        whole = Box.of(name, next(iter(holding.boxes.values())).whole)
        weight = torch.zeros(whole.whole, dtype=getattr(torch, dtypes[name].removeprefix("torch.")))
        for atom in atoms(holding.boxes):
            if atom.ranks[0] == comm.rank:
                weight[whole.place(atom.box)] = held[name][holding.boxes[comm.rank].place(atom.box)].cpu()
        # A sum with zeros; of bytes, because it then is exact for every dtype.
        comm.world.sum_(weight.view(-1).view(torch.uint8), name).wait()
        if everywhere or comm.rank == 0:
            yield from ((key, weight) for key in keys.get(name, ()))


@torch.no_grad()
def load_full_state(
    model: MultimodalModel, boxes: Mapping[str, Box], held: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Copy whole weights into what this rank holds of them. Raises UserError that lists keys which the state lacks or
    the model has not, and weights of another shape; then nothing is copied."""
    names = full_keys(model)
    given = {name: state[key] for key, name in names.items() if key in state}
    wrong = [f"the model has no {key!r}" for key in state if key not in names]
    wrong += [f"the state lacks {key!r}" for key, name in names.items() if name not in given]
    wrong += [
        f"{name} is {list(given[name].shape)} there, {list(box.whole)} here"
        for name, box in boxes.items()
        if name in given and tuple(given[name].shape) != box.whole
    ]
    if wrong:
        raise list_problems(f"the state does not fit the model in {len(wrong)} places:", wrong[:8])
    for name, tensor in held.items():
        tensor.copy_(slice_of(given[name], boxes[name]))
