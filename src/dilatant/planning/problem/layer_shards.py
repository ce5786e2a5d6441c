"""Tensor-parallel shards for planning: a unit with one rank's share of heads, feed-forward and vocabulary, as
`tensor_plan` divides them. The hidden size, the size of a head, norms and projectors stay whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dilatant.config import list_problems
from dilatant.config.degrees import Degrees
from dilatant.models.core.unit import Unit
from dilatant.models.parallel.tensor_parallel import set_local_heads, with_weights
from dilatant.models.parallel.tensor_plan import TensorPlan, degree_problems, tensor_plan
from dilatant.planning.problem.describe_model import ModelDescription


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
        raise list_problems(
            "tensor-parallel degrees (plan.tensor_parallel, --tp):", list(dict.fromkeys(nobody))
        )
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
    weights = {
        parameter: _share(plan, name, parameter, degree)
        for name, parameter in unit.named_logical_parameters()
    }
    model = with_weights(unit.model, weights)
    for block, regions in zip(
        model.get_submodule(unit.structure.blocks).children(), plan.regions, strict=True
    ):
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
    shape = (
        whole.shape
        if intervals is None
        else [sum(end - first for first, end in spans) for spans in intervals]
    )
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
