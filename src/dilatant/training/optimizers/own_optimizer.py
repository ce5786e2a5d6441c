"""The user's own optimizer over fp32 masters: any `torch.optim.Optimizer` whose state has the shapes of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config import UserError
from dilatant.config.errors import own_code
from dilatant.config.signatures import takes
from dilatant.plan.boxes import Box, parse_key
from dilatant.training.optimizers.master_weights import Delegating, WithMasters

ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
)
"""Optimizers of torch that update every number of a weight by itself."""
PROBED = 4
"""Length of each dimension of the weights on which an optimizer is tried."""


class OwnOptimizer(WithMasters, Delegating):
    """The optimizer that `factory` made for masters by key. Raises UserError for one that cannot be checkpointed, and
    for one that needs whole weights if a rank holds a part of one. boxes: key → the part that is held."""

    def __init__(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        weights: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        boxes: Mapping[str, Box],
    ) -> None:
        self._factory = factory
        keys = {master: key for key, master in masters.items()}
        inner = self._made(list(masters.values()), [parse_key(key)[0] for key in masters])
        for group in inner.param_groups:
            if unknown := [each for each in group["params"] if each not in keys]:
                raise UserError(f"optimizer: it has {len(unknown)} parameters that it was not given")
            group["names"] = [keys[each] for each in group["params"]]
            group["peak_lr"] = float(group["lr"])
        if left := masters.keys() - {name for group in inner.param_groups for name in group["names"]}:
            raise UserError(
                f"optimizer: it leaves out {min(left)!r} and {len(left) - 1} others; freeze what does not train"
            )
        super().__init__(inner.param_groups, weights, masters, inner=[inner])
        cut = next((key for key in masters if boxes[key].shape != tuple(boxes[key].whole)), None)
        is_torchs = type(inner).__module__.startswith("torch.optim") and type(inner).__name__ in ELEMENTWISE
        if cut is not None and not is_torchs and not getattr(factory, "elementwise", False):
            raise UserError(
                f"optimizer: {type(inner).__name__} may need whole weights, and this rank has a part of "
                f"{boxes[cut].name!r}: set train.zero: none and a layout without tp, or, if it updates every number of "
                "a weight by itself, set `elementwise = True` on the factory"
            )
        self._numbers: dict[str, type] = {}
        shapes = {master.ndim: key for key, master in masters.items() if master.ndim}
        found = [
            self._state_of(nn.Parameter(torch.zeros((PROBED,) * dimensions, device=masters[key].device)), key)
            for dimensions, key in shapes.items()
        ]
        self.scalars = frozenset(name for each in found for name, value in each.items() if not value.ndim)

    def step(self, closure: Any = None) -> Any:
        with own_code(f"optimizer: {type(self.inner[0]).__name__} ended the run", SystemExit, KeyboardInterrupt):
            return super().step(closure)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        found = {name: value for name, value in self.state.get(parameter, {}).items() if value is not None}
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(float(value)) for name, value in found.items()
        } or None

    def allocate(self, parameter: nn.Parameter) -> None:
        key = next(key for key, master in self.masters.items() if master is parameter)
        self.state[parameter] = self._state_of(nn.Parameter(torch.zeros_like(parameter)), key)

    def loaded(self) -> None:
        for state in self.state.values():
            for name in self._numbers.keys() & state.keys():
                state[name] = self._numbers[name](state[name])
        super().loaded()

    def _state_of(self, weight: nn.Parameter, key: str) -> dict[str, Tensor]:
        """Return the state of a weight of zeros after an update by nothing; numbers as tensors. Raises UserError."""
        tried = self._made([weight], [parse_key(key)[0]])
        weight.grad = torch.zeros_like(weight)
        with own_code(f"optimizer: {type(tried).__name__} cannot update"):
            tried.step()
        found: dict[str, Tensor] = {}
        for name, value in tried.state.get(weight, {}).items():
            if isinstance(value, int | float):
                self._numbers[name] = type(value)
                value = torch.tensor(float(value))
            if isinstance(value, Tensor) and (value.shape == weight.shape or not value.ndim):
                found[name] = value
            elif value is not None:
                shown = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise UserError(
                    f"optimizer: {type(tried).__name__} keeps {name!r}, {shown}, beside a weight {list(weight.shape)}; "
                    "checkpoints hold numbers, and tensors that have the shape of the weight"
                )
        return found

    def _made(self, masters: list[nn.Parameter], names: list[str]) -> torch.optim.Optimizer:
        call = partial(self._factory, masters, names) if takes(self._factory, 2) else partial(self._factory, masters)
        with own_code("optimizer: it cannot be made"):
            made = call()
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(f"optimizer: the factory returned a {type(made).__name__}, not a torch.optim.Optimizer")
        return made
