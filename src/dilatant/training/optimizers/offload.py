"""Optimizer offload: masters and moments of AdamW in host memory, weights and gradients on the device.

Gradients come to the host chunk by chunk and are applied there; updated weights go back in their own dtype. On a GPU
the copies have a stream of their own, so that the next chunk arrives while this one is updated (ZeRO-Offload, Ren et
al. 2021, section 4, without its delayed update, which changes the numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.training.optimizers.master_weights import MasterAdamW

CHUNK_BYTES = 64 << 20
"""Bytes of gradients on the host at once; as many again are in transit."""

Fetched = tuple[dict[str, Tensor], Callable[[], None]]


class OffloadedAdamW(MasterAdamW):
    """AdamW over fp32 masters on the CPU, which `make_masters` made; the weights may be on any device. Both are by
    name.

    The update equals that of `MasterAdamW` as far as the arithmetic of GPU and CPU agrees.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        weights: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        chunk_bytes: int = CHUNK_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(groups, weights, masters, **options)
        self._chunk_bytes = chunk_bytes
        devices = {weight.device for weight in self._rounded.values() if weight.device.type == "cuda"}
        self._stream = torch.cuda.Stream(device=devices.pop()) if devices else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply one update. Returns when all weights are in transit: device work that uses them waits on the device."""
        assert closure is None
        chunks = list(self._chunks())
        coming = self._fetch(chunks[0]) if chunks else None
        for number, names in enumerate(chunks):
            assert coming is not None
            gradients, wait = coming
            coming = self._fetch(chunks[number + 1]) if number + 1 < len(chunks) else None
            wait()
            for name in names:
                self.masters[name].grad = gradients[name]
            torch.optim.AdamW.step(self)  # only masters that have a gradient
            for name in names:
                self.masters[name].grad = None
            self._send(names)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return None

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the weights."""
        self._send(list(self._rounded))
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _chunks(self) -> Iterator[list[str]]:
        """Yield names of weights with a gradient, in chunks whose gradients take up to `chunk_bytes`."""
        chunk: list[str] = []
        size = 0
        for name, weight in self._rounded.items():
            if weight.grad is None:
                continue
            if chunk and size + 4 * weight.numel() > self._chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(name)
            size += 4 * weight.numel()
        if chunk:
            yield chunk

    def _fetch(self, names: list[str]) -> Fetched:
        """Start copying the gradients of these weights to the host; return them, and a function that waits for them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        found = {}
        with self._copying():
            for name in names:
                gradient = self._rounded[name].grad
                assert gradient is not None
                found[name] = self._staging(gradient.shape, torch.float32)
                found[name].copy_(gradient, non_blocking=True)
                if self._stream is not None:
                    gradient.record_stream(self._stream)
            arrived = torch.cuda.Event() if self._stream is not None else None
            if arrived is not None:
                arrived.record(self._stream)
        return found, (lambda: None) if arrived is None else arrived.synchronize

    def _send(self, names: list[str]) -> None:
        with self._copying():
            for name in names:
                weight = self._rounded[name]
                # Rounded on the host: half as much is copied, and the next update may overwrite the master.
                rounded = self._staging(weight.shape, weight.dtype).copy_(self.masters[name])
                weight.detach().copy_(rounded, non_blocking=True)

    def _staging(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate host memory, pinned for asynchronous copies by a GPU; torch keeps it until the copy is done."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def _copying(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
