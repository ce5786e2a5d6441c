"""Costs by which a run assigns samples, predicts steps and cuts stages: its own, else measured, else modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config import Config, UserError
from dilatant.config.degrees import Degrees
from dilatant.config.environment import place_from
from dilatant.config.files.own_files import read_text
from dilatant.config.memory_modes import Shard
from dilatant.config.plan import ClusterConfig
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.memory import Zero
from dilatant.cost.model import CostModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.costs.stage_costs import slower_between
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.costs.workload import Workload
from dilatant.plan.manual import Specs, cut_as_before, cut_by_seconds
from dilatant.plan.plan import Plan
from dilatant.planning.assemble import recompute_by_unit
from dilatant.planning.layout import MICROBATCHES
from dilatant.planning.measuring.cost_cache import cached_costs
from dilatant.planning.measuring.layer_costs import costs_in_use, described_costs, read_costs
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.planning.problem.describe_model import ModelDescription, describe_model
from dilatant.planning.problem.planned_hardware import Target, plan_target, target_of_run
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.trainability import trainability_of


def costs_of_run(
    config: Config,
    model: MultimodalModel,
    plan: Plan,
    planned: StepCosts | None = None,
    targets: float = 1.0,
    zero: Zero | None = None,
    shard: Mapping[str, Shard] | None = None,
) -> StepCosts:
    """Return the costs of the steps of `plan` on this hardware; `origin` names their source. Takes milliseconds.

    planned: costs in the plan file. They are used unless the run freezes other layers than the plan was made for. The
    next choices are the costs in `plan.costs`, if that file is of this hardware, precision and model; then costs that
    `dilatant profile` or `dilatant plan` measured for the same layers on this hardware; then costs modelled from the
    layers' shapes. targets: share of the language model's tokens that carry loss. zero: which ranks share optimizer
    state, shard: what else by unit (default: as the config says).
    """
    trains = trainability_of(plan, trainable_layers(model.units)).backward
    note = ""
    if planned is not None:
        if tuple(bool(row.any()) for row in planned.stages.seconds[:, 1]) == trains:
            return planned
        note = "; the plan's own costs are of other frozen layers"
    here = local_costs(config, model, plan, targets, zero, shard=shard)
    found = described_costs(plan, here.model, here.costs, here.target)
    return replace(found, origin=f"{found.origin}{note}{here.note}")


@dataclass(frozen=True, slots=True, eq=False)
class LocalCosts:
    """Layer costs of a model on this hardware. measured: as measured or modelled. costs: the same as training uses them
    (see `costs_in_use`). note: why other costs were not used, for a reader."""

    model: ModelDescription
    measured: CostModel
    costs: CostModel
    target: Target
    note: str

    def unit_layers(
        self, known: Mapping[str, ArrayLike], row: int
    ) -> tuple[UnitLayers, dict[str, NDArray[np.float64]]]:
        """Return the layers' costs for samples with `known` tokens, and the tokens by unit. A unit of unknown sizes
        counts as one item, or one row of `row` tokens."""
        items = self.model.item_tokens
        tokens = {
            unit.name: np.asarray(known.get(unit.name, [items.get(unit.name, row)]), dtype=np.float64)
            for unit in self.model.spec.units
        }
        squares = {name: tokens[name] * item for name, item in items.items()}
        workload = Workload(tokens, squares, dense_rows(self.model, self.costs))
        cluster, rules = self.target.cluster, self.target.rules
        costs = self.model.spec, self.costs, workload, cluster.gpus_per_node, rules
        return UnitLayers(*costs, slower=slower_between(cluster)), tokens


def local_costs(
    config: Config,
    model: MultimodalModel,
    plan: Plan,
    targets: float = 1.0,
    zero: Zero | None = None,
    also: Iterable[Degrees] = (),
    shard: Mapping[str, Shard] | None = None,
) -> LocalCosts:
    """Return the layer costs that a run on the ranks of `plan` uses, at the plan's degrees and those in `also`. The
    choice of their source, `targets`, `zero` and `shard` are as in `costs_of_run`."""
    target = target_here(config, len(plan.ranks))
    target = target if zero is None else target.sharing(zero, shard)
    described = describe_model(model, recompute_by_unit(config, model.units))
    degrees = sorted({*also, *(placed.stage.degrees.without_experts for placed in plan.stages())})
    costs: CostModel | None = None
    note = ""
    if config.plan.costs is not None:
        try:
            costs = read_costs(Path(config.plan.costs), described, target)
        except UserError as error:
            note = f"; plan.costs does not count: {' '.join(str(error).split())}"
    if costs is None and target.is_local:
        costs = cached_costs(described, target, degrees, config.data.max_length)
    if costs is None:
        costs = analytic_costs(
            layer_shapes(described, guess=True), target.hardware.among(target.cluster.num_devices), degrees,
            target.dtype, target.cluster.reach,
        )  # fmt: skip
        note += f"; {_how_to_measure(config, target)}"
    in_use = costs_in_use(costs, described, targets, config.row_tokens, config.train.loss_chunk)
    return LocalCosts(described, costs, in_use, target, note)


def target_here(config: Config, ranks: int) -> Target:
    """Return the devices that this run has, whatever other devices the config plans for."""
    place = place_from()
    here = ranks if place is None else place.local_size
    if config.resilience.enabled and (place is not None or config.resilience.listen is not None):
        here = config.resilience.ranks_per_node
    shape = {"nodes": -(-ranks // here), "gpus_per_node": here, "groups": None}
    try:
        target = target_of_run(config, config.cluster.model_copy(update=shape))
        if target.is_local:
            return target
    except UserError:  # the hardware file may exist only where plans are made
        pass
    return target_of_run(config, ClusterConfig(**shape))


def _how_to_measure(config: Config, target: Target) -> str:
    """Return the command that measures costs for this run: with fewer processes on a CPU, each has more threads."""
    here = config.cluster.model_copy(update={"hardware": None, "hardware_file": None})
    if plan_target(here).hardware.name == target.hardware.name:
        return "`dilatant profile` measures"
    return f"`dilatant profile CONFIG --set cluster.gpus_per_node={target.cluster.gpus_per_node}` measures"


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
        here = local_costs(self.config, self.model, plan, self.targets)
        units, tokens = here.unit_layers(self.tokens, self.config.row_tokens)
        row = self.config.row_tokens
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
