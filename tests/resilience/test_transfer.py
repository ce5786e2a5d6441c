"""Every rank ends up with what it wants, cell by cell, and nothing travels that is there already."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilatant.comm.comm import Comm
from dilatant.plan.boxes import Box
from dilatant.resilience.state_transfer import StateLost, TransferCorrupted, plan_copies, transfer
from dilatant.training.checkpoints.checkpoint import BoxPiece
from harness.worker_pool import Worker, WorkerPool
from oracles.live_storages import LiveStorages

SHAPE = (6, 5)


def numbers(box: Box) -> set[tuple[int, ...]]:
    spans = [[i for start, end in dim for i in range(start, end)] for dim in box.intervals]
    return set(itertools.product(*spans))


def random_box(draw: random.Random, name: str) -> Box:
    def dim(length: int) -> tuple[tuple[int, int], ...]:
        cuts = sorted(draw.sample(range(length + 1), draw.choice((2, 4))))
        return tuple(zip(cuts[::2], cuts[1::2]))

    if draw.random() < 0.3:
        return Box.of(name, SHAPE)
    return Box(name, SHAPE, (dim(SHAPE[0]), dim(SHAPE[1])))


@pytest.mark.parametrize("seed", range(60))
def test_every_wanted_number_comes_once_from_one_who_has_it(seed: int) -> None:
    draw = random.Random(seed)
    names = ["a", "b"]
    held = [[random_box(draw, name) for name in names if draw.random() < 0.8] for _ in range(4)]
    wanted = [[random_box(draw, name) for name in names] for _ in range(4)]
    everywhere = {name: set().union(*(numbers(b) for own in held for b in own if b.name == name)) for name in names}
    gone = any(not numbers(box) <= everywhere[box.name] for own in wanted for box in own)
    if gone:
        with pytest.raises(StateLost):
            plan_copies(held, wanted)
        return
    copies = plan_copies(held, wanted)
    for rank, own in enumerate(wanted):
        for box in own:
            cells = [copy for copy in copies if copy.target == rank and copy.cell.name == box.name]
            arrived = [number for copy in cells for number in numbers(copy.cell)]
            assert sorted(arrived) == sorted(numbers(box))
            here = set().union(*(numbers(b) for b in held[rank] if b.name == box.name), set())
            for copy in cells:
                theirs = [b for b in held[copy.source] if b.name == box.name]
                assert any(numbers(copy.cell) <= numbers(b) for b in theirs)
                assert copy.source == rank or not numbers(copy.cell) & here


def test_several_holders_share_the_sending() -> None:
    boxes = [Box.of(f"w{i}", (4,)) for i in range(6)]
    copies = plan_copies([boxes, boxes, []], [[], [], boxes])
    assert sorted(copy.source for copy in copies) == [0, 0, 0, 1, 1, 1]


def test_numbers_without_dimensions_travel_too() -> None:
    step = Box.of("optimizer.w.step", ())
    (copy,) = plan_copies([[step], []], [[], [step]])
    assert (copy.source, copy.target, copy.cell) == (0, 1, step)


def _rebuilt(worker: Worker, own: list[int], number: int, size: int) -> tuple[int, int]:
    """Take part in a rebuild after which each rank holds the other rank's tensors; return the peak bytes of tensors
    and the bytes of the state, old and new."""
    comm = Comm(worker.store, worker.rank, worker.size)
    with LiveStorages() as live:
        held, wanted = (
            [
                BoxPiece(Box.of(f"w{n}", (size,)), torch.full((size,), float(n) * is_held))
                for n in range(number)
                if (own[n] == comm.rank) == bool(is_held)
            ]
            for is_held in (1, 0)
        )
        both = live.now
        received = transfer(comm, held, wanted, round_bytes=3 * size * 4)
        peak = live.peak
    comm.close()
    assert received == len(wanted) * size * 4
    assert all(bool((piece.tensor == float(piece.box.name[1:])).all()) for piece in wanted)
    return peak, both


def test_state_moves_in_buffers_of_a_bounded_size(workers: WorkerPool) -> None:
    """Of three tensors, whatever there is to move; two more are copied while they are read."""
    number, size, draw = 24, 1 << 16, random.Random(0)
    own = [draw.randrange(2) for _ in range(number)]
    for peak, both in workers.run(_rebuilt, 2, own, number, size):
        assert both == number * size * 4
        assert peak <= both + 5 * size * 4 + 4096


class _Flips:
    """A group on whose way one bit of the state that arrives here changes, `at` so many bytes from its start."""

    def __init__(self, group: Any, at: int) -> None:
        self._group, self._at = group, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def receive(self, tensor: torch.Tensor, *where: Any, **named: Any) -> Any:
        pending = self._group.receive(tensor, *where, **named)
        if named.get("what") != "state of a layer":
            return pending

        def wait() -> None:
            pending.wait()
            tensor[self._at] ^= 16

        return SimpleNamespace(wait=wait)


def _moves(worker: Worker, at: int | None) -> list[float] | str:
    """Rank 0 has a weight and its step, which rank 1 wants."""
    comm = Comm(worker.store, worker.rank, worker.size)
    state = {"w": torch.arange(6.0).view(2, 3), "step": torch.tensor(7.0)}
    pieces = [
        BoxPiece(Box.of(name, each.shape), each if comm.rank == 0 else torch.zeros_like(each))
        for name, each in state.items()
    ]
    way: Any = comm
    if at is not None and comm.rank == 1:
        way = SimpleNamespace(rank=comm.rank, size=comm.size, world=_Flips(comm.world, at))
    try:
        transfer(way, *((pieces, []) if comm.rank == 0 else ([], pieces)))
        return [number for piece in pieces for number in piece.tensor.flatten().tolist()]
    except TransferCorrupted as error:
        return str(error)
    finally:
        comm.close()


@pytest.mark.parametrize("at", [None, 0, 9, 27, 28, -1])
def test_a_bit_that_changes_on_the_way_is_noticed(workers: WorkerPool, at: int | None) -> None:
    """In the weight, in the step, and in the hash itself."""
    _, arrived = workers.run(_moves, 2, at)
    if at is None:
        assert arrived == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    else:
        assert arrived == "state from rank 0 was changed on its way"
