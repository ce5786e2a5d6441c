"""Weights of a pretrained multimodal model's units under transformers' own names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dilatant.config.errors import UserError, one_line
from dilatant.models.adapters.lora import adapted_key, is_adapter, merged_state, plain_key
from dilatant.models.core.materialize import allocate_meta_tensors, excluded_from_init, models_of, seeded
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.sources import without_bars


def weights_of(
    weights: Iterable[tuple[Unit, Weight]], whole: PretrainedModel
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return the weights by the composite's key, with adapters merged in, and the keys of frozen weights without
    adapter. weights: see `MultimodalModel.weights_of_whole`."""
    held = tuple(weights)
    merged = {
        (unit, part): merged_state(getattr(unit, part)) for unit, part in {(u, w.part) for u, w in held}
    }
    trains = {name for unit in {unit for unit, _ in held} for name in unit.trained_names}
    adapted = {(unit, adapted_key(weight.key)) for unit, weight in held if is_adapter(weight.key)}
    state: dict[str, Tensor] = {}
    frozen = set()
    for unit, weight in held:
        if is_adapter(weight.key):
            continue
        key = whole.key_of(unit, weight)
        state[key] = merged[unit, weight.part][plain_key(weight.key)]
        if weight.canonical not in trains and (unit, plain_key(weight.key)) not in adapted:
            frozen.add(key)
    return state, frozenset(frozen)


def load_pretrained_weights(whole: PretrainedModel, source: str) -> dict[str, Tensor]:
    """Load all weights of a pretrained model by its own keys, as transformers reads them. Raises UserError."""
    try:
        with without_bars(source):
            loader: Any = type(whole.composite())
            model, found = loader.from_pretrained(source, dtype="auto", output_loading_info=True)
    except Exception as error:
        raise UserError(f"the weights of {source!r} cannot be loaded: {one_line(error)}") from None
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{source!r} lacks {missing[0]!r}{more} of the weights of its model; fetch it again, or begin with random "
            "weights (model.config)"
        )
    return model.state_dict()


@torch.no_grad()
def composite_of(weights: Iterable[tuple[Unit, Weight]], whole: PretrainedModel) -> PreTrainedModel:
    """Build transformers' own model around the units' tensors, on their device; weights that no unit has (blocks after
    the feature layer) are initialised at random. Raises UserError."""
    composite = whole.composite()
    state, _ = weights_of(weights, whole)
    composite.load_state_dict(state, strict=False, assign=True)
    composite.tie_weights()
    given = [parameter for parameter in composite.parameters() if not parameter.is_meta]
    owners = models_of(composite)
    with seeded(0, "unread"), excluded_from_init(given):  # also computed buffers, such as rotary frequencies
        for module in reversed([*composite.modules()]):
            if allocate_meta_tensors(module):
                owners[id(module)]._init_weights(module)
    device: Any = given[0].device  # transformers types `to` wrongly
    return composite.to(device)


def stored_keys(whole: PretrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map keys of the composite's state to the keys under which they are stored, without weights that transformers
    computes from several stored ones. If its conversion table cannot be read, only equal keys are mapped."""
    model = whole.composite()
    own = dict(model.state_dict())
    keys = list(stored)
    found = {key: key for key in keys if key in own}
    inner = "thinker."  # of Omni's files, which also hold the speech model
    listens = any(key.startswith(inner) for key in keys)
    try:
        # No public API: if it changes, the caller loads the whole model instead.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        table: list[Any] = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        for key in keys:
            if key not in own and (key.startswith(inner) or not listens):
                plain = key.removeprefix(inner)
                name, converted = rename_source_key(
                    plain, renamings, converters, model.base_model_prefix, own
                )
                if converted is None and name in own:
                    found[name] = key
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return found
