"""Settings that a search varies: tensor- and context-parallel degrees, ZeRO variants, and the shards of units at them.

In a unit with one rank's share of heads, feed-forward and vocabulary, as `tensor_plan` divides them, the hidden size,
the size of a head, norms and projectors stay whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dilatant.config import Config, PlanConfig, list_problems
from dilatant.config.degrees import AXES, Degrees
from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.models.core.unit import Unit
from dilatant.models.parallel.tensor_parallel import set_local_heads, with_weights
from dilatant.models.parallel.tensor_plan import TensorPlan, degree_problems, tensor_plan
from dilatant.plan.limits import SMALL_CLUSTER
from dilatant.plan.search.why_not import AskedLayout
from dilatant.planning.problem.describe_model import ModelDescription
from dilatant.planning.problem.planned_hardware import Target, is_same_hardware
from dilatant.runtime.layouts import context_problems

WIDEST = 16
"""Largest degree that is tried without being asked for across the nodes of an NVLink domain."""


def planned_degrees(plan: PlanConfig, model: ModelDescription, target: Target) -> list[Degrees]:
    """Return the tensor-parallel degrees that the config names. Without them, on GPUs, they are the powers of two that
    fit a node and that training can do for some unit of the model. Processes of a CPU share its memory: all are 1."""
    node = 1 if is_same_hardware("CPU", target.hardware.name) else target.cluster.gpus_per_node
    if target.cluster.reach > target.cluster.gpus_per_node:
        node = min(target.cluster.reach, WIDEST)
    powers = [1 << power for power in range(node.bit_length()) if 1 << power <= node]
    named = {name: getattr(plan, key) for name, key in AXES.items()}
    takes = {"tp": lambda: _dividing(model, powers), "cp": lambda: powers if _splits(model) else [1]}
    tried = [named[name] or takes[name]() for name in AXES]
    asked, found = None not in named.values(), itertools.starmap(Degrees, itertools.product(*tried))
    return [one for one in found if asked or one.ranks <= max(node, *one)]


def with_requested_degrees(config: Config, model: ModelDescription, target: Target, asked: AskedLayout) -> Config:
    """Return a config whose plans may also have the degrees that a layout asks for; a cost file may still lack them."""
    offered = planned_degrees(config.plan, model, target)
    wanted = {Degrees(*(own.get(name, 1) for name in AXES)) for own in asked.units.values()}
    if wanted <= {*offered}:
        return config
    axes = zip(*(one.axes for one in (*offered, *wanted)))
    degrees = {key: tuple(sorted({*values})) for key, values in zip(AXES.values(), axes)}
    return config.model_copy(update={"plan": config.plan.model_copy(update=degrees)})


def _splits(model: ModelDescription) -> bool:
    """Return True if the ranks of a context-parallel group can share the samples of every unit."""
    return not any(context_problems(unit) for unit in {entry.unit: None for entry in model.types})


def _dividing(model: ModelDescription, degrees: list[int]) -> list[int]:
    """Return those of `degrees` at which the ranks of a tensor-parallel group can share some unit."""
    found = {1}
    for unit in dict.fromkeys(entry.unit for entry in model.types):
        plan = tensor_plan(unit)
        found |= {tp for tp in degrees if tp not in found and not degree_problems(unit, plan, tp)}
    return [tp for tp in degrees if tp in found]


def zero_variants(
    config: Config, target: Target, fault_tolerance: int = 0
) -> tuple[tuple[Zero, ...], tuple[Zero, ...]]:
    """Return the ZeRO variants under which plans of all kinds are searched, preferred ones first, and those under which
    the best plan is also simulated. If nodes may be lost, none may hold the only copy of some state; offloaded state
    must not be held several times on a host."""
    if config.train.zero is not None:
        return (config.train.zero,), ()
    tried: list[Zero] = [DEFAULT_ZERO]
    if target.cluster.num_devices > 1:
        shards = any(word != "none" for _, word in target.rules.shard)
        tried += [] if config.train.optimizer.offload or shards else ["none"]
        several = target.cluster.num_devices > (target.rules.ranks_per_node or target.cluster.num_devices)
        tried += ["all"] if several and not (config.resilience.enabled or fault_tolerance) else []
    if target.cluster.num_devices <= SMALL_CLUSTER:
        return tuple(tried), ()
    # Search time is limited on many devices; variants that save memory are searched, as they allow other plans.
    searched = tuple(zero for zero in tried if zero != "none")
    return searched, tuple(zero for zero in tried if zero not in searched)


def may_shard(config: Config, target: Target, fault_tolerance: int = 0) -> bool:
    """Return True if the config leaves open whether weights are sharded, and nothing forbids it."""
    train, recovers = config.train, config.resilience.enabled or fault_tolerance > 0
    several = target.cluster.num_devices > 1
    return several and train.shard is None and train.zero != "none" and not (train.deterministic or recovers)


def degrees_by_kind(model: ModelDescription, degrees: Iterable[Degrees]) -> dict[str, list[Degrees]]:
    """Return layer type → those of `degrees` at which ranks can share its unit, also in training; tp 1 for a unit that
    takes no other. Raises UserError, naming units and the degrees that they take, for a tp that none does."""
    wanted = sorted(set(degrees))
    found: dict[str, list[Degrees]] = {}
    problems: dict[int, list[str]] = {one.tp: [] for one in wanted if one.tp > 1}
    taken: set[int] = set()
    for unit in dict.fromkeys(entry.unit for entry in model.types):
        plan = tensor_plan(unit)
        refused = {tp: degree_problems(unit, plan, tp) for tp in problems}
        for tp, why in refused.items():
            problems[tp] += why
            taken |= {tp} - {tp if why else 0}
        own = [one for one in wanted if not refused.get(one.tp)]
        own = own or sorted({one._replace(tp=1) for one in wanted})
        found |= {entry.kind: own for entry in model.types if entry.unit is unit}
    if nobody := [problem for tp in problems if tp not in taken for problem in problems[tp]]:
        raise list_problems("tensor-parallel degrees (plan.tensor_parallel, --tp):", list(dict.fromkeys(nobody)))
    return found


def tensor_shard(unit: Unit, degree: int) -> Unit:
    """Return the unit as the last of `degree` ranks holds it, which has the largest share, on the meta device; the unit
    itself if `degree` is 1.

    Raises UserError if ranks cannot share the unit, or not so many.
    """
    if degree == 1 or unit.structure is None:
        return unit
    plan = tensor_plan(unit)
    problems = degree_problems(unit, plan, degree)
    if problems:
        raise list_problems("it can be measured at tp = 1 only:", problems)
    weights = {parameter: _share(plan, name, parameter, degree) for name, parameter in unit.named_logical_parameters()}
    model = with_weights(unit.model, weights)
    for block, regions in zip(model.get_submodule(unit.structure.blocks).children(), plan.regions, strict=True):
        for region in regions:
            set_local_heads(block, region, degree)
        for linear in block.modules():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = linear.weight.shape
    _count_vocabulary(cast(PreTrainedModel, model))
    shard = copy.deepcopy(unit, {id(unit.model): model})  # copies all but the model
    shard.shared_by = degree
    return shard


def _share(plan: TensorPlan, name: str, whole: nn.Parameter, degree: int) -> nn.Parameter:
    intervals, _ = plan.held(name, tuple(whole.shape), Degrees(degree), degree - 1)
    shape = whole.shape if intervals is None else [sum(end - first for first, end in spans) for spans in intervals]
    return nn.Parameter(torch.empty(*shape, dtype=whole.dtype, device="meta"), whole.requires_grad)


def _count_vocabulary(model: PreTrainedModel) -> None:
    """Set a language model's vocabulary sizes to the rows of its embedding and its head."""
    head = cast(nn.Linear | None, model.get_output_embeddings())
    if head is None:
        return
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    embedding.num_embeddings = len(embedding.weight)
    model.config.get_text_config().vocab_size = len(head.weight)
    if embedding.padding_idx is not None:
        embedding.padding_idx = 0  # torch refuses an index outside the table
