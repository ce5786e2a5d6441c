"""Models: units, their layers, and the cut of Hugging Face models into stages."""

from dilatant.config.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, {"multimodal": "MultimodalModel"})
