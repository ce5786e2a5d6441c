"""Prepare a run: open its data, build its model on the meta device and prove its plan before any device is taken."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.comm.ray_cluster import check_cluster, cluster_address
from dilatant.config import Config, UserError
from dilatant.config.degrees import ONE, Degrees
from dilatant.config.model import LANGUAGE
from dilatant.data.index.sizes import Progress
from dilatant.data.order.blend import Blend
from dilatant.hf.stored_moments import find_moments
from dilatant.hf.stored_weights import check_sources
from dilatant.models.core.running_statistics import unheld_statistics
from dilatant.models.dropout.keyed_dropout import unkeyed_dropout
from dilatant.models.language.embedding_noise import EmbeddingNoise
from dilatant.models.language.position_limit import check_positions
from dilatant.models.language.router_loss import has_router_loss, router_weight
from dilatant.models.language.row_padding import pad_rows
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.templates.membership import ChainCosts
from dilatant.plan.templates.node_groups import unrecoverable_shards
from dilatant.planning.assemble import Samples, assemble_model, assemble_samples, with_sizes
from dilatant.planning.layout import TrainingPlan, plan_from_config
from dilatant.planning.memberships import chain_costs
from dilatant.planning.planning import PlanningProblem
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.planning.problem.describe_model import require_trained
from dilatant.planning.problem.planned_samples import planned_samples
from dilatant.planning.row_length import is_row_length_open, row_length
from dilatant.report.text.wording import counted
from dilatant.runtime.rank_trial import divide_as_planned
from dilatant.training.checkpoints.starting_point import checkpoints_before, with_template_date
from dilatant.training.feeding.step_data import count_steps
from dilatant.training.own_parts import checked_loss, find_loss
from dilatant.training.run_costs import Cutter, costs_of_run, local_costs, plan_before, target_here

LOOKED_AT = 4096
"""Samples from which stage cuts and the share of target tokens are estimated: opening a run must not take longer for
more data."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Samples, model and plan of a run. model: layers built from configs, and weights that ranks read for themselves,
    are on the meta device. warnings: to be shown once for all ranks. rows: reason for a row length chosen here."""

    samples: Samples
    model: MultimodalModel
    planned: TrainingPlan
    warnings: tuple[str, ...] = ()
    rows: str = ""


def prepare(
    config: Config,
    planned: TrainingPlan | None = None,
    made: TrainingPlan | None = None,
    progress: Progress = lambda done, total: None,
) -> PreparedRun:
    """Return the data with their sizes, the model and the plan of a run. Raises UserError that names the key or the
    sample.

    planned: plan that rank 0 or the launcher has proven valid. made: plan that the run made itself, to be proven valid
    like one in the config. progress: callback for samples that must be measured first.
    """
    config, reason = with_template_date(config), ""  # ranks of an agent read the run's file themselves
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        if config.data.preprocess == "ray":
            check_cluster(cluster_address(config.data.ray_address))
        samples = with_sizes(config, assemble_samples(config), progress)
        if config.data.preprocess == "ray" and samples.train_sizes is None:
            raise UserError(
                "data.preprocess: 'ray' asks for samples by index, which streamed data do not have; use 'local'"
            )
        model = open_model(config, samples)
        check_positions(model.language, _longest(samples))
        if planned is None:
            cut = Cutter(config, model, known_tokens(samples, model), target_share(samples), plan_before(config))
            planned = plan_from_config(config, model, made, cut)
            if config.resilience.enabled:
                each = config.resilience.ranks_per_node
                if problem := unrecoverable_shards(planned.plan, planned.shard, planned.zero, each):
                    raise UserError(problem)
            if found := row_length_of_run(config, samples, model, planned):
                config, reason = found[0].config, found[2]
                planned = replace(planned, row_tokens=config.row_tokens)
            planned = with_costs(config, samples, model, planned)
            if config.resilience.enabled and planned.chain is None:
                planned = replace(planned, chain=_chain_of_layout(config, samples, model, planned))
        else:
            divide_as_planned(model, planned.plan)
        for unit in planned.plan.units:
            if unit.recompute:
                model.units[unit.name].recompute(unit.recompute)
    said = dict.fromkeys(str(entry.message) for entry in caught if issubclass(entry.category, UserWarning))
    about = *said, *_about_warm_up(config, samples), *_about_routers(model)
    return PreparedRun(samples, model, planned, about, reason)


def open_model(config: Config, samples: Samples) -> MultimodalModel:
    """Return the model of a run on the meta device, with all that the config changes in it. No weights are read, but it
    is checked that they are there. Raises UserError for a model that cannot be opened or trained."""
    model = assemble_model(config, samples.tokenizer, samples.encoding, hollow=True)
    if (own_loss := find_loss(config)) is not None:
        model.use_loss(checked_loss(own_loss, model.language.config))
    if (preferences := config.train.preferences) is not None:
        if preferences.has_reference and not isinstance(samples.train, Blend):
            why = "compares with log-probabilities of data that are read by index; take simpo or orpo"
            raise UserError(f"train.preferences.method: {preferences.method!r} {why}")
        model.use_preferences(preferences)
    if (alpha := config.train.neftune_noise_alpha) is not None:
        language = model.language
        language.extensions.insert(0, EmbeddingNoise(language.unit, alpha))
    if config.train.row_multiple is not None:
        pad_rows(model.language, config.train.row_multiple)
    if (refused := unkeyed_dropout(model.units.values()) or unheld_statistics(model.units)) is not None:
        raise refused
    check_sources(model, config.model)
    if not checkpoints_before(config):
        for remark in find_moments(model, config).remarks:
            warnings.warn(remark, stacklevel=2)
    require_trained(model)
    return model


def _longest(samples: Samples) -> int:
    """Return the tokens of the longest sample in the language model, at most those of its encoding: held-out samples
    are refused like others."""
    most = samples.encoding.max_length or 0
    known = [sizes.of(LANGUAGE) for sizes in (samples.train_sizes, samples.held_out_sizes) if sizes is not None]
    return most if samples.train_sizes is None else max(int(own[own <= most].max(initial=0)) for own in known)


def known_tokens(samples: Samples, model: MultimodalModel) -> dict[str, NDArray[np.int64]]:
    """Return unit → tokens of some samples; empty if sizes are unknown."""
    sizes = samples.train_sizes
    if sizes is None or not len(sizes):
        return {}
    each = -(-len(sizes) // LOOKED_AT)
    return {name: sizes.of(name)[::each] for name in model.units}


def with_costs(config: Config, samples: Samples, model: MultimodalModel, planned: TrainingPlan) -> TrainingPlan:
    """Return the plan with the costs of its steps on this hardware; costs that the plan has already are kept."""
    targets = target_share(samples)
    costs = costs_of_run(config, model, planned.plan, planned.costs, targets, planned.zero, planned.shard)
    return replace(planned, costs=costs)


def row_length_of_run(
    config: Config, samples: Samples, model: MultimodalModel, planned: TrainingPlan
) -> tuple[PlanningProblem, PlanScore, str] | None:
    """Return `row_length` for this hardware; None if the plan or the config sets it, or sizes are unknown."""
    is_open = is_row_length_open(config, target_here(config, len(planned.plan.ranks)))
    # Later memberships count on the rows of `chain`.
    is_known = planned.row_tokens is not None or planned.chain is not None
    if is_known or not isinstance(samples.train, Blend) or not is_open:
        return None
    here = local_costs(config, model, planned.plan, target_share(samples), planned.zero, shard=planned.shard)
    sampled = planned_samples(config, samples, here.model)
    dense = dense_rows(here.model, here.costs)
    sampled = replace(sampled, workload=replace(sampled.workload, dense=dense))
    problem = PlanningProblem(config, here.target, here.model, here.measured, here.costs, sampled)
    return row_length(problem, planned.plan, "1f1b" if planned.schedule == "serial" else planned.schedule)


def _chain_of_layout(config: Config, samples: Samples, model: MultimodalModel, planned: TrainingPlan) -> ChainCosts:
    """Return the costs from which memberships that follow this layout are planned: those that assign samples."""
    plan, anchor = planned.plan, model.graph.anchor
    own: dict[str, dict[int, Degrees]] = {unit.name: {1: ONE} for unit in plan.units}
    for placed in plan.stages():
        own[placed.unit].setdefault(len(placed.stage.ranks), placed.stage.degrees)
    others = {width: one.of_guests for each in (*own.values(), own[anchor]) for width, one in each.items()}
    degrees = {name: {**others, **each} for name, each in own.items()}
    here = local_costs(config, model, plan, target_share(samples), planned.zero, others.values(), planned.shard)
    units, tokens = here.unit_layers(known_tokens(samples, model), config.row_tokens)
    count = planned.num_microbatches * len(plan.unit(anchor).replicas)
    rows = max(degrees.groups for degrees in own[anchor].values()) * config.row_tokens
    size = min(config.train.global_batch_size / count, max(1.0, rows / max(1.0, float(tokens[anchor].mean()))))
    limits = config.resilience
    lost = limits.ranks_per_node, limits.fault_tolerance
    recompute = {unit.name: unit.recompute for unit in plan.units}
    found = chain_costs(units, here.target.cluster, lost, degrees, recompute, size, count)
    narrowest = {u.name: min(len(s.ranks) for replica in u.replicas for s in replica.stages) for u in plan.units}
    return replace(found, keeps_layout=True, narrowest=narrowest)


def _about_routers(model: MultimodalModel) -> tuple[str, ...]:
    causal = model.language.model
    if router_weight(causal) == 0 or has_router_loss(causal):
        return ()
    return (
        "nothing keeps the experts of the language model evenly used; `output_router_logits: true` in "
        f"model.language_model.config adds its loss, {router_weight(causal):g} times",
    )


def _about_warm_up(config: Config, samples: Samples) -> tuple[str, ...]:
    steps = count_steps(config, samples)
    warm_up = config.train.schedule.warm_up(steps)
    if warm_up < steps:
        return ()
    return (
        f"train.schedule: a warm-up of {warm_up} is no less than the run's {counted(steps, 'step')}: the learning rate "
        "does not reach its peak",
    )


def target_share(samples: Samples) -> float:
    """Return the share of language-model tokens that carry loss, by the first samples; 1 if sizes are unknown."""
    sizes = samples.train_sizes
    if sizes is None:
        return 1.0
    tokens = int(sizes.of(LANGUAGE)[:LOOKED_AT].sum())
    return float(sizes.target_tokens[:LOOKED_AT].sum()) / tokens if tokens else 1.0
