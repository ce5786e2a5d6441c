"""Gradient hashes are equal for equal bits at any memory address, and differ for all other gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, Holding, make_buckets, shard_of
from dilatant.runtime.state.owned_weights import OwnedWeights
from dilatant.training.gradient_hashes import gradient_hashes, owned_gradients


def hash_of(gradient: torch.Tensor) -> int:
    [found] = gradient_hashes({"weight": gradient}, {"weight": "layer"}).values()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 7, 8, 9, 31, 64, 1001])
def test_a_hash_depends_on_bits_and_not_on_where_they_lie(numel: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    shifted = torch.empty(numel + 1, dtype=dtype)[1:].copy_(gradient)  # begins in the middle of a word
    assert hash_of(gradient) == hash_of(shifted) == hash_of(gradient.clone())
    for place in range(numel):
        changed = gradient.clone()
        changed[place] = -changed[place]  # one bit
        assert hash_of(changed) != hash_of(gradient)


def test_halves_that_changed_places_show() -> None:
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert hash_of(torch.cat([gradient[32:], gradient[:32]])) != hash_of(gradient)


def test_a_layer_has_the_hash_of_all_its_gradients() -> None:
    gradients: dict[str, torch.Tensor | None] = {"a": torch.ones(4), "b": torch.ones(4), "frozen": None}
    layer_of = dict.fromkeys(gradients, "layer")
    before = gradient_hashes(gradients, layer_of)
    gradients["b"] = torch.full((4,), 2.0)
    changed = gradient_hashes(gradients, layer_of)
    assert changed.keys() == before.keys()
    assert len(before) == 1
    assert changed != before
    assert gradient_hashes(dict(reversed(gradients.items())), layer_of) == changed
    gradients["a"] = None  # on a rank that lost it
    without = gradient_hashes(gradients, layer_of)
    assert without.keys() == before.keys()
    assert without != before
    assert gradient_hashes({}, {}) == {}


def test_hashes_of_other_weights_of_a_layer_are_not_compared() -> None:
    """In unlike pipelines, ranks of a node may hold other weights of a layer; their hashes have other keys."""
    gradients = {name: torch.ones(4) for name in ("a", "b")}
    layer_of = dict.fromkeys(gradients, "layer")
    apart = [gradient_hashes({name: gradients[name]}, layer_of) for name in gradients]
    together = gradient_hashes(gradients, layer_of)
    assert len({*apart[0], *apart[1], *together}) == 3


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (1, 2, 4), (3, 3)])
def test_every_number_is_compared_between_unlike_nodes(counts: tuple[int, ...]) -> None:
    """Nodes of so many ranks share the optimizer state of two weights. Their gradients have equal hashes under equal
    keys, which together cover all numbers on each node."""
    shapes = {"w": (7, 3), "v": (5,)}
    values = {name: torch.arange(math.prod(shape)).view(shape).float() for name, shape in shapes.items()}
    ranks = range(sum(counts))
    node_of = [node for node, count in enumerate(counts) for _ in range(count)]
    whole = {name: Box.of(name, shape) for name, shape in shapes.items()}
    held = {name: Holding(dict.fromkeys(ranks, box)) for name, box in whole.items()}
    formats = dict.fromkeys(shapes, Format("float32", 4))
    by_node: dict[int, dict[str, int]] = {}
    for rank in ranks:
        (bucket,) = make_buckets(held, formats, shapes, 1 << 20)
        share = shard_of(bucket, rank, "node", node_of)
        weights = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        comm: Any = SimpleNamespace(rank=rank)
        owned = OwnedWeights(comm, weights, held, [share])
        for key, parameter in owned.parameters.items():
            box = owned.boxes[key]
            parameter.grad = values[box.name][whole[box.name].place(box)].clone()
        found = owned_gradients(owned)
        hashes = gradient_hashes(found, {})
        assert not by_node.setdefault(node_of[rank], {}).keys() & hashes.keys()
        by_node[node_of[rank]] |= hashes
        covered = sum(gradient.numel() for gradient in found.values() if gradient is not None)
        assert covered == share.sizes[share.sharing.index(rank)]
    assert all(hashes == by_node[0] for hashes in by_node.values())
