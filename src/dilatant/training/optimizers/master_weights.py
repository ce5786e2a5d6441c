"""fp32 master weights, which the optimizer updates if weights are held in a smaller dtype, and averages of them (EMA).

A bf16 weight of 1 loses an update of 0.001 to rounding. So the optimizer keeps an fp32 copy of each trainable weight,
updates that with the fp32 gradient, and rounds it into the model's weight. A checkpoint stores the master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State tensors of AdamW shaped like the parameter; the number of its steps is kept beside them."""


def make_masters(
    weights: Mapping[str, nn.Parameter], exact: Mapping[str, Tensor] | None = None, device: torch.device | None = None
) -> dict[str, nn.Parameter]:
    """Return logical name → fp32 master of every trainable weight; a weight in fp32 or fp64 is its own master.

    exact: the values from which weights were rounded, where known. device: where all masters are copies; None: masters
    are where the weights are.
    """
    masters = {}
    for name, weight in weights.items():
        if not weight.requires_grad:
            continue
        if device is None and weight.dtype in (torch.float32, torch.float64):
            masters[name] = weight
            continue
        source = (exact or {}).get(name, weight).detach()
        copied = torch.empty_like(weight, dtype=torch.float32, device=device).copy_(source)
        masters[name] = nn.Parameter(copied)
    return masters


class WithMasters(torch.optim.Optimizer):
    """Mixin for an optimizer class that updates the `masters` that `make_masters` made of `weights`; both by name.

    groups: torch parameter groups of masters. `step` takes the gradients of the weights, `zero_grad` clears both.
    scalars: names of the state that is one number per weight.
    """

    scalars: frozenset[str] = frozenset(("step",))

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        weights: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self.masters = dict(masters)
        self._rounded = {name: weights[name] for name, master in masters.items() if master is not weights[name]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the masters once, and round them into the weights."""
        for name, weight in self._rounded.items():
            self.masters[name].grad = weight.grad
        loss = super().step(closure)
        self.write_weights()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for name, weight in self._rounded.items():
            self.masters[name].grad = weight.grad = None

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the weights."""
        if self._rounded:
            weights: list[Tensor] = [*self._rounded.values()]
            torch._foreach_copy_(weights, [self.masters[name] for name in self._rounded])

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """Return `step` and the moments of a master, shaped like it; None before its first update."""
        return dict(self.state.get(parameter, ())) or None

    def allocate(self, parameter: nn.Parameter) -> None:
        """Allocate what `moments` returns, so that a checkpoint can be read into it."""
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS},
        }

    def loaded(self) -> None:
        """Use masters and moments that were filled from a checkpoint: round the masters into the weights."""
        self.write_weights()


class Delegating(torch.optim.Optimizer):
    """The optimizers `inner` as one, with their groups and one state."""

    def __init__(self, groups: Any, inner: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.inner = inner
        self.param_groups = [group for each in inner for group in each.param_groups]
        self.state = inner[0].state
        for each in inner:
            each.state = self.state

    def step(self, closure: Any = None) -> Any:
        for each in self.inner:
            each.step()


class MasterAdamW(WithMasters, torch.optim.AdamW):
    """torch's AdamW over fp32 masters."""


AVERAGE = "ema"
"""Key of a weight's average, beside those of its moments."""


class Averages:
    """EMA of `masters` by key, starting from their values. decay: the share that an update keeps, at most `(1 + n) /
    (10 + n)` after `n` updates, so that the initial weights are soon forgotten."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.tensors = {key: master.detach().clone() for key, master in masters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor], updates: int) -> None:
        """Update the averages after optimizer update number `updates`, counted from 1."""
        if self.tensors:
            share = 1.0 - min(self._decay, (1 + updates) / (10 + updates))
            torch._foreach_lerp_([*self.tensors.values()], [masters[key].detach() for key in self.tensors], share)

    @torch.no_grad()
    def begin(self, masters: Mapping[str, Tensor], keys: set[str]) -> None:
        """Reset the averages of `keys` to the masters."""
        for key in keys:
            self.tensors[key].copy_(masters[key])

    @contextmanager
    def in_place_of(self, masters: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the masters by the averages inside this context."""
        with torch.no_grad():
            trained = {key: masters[key].detach().clone() for key in self.tensors}
            for key, average in self.tensors.items():
                masters[key].copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, weight in trained.items():
                    masters[key].copy_(weight)
