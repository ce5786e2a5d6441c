"""What is trained: units, their layers, how Hugging Face models become stages.

The names below are imported when they are first used, so that what needs no torch (geometry) imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.models.build import build_model
    from dilatant.models.geometry import EncoderGeometry, encoder_geometry
    from dilatant.models.multimodal import Encoder, MultimodalModel
    from dilatant.models.stage import MultimodalOutput

_HOME = {
    "build_model": "build",
    "EncoderGeometry": "geometry",
    "encoder_geometry": "geometry",
    "Encoder": "multimodal",
    "MultimodalModel": "multimodal",
    "MultimodalOutput": "stage",
}

__all__ = [
    "Encoder",
    "EncoderGeometry",
    "MultimodalModel",
    "MultimodalOutput",
    "build_model",
    "encoder_geometry",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
