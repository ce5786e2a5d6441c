"""Models: units, their layers, and the cut of Hugging Face models into stages.

The names below are imported lazily, so that torch-free modules (geometry) do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilatant.config.lazy import lazy_names

if TYPE_CHECKING:
    from dilatant.models.build import build_model as build_model
    from dilatant.models.core.geometry import EncoderGeometry as EncoderGeometry
    from dilatant.models.core.geometry import encoder_geometry as encoder_geometry
    from dilatant.models.encoders.encoder_spec import Encoder as Encoder
    from dilatant.models.generators.generator import Generator as Generator
    from dilatant.models.language.language_stage import MultimodalOutput as MultimodalOutput
    from dilatant.models.multimodal import MultimodalModel as MultimodalModel

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "build": "build_model",
        "core.geometry": "EncoderGeometry encoder_geometry",
        "encoders.encoder_spec": "Encoder",
        "generators.generator": "Generator",
        "language.language_stage": "MultimodalOutput",
        "multimodal": "MultimodalModel",
    },
)
