"""Build a rank's part of a plan: materialized stages with their weights, and gradient buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.cost.memory import Zero
from dilatant.models.core.dtype import cast_weights, quantize, require_shape
from dilatant.models.core.freeze import check
from dilatant.models.core.materialize import materialize
from dilatant.models.core.stage import Boundary, Context, Stage, stage_tensors
from dilatant.models.language.extension import ContextParallel
from dilatant.models.language.language_stage import LanguageStage
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format
from dilatant.plan.holdings import Holdings
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.runtime.state.shared_unit import ShardedUnit
from dilatant.runtime.state.shared_weights import BucketedWeights, bucket_weights


def derive_boundaries(model: MultimodalModel, plan: Plan) -> list[dict[str, Boundary]]:
    """Return, for each stage, the boundary of its output rows by consumer unit (its own unit for the next stage)."""
    boundaries = []
    for placed in plan.stages():
        consumers = model.graph.feeds[placed.unit] if placed.is_last else (placed.unit,)
        unit = model.units[placed.unit]
        boundaries.append({consumer: unit.boundary(placed.stage.end, consumer) for consumer in consumers})
    return boundaries


@torch.no_grad()
def build_stages(
    model: MultimodalModel,
    plan: Plan,
    comm: Comm,
    seed: int | None,
    weights: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    precision: torch.dtype | None = None,
) -> dict[int, Stage]:
    """Build this rank's stages on its device, by stage number; weights are initialized from `seed`, or copied from
    `weights`.

    boxes: the part of each weight that this rank holds and `weights` contains. precision: the dtype to which every rank
    converts all units' weights, since rows are sent in it; gradients are then fp32. None: the model's dtypes.

    Raises UserError for a weight of another shape.
    """
    own = [placed for placed in plan.stages() if comm.rank in placed.stage.ranks]
    shared = {
        placed.unit: ShardedUnit(model.units[placed.unit], comm, placed.stage, boxes)
        for placed in own
        if max(placed.stage.tp, placed.stage.ep) > 1 and model.units[placed.unit].structure is not None
    }
    for placed in own:
        first, end = placed.stage.first, placed.stage.end
        if placed.unit in shared:
            shared[placed.unit].materialize(first, end, seed, weights.keys())
        else:
            materialize(model.units[placed.unit], first, end, seed, weights.keys())
    if precision is not None:  # after drawing, so that draws do not depend on `precision`
        for unit in model.units.values():
            cast_weights(unit, precision)
    for name in dict.fromkeys(placed.unit for placed in own):
        model.units[name].set_frozen(model.units[name].frozen)
    stages = {}
    for placed in own:
        unit = model.units[placed.unit]
        stage = unit.stage(placed.stage.first, placed.stage.end)
        _share_rows(stage, placed, comm)
        if placed.unit in shared:
            shared[placed.unit].share(stage, placed.stage)
        quantize(stage, unit.four_bit, comm.device, weights)
        stage = stage.to(comm.device)
        stage.train(unit.training)
        check(stage.named_logical_parameters(), unit.frozen)
        for name, tensor in stage_tensors(stage).items():
            if name in weights:
                require_shape(name, weights[name], tensor)
                tensor.copy_(weights[name])
        for _, parameter in stage.named_logical_parameters():
            if precision is not None and parameter.requires_grad:
                parameter.grad_dtype = torch.float32  # autograd casts, then accumulates in fp32
        stages[placed.index] = stage
    return stages


def _share_rows(stage: Stage, placed: PlacedStage, comm: Comm) -> None:
    """Give `stage` its place among the context-parallel ranks, if there are several."""
    ranks, tp, cp = placed.stage.ranks, placed.stage.tp, placed.stage.cp
    if cp == 1:
        return
    place = ranks.index(comm.rank)
    stage.context = Context(place // tp, cp)
    if isinstance(stage, LanguageStage):
        assert stage.row_attention is not None
        together = ranks[place % tp :: tp]
        group = comm.group("context/" + "-".join(map(str, together)), together)
        stage.extensions.insert(0, ContextParallel(group, stage.row_attention.placement))


def build_bucketed_weights(
    model: MultimodalModel,
    plan: Plan,
    comm: Comm,
    stages: Mapping[int, Stage],
    held: Holdings,
    bucket_bytes: int,
    zero: Zero = "none",
    node_of: Sequence[int] | None = None,
    exact: Mapping[str, Tensor] | None = None,
    masters: bool = True,
    before: OwnedWeights | None = None,
) -> BucketedWeights:
    """Group the trainable weights of `stages` into buckets, identically on all ranks; see `bucket_weights`."""
    everything: dict[str, Tensor] = {}
    frozen: set[str] = set()
    for unit_plan in plan.units:
        unit = model.units[unit_plan.name]
        everything |= dict(unit.named_logical_parameters())
        frozen |= unit.frozen
    formats = {
        name: Format(str(weight.dtype), weight.element_size())
        for name, weight in everything.items()
        if name not in frozen
    }
    weights: dict[str, nn.Parameter] = {}
    stages_of: dict[str, set[int]] = {}
    for index, stage in stages.items():
        for name, parameter in stage.named_logical_parameters():
            if name in formats:
                weights[name] = parameter
                stages_of.setdefault(name, set()).add(index)
    return bucket_weights(
        comm, weights, stages_of, held, formats, bucket_bytes, zero, node_of, exact, masters, before
    )
