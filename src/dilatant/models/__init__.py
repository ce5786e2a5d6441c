"""What is trained: units, their layers, how Hugging Face models become stages.

The names below are imported when they are first used, so that what needs no torch (geometry) imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.models.build import build_model
    from dilatant.models.encoder_spec import Encoder
    from dilatant.models.generator import Generator
    from dilatant.models.geometry import EncoderGeometry, encoder_geometry
    from dilatant.models.language_stage import MultimodalOutput
    from dilatant.models.multimodal import MultimodalModel

_HOME = {
    "build_model": "build",
    "EncoderGeometry": "geometry",
    "encoder_geometry": "geometry",
    "Encoder": "encoder_spec",
    "Generator": "generator",
    "MultimodalModel": "multimodal",
    "MultimodalOutput": "language_stage",
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
