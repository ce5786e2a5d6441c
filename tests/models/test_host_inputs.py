"""Inputs of blocks in host memory: the same bits, not on the device meanwhile, and copies in an order that is safe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.host_memory import Elsewhere
from dilatant.models.core.host_inputs import HostInputs, PlainCopies, StreamedCopies
from dilatant.models.core.recompute import recompute
from oracles.live_storages import LiveStorages

WIDTH, ROWS, BLOCKS = 16, 64, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden * table))) * scale


def blocks(how: Any, inputs: HostInputs) -> nn.ModuleList:
    torch.manual_seed(0)
    found = nn.ModuleList([Block() for _ in range(BLOCKS)])
    for number, block in enumerate(found):
        recompute(block, how, (inputs, number))
    return found


def forward(stack: nn.ModuleList, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # The first rows come from a layer that trains, as an embedding does; they are no leaf.
    weight = torch.randn(1, ROWS, WIDTH, generator=generator).requires_grad_()
    hidden, table = weight * 2, torch.rand(1, ROWS, WIDTH, generator=generator)
    for block in stack:
        hidden = block(hidden, table, scale=0.5)
    return hidden


@pytest.mark.parametrize("copies", [PlainCopies(), Elsewhere()])
def test_gradients_are_those_of_recomputation_to_the_bit(copies: Any) -> None:
    plain, moved = blocks("block", HostInputs()), blocks("block_offload", HostInputs(copies))
    for stack in (plain, moved):
        first, second = forward(stack), forward(stack, 2)  # two microbatches in flight
        first.square().sum().backward()
        second.square().sum().backward()
    for mine, its in zip(moved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_inputs_leave_the_device_and_come_back_one_ahead() -> None:
    held = {}
    elsewhere = Elsewhere()
    for how in ("block", "block_offload"):
        stack = blocks(how, HostInputs(elsewhere))
        with LiveStorages(stack.parameters()) as live:
            output = forward(stack)
            held[how] = live.now
            output.sum().backward()
    # All inputs but none of what blocks share: their table, the leaf and the output are kept in both cases.
    assert held["block"] - held["block_offload"] == BLOCKS * ROWS * WIDTH * 4
    order = [number for what, number in elsewhere.log if what == "fetch"]
    assert [what for what, _ in elsewhere.log] == ["leave"] * BLOCKS + ["fetch"] * BLOCKS
    assert order == [*range(BLOCKS)][::-1]


def test_received_rows_are_not_copied() -> None:
    elsewhere = Elsewhere()
    stack = blocks("block_offload", HostInputs(elsewhere))
    rows = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    stack[1](stack[0](rows, torch.ones(WIDTH)), torch.ones(WIDTH)).sum().backward()
    assert [what for what, _ in elsewhere.log] == ["leave", "fetch"]
    assert rows.grad is not None


class Recorder:
    """Stands for torch.cuda: notes the calls of streams and events, in the order of the host."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = self._stream("compute")
        self._names = iter(("out", "in"))
        self._events = 0

    def _stream(self, name: str) -> Any:
        recorder = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                recorder.calls.append(f"{name} waits for {other.name}")

            def wait_event(self, event: str) -> None:
                recorder.calls.append(f"{name} waits for {event}")

            def record_event(self) -> str:
                recorder._events += 1
                return f"{name} {recorder._events}"

        Stream.name = name  # type: ignore[attr-defined]  # of the recorder
        return Stream()

    def Stream(self, device: torch.device) -> Any:  # torch's name
        return self._stream(next(self._names))

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"copy on {stream.name}")
        yield


def test_streams_wait_for_what_they_read_and_overwrite() -> None:
    cuda = Recorder()
    copies = StreamedCopies(torch.device("cpu"), cuda)
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    kept = [copies.leave(tensor) for tensor in tensors]
    leave = ["out waits for compute", "copy on out"]
    # At most two inputs are on their way out: the memory of older ones is used again behind their copies.
    assert cuda.calls == [*leave * 3, "compute waits for out 1", *leave, "compute waits for out 2"]
    cuda.calls.clear()
    assert copies.take(kept[3]) is tensors[3]  # it has not left yet
    assert cuda.calls == ["compute waits for out 3", "compute waits for out 4"]
    cuda.calls.clear()
    copies.fetch(kept[2])
    copies.fetch(kept[2])
    back = copies.take(kept[2])
    assert back is not tensors[2]
    assert torch.equal(back, tensors[2])
    fetch = ["in waits for compute", "in waits for out 3", "copy on in"]
    assert cuda.calls == [*fetch, "compute waits for in 5"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: copies to its host were not checked")
def test_inputs_come_back_to_a_gpu_to_the_bit() -> None:
    device = torch.device("cuda")
    found = {}
    for how in ("block", "block_offload"):
        stack = blocks(how, HostInputs(StreamedCopies(device))).to(device)
        rows, table = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        hidden = rows.requires_grad_() * 1.0  # no leaf, as behind an embedding
        for block in stack:
            hidden = block(hidden, table)
        hidden.square().sum().backward()
        found[how] = [parameter.grad for parameter in stack.parameters()]
    assert all(map(torch.equal, *found.values()))
