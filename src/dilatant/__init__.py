"""Dilatant: plan, balance and train multimodal LLMs on any set of devices.

The names below are what a program needs; each is imported when it is first used. Importing this package imports neither
torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilatant.config.lazy import lazy_names

if TYPE_CHECKING:
    from dilatant.comm.launch import Worker as Worker
    from dilatant.comm.launch import launch as launch
    from dilatant.config import Config as Config
    from dilatant.config import UserError as UserError
    from dilatant.config import load_config as load_config
    from dilatant.config.signatures import callback as callback
    from dilatant.config.signatures import loss as loss
    from dilatant.config.signatures import metric as metric
    from dilatant.config.signatures import optimizer as optimizer
    from dilatant.config.signatures import rate_schedule as rate_schedule
    from dilatant.data.sample import EncodedSample as EncodedSample
    from dilatant.models.encoders.encoder_spec import Encoder as Encoder
    from dilatant.models.generators.generator import Generator as Generator
    from dilatant.models.language.language_stage import MultimodalOutput as MultimodalOutput
    from dilatant.models.multimodal import MultimodalModel as MultimodalModel
    from dilatant.plan.plan import ParallelSpec as ParallelSpec
    from dilatant.plan.plan import Plan as Plan
    from dilatant.resilience.train import train as train
    from dilatant.training.feeding.loading import make_loader as make_loader
    from dilatant.training.parallelize import Auto as Auto
    from dilatant.training.parallelize import parallelize as parallelize

__version__ = "0.1.0"

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "comm.launch": "Worker launch",
        "config": "Config UserError load_config",
        "config.signatures": "callback loss metric optimizer rate_schedule",
        "data.sample": "EncodedSample",
        "models.encoders.encoder_spec": "Encoder",
        "models.generators.generator": "Generator",
        "models.language.language_stage": "MultimodalOutput",
        "models.multimodal": "MultimodalModel",
        "plan.plan": "ParallelSpec Plan",
        "resilience.train": "train",
        "training.feeding.loading": "make_loader",
        "training.parallelize": "Auto parallelize",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
