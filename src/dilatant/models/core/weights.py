"""Logical names of weights: unit, layer and weight; they are independent of the rank or stage that holds the weight.

`vision.layers.0.mlp.fc1.weight` is weight `mlp.fc1.weight` of block 0 of unit `vision`, and
`encoder.layers.0.mlp.fc1.weight` in the state dict of the Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dilatant.config.errors import UserError
from dilatant.models.adapters.lora import plain_key
from dilatant.models.core.structure import Structure


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight (parameter or persistent buffer) of a unit.

    name: logical name, `<layer>.<rest>`. layer: the logical layer that holds it. part: the module of the unit that
    holds it ("model", "projector", "connector"). key: its name in that module's state dict. tied_to: for a further name
    of a tied tensor, the logical name of the first.
    """

    name: str
    layer: str
    part: str
    key: str
    tied_to: str | None = None

    @property
    def canonical(self) -> str:
        """The unique logical name of the tensor: its own, or that of the weight it is tied to."""
        return self.tied_to or self.name


def name_weights(
    unit: str, model: nn.Module, structure: Structure, tail: str, projector: nn.Module | None
) -> tuple[Weight, ...]:
    """Return every weight of a unit in layer order; names and keys are one to one.

    Layers are `<unit>.embedding`, `<unit>.layers.<i>`, `<unit>.<tail>` and, with a projector, `<unit>.projector`.
    """
    weights: list[Weight] = []
    for key in model.state_dict():
        layer = f"{unit}.{_layer_of(key, structure, tail)}"
        weights.append(Weight(f"{layer}.{plain_key(_rest(key, structure))}", layer, "model", key))
    if projector is not None:
        layer = f"{unit}.projector"
        weights += [Weight(f"{layer}.{plain_key(key)}", layer, "projector", key) for key in projector.state_dict()]
    names = [weight.name for weight in weights]
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f"two weights of unit {unit!r} share a logical name: {', '.join(repeated)}")
    layers = ["embedding", *(f"layers.{i}" for i in range(structure.num_blocks)), tail, "projector"]
    order = {f"{unit}.{layer}": position for position, layer in enumerate(layers)}
    return mark_tied(model, sorted(weights, key=lambda weight: order[weight.layer]))


def name_module_weights(unit: str, modules: Mapping[str, tuple[str, nn.Module]]) -> tuple[Weight, ...]:
    """Return every weight of a unit whose layers are whole modules. modules: layer → (part, module), in layer order."""
    return tuple(
        Weight(f"{unit}.{layer}.{plain_key(key)}", f"{unit}.{layer}", part, key)
        for layer, (part, module) in modules.items()
        for key in module.state_dict()
    )


def _layer_of(key: str, structure: Structure, tail: str) -> str:
    if key.startswith(structure.blocks + "."):
        return f"layers.{key[len(structure.blocks) + 1 :].split('.', 1)[0]}"
    if any(key == path or key.startswith(path + ".") for path in structure.after):
        return tail
    return "embedding"


def _rest(key: str, structure: Structure) -> str:
    """Return the key without the part that the layer's name implies: block path and index, or the containers' path."""
    if key.startswith(structure.blocks + "."):
        return key[len(structure.blocks) + 1 :].split(".", 1)[1]
    inside = [path for path in structure.containers if path and key.startswith(path + ".")]
    return key[len(inside[-1]) + 1 :] if inside else key


def mark_tied(model: nn.Module, weights: list[Weight]) -> tuple[Weight, ...]:
    """Give a tied weight the name of its first holder in layer order."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first_name: dict[int, str] = {}
    marked = []
    for weight in weights:
        if weight.part == "model":
            first = first_name.setdefault(id(tensors[weight.key]), weight.name)
            if first != weight.name:
                weight = Weight(weight.name, weight.layer, weight.part, weight.key, tied_to=first)
        marked.append(weight)
    return tuple(marked)
