"""Models: units, their layers, and the cut of Hugging Face models into stages.

The names below are imported lazily, so that torch-free modules (geometry) do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.models.build import build_model
    from dilatant.models.core.geometry import EncoderGeometry, encoder_geometry
    from dilatant.models.encoders.encoder_spec import Encoder
    from dilatant.models.generators.generator import Generator
    from dilatant.models.language.language_stage import MultimodalOutput
    from dilatant.models.multimodal import MultimodalModel

_HOME = {
    "build_model": "build",
    "EncoderGeometry": "core.geometry",
    "encoder_geometry": "core.geometry",
    "Encoder": "encoders.encoder_spec",
    "Generator": "generators.generator",
    "MultimodalModel": "multimodal",
    "MultimodalOutput": "language.language_stage",
}

__all__ = [
    "Encoder",
    "EncoderGeometry",
    "Generator",
    "MultimodalModel",
    "MultimodalOutput",
    "build_model",
    "encoder_geometry",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
