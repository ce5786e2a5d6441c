"""Layer costs of a model on the devices to plan for: from a file, measured here, or modelled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dilatant.config import Config, UserError, list_problems
from dilatant.config.degrees import ONE, Degrees
from dilatant.cost.analytic import DILATANT, LayerShape, Runner, analytic_cost, analytic_costs, group_cost
from dilatant.cost.hardware import Link
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import CostModel, load_costs
from dilatant.cost.profile import LayerProbe, profile_layers
from dilatant.cost.quadratic import Quadratic
from dilatant.models.core.parallel_linear import ParallelLinear
from dilatant.models.experts.grouped_experts import is_fused
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.plan import Plan
from dilatant.planning.measuring.layer_probes import LONG_ROW, layer_probe
from dilatant.planning.measuring.layer_shapes import counted_shapes, layer_shapes
from dilatant.planning.problem.dense_rows import dense_rows, dense_tokens
from dilatant.planning.problem.describe_model import (
    BLOCK,
    EMBEDDING,
    HEAD,
    LayerType,
    ModelDescription,
    weights_by_layer,
)
from dilatant.planning.problem.planned_hardware import Target, is_same_hardware
from dilatant.planning.problem.searched_settings import degrees_by_kind, planned_degrees, tensor_shard
from dilatant.runtime.precision import pick_device
from dilatant.schedule.plan_scorer import step_costs

Say = Callable[[str], None]


def layer_costs(
    config: Config,
    model: ModelDescription,
    target: Target,
    say: Say = lambda text: None,
    known: CostModel | None = None,
    again: bool = True,
) -> CostModel:
    """Return the costs that `plan.costs` names; else measured, if `target` is local; else modelled, which their origin
    says.

    Measuring takes `plan.measure_seconds`; known, again: see `measure_layers`. Groups of unlike devices each have their
    own costs: a file counts for the group that it names, or for devices of its kind.

    Raises UserError for a file of other hardware (naming it), of another precision, or of other layers.
    """
    if target.groups:
        return _costs_of_groups(config, model, target, say)
    if config.plan.costs is not None:
        return read_costs(Path(config.plan.costs), model, target)
    if target.is_local:
        counts, seconds = measured_tokens(config), config.plan.measure_seconds
        degrees = planned_degrees(config.plan, model, target)
        return measure_layers(model, target, counts, 7, say, degrees, seconds, known, again)
    return modelled_costs(config, model, target)


def modelled_costs(config: Config, model: ModelDescription, target: Target, runner: Runner = DILATANT) -> CostModel:
    """Return the modelled costs of layers as `runner` computes them."""
    degrees = degrees_by_kind(model, planned_degrees(config.plan, model, target))
    per_node, slowest = target.cluster.reach, target.hardware.among(target.cluster.num_devices)
    return analytic_costs(counted_shapes(model), slowest, degrees, target.dtype, per_node, runner)


def _costs_of_groups(config: Config, model: ModelDescription, target: Target, say: Say) -> CostModel:
    file = None if config.plan.costs is None else _load(Path(config.plan.costs))
    known: set[str] = set()
    if file is not None:
        there = dict.fromkeys([file.hardware, *(own.hardware for own in file.groups.values())])
        known = {
            own.cluster.name
            for own in target.groups
            if own.cluster.name in file.groups or any(is_same_hardware(one, own.requested) for one in there)
        }
        if not known:
            kinds = ", ".join(repr(own.requested) for own in target.groups)
            raise UserError(f"plan.costs holds costs of {', '.join(map(repr, there))}, but groups have {kinds}")
    unnamed = config.model_copy(update={"plan": config.plan.model_copy(update={"costs": None})})
    groups = {
        own.cluster.name: layer_costs(config if own.cluster.name in known else unnamed, model, own, say)
        for own in target.groups
    }
    return replace(next(iter(groups.values())), groups=groups)


def _load(path: Path) -> CostModel:
    try:
        return load_costs(path)
    except OSError as error:
        raise UserError(f"plan.costs: {str(path)!r} cannot be read: {error.strerror}") from None


def read_costs(path: Path, model: ModelDescription, target: Target) -> CostModel:
    """Read a cost file that must fit target and model; of a file with groups, the target's costs. Raises UserError."""
    costs = _load(path)
    kinds = {own.hardware: own for own in reversed([*costs.groups.values()])}
    costs = costs.groups.get(target.cluster.name) or next(
        (own for kind, own in kinds.items() if is_same_hardware(kind, target.requested)), costs
    )
    if not is_same_hardware(costs.hardware, target.requested):
        raise UserError(
            f"{path} holds costs of {costs.hardware!r}, but the plan is for {target.requested!r}; profile there "
            f"(`dilatant profile`), or plan for that hardware (cluster.hardware)"
        )
    if costs.dtype != target.dtype:
        raise UserError(
            f"{path} holds costs in {costs.dtype}, but the run is in {target.dtype}; profile again, or set "
            "train.precision"
        )
    problems = misfits(costs, model)
    if problems:
        raise list_problems(f"{path} is of another model; profile this one (`dilatant profile`):", problems)
    return costs


def measure_layers(
    model: ModelDescription,
    target: Target,
    tokens: Sequence[int],
    repeats: int = 7,
    say: Say = lambda text: None,
    degrees: Iterable[Degrees] = (ONE,),
    seconds: float = math.inf,
    known: CostModel | None = None,
    again: bool = True,
) -> CostModel:
    """Measure every layer type on one device of this machine, at `degrees`.

    The computation of one tensor-parallel rank alone is measured: the layer with its share of heads, feed-forward and
    vocabulary. Collectives, and the part of a row that context parallelism leaves (`cost.analytic`), are modelled from
    the links of the target's hardware; the cost model's note says so. `tokens`: counts for the language model; encoders
    are measured at 1 to 8 images or clips (more on a GPU), rows of several samples at `dense_tokens`, and on a GPU at
    `long_row`, since it computes short ones at another speed. Within `seconds` those layer
    types come first that take most of a step; the others are modelled, see `profile_layers`. `known`: costs that were
    measured before. They are used when time runs out, and what they lack is measured first; without `again` nothing
    else is. Raises UserError like `degrees_by_kind`.
    """
    by_kind = degrees_by_kind(model, degrees)
    shapes = layer_shapes(model, guess=True)
    before = {} if known is None else {kind: _measured_of(own) for kind, own in known.layers.items()}
    # One rank alone: communication is added later, to measured and modelled shares alike.
    alone = replace(target.hardware, inside=Link(math.inf), between=Link(math.inf))
    counts = Counter(layer.kind for unit in model.spec.units for layer in unit.layers)
    shard = cache(tensor_shard)
    probes: list[tuple[bool, float, LayerProbe]] = []
    for entry in model.types:
        own = by_kind[entry.kind]
        shares = sorted({one.tp for one in own}) if entry.is_divided else [own[0].tp]
        for tp in shares:
            served = [one for one in own if not entry.is_divided or one.tp == tp]
            lacks = any(one not in before.get(entry.kind, ()) for one in served)
            if not (lacks or again):
                continue
            share = replace(entry, unit=shard(entry.unit, tp)) if entry.is_divided else entry
            modelled = analytic_cost(shapes[entry.kind], alone, target.dtype, Degrees(tp))
            several = dense_tokens(model, entry, tokens)
            is_dense = model.dense.get(entry.unit.unit, 1.0) > 1.0
            row = () if is_dense or pick_device().type != "cuda" else long_row(max(tokens))
            probe = layer_probe(share, pick_device(), target.activations, several, row)
            probe = replace(probe, degrees=Degrees(tp), modelled=modelled)
            seconds_of_all = counts[entry.kind] * probe.expected(max(probe.tokens or tokens))
            probes.append((known is not None and not lacks, -seconds_of_all, probe))
    ordered = [probe for *_, probe in sorted(probes, key=lambda entry: entry[:2])]
    # Never more threads than this process trains with (OMP_NUM_THREADS).
    threads = torch.get_num_threads()
    with _threads(min(target.threads, threads) if pick_device().type == "cpu" else threads):
        found = profile_layers(ordered, target.hardware.name, target.dtype, tokens, repeats, say, seconds)
    found = replace(found, layers={kind: found.layers[kind] for kind in by_kind if kind in found.layers})
    if any(own != [ONE] for own in by_kind.values()):
        found = _on_groups(found, model, target, shapes, by_kind)
    return found if known is None else _completed(found, known, by_kind)


def _measured_of(costs: Mapping[Degrees, LayerCost]) -> dict[Degrees, LayerCost]:
    return {degrees: cost for degrees, cost in costs.items() if cost.fit_error is not None}


def _completed(found: CostModel, known: CostModel, degrees: Mapping[str, Sequence[Degrees]]) -> CostModel:
    """Return the costs found now, completed by those `known` before for what was not measured now."""
    layers: dict[str, dict[Degrees, LayerCost]] = {}
    for kind, own in degrees.items():
        now = found.layers.get(kind, {})
        best = {**now, **_measured_of(known.layers.get(kind, {})), **_measured_of(now)}
        layers[kind] = {one: best[one] for one in own}
    is_used = any(_measured_of(own) != _measured_of(found.layers.get(kind, {})) for kind, own in layers.items())
    has_measured = any(map(_measured_of, found.layers.values()))
    return replace(
        found,
        layers=layers,
        origin="measured" if is_used else found.origin,
        note=found.note if has_measured else known.note,
        longest=min(found.longest, known.longest) if is_used else found.longest,
    )


def _on_groups(
    measured: CostModel,
    model: ModelDescription,
    target: Target,
    shapes: Mapping[str, LayerShape],
    degrees: Mapping[str, Sequence[Degrees]],
) -> CostModel:
    """Return the costs at `degrees` by layer type, from those of one tensor-parallel rank alone; undivided layers cost
    the same at every tp."""
    layers: dict[str, dict[Degrees, LayerCost]] = {}
    divided = {entry.kind for entry in model.types if entry.is_divided}
    for kind, shares in measured.layers.items():
        whole = None if kind in divided else next(iter(shares.values()))
        for own in degrees[kind]:
            links = target.hardware.group_links(own, target.cluster.reach)
            if (share := shares.get(Degrees(own.tp), whole)) is not None:
                cost = group_cost(share, shapes[kind], links, target.dtype, own)
                layers.setdefault(kind, {})[own] = cost
    source = target.hardware.source or target.hardware.name
    note = f"one tp rank's share measured; cp's part of a row modelled, and collectives, from links of: {source}"
    return replace(measured, layers=layers, note=f"{measured.note}; {note}")


def measured_tokens(config: Config) -> tuple[int, ...]:
    """Return token counts for the language model: four up to `data.max_length`, each twice the one before."""
    longest = config.data.max_length
    return tuple(sorted({max(1, longest // part) for part in (1, 2, 4, 8)}))


def long_row(longest: int) -> tuple[int, ...]:
    """Return the samples, each of `longest` tokens, of a row as long as those of training on GPUs. There are at most
    four samples, and none if a sample alone is as long."""
    count = min(4, LONG_ROW // longest)
    return (longest,) * count if count > 1 else ()


def costs_in_use(costs: CostModel, model: ModelDescription, targets: float, row: int, chunk: int | None) -> CostModel:
    """Return the costs as training meets them. The head runs only on the share `targets` of tokens that carry loss, by
    chunks if a microbatch of up to `row` tokens has more than `chunk` of them. Weight gradients are postponed only in
    linear layers, and never in the head. Only blocks are recomputed."""
    if costs.groups:
        return costs.mapped(lambda own: costs_in_use(own, model, targets, row, chunk))
    heads, blocks = model.kinds(HEAD), model.kinds(BLOCK)
    put_off = {entry.kind for entry in model.types if delays_weight_gradients(entry)}

    def used(kind: str, cost: LayerCost) -> LayerCost:
        if kind not in put_off:
            cost = replace(cost, splits=False)
        if kind in heads:
            cost = _on_targets(cost, targets)
            if chunk is not None and row * targets > chunk:
                return _in_chunks(cost, chunk / targets, row)
        if kind not in blocks:
            kept = cost.activation_bytes
            cost = replace(cost, recompute=ZERO, checkpoint_bytes=kept, attention=ZERO, attention_bytes=ZERO)
        return cost

    return replace(
        costs,
        layers={
            kind: {degrees: used(kind, cost) for degrees, cost in own.items()} for kind, own in costs.layers.items()
        },
    )


def described_costs(plan: Plan, model: ModelDescription, costs: CostModel, target: Target) -> StepCosts:
    """Return what the steps of `plan` cost; `costs` as training meets them (`costs_in_use`). Raises UserError if they
    lack a layer type or degree."""
    return replace(
        step_costs(plan, model.spec, costs, target.cluster, target.rules),
        item_tokens=model.item_tokens,
        media_pairs=model.media_pairs,
        dense=dense_rows(model, costs),
    )


def delays_weight_gradients(entry: LayerType) -> bool:
    """Return True if a split backward postpones most of a layer's weight gradients. That is so in linear layers and
    experts, but not in the head, or an embedding that may be tied to it (see `runtime.state.weight_gradients`)."""
    unit = entry.unit
    linear = {
        id(weight)
        for part in unit.parts
        for module in getattr(unit, part).modules()
        if type(module) in (nn.Linear, ParallelLinear) or is_fused(module)
        for weight in module.parameters(recurse=False)
    }
    own = [weight for _, weight in next(islice(weights_by_layer(unit), entry.index, None))]
    put_off = sum(weight.numel() for weight in own if id(weight) in linear)
    return entry.role not in (EMBEDDING, HEAD) and 2 * put_off > sum(weight.numel() for weight in own)


def _in_chunks(cost: LayerCost, tokens: float, row: int) -> LayerCost:
    """Return the cost of a head that holds the activations of at most `tokens` tokens at once, besides those of its
    norm, and the hidden states of all targets. In the backward of `row` tokens either a chunk or the norm takes the
    most memory, each with the gradients of these hidden states."""

    def of_chunk(whole: Quadratic, of_row: Quadratic) -> float:
        return whole.c + max(0.0, whole.b - of_row.b) * tokens

    chosen = cost.checkpoint_bytes
    activations = of_chunk(cost.activation_bytes, cost.row_bytes)
    working = of_chunk(cost.working_bytes, cost.row_working_bytes)
    of_norm = cost.row_working_bytes(row) - activations
    most = Quadratic(c=working) if working >= of_norm else Quadratic(b=of_norm / row)
    return replace(
        cost,
        recompute=cost.forward,
        activation_bytes=Quadratic(c=activations),
        frozen_bytes=ZERO,  # frozen heads count like trained ones
        frozen_working_bytes=ZERO,
        forward_bytes=ZERO,
        checkpoint_bytes=cost.row_bytes + chosen,
        working_bytes=chosen + most,
        in_chunks=True,
    )


def _on_targets(cost: LayerCost, share: float) -> LayerCost:
    names = ("forward", "input_gradient", "weight_gradient", "first_trainable", "weight_bytes", "checkpoint_bytes")
    grows = {
        **dict.fromkeys(names, ZERO),
        **dict.fromkeys(("activation_bytes", "frozen_bytes", "forward_bytes"), cost.row_bytes),
        **dict.fromkeys(("working_bytes", "frozen_working_bytes"), cost.row_working_bytes),
    }
    scaled: dict[str, Any] = {}
    for name, of_row in grows.items():
        whole = getattr(cost, name)
        linear = of_row.b + max(0.0, whole.b - of_row.b) * share
        scaled[name] = Quadratic(whole.a * share, linear, whole.c)
    return replace(cost, **scaled)


def misfits(costs: CostModel, model: ModelDescription) -> list[str]:
    """List layer types that the costs lack, or have with other weights."""
    parameters = {layer.kind: layer.parameters for unit in model.spec.units for layer in unit.layers}
    problems = []
    for kind, count in parameters.items():
        own = costs.layers.get(kind)
        if not own:
            problems.append(f"it has no layer type {kind!r}")
            continue
        degrees, cost = next(iter(own.items()))
        there, tp = cost.parameters, degrees.tp
        if not count <= there * tp <= count * tp and costs.origin != "synthetic":
            problems.append(f"{kind!r} has {there:,} parameters there, {count:,} in this model")
    return problems


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def degrees_of(costs: CostModel) -> list[Degrees]:
    """Return all degrees that any layer type has costs for."""
    return sorted({degrees for own in costs.layers.values() for degrees in own})
