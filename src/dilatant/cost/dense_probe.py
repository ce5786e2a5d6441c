"""Measuring what a dense row takes more than a row of one sample. Importing this module imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dilatant.cost.clock import Clock, now

if TYPE_CHECKING:
    import torch
    from torch import nn

Given = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True, slots=True)
class DenseProbe:
    """The lengths of rows to measure at, and the arguments of a layer for a row of two samples of so many tokens."""

    tokens: tuple[int, ...]
    together: Callable[[int], Given]


def dense_seconds(
    layer: nn.Module, block: nn.Module, alone: Given, together: Given, repeats: int, end: float = math.inf
) -> float:
    """Seconds of forward and backward that `block`, which runs in `layer`, takes more of the samples `together` than of
    as many tokens `alone`: the arguments of `layer` for a row of several samples, and for one of a single one.

    The block runs as the layer calls it, without what a stage does once for all its blocks (a mask is made, positions
    are turned into tables), and towards its input alone: weight gradients are the same in both. The two take turns, and
    their ratios count, so that what slows a machine down for a while slows both. end: as in `cost.profile.measure`.
    """
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    calls = [_call_of(layer, block, given) for given in (alone, together)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        ratios: list[float] = []
        once: list[float] = []
        for run in range(repeats + 1):
            if run > 1 and now() > end:
                break
            first, second = (_seconds(block, *call) for call in calls)
            if run:  # the first run allocates and warms up
                ratios.append(second / first)
                once.append(first)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    return max(0.0, (statistics.median(ratios) - 1.0) * statistics.median(once))


def _call_of(
    layer: nn.Module, block: nn.Module, given: Given
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The hidden states that the layer hands the block, and the block as a function of them."""
    import torch

    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    # Before other hooks: what they do to arguments, they do when the block is called again.
    hook = block.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad():
            layer(*given[0], **given[1])
    finally:
        hook.remove()
    (args, kwargs), *_ = seen
    if args:
        return args[0], lambda hidden: block(hidden, *args[1:], **kwargs)
    name = next(key for key, value in kwargs.items() if torch.is_tensor(value) and value.is_floating_point())
    return kwargs[name], lambda hidden: block(**{**kwargs, name: hidden})


def _seconds(block: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> float:
    import torch

    clock = Clock(hidden.device)
    hidden = hidden.detach().requires_grad_()
    began = clock.now()
    output = run(hidden)
    output = output if torch.is_tensor(output) else output[0]
    torch.autograd.grad(output, hidden, torch.ones_like(output))
    return clock.now() - began
