"""Dropout by the written rule, for one sample at a time.

The numbers of an item at the n-th dropout of a layer come from a generator seeded by the 8 bytes of BLAKE2b over
"seed/key/layer/n", where the key is the sample's, and for what is no token of the language model " item i" behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class OneSampleDropout(TorchFunctionMode):
    """layers: (layer, module, whether it trains, whether the tensors are those of a row of text)."""

    def __init__(self, seed: int, layers: Iterable[tuple[str, nn.Module, bool, bool]]) -> None:
        super().__init__()
        self.seed, self.key = seed, ""
        self.calls: dict[str, int] = {}
        self.now: tuple[str, bool, bool] = ("", False, False)
        for layer, module, trains, is_text in layers:
            module.register_forward_pre_hook(self._entering((layer, trains, is_text)))

    def begin(self, key: str) -> None:
        self.key, self.calls = key, {}

    def _entering(self, now: tuple[str, bool, bool]) -> Any:
        def enter(*_: Any) -> None:
            self.now = now

        return enter

    def _keep(self, shape: Any, p: float) -> Tensor:
        layer, _, is_text = self.now
        call = self.calls[layer] = self.calls.get(layer, -1) + 1
        parts = []
        for item in range(1 if is_text else shape[0]):
            key = self.key if is_text else f"{self.key} item {item}"
            text = f"{self.seed}/{key}/{layer}/{call}"
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            parts.append(torch.rand(shape[1:], generator=torch.Generator().manual_seed(number)))
        return (torch.stack(parts) < 1 - p) / (1 - p)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            p, training = kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get("training", True)
            training = args[2] if len(args) > 2 else training
            if not (training and p):
                return args[0]
            if not self.now[1]:
                return args[0]
            return (args[0] * self._keep(args[0].shape, p)).to(args[0].dtype)
        return func(*args, **kwargs)
