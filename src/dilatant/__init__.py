"""Dilatant: plan, balance and train multimodal LLMs on any set of devices.

The names below are what a program needs; each is imported when it is first used. Importing this package imports neither
torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.comm.launch import Worker, launch
    from dilatant.config import Config, UserError, load_config
    from dilatant.config.signatures import metric
    from dilatant.data.sample import EncodedSample
    from dilatant.models.encoders.encoder_spec import Encoder
    from dilatant.models.generators.generator import Generator
    from dilatant.models.language.language_stage import MultimodalOutput
    from dilatant.models.multimodal import MultimodalModel
    from dilatant.plan.plan import ParallelSpec, Plan
    from dilatant.resilience.launch import train
    from dilatant.training.feeding.loading import make_loader
    from dilatant.training.parallelize import Auto, parallelize

__version__ = "0.1.0"

_HOME = {
    "Auto": "training.parallelize",
    "Config": "config",
    "EncodedSample": "data.sample",
    "Encoder": "models.encoders.encoder_spec",
    "Generator": "models.generators.generator",
    "MultimodalModel": "models.multimodal",
    "MultimodalOutput": "models.language.language_stage",
    "ParallelSpec": "plan.plan",
    "Plan": "plan.plan",
    "UserError": "config",
    "Worker": "comm.launch",
    "launch": "comm.launch",
    "load_config": "config",
    "make_loader": "training.feeding.loading",
    "metric": "config.signatures",
    "parallelize": "training.parallelize",
    "train": "resilience.launch",
}

__all__ = [
    "Auto",
    "Config",
    "EncodedSample",
    "Encoder",
    "Generator",
    "MultimodalModel",
    "MultimodalOutput",
    "ParallelSpec",
    "Plan",
    "UserError",
    "Worker",
    "launch",
    "load_config",
    "make_loader",
    "metric",
    "parallelize",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
