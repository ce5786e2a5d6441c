"""Measurement of the extra cost of a dense row over a row of one sample. Importing this module imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dilatant.cost.clock import Clock, now

if TYPE_CHECKING:
    import torch
    from torch import nn

CallArguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments."""


def dense_seconds(
    layer: nn.Module,
    block: nn.Module,
    alone: CallArguments,
    together: CallArguments,
    repeats: int,
    end: float = math.inf,
) -> float:
    """Measure the extra seconds of forward and backward of `block` in `layer` for a row of several samples.

    alone, together: arguments of `layer` for a row of one sample, and for one of several samples with as many tokens.
    The block runs as the layer calls it, without work that a stage does once for all blocks (the mask, position
    tables), and its backward goes to the input only, since weight gradients are equal in both. The two cases alternate
    and the median of their ratios is used, so that a temporary slowdown affects both. end: see `cost.profile.measure`.
    """
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    calls = [_call_of(layer, block, arguments) for arguments in (alone, together)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        ratios: list[float] = []
        once: list[float] = []
        for run in range(repeats + 1):
            if run > 1 and now() > end:
                break
            first, second = (_seconds(*call) for call in calls)
            if run:  # the first run allocates and warms up
                ratios.append(second / first)
                once.append(first)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    return max(0.0, (statistics.median(ratios) - 1.0) * statistics.median(once))


def _call_of(
    layer: nn.Module, block: nn.Module, arguments: CallArguments
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Return the hidden states that the layer passes to the block, and the block as a function of them."""
    import torch

    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    # Prepended: other hooks change the arguments again when the block is called.
    with block.register_forward_pre_hook(note, prepend=True, with_kwargs=True), torch.no_grad():
        layer(*arguments[0], **arguments[1])
    (args, kwargs), *_ = seen
    if args:
        return args[0], lambda hidden: block(hidden, *args[1:], **kwargs)
    name = next(key for key, value in kwargs.items() if torch.is_tensor(value) and value.is_floating_point())
    return kwargs[name], lambda hidden: block(**{**kwargs, name: hidden})


def _seconds(hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> float:
    import torch

    clock, taken, issued = Clock(hidden.device), list[float](), list[float]()
    hidden = hidden.detach().requires_grad_()

    def once() -> None:
        output = run(hidden)
        output = output if torch.is_tensor(output) else output[0]
        torch.autograd.grad(output, hidden, torch.ones_like(output))

    if clock.is_host_apart:
        with clock.issuing_into(issued):
            once()
    with clock.into(taken, sum(issued)):
        once()
    return taken[0]
