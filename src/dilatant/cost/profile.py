"""Layer profiling: measure forward, input gradient and weight gradient at several token counts, and fit the costs.

This package contains no model code: callers pass functions that build a layer and its inputs. Importing this module
imports no torch; measuring does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilatant.config.degrees import ONE, Degrees
from dilatant.config.errors import UserError
from dilatant.cost.clock import Clock, deadlines, now
from dilatant.cost.dense_probe import CallArguments, dense_seconds
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic, fit

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """Description of one layer type at some degrees for measuring.

    `build()`: makes the layer, on its device and in its dtype, with every parameter trainable; under tensor parallelism
    one rank's shard. `inputs(tokens)`: makes its positional and keyword arguments for one sample of `tokens` tokens
    (before cp splits them); the first floating-point tensor among the positional ones is its input.
    `keep`: a `context_fn` of torch's `checkpoint` that keeps attention, whose first context has `nbytes`.
    `tokens`: token counts to measure at instead of the common ones. `square`: False if nothing grows with the square of
    the tokens, because more tokens are more images that do not attend to each other. `checkpoint_share`: fraction of
    the input that is kept for recomputation, under tensor parallelism the rank's tokens. `before_chunks(layer)`: the
    part that runs on whole rows while the rest runs in chunks. `blocks(layer)`: the blocks in it that get tensors
    shared by all blocks of a stage. `packed(lengths)`: arguments of a block for a row of several samples. `row`:
    samples of a row to measure besides, which is as long as those of training. `dense`: tokens of rows of two samples
    to measure if the block's attention computes extra pairs in them. `modelled`: modelled cost, which divides the time
    budget among probes and replaces omitted measurements.
    """

    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], CallArguments]
    degrees: Degrees = ONE
    keep: Callable[[], tuple[Any, Any]] | None = None
    tokens: tuple[int, ...] | None = None
    square: bool = True
    checkpoint_share: float = 1.0
    before_chunks: Callable[[nn.Module], Callable[..., Any]] | None = None
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    packed: Callable[[Sequence[int]], CallArguments] | None = None
    row: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    modelled: LayerCost | None = None

    def expected(self, tokens: float) -> float:
        """Return the modelled seconds of a forward and a backward; without a model, the tokens."""
        return tokens if self.modelled is None else self.modelled.pass_seconds(tokens) + 1e-9


Measurement = Mapping[str, float]
"""Seconds and bytes of one layer for one row, by their names in `LayerCost`; the row's `tokens`, and the sum of the
`squares` of its samples' tokens if it has several."""

PASSES = 14
"""Approximate number of forwards and backwards in the shortest measurement of a layer at one token count."""


def profile_layers(
    probes: Sequence[LayerProbe],
    hardware: str,
    dtype: str,
    tokens: Sequence[int] = (64, 256, 1024, 4096),
    repeats: int = 7,
    progress: Callable[[str], None] | None = None,
    seconds: float = math.inf,
) -> CostModel:
    """Measure every probe, in this order, and fit T(x) = ax² + bx + c.

    The probes divide the time limit `seconds` in proportion to their modelled costs: each is measured up to `repeats`
    times, and none begins after the limit. A probe that was not measured at all of its token counts keeps its modelled
    cost, scaled by its measured over modelled seconds where it was measured, else by that ratio of all measured probes;
    its `fit_error` is None. `progress` gets the name of each measurement. Raises UserError if two probes have the same
    type and degree, or if a layer's first argument or output is not a floating-point tensor.
    """
    layers: dict[str, dict[Degrees, LayerCost]] = {}
    ratios, everything, until = dict[tuple[str, Degrees], float](), _Pairs(), now() + seconds
    budget = "" if math.isinf(seconds) else f" for {seconds:g} s at most"
    weights = [sum(map(probe.expected, probe.tokens or tokens)) for probe in probes]
    for number, (probe, end) in enumerate(zip(probes, deadlines(until, weights), strict=True), 1):
        degrees = probe.degrees.without_experts
        if degrees in layers.setdefault(probe.kind, {}):
            raise UserError(f"layer type {probe.kind!r} at {probe.degrees} is to be measured twice")
        found, pairs = None, _Pairs()
        if now() < until:
            if progress is not None:
                what = f"{number} of {len(probes)}, {probe.kind} at {probe.degrees}"
                progress(f"measuring layers{budget}: {what}")
            found = _measured(probe, tokens, repeats, (end, until), pairs, _ratio(everything))
            everything += pairs
        if found is None:
            ratios[probe.kind, degrees] = _ratio(pairs)
        layers[probe.kind][degrees] = found or probe.modelled or LayerCost(ZERO, ZERO, ZERO, ZERO)
    for (kind, degrees), ratio in ratios.items():
        layers[kind][degrees] = layers[kind][degrees].slower(ratio or _ratio(everything) or 1.0)
    origin, note = "measured", f"tokens {list(tokens)}, median of {repeats}{budget and ' or fewer'}"
    if probes and len(ratios) == len(probes):
        origin, note = "analytic", "from FLOPs and bytes, not measured"
    return CostModel(hardware, origin, dtype, layers, note, max(tokens))


_Pairs = list[tuple[float, float]]
"""(measured, modelled) seconds of the same work."""


def _ratio(pairs: _Pairs) -> float:
    """Return measured over modelled seconds; 0 if nothing was measured."""
    measured, modelled = (sum(seconds) for seconds in zip(*pairs, strict=True)) if pairs else (0.0, 1.0)
    return measured / modelled


def _measured(
    probe: LayerProbe, tokens: Sequence[int], repeats: int, ends: tuple[float, float], pairs: _Pairs, ratio: float
) -> LayerCost | None:
    """Return the fitted cost of a layer; None if time runs out before all token counts are measured. ends: end of this
    layer's time, and of all measuring. pairs: measurements are appended to it. ratio: of earlier layers."""
    layer = probe.build()
    rows: list[tuple[int, ...]] = [(count,) for count in sorted(probe.tokens or tokens)]
    rows += [probe.row] if probe.row else []
    expected = [sum(map(probe.expected, row)) for row in rows]
    measured: list[Measurement] = []
    for row, modelled, end in zip(rows, expected, deadlines(ends[0], expected), strict=True):
        if now() + PASSES * modelled * (_ratio(pairs) or ratio) > ends[1]:
            return None
        measured.append(found := measure(layer, probe, row, repeats, end))
        if probe.modelled is not None:
            seconds = found["forward"] + found["input_gradient"] + found["weight_gradient"]
            pairs.append((seconds, modelled))
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    cost = fit_layer(measured, parameters, probe.square)
    return replace(cost, dense_seconds=_dense_seconds(layer, probe, repeats, ends))


def _dense_seconds(
    layer: nn.Module, probe: LayerProbe, repeats: int, ends: tuple[float, float]
) -> tuple[tuple[int, float], ...]:
    if not probe.dense or probe.packed is None or probe.blocks is None:
        return ()
    (block,) = probe.blocks(layer)
    found: list[tuple[int, float]] = []
    for count in probe.dense:
        if now() < ends[1]:
            calls = probe.inputs(count), probe.packed((count - count // 2, count // 2))
            found.append((count, dense_seconds(layer, block, *calls, repeats, ends[0])))
    return tuple(found)


def fit_layer(measured: Sequence[Measurement], parameters: int, square: bool = True) -> LayerCost:
    """Fit the cost of a layer; `fit_error` is the largest relative error over its forward and backward seconds.

    Weight gradients get no quadratic term: they grow linearly, so the term would be noise that longer rows amplify. The
    host's seconds are the least of all rows: they do not depend on tokens, and interruptions only add to them.
    """
    rows = [(entry["tokens"], entry.get("squares", entry["tokens"] ** 2)) for entry in measured]
    errors: list[float] = []

    def fitted(name: str) -> Quadratic:
        values = [float(entry[name]) for entry in measured]
        curved = square and name != "weight_gradient"
        if min(values) <= 0:
            # A layer without parameters has no weight gradient, one without saved tensors no activations.
            positive = [(row, value) for row, value in zip(rows, values, strict=True) if value > 0]
            if not positive:
                return ZERO
            return fit([row for row, _ in positive], [value for _, value in positive], curved)[0]
        found, error = fit(rows, values, curved)
        if name in ("forward", "input_gradient", "weight_gradient", "first_trainable"):
            errors.append(error)
        return found

    curves: dict[str, Any] = {name: fitted(name) for name in measured[0] if name not in ("tokens", "squares", "host")}
    host = min(entry.get("host", 0.0) for entry in measured)
    error = round(max(errors), 4) if errors else None
    return LayerCost(**curves, parameters=parameters, host=host, fit_error=error)


def measure(
    layer: nn.Module, probe: LayerProbe, row: Sequence[int], repeats: int, end: float = math.inf
) -> Measurement:
    """Measure one layer on a row of samples of so many tokens: medians of `repeats` runs, with the variants alternating
    so that drift affects all equally. Fewer runs, at least one, are made if they would end after `end`, a time of
    `now`.

    The weight gradient is the seconds of a full backward minus those of a backward to the input only. The backward of
    the first trainable layer and the one with recomputation are run as such. Of a GPU, these are the device's seconds;
    the host's are the mean of a forward and a full backward.
    """
    import torch
    from torch.utils.checkpoint import checkpoint, noop_context_fn

    if len(row) == 1:
        args, kwargs = probe.inputs(row[0])
    else:
        assert probe.packed is not None, f"layer type {probe.kind!r} takes no row of several samples"
        args, kwargs = probe.packed(row)
    source = next(
        (number for number, value in enumerate(args) if torch.is_tensor(value) and value.is_floating_point()), None
    )
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    clock = Clock(next((value.device for value in args if torch.is_tensor(value)), torch.device("cpu")))
    taken: dict[str, list[float]] = {}
    issued: list[float] = []  # seconds of the host for a forward and a full backward

    def forward(
        to_input: bool, recompute: Callable[[], tuple[Any, Any]] | None = None, run: Callable[..., Any] = layer
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = list(args)
        wanted: list[torch.Tensor] = []
        if source is not None and to_input:
            values[source] = values[source].detach().requires_grad_()
            wanted.append(values[source])
        result = (
            checkpoint(run, *values, use_reentrant=False, context_fn=recompute, **kwargs)
            if recompute is not None
            else run(*values, **kwargs)
        )
        return _first_tensor(result, probe.kind), wanted

    def backward(name: str, to_input: bool, to_weights: bool, recompute: Callable[[], tuple[Any, Any]] | None) -> None:
        for parameter in parameters:
            parameter.requires_grad_(to_weights)
        with clock.into(taken.setdefault(f"{name} forward", []), sum(issued[:1])):
            output, wanted = forward(to_input, recompute)
        wanted += parameters if to_weights else []
        if not (wanted and output.requires_grad):
            taken.setdefault(name, []).append(0.0)
            return
        gradient = torch.ones_like(output)
        with clock.into(taken.setdefault(name, []), sum(issued)):
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)

    def issue() -> None:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with clock.issuing_into(issued):
            output, wanted = forward(True)
        wanted += parameters
        if wanted and output.requires_grad:
            gradient = torch.ones_like(output)
            with clock.issuing_into(issued):
                torch.autograd.grad(output, wanted, gradient, allow_unused=True)

    variants: dict[str, tuple[bool, bool, Callable[[], tuple[Any, Any]] | None]] = {
        "input": (True, False, None),
        "both": (True, True, None),
        "weights": (False, True, None),
        "recomputed": (True, True, noop_context_fn),
    }
    attention_bytes = 0
    if probe.keep is not None:
        contexts = probe.keep()
        forward(True, lambda: contexts)
        attention_bytes = contexts[0].nbytes
        if attention_bytes:
            variants["kept"] = (True, True, probe.keep)
    began = now()
    for run in range(repeats + 1):
        began, last = now(), began
        if run > 1 and began + 2 * (began - last) > end:  # counting bytes takes about as long as a run
            break
        for name, (to_input, to_weights, recompute) in variants.items():
            backward(name, to_input, to_weights, recompute)
        if run == 0:
            taken.clear()  # the first run allocates, compiles and warms up
            if clock.is_host_apart:
                issue()
    for parameter in parameters:
        parameter.requires_grad_(True)
    seconds = {name: statistics.median(values) for name, values in taken.items()}

    def bytes_of(run: Callable[..., Any]) -> tuple[int, int, int, int]:
        """Return saved bytes, the weight half's, the output's, and the working memory of the backward."""

        def once() -> torch.Tensor:
            return forward(True, run=run)[0]

        return *_saved_bytes(layer, once), _working_bytes(clock.device, once)

    kept, weight, output, working = bytes_of(layer)
    before = None if probe.before_chunks is None else probe.before_chunks(layer)
    of_row, _, _, working_of_row = (0, 0, 0, 0) if before is None else bytes_of(before)
    for parameter in parameters:
        parameter.requires_grad_(False)
    frozen, _, _, working_frozen = bytes_of(layer)
    with torch.no_grad():
        alone = _most_bytes(clock.device, lambda: forward(to_input=False))
    own = 0 if source is None else int(args[source].numel() * args[source].element_size())
    for parameter in parameters:
        parameter.requires_grad_(True).grad = None
    return {
        "tokens": sum(row),
        "squares": sum(tokens**2 for tokens in row),
        "host": sum(issued) / 2,
        "forward": seconds["both forward"],
        "input_gradient": seconds["input"],
        "weight_gradient": max(0.0, seconds["both"] - seconds["input"]),
        "first_trainable": seconds["weights"],
        "recompute": max(0.0, seconds["recomputed"] - seconds["both"]),
        "attention": max(0.0, seconds["recomputed"] - seconds["kept"]) if attention_bytes else 0.0,
        "activation_bytes": kept,
        "attention_bytes": attention_bytes,
        "working_bytes": working,
        "frozen_bytes": frozen,
        "weight_bytes": weight,
        "checkpoint_bytes": int(own * probe.checkpoint_share),
        "output_bytes": output,
        "row_bytes": of_row,
        "row_working_bytes": working_of_row,
        "common_bytes": 0
        if probe.blocks is None
        else _common_bytes(probe.blocks(layer), lambda: forward(to_input=True)),
        "forward_bytes": alone + own,
        "frozen_working_bytes": working_frozen,
    }


def _common_bytes(blocks: Sequence[nn.Module], forward: Callable[[], Any]) -> int:
    """Return the bytes of the floating-point tensors that the blocks receive as keyword arguments."""
    import torch
    from torch.utils._pytree import tree_leaves

    sizes: dict[int, int] = {}

    def note(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        for value in tree_leaves(given):
            if torch.is_tensor(value) and value.is_floating_point():
                storage = value.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(note, with_kwargs=True))
        forward()
    return sum(sizes.values())


def _working_bytes(device: torch.device, forward: Callable[[], torch.Tensor]) -> int:
    """Return the peak bytes of a backward beyond those at its start, without weight gradients."""
    import torch

    for _ in range(2):  # the first one allocates the weight gradients
        output = forward()
        if not output.requires_grad:
            return 0
        gradient = torch.ones_like(output)
        most = _most_bytes(device, partial(output.backward, gradient))
    return most


def _most_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the peak bytes during `run` beyond those before it."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    from dilatant.cost.allocations import Allocations

    with Allocations() as made:
        run()
    return made.peak


def _first_tensor(result: Any, kind: str) -> torch.Tensor:
    """Return the tensor for the next layer: the result, or its first floating-point tensor."""
    import torch

    values = [result] if torch.is_tensor(result) else list(getattr(result, "values", lambda: result)())
    for value in values:
        if torch.is_tensor(value) and value.is_floating_point():
            return value
    raise UserError(f"layer type {kind!r} returns no floating-point tensor, so its backward cannot be measured")


def _saved_bytes(layer: nn.Module, forward: Callable[[], torch.Tensor]) -> tuple[int, int, int]:
    """Return the bytes that autograd saves, the part that a split backward keeps for its weight half, and the output's.

    Bytes are counted per storage, so that views are not counted twice, and without parameters. The weight half needs
    the inputs of all linear layers and the gradients of their outputs; for experts with stacked weights, approximately
    all that is saved inside them and the gradient of their output.
    """
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    weight = 0
    counted: dict[int, torch.Tensor | None] = {}  # holds what was counted, or another tensor might get its address

    def count(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal weight
        for value in (*inputs, output):
            if torch.is_tensor(value) and value.untyped_storage().data_ptr() not in counted:
                weight += value.numel() * value.element_size()
                counted[value.untyped_storage().data_ptr()] = value

    before: dict[nn.Module, set[int]] = {}

    def begin(module: nn.Module, _: tuple[Any, ...]) -> None:
        before[module] = {*storages}

    def count_within(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal weight
        kept_within = {key: size for key, size in storages.items() if key not in before[module] | counted.keys()}
        weight += sum(kept_within.values())
        counted.update(dict.fromkeys(kept_within))
        count(module, inputs, output)

    with ExitStack() as hooks, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear) and module.weight.requires_grad:
                hooks.enter_context(module.register_forward_hook(count))
            elif any(own.dim() == 3 and own.requires_grad for own in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(begin))
                hooks.enter_context(module.register_forward_hook(count_within))
        output = forward()
    kept = sum(storages.values())
    return kept, min(weight, kept), output.numel() * output.element_size()
