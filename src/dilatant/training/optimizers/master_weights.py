"""fp32 master weights: what the optimizer updates where weights are held in less.

A bf16 weight of 1 does not notice an update of 0.001. So the optimizer keeps each trainable weight once more in fp32,
updates that with the fp32 gradient, and rounds it into the weight that the model computes with. A checkpoint stores
the master as the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps in the form of a parameter; beside them the number of its steps."""


def make_masters(
    weights: Mapping[str, nn.Parameter],
    exact: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> dict[str, nn.Parameter]:
    """Logical name → fp32 master of every trainable one of `weights`; a weight that is fp32 is its own.

    exact: values that weights were rounded from, where they are known. device: of masters that are all copies; None:
    where the weights are.
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
    """Mixed into an optimizer's class: it updates `masters`, as `make_masters` made them of `weights`; both by name.

    groups: of masters, as torch takes them. `step` takes the gradients of the weights, `zero_grad` clears both.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        weights: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self.masters = dict(masters)
        self._rounded = {
            name: weights[name] for name, master in masters.items() if master is not weights[name]
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of the masters, and of the weights that are rounded from them."""
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
        """ "step" and moments of a master, shaped like it; None before its first update."""
        state = self.state.get(parameter)
        return {name: state[name] for name in ("step", *MOMENTS)} if state else None

    def allocate(self, parameter: nn.Parameter) -> None:
        """Make room for what `moments` gives, so that a checkpoint can be read into it."""
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS},
        }

    def loaded(self) -> None:
        """To be called when masters and moments were filled from a checkpoint."""
        self.write_weights()


class MasterAdamW(WithMasters, torch.optim.AdamW):
    """torch's AdamW over masters."""
