"""What a run works with, complete and proven before any device is taken."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.config import Config
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import Plan
from dilatant.profiling.assemble import Samples, assemble_model, assemble_samples
from dilatant.training.layout import plan_from_config


@dataclass(frozen=True, slots=True)
class Prepared:
    """model: layers from configs, and weights that ranks
    read for themselves, are on the meta device."""

    samples: Samples
    model: MultimodalModel
    plan: Plan


def prepare(config: Config, plan: Plan | None = None) -> Prepared:
    """Data, model and plan of a run. Raises UserError that names the key or the sample."""
    samples = assemble_samples(config)
    model = assemble_model(config, samples, hollow=True)
    return Prepared(samples, model, plan or plan_from_config(config.parallel, model))
