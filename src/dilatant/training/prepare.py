"""What a run works with, complete and proven before any device is taken."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from dilatant.config import Config
from dilatant.models.multimodal import MultimodalModel
from dilatant.profiling.assemble import Samples, assemble_model, assemble_samples
from dilatant.training.layout import TrainingPlan, plan_from_config


@dataclass(frozen=True, slots=True)
class Prepared:
    """model: layers from configs, and weights that ranks read for themselves, are on the meta device. warnings: what
    the user should know, to be said once for all ranks."""

    samples: Samples
    model: MultimodalModel
    planned: TrainingPlan
    warnings: tuple[str, ...] = ()


def prepare(
    config: Config, planned: TrainingPlan | None = None, made: TrainingPlan | None = None
) -> Prepared:
    """Data, model and plan of a run. Raises UserError that names the key or the sample.

    planned: proven already, by rank 0 or the launcher. made: by the run itself, to be proven as the config's own.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        samples = assemble_samples(config)
        model = assemble_model(config, samples, hollow=True)
        planned = planned or plan_from_config(config, model, made)
    said = dict.fromkeys(str(entry.message) for entry in caught if issubclass(entry.category, UserWarning))
    return Prepared(samples, model, planned, tuple(said))
