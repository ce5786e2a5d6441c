"""Model description for planners: units, layers, layer types, parameters, freezing; weights take no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dilatant.config import Config, UserError
from dilatant.config.memory_modes import Recompute
from dilatant.cost.analytic import LayerShape
from dilatant.models.build import build_model
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.core.freeze import audit, choose_orthogonal, thaw
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.unit import Unit
from dilatant.models.experts.grouped_experts import fused_experts
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.generators.generator import GeneratorUnit
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import attend_as_configured, limits_of
from dilatant.plan.costs.workload import MediaPairs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.runtime.rank_trial import divide_where_proven

_DENSE = {"sdpa": 2.0, "eager": 1.0}
"""Cost of a packed row in squares of its tokens, against a row of one sample, for transformers' attentions that do not
know samples: under a mask, sdpa gives up its causal kernel, which computes half of the pairs of a long row. Of short
rows the kernel computes more (see `dense_rows`); eager attention computes all pairs of any row."""

EMBEDDING, BLOCK, NORM, HEAD, PROJECTOR = "embedding", "block", "norm", "head", "projector"
ENCODER, CONNECTOR, GENERATOR = "encoder", "connector", "generator"
"""Roles of layers: those of a transformers model and its projector; and modules that are one layer."""


@dataclass(frozen=True, slots=True)
class LayerType:
    """Layers that take the same time: `kind` names them in cost files, the first of them is `unit.layers[index]`.

    `role` is one of the constants of this module; `variant` the family's own word for the layer ("sliding_attention").
    `geometry` is that of an encoder, None in other units.
    """

    kind: str
    role: str
    unit: Unit
    index: int
    variant: str
    geometry: EncoderGeometry | None

    @property
    def is_divided(self) -> bool:
        """True if tensor-parallel ranks hold shares of such a layer; other layers are held whole by each of them."""
        return self.role == BLOCK or (self.geometry is None and self.role in (EMBEDDING, HEAD))

    @property
    def item_tokens(self) -> int | None:
        """Return the tokens of one image or clip where items do not attend to each other. That is so in encoders, and
        in a module after a connector, whose tokens are rows of the language model."""
        if self.geometry is not None:
            return self.geometry.encoder_tokens
        if not isinstance(self.unit, GeneratorUnit):
            return None
        sees_items = self.role == GENERATOR or (self.role == CONNECTOR and self.unit.rows_see_each_other)
        return self.unit.tokens_per_item if sees_items else None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a model: `spec` for the planners, `types` for layer costs; `units`, and their `names` and
    `parameters` for a reader.

    A tied weight counts in each layer of `spec` that holds it, since each needs it, and once in `parameters`, which are
    (all, trainable). `anchor` is as in `ModelGraph`. `dense`: unit → factor on the square of a row of several samples
    if none was measured, where attention does not skip pairs of different samples. `media_pairs`: of media masks.
    `limits`: see `limits_of`. `shapes`: cache of `counted_shapes`.
    """

    spec: ModelSpec
    anchor: str
    types: tuple[LayerType, ...]
    units: dict[str, Unit]
    names: dict[str, str]
    parameters: dict[str, tuple[int, int]]
    dense: dict[str, float]
    media_pairs: MediaPairs
    limits: tuple[str, ...] = ()
    shapes: dict[str, LayerShape] = field(default_factory=dict, compare=False, repr=False)

    def kinds(self, role: str) -> tuple[str, ...]:
        """Return the layer types with this role."""
        return tuple(entry.kind for entry in self.types if entry.role == role)

    @property
    def item_tokens(self) -> dict[str, float]:
        """Tokens of one image or clip by encoder; items do not attend to each other, so a sample's square is that of
        one, times their number."""
        return {
            entry.unit.unit: float(entry.geometry.encoder_tokens) for entry in self.types if entry.geometry is not None
        }


def require_trained(model: MultimodalModel) -> None:
    """Raise UserError if all weights of the model are frozen."""
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("model.freeze leaves nothing to train; leave out at least a projector")


def build_meta_model(config: Config, vocab_size: int) -> MultimodalModel:
    """Build the config's model on the meta device, frozen as configured; reads only configs of pretrained models.
    Raises UserError."""
    model = build_model(config.model, vocab_size=vocab_size, hollow=config.model.units, reads_weights=False)
    attend_as_configured(model, config.model.text)
    divide_where_proven(model)
    choose_orthogonal(model.units, config.train.optimizer.muon)
    choose_fp8(model.units, config.train.precision)
    return model


def describe_model(model: MultimodalModel, recompute: Mapping[str, Recompute | None] | None = None) -> ModelDescription:
    """Describe a model, on the meta device or not, as planners need it.

    Layers share a type if their weights have the same names and shapes, their family calls them alike and they are in
    the same place of units of the same family and width. `recompute`: by unit, what is recomputed in the backward; None
    leaves it to the plan.
    """
    known: dict[str, list[Any]] = {}
    types: dict[str, LayerType] = {}
    units = []
    for name, unit in model.units.items():
        geometry = unit.geometry
        layers: list[LayerSpec] = []
        by_layer = list(weights_by_layer(unit))
        leading = {id(parameter) for _, parameter in by_layer[0]}
        experts = {layer: _experts(block) for layer, block in zip(unit.layers[1:], unit.blocks)}
        of_experts = _expert_weights(unit)
        for index, weights in enumerate(by_layer):
            role, variant = _role(unit, index)
            shapes = tuple((rest, tuple(parameter.shape)) for rest, parameter in weights)
            four_bit = sum(p.numel() for rest, p in weights if f"{unit.layers[index]}{rest}" in unit.four_bit)
            stem = _stem(unit, role, variant, geometry) + (" in 4 bits" if four_bit else "")
            alike = known.setdefault(stem, [])
            if shapes not in alike:
                alike.append(shapes)
            number = alike.index(shapes)
            kind = stem if number == 0 else f"{stem} #{number + 1}"
            types.setdefault(kind, LayerType(kind, role, unit, index, variant, geometry))
            layers.append(
                LayerSpec(
                    name=unit.layers[index],
                    kind=kind,
                    parameters=sum(parameter.numel() for _, parameter in weights),
                    divided=types[kind].is_divided,
                    **_trained_fields(weights, of_experts),
                    four_bit=four_bit,
                    orthogonal=sum(p.numel() for r, p in weights if f"{unit.layers[index]}{r}" in unit.orthogonal),
                    tied=sum(parameter.numel() for _, parameter in weights if index and id(parameter) in leading),
                    experts=experts.get(unit.layers[index], (0, 0))[0],
                    expert_parameters=experts.get(unit.layers[index], (0, 0))[1],
                )
            )
        units.append(
            UnitSpec(
                name,
                tuple(layers),
                model.graph.feeds[name],
                (recompute or {}).get(name, "none"),
                _items_per_token(unit),
                getattr(unit, "uncut", None) is None,
            )
        )
    return ModelDescription(
        spec=ModelSpec(tuple(units)),
        anchor=model.graph.anchor,
        types=tuple(types.values()),
        units=dict(model.units),
        names={name: unit.family for name, unit in model.units.items()},
        parameters={
            name: (sum(part.parameters for part in parts), sum(part.trainable for part in parts))
            for name, unit in model.units.items()
            for parts in [audit({name: unit})]
        },
        dense=_dense(model),
        media_pairs=_media_pairs(model),
        limits=limits_of(model),
    )


def _trained_fields(weights: Sequence[tuple[str, nn.Parameter]], of_experts: Set[int]) -> dict[str, Any]:
    """Return the fields of `LayerSpec` that depend on which of a layer's weights train. of_experts: `_expert_weights`
    of its unit."""
    trained = [parameter for _, parameter in weights if parameter.requires_grad]
    fixed = sum(parameter.numel() for _, parameter in weights) - sum(parameter.numel() for parameter in trained)
    return {
        "trainable": bool(trained),
        "fixed": fixed,
        "largest": max((one.numel() for one in trained if id(one) not in of_experts), default=0),
        "largest_of_experts": max((one.numel() for one in trained if id(one) in of_experts), default=0),
    }


def _expert_weights(unit: Unit) -> set[int]:
    """Return the identities of all weights of experts."""
    modules = [module for block in unit.blocks for _, module in fused_experts(block)]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def describe_unfrozen(model: ModelDescription, name: str) -> ModelDescription:
    """Return the description of the same model if every weight of the unit `name` trained, adapters included."""
    known = model.units[name]
    unit = copy.deepcopy(known)
    thaw({name: unit}, [name])
    of_experts = _expert_weights(unit)
    fields = [_trained_fields(weights, of_experts) for weights in weights_by_layer(unit)]
    spec = model.spec.unit(name)
    layers = tuple(replace(layer, **own) for layer, own in zip(spec.layers, fields, strict=True))
    units = tuple(replace(spec, layers=layers) if one is spec else one for one in model.spec.units)
    types = tuple(replace(entry, unit=unit) if entry.unit is known else entry for entry in model.types)
    return replace(model, spec=ModelSpec(units), types=types, units={**model.units, name: unit})


def _items_per_token(unit: Unit) -> float:
    """Return `UnitSpec.items_per_token`, from the items that a unit counts for a sample of very many tokens."""
    many = 1 << 40
    items = unit.items({unit.unit: many})
    return items / many if items > 1 else 0.0


def _dense(model: MultimodalModel) -> dict[str, float]:
    attention = getattr(model.language.model.config, "_attn_implementation", None)
    if not model.language.packs_rows:  # every row is one sample
        return {}
    return {model.graph.anchor: _DENSE[attention]} if attention in _DENSE else {}


def _media_pairs(model: MultimodalModel) -> MediaPairs:
    """Return the pairs that media masks show or hide, as if media were spread evenly over the text. A user's own mask,
    which sizes do not describe, counts as causal."""
    masks, pairs = model.media_attention, {}
    for name in model.encoders:
        geometry = model[name].geometry
        mask = masks.get(name) if isinstance(masks, Mapping) else masks
        share, item = geometry.tokens_per_row / geometry.encoder_tokens, float(geometry.tokens_per_row)
        if mask == "bidirectional":
            pairs[name] = (0.0, share * item, 0.0)
        elif mask == "embedded":
            pairs[name] = (-share, 2 * share * item, 0.0)
        elif mask == "modality":
            pairs[name] = (-share, 0.0, 2 * share**2)
    return {model.graph.anchor: pairs} if pairs else {}


def weights_by_layer(unit: Unit) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield for every layer of the unit its parameters by their name inside the layer, tied ones in each layer."""
    parameters = {part: dict(getattr(unit, part).named_parameters(remove_duplicate=False)) for part in unit.parts}
    for layer in unit.layers:
        yield [
            (weight.name.removeprefix(layer), parameters[weight.part][weight.key])
            for weight in unit.weights
            if weight.layer == layer and weight.key in parameters[weight.part]
        ]


def _experts(block: nn.Module) -> tuple[int, int]:
    """Return the number of a block's experts, and of their parameters."""
    found = [module for _, module in fused_experts(block)]
    counts = [next(iter(module.parameters())).shape[0] for module in found]
    return max(counts, default=0), sum(p.numel() for module in found for p in module.parameters())


def _role(unit: Unit, index: int) -> tuple[str, str]:
    """Return the role of a layer, and the family's word for it if blocks differ."""
    name = unit.layers[index].removeprefix(f"{unit.unit}.")
    if isinstance(unit, GeneratorUnit) and index and unit.cut is not None:
        return GENERATOR, "block" if name.startswith("layers.") else name
    if not name.startswith("layers."):
        return name, ""
    names = getattr(unit.config, "layer_types", None)
    variant = names[index - 1] if names and len(set(names)) > 1 else ""
    return BLOCK, variant


def _stem(unit: Unit, role: str, variant: str, geometry: EncoderGeometry | None) -> str:
    """Return a name that describes the layer: family, role and width. The name of an encoder's layer also has the
    tokens of an image or clip; that of a generator's net, the size of what it draws and the number of rows that
    condition it."""
    words = [unit.family, role, variant, str(unit.width)]
    if role in (PROJECTOR, CONNECTOR):
        words = [role, type(getattr(unit, role)).__name__, str(unit.width)]
    tokens = "" if geometry is None else f" @{geometry.encoder_tokens}"
    if role == CONNECTOR and isinstance(unit, GeneratorUnit) and unit.rows_see_each_other:
        parameters = sum(parameter.numel() for parameter in unit.connector.parameters())
        tokens = f" of {parameters} by {unit.tokens_per_item}"
    if role == GENERATOR and isinstance(unit, GeneratorUnit) and isinstance(unit.model, Diffusion):
        size = "x".join(map(str, unit.model.shape))
        tokens = f" @{size} by {unit.tokens_per_item}"
    return " ".join(word for word in words if word).lower() + tokens
