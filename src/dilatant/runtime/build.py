"""Build a rank's part of a plan: materialized stages with their weights and training state, and gradient buckets."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config.memory_modes import Shard
from dilatant.models.adapters.lora import MAGNITUDE, adapted_key
from dilatant.models.core.dtype import cast_parameters, cast_weights, quantize, require_shape
from dilatant.models.core.freeze import check
from dilatant.models.core.fused_modules import FusedModules, KernelSet, fuse
from dilatant.models.core.materialize import materialize
from dilatant.models.core.slicing import held_blocks
from dilatant.models.core.stage import Boundary, Context, Stage, stage_tensors
from dilatant.models.core.unit import Unit
from dilatant.models.dropout.keyed_dropout import StageDropout
from dilatant.models.language.extension import ContextParallel
from dilatant.models.language.language_stage import LanguageStage
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, Holdings
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.compiled_blocks import CompiledBlocks
from dilatant.runtime.routes import stages_before
from dilatant.runtime.state.fp8_products import fp8_products
from dilatant.runtime.state.holders import boxes_held_on, holdings_of
from dilatant.runtime.state.sharded_stage import ShardedStage
from dilatant.runtime.state.shared_unit import ShardedUnit
from dilatant.runtime.state.shared_weights import BucketedWeights, StateLayout, bucket_weights, cut_shares
from dilatant.runtime.state.weight_gradients import ReplacedLayers, WeightGradients, replace_linears, restore_linears
from dilatant.runtime.step.agreement import digest
from dilatant.schedule.schedule import ActionKind


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
    shard: Mapping[str, Shard] = MappingProxyType({}),
    read: Collection[str] = (),
) -> dict[int, Stage]:
    """Build this rank's stages on its device, by stage number; weights are initialized from `seed`, or copied from
    `weights`.

    boxes: the part of each weight that this rank holds and `weights` contains. precision: the dtype to which every rank
    converts all units' weights, since rows are sent in it; gradients are then fp32. None: the model's dtypes. shard:
    see `StateLayout`; stages whose weights are sharded stay in host memory until `release_sharded`. read: those of
    `weights` that are parts of sharded ones, which are left out.

    Raises UserError for a weight of another shape.
    """
    own = [placed for placed in plan.stages() if comm.rank in placed.stage.ranks]
    shared = {
        placed.unit: ShardedUnit(model.units[placed.unit], comm, placed.stage, boxes)
        for placed in own
        if placed.stage.degrees.divides_weights and model.units[placed.unit].structure is not None
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
        stage = stage if shard.get(placed.unit, "").startswith("weights") else stage.to(comm.device)
        stage.train(unit.training)
        check(stage.named_logical_parameters(), unit.frozen)
        for name, tensor in stage_tensors(stage).items():
            if name in weights and name not in read:
                require_shape(name, weights[name], tensor)
                tensor.copy_(weights[name])
        for _, parameter in stage.named_logical_parameters():
            if precision is not None and parameter.requires_grad:
                parameter.grad_dtype = torch.float32  # autograd casts, then accumulates in fp32
        stages[placed.index] = stage
    return stages


def _share_rows(stage: Stage, placed: PlacedStage, comm: Comm) -> None:
    """Give `stage` its part of microbatches, if there are several."""
    ranks, degrees = placed.stage.ranks, placed.stage.degrees
    if degrees.row_parts == 1:
        return
    place = ranks.index(comm.rank)
    stage.context = Context(degrees.row_part(place), degrees.row_parts, degrees.groups)
    if isinstance(stage, LanguageStage) and degrees.cp > 1:
        assert stage.row_attention is not None
        together = degrees.ranks_with(ranks, place)
        group = comm.group("context/" + "-".join(map(str, together)), together)
        stage.extensions.insert(0, ContextParallel(group, stage.row_attention.placement))


def bucket_stages(
    model: MultimodalModel,
    plan: Plan,
    comm: Comm,
    stages: Mapping[int, Stage],
    held: Holdings,
    layout: StateLayout,
    exact: Mapping[str, Tensor],
    before: BucketedWeights | None,
    read: Mapping[str, Box],
) -> BucketedWeights:
    """Group the weights of `stages` that train, and frozen ones that are sharded, into buckets, identically on all
    ranks; see `bucket_weights`."""
    formats, apart, frozen = _bucketed(model, plan, layout)
    weights: dict[str, nn.Parameter] = {}
    stages_of: dict[str, set[int]] = {}
    for index, stage in stages.items():
        for name, parameter in stage.named_logical_parameters():
            if name in formats:
                weights[name] = parameter
                stages_of.setdefault(name, set()).add(index)
    return bucket_weights(comm, weights, stages_of, held, formats, layout, exact, before, apart, frozen, read)


def _bucketed(
    model: MultimodalModel, plan: Plan, layout: StateLayout, precision: torch.dtype | None = None
) -> tuple[dict[str, Format], dict[str, str], set[str]]:
    """Return the formats of the weights in buckets, the layers of those that may be sharded, and which are frozen.
    precision: the dtype to which weights will be cast, if they are not yet."""
    formats: dict[str, Format] = {}
    frozen: set[str] = set()
    for unit_plan in plan.units:
        unit, gathers = model.units[unit_plan.name], layout.shard.get(unit_plan.name, "").startswith("weights")
        cast = set() if precision is None else {*cast_parameters(unit, precision)}
        for name, weight in unit.named_logical_parameters():
            if name not in unit.frozen or (gathers and name not in unit.four_bit):
                dtype = precision if precision is not None and weight in cast else weight.dtype
                formats[name] = Format(str(dtype), dtype.itemsize)
                frozen |= {name} & unit.frozen
    apart = _layers_apart(plan, model, formats.keys(), layout)
    formats = {name: form for name, form in formats.items() if name in apart or name not in frozen}
    return formats, apart, frozen & apart.keys()


def boxes_to_read(
    model: MultimodalModel,
    plan: Plan,
    comm: Comm,
    layout: StateLayout,
    precision: torch.dtype | None = None,
    holdings: Holdings | None = None,
) -> dict[str, Box]:
    """Return logical name → the part of each weight and buffer with which this rank begins: what it holds or, of a
    frozen weight that is sharded, the rows around its own part (one row if it has none). Weights from which DoRA's
    magnitudes begin are needed whole."""
    holdings = holdings or holdings_of(plan, model.units)
    held = boxes_held_on(holdings, comm.rank)
    formats, apart, frozen = _bucketed(model, plan, layout, precision)
    own: dict[str, list[Box]] = {}
    for share in cut_shares(comm, holdings, formats, layout, apart, frozen)[1] if frozen else ():
        for name in frozen.intersection(share.bucket.names):
            own.setdefault(name, []).extend(box for box in share.own if box.name == name)
    measured = {adapted_key(name) for name in held if MAGNITUDE in name}
    return held | {name: _rows_around(held[name], boxes) for name, boxes in own.items() if name not in measured}


def _rows_around(held: Box, parts: Sequence[Box]) -> Box:
    if not held.whole:
        return held
    begin = held.intervals[0][0][0]
    first = min((part.intervals[0][0][0] for part in parts), default=begin)
    end = max((part.intervals[0][-1][1] for part in parts), default=begin + 1)
    rows = tuple((max(low, first), min(high, end)) for low, high in held.intervals[0] if low < end and first < high)
    return Box(held.name, held.whole, (rows, *held.intervals[1:]))


def _layers_apart(plan: Plan, model: MultimodalModel, chosen: Collection[str], layout: StateLayout) -> dict[str, str]:
    """Return weight → layer for the `chosen` weights of sharded units. A weight that is tied between stages is left
    out: its holders run different actions."""
    apart = {}
    for unit_plan in plan.units:
        unit = model.units[unit_plan.name]
        if layout.shard.get(unit_plan.name, "none") == "none":
            continue
        layers: dict[str, dict[int, None]] = {}
        for weight in unit.weights:
            if weight.canonical in chosen:
                layers.setdefault(weight.canonical, {})[unit.layers.index(weight.layer)] = None
        for name, numbers in layers.items():
            stages = {
                position
                for position, stage in enumerate(unit_plan.replicas[0].stages)
                for number in numbers
                if stage.first <= number < stage.end
            }
            if len(stages) == 1:
                apart[name] = f"{unit_plan.name} {sorted(numbers)}"
    return apart


def compile_stages(
    model: MultimodalModel,
    stages: Mapping[int, LocalStage],
    units: Collection[str],
    backend: str,
    eager: set[type[nn.Module]],
) -> None:
    """Compile the blocks of this rank's stages of `units`. Call this once their modules are final. backend: of
    `torch.compile`. eager: classes of blocks that cannot be compiled, to which more are added."""
    for local in stages.values():
        unit, layers = model.units[local.placed.unit], local.placed.stage
        if unit.unit not in units:
            continue
        if unit.structure is None:
            warnings.warn(f"train.compile: {unit.unit} runs eager, for it has no list of blocks", stacklevel=2)
        where = f"{unit.unit} (layers {layers.first} to {layers.end - 1})"
        local.compiled = CompiledBlocks(blocks_of(unit, local.module), where, eager, backend)


def blocks_of(unit: Unit, module: Stage) -> list[nn.Module]:
    """Return the blocks that a stage holds; none for a user's own module."""
    structure, part = unit.structure, getattr(module, "model", None)
    if structure is None or part is None:
        return []
    return held_blocks(part.get_submodule(structure.blocks))


def release_sharded(modules: Iterable[Stage], shared: BucketedWeights) -> None:
    """Free the sharded weights of stages that `build_stages` left on the host, whose parts are in `shared`; move the
    rest to this rank's device."""
    device = shared.owned.comm.device
    for owned in (shared.owned, shared.fixed):
        for weight in (owned.weights[name] for name in owned.sharded):
            if weight.untyped_storage().nbytes():  # not those of an earlier generation
                weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                weight.untyped_storage().resize_(0)
    for stage in modules:
        stage.to(device)


def shard_stages(
    model: MultimodalModel, stages: Mapping[int, LocalStage], shared: BucketedWeights, layout: StateLayout
) -> None:
    """Let this rank's `stages` run with their sharded weights, those of each block gathered."""
    for index, local in stages.items():
        unit, module = local.placed.unit, local.module
        held = {name for name, _ in module.named_logical_parameters()}
        own = [share for share in shared.sharded if held.issuperset(share.bucket.names)]
        if not own:
            continue
        blocks = blocks_of(model.units[unit], module) if module.runs_blocks_once else []
        first = 0
        if not any(needs_gradient for _, needs_gradient in local.inbound.values()):
            trained = [module.layers.index(w.layer) for w in module.weights if w.canonical in shared.owned.weights]
            first = min(trained, default=len(module.layers))
        forward_only = sum("layers." in layer for layer in module.layers[:first])
        local.sharded = shared.stages[index] = ShardedStage(
            shared.owned, shared.fixed, blocks, own, layout.shard[unit], shared.sync.duplicates, forward_only
        )


@dataclass(slots=True)
class LocalStage:
    """A stage on this rank.

    outbound: consumer unit → boundary of the rows sent to it. inbound: producer unit → (boundary of its rows, True if
    they need gradients). needs_backward: this stage or an earlier one trains. gradients: the delayed weight gradients
    of the linear layers. loss_weights: loss → its weight. place: index of this rank among the ranks of the stage.
    dropout: wraps the stage's forwards. replaced: the layers that `close` restores. sharded: its sharded weights.
    compiled: its compiled blocks. fused: the modules that fused kernels replace.
    """

    placed: PlacedStage
    module: Stage
    outbound: Mapping[str, Boundary]
    inbound: Mapping[str, tuple[Boundary, bool]]
    needs_backward: bool
    gradients: WeightGradients
    loss_weights: Mapping[str, float]
    place: int = 0
    dropout: StageDropout | None = None
    replaced: ReplacedLayers | None = None
    fused: FusedModules | None = None
    sharded: ShardedStage | None = None
    compiled: CompiledBlocks | None = None

    @property
    def reports_losses(self) -> bool:
        """True for the first of the tensor-parallel ranks, which compute the same losses."""
        return self.place % self.placed.stage.tp == 0

    @property
    def reports_predictions(self) -> bool:
        """True for the rank that reports the predictions of the stage, or of its group of whole samples."""
        return self.place % (self.placed.stage.tp * self.placed.stage.cp) == 0

    @property
    def has_peers(self) -> bool:
        """True if the stage's forwards contain collectives."""
        return len(self.placed.stage.ranks) > 1 or self.sharded is not None

    def running(self, kind: ActionKind) -> AbstractContextManager[None]:
        """Context of an action of this kind, in which the stage has its weights."""
        return nullcontext() if self.sharded is None else self.sharded.running(kind)

    def close(self) -> None:
        """Restore the module's plain linear layers and remove hooks. May be called twice."""
        if self.compiled is not None:
            self.compiled.close()
        if self.dropout is not None:
            self.dropout.close()
        if self.sharded is not None:
            self.sharded.close()
        if self.replaced is not None:
            restore_linears(self.replaced)
            self.replaced = None
        if self.fused is not None:
            self.fused.restore()
            self.fused = None


def local_stages(
    model: MultimodalModel,
    plan: Plan,
    rank: int,
    modules: Mapping[int, Stage],
    boundaries: Sequence[Mapping[str, Boundary]],
    backward: Sequence[bool],
    kernels: Mapping[str, KernelSet],
) -> dict[int, LocalStage]:
    """Wrap `modules`, the stages of `rank` by number. boundaries: for every stage, by consumer unit. backward: for
    every stage, True if it or an earlier stage trains. kernels: by unit."""
    placed, before = plan.stages(), stages_before(plan)
    stages = {}
    for index, module in modules.items():
        own = placed[index]
        gradients = WeightGradients()
        fused = fuse(blocks_of(model.units[own.unit], module), kernels[own.unit])
        products = fp8_products(module, model.units[own.unit].fp8)
        inbound: dict[str, tuple[Boundary, bool]] = {}
        for source in before[index]:
            # The frozen rule depends only on layers, so the value is equal in all replicas of a unit.
            inbound[placed[source].unit] = boundaries[source][own.unit], backward[source]
        stages[index] = LocalStage(
            placed=own,
            module=module,
            outbound=boundaries[index],
            inbound=inbound,
            needs_backward=backward[index],
            gradients=gradients,
            dropout=StageDropout(module, model.units[own.unit]),
            loss_weights={name: loss.weight for name, loss in model.graph.losses.items()},
            place=own.stage.ranks.index(rank),
            replaced=replace_linears(module, gradients, module.undeferred, products),
            fused=fused,
        )
    return stages


def first_ranks_costs(comm: Comm, costs: StepCosts | None, plan: Plan) -> StepCosts | None:
    """Return the costs of rank 0: machines may have different costs, but all ranks must plan with equal ones."""
    digests = all_gather_object(comm, None if costs is None else digest(json.dumps(costs.to_document())))
    if len(set(digests)) == 1:
        return costs
    first = all_gather_object(comm, None if costs is None or comm.rank else costs.to_document())[0]
    return None if first is None else StepCosts.from_document(first, plan)
