"""Configuration: the typed YAML file that a user writes.

Names below are imported on first use: errors are imported everywhere, pydantic and YAML only where a config is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilatant.config.lazy import lazy_names

if TYPE_CHECKING:
    from dilatant.config.config import Config as Config
    from dilatant.config.config import load_config as load_config
    from dilatant.config.config import parse_config as parse_config
    from dilatant.config.data import DataConfig as DataConfig
    from dilatant.config.data import DataSource as DataSource
    from dilatant.config.errors import UserError as UserError
    from dilatant.config.errors import list_problems as list_problems
    from dilatant.config.model import EncoderConfig as EncoderConfig
    from dilatant.config.model import LanguageModelConfig as LanguageModelConfig
    from dilatant.config.model import ModelConfig as ModelConfig
    from dilatant.config.parallel import ParallelConfig as ParallelConfig
    from dilatant.config.parallel import UnitParallelism as UnitParallelism
    from dilatant.config.plan import ClusterConfig as ClusterConfig
    from dilatant.config.plan import PlanConfig as PlanConfig
    from dilatant.config.train import EvaluationConfig as EvaluationConfig
    from dilatant.config.train import OptimizerConfig as OptimizerConfig
    from dilatant.config.train import RateSchedule as RateSchedule
    from dilatant.config.train import TrainConfig as TrainConfig

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "config": "Config load_config parse_config",
        "data": "DataConfig DataSource",
        "errors": "UserError list_problems",
        "model": "EncoderConfig LanguageModelConfig ModelConfig",
        "parallel": "ParallelConfig UnitParallelism",
        "plan": "ClusterConfig PlanConfig",
        "train": "EvaluationConfig OptimizerConfig RateSchedule TrainConfig",
    },
)
