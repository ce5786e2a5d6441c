"""Gradient hashes are equal for equal bits at any memory address, and differ for all other gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilatant.training.gradient_hashes import gradient_hashes


def hash_of(gradient: torch.Tensor) -> int:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    [found] = gradient_hashes({"weight": parameter}, {"weight": "layer"}).values()
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
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in ("a", "b", "frozen")}
    layer_of = dict.fromkeys(parameters, "layer")
    for name in ("a", "b"):
        parameters[name].grad = torch.ones(4)
    before = gradient_hashes(parameters, layer_of)
    parameters["b"].grad = torch.full((4,), 2.0)
    assert gradient_hashes(parameters, layer_of).keys() == before.keys()
    assert len(before) == 1
    assert gradient_hashes(parameters, layer_of) != before
    assert gradient_hashes(dict(reversed(parameters.items())), layer_of) == gradient_hashes(
        parameters, layer_of
    )
    parameters["a"].grad = None  # on a rank that lost it
    without = gradient_hashes(parameters, layer_of)
    assert without.keys() == before.keys()
    assert without != before
    assert gradient_hashes({}, {}) == {}


def test_hashes_of_other_weights_of_a_layer_are_not_compared() -> None:
    """In unlike pipelines, ranks of a node may divide a layer's weights differently; their hashes have other keys."""
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in ("a", "b")}
    for parameter in parameters.values():
        parameter.grad = torch.ones(4)
    layer_of = dict.fromkeys(parameters, "layer")
    apart = [gradient_hashes({name: parameters[name]}, layer_of) for name in parameters]
    together = gradient_hashes(parameters, layer_of)
    assert len({*apart[0], *apart[1], *together}) == 3
