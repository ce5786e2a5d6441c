"""Stage costs: the cost model summed over the layers of each stage of a plan, under the frozen rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.config.recompute import Recompute
from dilatant.cost.degrees import Degrees
from dilatant.cost.layer import frozen_work, trainable_before, with_experts_on_ranks
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.state_sharing import sharing
from dilatant.plan.model_spec import ModelSpec, UnitSpec
from dilatant.plan.plan import PlacedStage, Plan

KIND_ORDER = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Costs of stages as coefficient triples (per token², per token, per call) of the tokens of the stage's unit.

    `seconds` is `[stages, kinds, 3]` in the order F, B, I, W. `kept_bytes`, `weight_bytes`, `transient_bytes` and
    `output_bytes` are `[stages, 3]` bytes per rank: activations from forward to backward, the part of them that a split
    backward keeps for W, memory held only while the stage runs, and the output to the next stage. The following are
    bytes per rank, `[stages]`: `static_bytes` is held for the whole step and includes the rank's part of sharded
    optimizer state; its part `gradient_bytes` exists only from the stage's first weight gradients on; `sum_bytes` is
    used after the stage's last backward, to sum its largest gradient; `own_gradient_bytes` is held from then to the
    update, for local gradients kept in addition to the sums. `late_bytes` `[stages, 2, 3]` is used by a backward that
    has reached the stage's beginning, in addition to kept bytes: row 0 by a whole backward that makes the first weight
    gradients, including those of later layers; row 1 by an input-gradient half, including the activations that later
    layers keep for W. `items_per_token` `[stages]`: as in `UnitSpec`.
    """

    seconds: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    transient_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    static_bytes: NDArray[np.float64]
    gradient_bytes: NDArray[np.float64]
    sum_bytes: NDArray[np.float64]
    own_gradient_bytes: NDArray[np.float64]
    late_bytes: NDArray[np.float64]
    items_per_token: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Costs of one unit's layers at one (tp, cp): `seconds [layers, kinds, 3]`, bytes `[layers, 3]` unless noted.
    A stage holds `common_bytes`, a part of `kept_bytes`, only once. `static_bytes [layers]` assumes unsharded optimizer
    state, of which `shared_bytes [layers]` can be sharded; `tied_bytes`, `tied_shared_bytes [layers]`: the part that a
    holder of the first layer already has; `backward [layers]`: True if the layer or anything before it trains."""

    seconds: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    transient_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    common_bytes: NDArray[np.float64]
    static_bytes: NDArray[np.float64]
    shared_bytes: NDArray[np.float64]
    tied_bytes: NDArray[np.float64]
    tied_shared_bytes: NDArray[np.float64]
    backward: NDArray[np.bool_]

    def static_shared_by(
        self, ranks: NDArray[np.float64] | float, layers: slice = slice(None)
    ) -> NDArray[np.float64]:
        """Return `static_bytes` of `layers` when `ranks` ranks shard the optimizer state."""
        return self.static_bytes[layers] - self.shared_bytes[layers] * (1.0 - 1.0 / ranks)

    def twice(self, ranks: NDArray[np.float64] | float, layers: slice = slice(None)) -> NDArray[np.float64]:
        """Return the part of `static_shared_by` that a rank with the first layer already holds (tied weights)."""
        return self.tied_bytes[layers] - self.tied_shared_bytes[layers] * (1.0 - 1.0 / ranks)


def layer_table(
    unit: UnitSpec,
    upstream: bool,
    costs: CostModel,
    tp: int = 1,
    cp: int = 1,
    rules: ParameterBytes = BF16,
    recompute: Sequence[Recompute] = (),
    ep: int = 1,
) -> LayerTable:
    """Build the cost table of `unit`. upstream: True if anything in the units before it trains.

    recompute: by layer, default as in the unit; ep: expert-parallel degree. Raises UserError when the cost model lacks
    a layer type or degree.
    """
    seconds, kept, weight, transient, output, common, static, shared = ([] for _ in range(8))
    tied = [layer.held_before(tp) for layer in unit.layers]
    again = recompute or (unit.recompute or "none",) * len(unit.layers)
    ahead = trainable_before(unit.trainable, upstream)
    for layer, before, how in zip(unit.layers, ahead, again, strict=True):
        cost = costs.layer(layer.kind, Degrees(tp, cp))
        if layer.experts:
            cost = with_experts_on_ranks(cost, ep)
        work = frozen_work(cost, layer.trainable, before, how)
        seconds.append(
            [_triple(q) for q in (work.forward, work.backward, work.input_gradient, work.weight_gradient)]
        )
        kept.append(_triple(work.kept_bytes))
        weight.append(_triple(work.weight_bytes))
        transient.append(_triple(work.transient_bytes))
        output.append(_triple(cost.output_bytes))
        common.append(_triple(work.common_bytes))
        static.append(
            rules.held(layer.held(tp, ep), layer.held_trained(tp, ep))
            - rules.spared(layer.held_in_four_bits(tp))
        )
        shared.append(rules.shared(layer.held_trained(tp, ep), True))
    trains = np.logical_or.accumulate(np.asarray([upstream, *unit.trainable]))[1:]
    columns = {
        "seconds": seconds,
        "kept_bytes": kept,
        "weight_bytes": weight,
        "transient_bytes": transient,
        "output_bytes": output,
        "common_bytes": common,
        "static_bytes": static,
        "shared_bytes": shared,
        "tied_bytes": [rules.of(own, layer.trainable) for own, layer in zip(tied, unit.layers)],
        "tied_shared_bytes": [rules.shared(own, layer.trainable) for own, layer in zip(tied, unit.layers)],
    }
    return LayerTable(
        backward=trains, **{name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
    )


def stage_costs(
    plan: Plan,
    model: ModelSpec,
    costs: CostModel,
    rules: ParameterBytes = BF16,
    cluster: Cluster | None = None,
) -> StageCosts:
    """Return the costs of every stage of `plan`, each on the devices of its group if `cluster` is heterogeneous.
    Raises UserError when the cost model lacks a layer type or degree."""
    tables: dict[tuple[str, int, int, int, str], LayerTable] = {}
    placed = plan.stages()
    seconds = np.empty((len(placed), len(KIND_ORDER), 3))
    kept, weight, transient, output = (np.empty((len(placed), 3)) for _ in range(4))
    late = np.empty((len(placed), 2, 3))
    static, gradient, summed, own_gradient = (np.empty(len(placed)) for _ in range(4))
    shared_by = sharing(plan, model, rules)
    columns = seconds, kept, weight, transient, output, static, gradient, summed, own_gradient, late
    alike: dict[tuple[object, ...], int] = {}  # index of the first equal stage, mostly of another replica
    for entry in placed:
        group = "" if cluster is None else cluster.at(entry.stage.ranks[0]).name
        key = entry.unit, entry.stage.tp, entry.stage.cp, entry.stage.ep, group
        same = (
            *key,
            entry.stage.first,
            entry.stage.end,
            entry.is_first,
            shared_by[entry.index].tobytes(),
        )
        first = alike.setdefault(same, entry.index)
        if first < entry.index:
            for column in columns:
                column[entry.index] = column[first]
            continue
        if key not in tables:
            upstream = model.upstream_trainable(entry.unit)
            again = plan.unit(entry.unit).recompute
            tables[key] = layer_table(
                model.unit(entry.unit), upstream, costs.on(group), *key[1:3], rules, again, key[3]
            )
        table, layers = tables[key], slice(entry.stage.first, entry.stage.end)
        seconds[entry.index] = table.seconds[layers].sum(axis=0)
        common = table.common_bytes[layers]
        kept[entry.index] = table.kept_bytes[layers].sum(axis=0) - common.sum(axis=0) + common.max(axis=0)
        if table.backward[entry.stage.end - 1]:  # the output stays, as root of the backward
            kept[entry.index] += table.output_bytes[entry.stage.end - 1]
        weight[entry.index] = table.weight_bytes[layers].sum(axis=0)
        transient[entry.index] = _transient(table.transient_bytes[layers], table.kept_bytes[layers])
        output[entry.index] = table.output_bytes[entry.stage.end - 1]
        static[entry.index] = table.static_shared_by(shared_by[entry.index], layers).sum()
        if entry.is_first:
            static[entry.index] -= table.twice(shared_by[entry.index], layers).sum()
        own = model.unit(entry.unit).layers[layers]
        gradients = rules.gradients * np.array(
            [
                layer.held_trained(entry.stage.tp, entry.stage.ep)
                - (layer.held_before(entry.stage.tp) * layer.trained_share if entry.is_first else 0.0)
                if layer.trainable
                else 0.0
                for layer in own
            ]
        )
        gradient[entry.index] = gradients.sum()
        held = table.transient_bytes[layers], table.kept_bytes[layers], table.weight_bytes[layers]
        late[entry.index] = _late(*held, gradients)
        summed[entry.index] = _sum_bytes(entry, plan, model, rules)
        own_gradient[entry.index] = _own_gradient_bytes(entry, plan, model, rules)
    items = np.asarray([model.unit(entry.unit).items_per_token for entry in placed])
    return StageCosts(*columns, items_per_token=items)


def _transient(own: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the peak [3] of a stage's layers, [layers, 3] each, beyond all kept bytes of the stage.
    While a layer runs, later layers keep no activations: not yet in the forward, no longer in the backward."""
    behind = np.cumsum(kept[::-1], axis=0)[::-1] - kept
    return np.asarray(np.maximum(own - behind, 0.0).max(axis=0))


def _late(
    own: NDArray[np.float64],
    kept: NDArray[np.float64],
    weight: NDArray[np.float64],
    gradients: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return [2, 3]: the bytes of the first of a stage's largest layers beyond all kept bytes, as in `_transient`. Row
    0 adds the gradients [layers] of later layers, row 1 the activations [layers, 3] that they keep for W."""
    first = int(own[:, 1].argmax())
    held = own[first] - kept[first + 1 :].sum(axis=0)
    made = np.array([0.0, 0.0, gradients[first + 1 :].sum()])
    return np.stack([held + made, held + weight[first + 1 :].sum(axis=0)])


def _sum_bytes(entry: PlacedStage, plan: Plan, model: ModelSpec, rules: ParameterBytes) -> float:
    """Return the buffer bytes to sum the stage's largest gradient over its holders: a flat copy and, with sharded
    state, a second one, which is ordered by shard and exists before the gradient itself is freed."""
    return _largest_sum(entry, plan, model, rules) * (1.0 if rules.zero == "none" else 2.0)


def _own_gradient_bytes(entry: PlacedStage, plan: Plan, model: ModelSpec, rules: ParameterBytes) -> float:
    """Return the bytes in addition to the gradients at the end of a step if local gradients are kept until the update:
    a flat copy of each gradient with other holders, and the second copy (`_sum_bytes`) of the last."""
    if not rules.keeps_gradients:
        return 0.0
    copies = sum(held for held, _ in _summed(entry, plan, model))
    second = 0.0 if rules.zero == "none" else _largest_sum(entry, plan, model, rules)
    return copies * rules.own_gradient + second


def _largest_sum(entry: PlacedStage, plan: Plan, model: ModelSpec, rules: ParameterBytes) -> float:
    """Return the bytes of the stage's largest gradient that other ranks hold as well."""
    return rules.summed * max((largest for _, largest in _summed(entry, plan, model)), default=0.0)


def _summed(entry: PlacedStage, plan: Plan, model: ModelSpec) -> list[tuple[float, float]]:
    """Return for each trained layer of a stage (elements with other holders, elements of its largest such weight).
    Other holders come from replicas, context parallelism, tensor parallelism that does not divide the layer, and the
    other end of a tied weight."""
    stage, layers = entry.stage, model.unit(entry.unit).layers
    replicas = len(plan.unit(entry.unit).replicas)
    found = []
    for number in range(stage.first, stage.end):
        layer = layers[number]
        part = stage.tp if layer.divided else 1
        if not layer.trainable:
            continue
        if replicas * stage.cp > 1 or part < stage.tp:
            held = layer.held_beside_experts(stage.tp)
            if replicas > 1 or stage.ep == 1:
                held = layer.held(stage.tp, stage.ep)
            held -= layer.held_before(stage.tp) if entry.is_first else 0.0
            found.append((held * layer.trained_share, layer.largest / part))
        elif number == 0 or not entry.is_first:
            ends = layers[stage.end :] if number == 0 else (layer,)
            tied = max((end.tied for end in ends), default=0) / part
            found.append((tied, tied))
    return found


def _triple(value: Quadratic) -> tuple[float, float, float]:
    return value.a, value.b, value.c
