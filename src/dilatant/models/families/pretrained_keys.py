"""Stored keys of a pretrained multimodal model: the keys in hub files, which transformers renames at load time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dilatant.models.families.pretrained import PretrainedModel


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
