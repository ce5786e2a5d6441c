"""Stage costs: the cost model summed over the layers of each stage of a plan, under the frozen rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import ONE, Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.cost.layer import frozen_work, on_groups, trainable_before, with_experts_on_ranks
from dilatant.cost.memory import BF16, MUON_SAVES, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.sync_time import shard_seconds, sharing
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import PlacedStage, Plan, Stage

KIND_ORDER = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Costs of stages as coefficient triples (per token², per token, per call) of the tokens of the stage's unit.

    `seconds` is `[stages, kinds, 3]` in the order F, B, I, W. `kept_bytes`, `weight_bytes`, `transient_bytes`,
    `forward_bytes` and `output_bytes` are `[stages, 3]` bytes per rank: activations from forward to backward, the part
    of them that a split backward keeps for W, memory held only while the stage runs a backward, and only while it runs
    a forward, and the output to the next stage. The following are
    bytes per rank, `[stages]`: `static_bytes` is held for the whole step and includes the rank's part of sharded
    optimizer state; its part `gradient_bytes` exists only from the stage's first weight gradients on; `sum_bytes` is
    used after the stage's last backward, to sum its largest gradient; `own_gradient_bytes` is held from then to the
    update, for local gradients kept in addition to the sums. `late_bytes` `[stages, 2, 3]` is used by a backward that
    has reached the stage's beginning, in addition to kept bytes: row 0 by a whole backward that makes the first weight
    gradients, including those of later layers; row 1 by an input-gradient half, including the activations that later
    layers keep for W. `items_per_token` `[stages]`: as in `UnitSpec`. `host_seconds` `[stages, kinds]`: those in which
    the host issues an action's operations; it takes no less. `gather_seconds` `[stages, 2]`: by how much the first
    forward of a step takes longer to gather weights that then stay, and how long it takes at least. `shard_bytes`
    `[stages, 3, 3]`: as `late_bytes`, for a sharded stage: row 0 by a whole backward while a block runs and gradients
    of the block behind are summed, row 1 when it has run, row 2 by W when it has run.
    """

    seconds: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    transient_bytes: NDArray[np.float64]
    forward_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    static_bytes: NDArray[np.float64]
    gradient_bytes: NDArray[np.float64]
    sum_bytes: NDArray[np.float64]
    own_gradient_bytes: NDArray[np.float64]
    late_bytes: NDArray[np.float64]
    items_per_token: NDArray[np.float64]
    host_seconds: NDArray[np.float64]
    shard_bytes: NDArray[np.float64]
    gather_seconds: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Costs of one unit's layers at some degrees: `seconds [layers, kinds, 3]`, bytes `[layers, 3]` unless noted.
    A stage holds `common_bytes`, a part of `kept_bytes`, only once. `static_bytes [layers]` assumes unsharded optimizer
    state, of which `shared_bytes [layers]` can be sharded; `tied_bytes`, `tied_shared_bytes [layers]`: the part that a
    holder of the first layer already has; `backward [layers]`: True if the layer or anything before it trains;
    `host_seconds [layers, kinds]`."""

    seconds: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    transient_bytes: NDArray[np.float64]
    forward_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    common_bytes: NDArray[np.float64]
    static_bytes: NDArray[np.float64]
    shared_bytes: NDArray[np.float64]
    tied_bytes: NDArray[np.float64]
    tied_shared_bytes: NDArray[np.float64]
    backward: NDArray[np.bool_]
    host_seconds: NDArray[np.float64]

    def static_shared_by(self, ranks: NDArray[np.float64] | float, layers: slice = slice(None)) -> NDArray[np.float64]:
        """Return `static_bytes` of `layers` when `ranks` ranks shard the optimizer state."""
        return self.static_bytes[layers] - self.shared_bytes[layers] * (1.0 - 1.0 / ranks)

    def twice(self, ranks: NDArray[np.float64] | float, layers: slice = slice(None)) -> NDArray[np.float64]:
        """Return the part of `static_shared_by` that a rank with the first layer already holds (tied weights)."""
        return self.tied_bytes[layers] - self.tied_shared_bytes[layers] * (1.0 - 1.0 / ranks)


def layer_table(
    unit: UnitSpec,
    upstream: bool,
    costs: CostModel,
    degrees: Degrees = ONE,
    rules: ParameterBytes = BF16,
    recompute: Sequence[Recompute] = (),
    on_node: int = 0,
    slower: tuple[float, float] = (1.0, 1.0),
) -> LayerTable:
    """Build the cost table of `unit`. upstream: True if anything in the units before it trains.

    recompute: by layer, default as in the unit. on_node, slower: see `with_experts_on_ranks`. Raises UserError when the
    cost model lacks a layer type or degree.
    """
    columns: dict[str, list[Any]] = {one.name: [] for one in fields(LayerTable)}
    again = recompute or (unit.recompute or "none",) * len(unit.layers)
    known: dict[tuple[LayerSpec, bool, Recompute], dict[str, Any]] = {}  # most blocks of a model are alike
    for layer, before, how in zip(unit.layers, trainable_before(unit.trainable, upstream), again, strict=True):
        alike = replace(layer, name=""), before, how
        if alike in known:
            for name, value in known[alike].items():
                columns[name].append(value)
            continue
        cost = costs.layer(layer.kind, degrees)
        if layer.experts:
            cost = with_experts_on_ranks(cost, degrees.ep, on_node, slower)
        cost = on_groups(cost, degrees.groups)
        work = frozen_work(cost, layer.trainable, before, how, rules.host_link)
        kinds = work.forward, work.backward, work.input_gradient, work.weight_gradient
        forward, inputs, weights = work.host
        held, trained, tied = layer.held(degrees), layer.held_trained(degrees), layer.held_before(degrees)
        saved = MUON_SAVES * layer.orthogonal
        row = {
            "seconds": [_triple(kind) for kind in kinds],
            "kept_bytes": _triple(work.kept_bytes),
            "weight_bytes": _triple(work.weight_bytes),
            "transient_bytes": _triple(work.transient_bytes),
            "forward_bytes": _triple(work.forward_bytes),
            "output_bytes": _triple(cost.output_bytes),
            "common_bytes": _triple(work.common_bytes),
            "static_bytes": rules.held(held, trained) - rules.spared(layer.held_in_four_bits(degrees)) - saved,
            "shared_bytes": rules.shared(trained, True, unit.name)
            + rules.shared(layer.held_frozen(degrees), False, unit.name)
            - saved,
            "tied_bytes": rules.of(tied, layer.trainable),
            "tied_shared_bytes": rules.shared(tied, layer.trainable, unit.name),
            "backward": layer.trainable or before,
            "host_seconds": [forward, inputs + weights, inputs, weights],
        }
        known[alike] = row
        for name, value in row.items():
            columns[name].append(value)
    trains = np.array(columns.pop("backward"), dtype=np.bool_)
    return LayerTable(backward=trains, **{name: np.array(values, dtype=np.float64) for name, values in columns.items()})


LayerTables = dict[tuple[object, ...], LayerTable]
"""Tables by unit, what its layers recompute, degrees and devices, under the same model, costs and rules."""


def stage_costs(
    plan: Plan,
    model: ModelSpec,
    costs: CostModel,
    rules: ParameterBytes = BF16,
    cluster: Cluster | None = None,
    known_tables: LayerTables | None = None,
) -> StageCosts:
    """Return the costs of every stage of `plan`, each on the devices of its group if `cluster` is heterogeneous.
    known_tables: tables of other plans, to which this plan's are added. Raises UserError when the cost model lacks a
    layer type or degree."""
    tables = {} if known_tables is None else known_tables
    known: dict[tuple[object, ...], tuple[NDArray[np.float64] | float, ...]] = {}  # mostly of another replica
    rows = []
    exchanged = {} if cluster is None else shard_seconds(plan, model, cluster, rules)
    for entry, shared_by in zip(plan.stages(), sharing(plan, model, rules)):
        stage, unit = entry.stage, model.unit(entry.unit)
        group = "" if cluster is None else cluster.at(stage.ranks[0]).name
        on_node, slower = _on_nodes(stage, cluster)
        again = plan.unit(entry.unit).recompute
        key = entry.unit, again, stage.degrees, group, on_node, slower
        if key not in tables:
            upstream = model.upstream_trainable(entry.unit)
            tables[key] = layer_table(unit, upstream, costs.on(group), stage.degrees, rules, again, on_node, slower)
        same = *key, stage.first, stage.end, entry.is_first, shared_by.tobytes()
        if same not in known:
            replicas = len(plan.unit(entry.unit).replicas)
            known[same] = _sum_stage(entry, unit, tables[key], shared_by, rules, replicas)
        if entry.index in exchanged:  # no action takes less than its collectives, and they delay it
            *least, once, delay = exchanged[entry.index]
            seconds, *rest, host, summing, _ = known[same]
            runs = np.asarray(seconds).any(axis=1) * np.array(least)
            first = np.array([delay * once, once])
            rows.append((seconds + np.outer(delay * runs, [0, 0, 1]), *rest, np.maximum(host, runs), summing, first))
            continue
        rows.append(known[same])
    return StageCosts(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))


def _on_nodes(stage: Stage, cluster: Cluster | None) -> tuple[int, tuple[float, float]]:
    """Return on how many ranks of its node a rank of a stage of several groups finds experts, and how much slower those
    of other nodes are (see `with_experts_on_ranks`)."""
    if cluster is None or stage.degrees.groups == 1:
        return 0, (1.0, 1.0)
    return min(Counter(map(cluster.node_of, stage.ranks)).values()), slower_between(cluster.at(stage.ranks[0]))


def slower_between(cluster: Cluster) -> tuple[float, float]:
    """Return how many times as long as inside a node bytes, and messages, take between equal nodes, if all devices of a
    node send through its ports at once."""
    share = cluster.between.bandwidth / cluster.gpus_per_node
    return max(1.0, cluster.inside.bandwidth / share), cluster.between.latency / max(cluster.inside.latency, 1e-9)


def _sum_stage(
    entry: PlacedStage,
    unit: UnitSpec,
    table: LayerTable,
    shared_by: NDArray[np.float64],
    rules: ParameterBytes,
    replicas: int,
) -> tuple[NDArray[np.float64] | float, ...]:
    """Sum the layers of one stage: the columns of `StageCosts`, in order."""
    degrees, layers = entry.stage.degrees, slice(entry.stage.first, entry.stage.end)
    kept, common, output = (table.kept_bytes[layers], table.common_bytes[layers], table.output_bytes[layers][-1])
    transient, forward = table.transient_bytes[layers], table.forward_bytes[layers]
    weight = table.weight_bytes[layers]
    held = kept.sum(axis=0) - common.sum(axis=0) + common.max(axis=0)
    if table.backward[layers][-1]:  # the output stays, as root of the backward
        held = held + output
    if not entry.is_first and table.backward[layers][0] and (kept[0] == common[0]).all():
        held = held + table.output_bytes[entry.stage.first - 1]  # received rows stay, not on the host
    static = table.static_shared_by(shared_by, layers).sum()
    if entry.is_first:
        static -= table.twice(shared_by, layers).sum()
    shards = rules.shard_of(unit.name) != "none" and bool((shared_by > 1).any())
    summing = np.zeros((3, 3))
    if shards:
        transient, forward, summing = _sharded(entry, unit, table, shared_by, rules)
        for trains in (True, False):
            parts = _held(unit, entry, trains) / shared_by
            static -= rules.spared_by_masters(unit.name, trains) * float(parts[shared_by > 1].sum())
    gradients = rules.gradients * np.array(
        [layer.held_trained(degrees, entry.is_first) for layer in unit.layers[layers]]
    )
    gradients = gradients / shared_by if shards else gradients
    summed = [] if shards else _summed(entry, unit, replicas)
    largest = rules.summed * max((elements for _, elements in summed), default=0.0)
    # With sharded state there is a second flat copy, which is ordered by shard and exists before the gradient itself is
    # freed. Local gradients that are kept until the update take a flat copy of each gradient with other holders.
    second = 0.0 if rules.zero == "none" else largest
    kept_gradients = sum(elements for elements, _ in summed) * rules.own_gradient + second
    return (
        table.seconds[layers].sum(axis=0),
        held,
        weight.sum(axis=0),
        *(np.maximum(stage_peaks(own, kept, [0])[0], 0.0) for own in (transient, forward)),
        output,
        static,
        gradients.sum(),
        largest + second,
        kept_gradients if rules.keeps_gradients else 0.0,
        _late(transient, kept, weight, gradients),
        degrees.dealt(unit.items_per_token)[0],
        table.host_seconds[layers].sum(axis=0),
        summing,
        np.zeros(2),
    )


def _held(unit: UnitSpec, entry: PlacedStage, trains: bool) -> NDArray[np.float64]:
    """Return [layers]: parameters of a stage's layers on one rank that train, or frozen ones that can be sharded."""
    rank, layers = (entry.stage.degrees, entry.is_first), unit.layers[entry.stage.first : entry.stage.end]
    return np.array([layer.held_trained(*rank) if trains else layer.held_frozen(*rank) for layer in layers])


EARLY = 1 / 3
"""Share of a block's gradients that exist when its backward holds most: those of the last products of the MLP."""


def _sharded(
    entry: PlacedStage, unit: UnitSpec, table: LayerTable, shared_by: NDArray[np.float64], rules: ParameterBytes
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the `transient_bytes` and `forward_bytes` [layers, 3] of a sharded stage, and its `shard_bytes`.

    Besides its parts it holds all weights outside blocks, those of the running block, and those of the block to run
    next with their parts in a message; in a backward those of blocks that have one. Gradients of a block are summed in
    flat copies (`ParameterBytes.sum_copies`) and a part, while the block before runs its backward; those of weights
    outside blocks at the end, until the first block of the next backward has run.
    """
    layers = slice(entry.stage.first, entry.stage.end)
    trained, frozen = (_held(unit, entry, trains) * (shared_by > 1) for trains in (True, False))
    is_block = np.array(["layers." in layer.name for layer in unit.layers[layers]])
    block, outside, part = trained * is_block, trained * ~is_block, 1.0 / shared_by.max()
    shard, gradient, always = rules.shard_of(unit.name), rules.gradient, np.array([0.0, 0.0, 1.0])
    weight = rules.weight if shard == "weights" else 0.0
    coming = rules.weight * (1.0 + part) * shard.startswith("weights")
    used = trained + frozen  # weights, of blocks in forwards and backwards, and of the layers before and behind
    ran, again = used * is_block, used * is_block * table.backward[layers]
    always_here, flat = weight * (used * ~is_block).sum(), gradient * (rules.sum_copies + part)
    behind = _behind(block)
    forward = always_here + weight * ran + coming * _behind(ran) + weight * _ahead(ran) * ~is_block
    if shard == "weights_by_step":  # all are counted as whole, also those that the first forward has yet to gather
        forward = np.maximum(0.0, forward - rules.weight * (ran.sum() - ran.cumsum()))
    gathered = always_here + weight * (again + (1.0 + part) * _ahead(again) + _behind(again) * ~is_block)
    gathered *= table.backward[layers]
    summed = flat * np.where(behind > 0.0, behind, outside.sum())
    backward = gathered + gradient * np.cumsum(outside[::-1])[::-1]
    end = backward + (gradient + flat) * block
    end[0] = max(end[0], always_here + outside.sum() * (gradient + flat))
    transient, kept, summing = table.transient_bytes[layers], table.kept_bytes[layers], np.zeros((3, 3))
    running, flies = backward + gradient * EARLY * block + summed, (behind > 0.0) & table.backward[layers]
    if flies.any():
        beside = transient + np.outer(running, always)
        beside[~flies] = -np.inf
        summing[0] = stage_peaks(beside, kept, [0])[0]
    transient = transient + np.outer(np.where(flies, gathered, running), always)
    last = len(end) - 1 - int(end[::-1].argmax())
    summing[1] = end[last] * always + table.output_bytes[layers][last] - kept[last:].sum(axis=0)
    summing[2] = (end - gathered)[last] * always - table.weight_bytes[layers][last:].sum(axis=0)
    return transient, table.forward_bytes[layers] + np.outer(forward, always), summing


def _ahead(block: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(0.0, block[:-1])


def _behind(block: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(block[1:], 0.0)


def stage_peaks(transient: NDArray[np.float64], kept: NDArray[np.float64], cuts: Sequence[int]) -> NDArray[np.float64]:
    """Return the peak of each stage's layers beyond all kept bytes of the stage: [stages, ...] of [layers, ...].
    While a layer runs, later layers keep no activations: not yet in the forward, no longer in the backward."""
    at, until = np.array(cuts), np.cumsum(kept, axis=0)
    return np.asarray(np.maximum.reduceat(transient + until, at, axis=0) - until[[*at[1:] - 1, -1]])


def _late(
    own: NDArray[np.float64], kept: NDArray[np.float64], weight: NDArray[np.float64], gradients: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [2, 3]: the bytes of the first of a stage's largest layers beyond all kept bytes, as in
    `stage_peaks`. Row
    0 adds the gradients [layers] of later layers, row 1 the activations [layers, 3] that they keep for W."""
    first = int(own[:, 1].argmax())
    held = own[first] - kept[first + 1 :].sum(axis=0)
    made = np.array([0.0, 0.0, gradients[first + 1 :].sum()])
    return np.stack([held + made, held + weight[first + 1 :].sum(axis=0)])


def _summed(entry: PlacedStage, unit: UnitSpec, replicas: int) -> list[tuple[float, float]]:
    """Return for each trained layer of a stage (elements with other holders, elements of its largest such weight).
    Other holders come from replicas, context parallelism, tensor parallelism that does not divide the layer, and the
    other end of a tied weight."""
    stage, degrees, layers = entry.stage, entry.stage.degrees, unit.layers
    found = []
    for number in range(stage.first, stage.end):
        layer = layers[number]
        parts = layer.parts(degrees)
        if not layer.trainable:
            continue
        if replicas * degrees.ranks > parts:
            held, largest = layer.held_beside_experts(degrees), layer.largest / parts
            if replicas * degrees.ranks > layer.expert_parts(degrees):
                held = layer.held(degrees)
                largest = max(largest, layer.largest_of_experts / layer.expert_parts(degrees))
            held -= layer.held_before(degrees) if entry.is_first else 0.0
            if layer.orthogonal:  # a bucket has a matrix for every holder, of this layer or the next
                largest = min(largest * replicas * degrees.ranks, layer.orthogonal * (stage.end - stage.first))
            found.append((held * layer.trained_share, largest))
        elif number == 0 or not entry.is_first:
            ends = layers[stage.end :] if number == 0 else (layer,)
            tied = max((end.tied for end in ends), default=0) / parts
            found.append((tied, tied))
    return found


def _triple(value: Quadratic) -> tuple[float, float, float]:
    return value.a, value.b, value.c
