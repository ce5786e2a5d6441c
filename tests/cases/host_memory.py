"""A host whose memory is not that of the device, on a machine without a GPU: numpy holds what torch then does not."""

from __future__ import annotations

import torch
from torch import Tensor

from dilatant.models.core.host_inputs import HostCopy


class Elsewhere:
    """Copies to such a host and back, noted in order: what was done, and the number of the copy."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._numbers: dict[int, int] = {}

    def leave(self, tensor: Tensor) -> HostCopy:
        bits = tensor.detach().contiguous().view(torch.uint8).numpy().copy()
        copy = HostCopy((bits, tensor.dtype, tensor.shape), tensor.device)
        self._numbers[id(copy)] = len(self.log)
        self.log.append(("leave", self._numbers[id(copy)]))
        return copy

    def fetch(self, copy: HostCopy) -> None:
        if copy.back is None:
            self.log.append(("fetch", self._numbers[id(copy)]))
            bits, dtype, shape = copy.host
            copy.back = torch.empty(shape, dtype=dtype)
            copy.back.view(torch.uint8).numpy()[...] = bits

    def take(self, copy: HostCopy) -> Tensor:
        self.fetch(copy)
        tensor, copy.back = copy.back, None
        assert tensor is not None
        return tensor
