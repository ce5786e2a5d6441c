"""Several samples one after another in one row, as keywords of `MultimodalModel.forward`; written for tests alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dilatant.data.media.pixels import as_array
from dilatant.data.sample import EncodedSample


def packed_inputs(samples: Sequence[EncodedSample]) -> dict[str, Any]:
    media: dict[str, dict[str, list[np.ndarray]]] = {}
    for sample in samples:
        for unit, inputs in sample.media.items():
            for name, array in inputs.items():
                media.setdefault(unit, {}).setdefault(name, []).append(as_array(array))
    return {
        "input_ids": torch.cat([torch.as_tensor(sample.input_ids) for sample in samples])[None],
        "labels": torch.cat([torch.as_tensor(sample.labels) for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(len(sample.input_ids)) for sample in samples])[None],
        "encoder_inputs": {
            unit: {name: torch.as_tensor(np.concatenate(arrays)) for name, arrays in inputs.items()}
            for unit, inputs in media.items()
        },
        "sample_ids": [sample.id for sample in samples],
        "lengths": [len(sample.input_ids) for sample in samples],
    }
