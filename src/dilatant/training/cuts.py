"""Stage cuts of a user's layout: kept from the run so far, or balanced by the costs that the run counts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from dilatant.config import Config
from dilatant.config.files.own_files import read_text
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.costs.workload import Workload
from dilatant.plan.manual import Specs, cut_as_before, cut_by_seconds
from dilatant.plan.plan import Plan
from dilatant.planning.layout import MICROBATCHES
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.training.run_costs import local_costs


@dataclass(frozen=True, slots=True)
class Cutter:
    """Fill in the stage cuts of layouts of `model`.

    tokens: unit → token counts of some samples, for all units or none; if sizes are unknown, rows are taken to have
    their maximum length. targets: share of the language model's tokens that carry loss. before: the plan that the run
    had; its cuts are kept where the layout is unchanged.
    """

    config: Config
    model: MultimodalModel
    tokens: Mapping[str, ArrayLike]
    targets: float = 1.0
    before: Plan | None = None

    def __call__(self, specs: Specs, colocated: Mapping[str, str], plan: Plan) -> Specs:
        """Return the specs with cuts. plan: the plan of these specs, with any cuts."""
        kept = None if self.before is None else cut_as_before(specs, plan, self.before)
        if kept is not None:
            return kept
        degrees = {(placed.stage.tp, placed.stage.cp) for placed in plan.stages()}
        here = local_costs(self.config, self.model, len(plan.ranks), degrees, self.targets)
        row, items = self.config.row_tokens, here.model.item_tokens
        tokens = {
            name: np.asarray(self.tokens.get(name, [items.get(name, row)]), dtype=np.float64)
            for name in self.model.units
        }
        squares = {name: tokens[name] * item for name, item in items.items()}
        workload = Workload(tokens, squares, dense_rows(here.model, here.costs))
        units = UnitLayers(
            here.model.spec, here.costs, workload, here.target.cluster.gpus_per_node, here.target.rules
        )
        anchor = self.model.graph.anchor
        count = self.config.parallel.microbatches or MICROBATCHES
        together = min(  # samples in one microbatch of every replica together
            self.config.train.global_batch_size / count,
            specs[anchor].replicas * row / max(1.0, float(tokens[anchor].mean())),
        )
        samples = {name: together / spec.replicas for name, spec in specs.items()}
        return cut_by_seconds(specs, colocated, units, samples)


def plan_before(config: Config) -> Plan | None:
    """Return the plan of the run that continues in `output_dir`, or None."""
    if config.train.resume == "never":
        return None
    try:
        return Plan.from_json(read_text(Path(config.output_dir) / "plan.json"))
    except (OSError, ValueError):
        return None
