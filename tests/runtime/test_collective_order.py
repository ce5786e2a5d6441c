"""On a GPU all members of all groups launch their collectives in one order, whatever finishes first."""

from __future__ import annotations

import contextlib
import itertools
from graphlib import CycleError, TopologicalSorter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases.made_up_holdings import SHAPES, WEIGHTS, plan_of, split
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, holdings
from dilatant.runtime.state.shared_weights import StateLayout, bucket_weights

NAMES = [f"u.0.{name}" for name in SHAPES]
Launch = tuple[str, tuple[int, ...], str, int]
"""Operation, ranks of the group, gradients, and how many of the same three this rank launched before."""


class _Group:
    """Stand-in for a group on a GPU: records the launches; `is_done` is random."""

    def __init__(self, launched: list[Launch], ranks: tuple[int, ...], random: Random) -> None:
        self._launched, self._ranks, self._random = launched, ranks, random

    def sum_(self, tensor: torch.Tensor, what: str = "") -> Any:
        return self._started("sum", what)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, what: str = "") -> Any:
        return self._started("scatter", what)

    def _started(self, kind: str, what: str) -> Any:
        before = sum(each[:3] == (kind, self._ranks, what) for each in self._launched)
        self._launched.append((kind, self._ranks, what, before))
        return _Work(self._random)


class _Work:
    def __init__(self, random: Random) -> None:
        self._random = random

    @property
    def is_done(self) -> bool:
        return self._random.random() < 0.5

    def wait(self) -> None:
        pass


def _launches_of(rank: int, degrees: tuple[int, ...], node_of: list[int], random: Random, device: str) -> list[Launch]:
    """Return the launches of one rank in a step whose gradients are completed in a random order."""
    launched: list[Launch] = []
    comm: Any = SimpleNamespace(
        rank=rank,
        size=sum(degrees),
        device=torch.device(device),
        world=SimpleNamespace(is_on_device=False),
        group=lambda name, ranks: _Group(launched, ranks, random),
    )
    held = holdings(plan_of(*degrees), {"u": ["u.0"]}, WEIGHTS, split)
    weights = {name: nn.Parameter(torch.zeros(_shape(held[name].boxes[rank]))) for name in NAMES}
    layout = StateLayout("node", node_of, bucket_bytes=60)
    formats = dict.fromkeys(NAMES, Format("float32", 4))
    sync = bucket_weights(comm, weights, dict.fromkeys(NAMES, (0,)), held, formats, layout).sync
    sync.begin([0])
    sync.entering_last_backward(0)
    for name in random.sample(NAMES, len(NAMES)):
        weights[name].sum().backward()
    sync.left_last_backward(0)
    sync.finish()
    return launched


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(sum(end - first for first, end in spans) for spans in box.intervals)


def check_order(degrees: tuple[int, ...], nodes: int, seed: int, device: str = "cuda") -> None:
    random = Random(seed)
    node_of = [rank * nodes // sum(degrees) for rank in range(sum(degrees))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda: "beside")
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        of_rank = [_launches_of(rank, degrees, node_of, random, device) for rank in range(sum(degrees))]
    order: TopologicalSorter[Launch] = TopologicalSorter()
    for launched in of_rank:
        for earlier, later in itertools.pairwise(launched):
            order.add(later, earlier)
    order.prepare()  # raises CycleError if two ranks launch in unlike orders
    for rank, launched in enumerate(of_rank):
        shared = {each for other in of_rank for each in other if rank in each[1]}
        assert shared == {*launched}


MIXES = {
    "degrees": st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=5).map(tuple),
    "nodes": st.integers(2, 3),
    "seed": st.integers(0, 1 << 30),
}


@settings(max_examples=15, deadline=None)
@given(**MIXES)
def test_all_ranks_launch_collectives_in_one_order(degrees: tuple[int, ...], nodes: int, seed: int) -> None:
    check_order(degrees, nodes, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(**MIXES)
def test_ranks_of_many_mixes_launch_collectives_in_one_order(degrees: tuple[int, ...], nodes: int, seed: int) -> None:
    check_order(degrees, nodes, seed)


def test_sums_over_nodes_that_start_when_ready_are_found() -> None:
    """So a CPU starts them: over Gloo, groups need no common order. On a GPU two ranks would wait for each other."""

    def check_some() -> None:
        for seed in range(40):
            check_order((1, 1, 1, 1), 2, seed, device="cpu")

    with pytest.raises(CycleError):
        check_some()
