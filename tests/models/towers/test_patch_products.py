"""Patch embeddings as matrix products compute what the convolutions do, under the same names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases.cut_wholes import opened
from dilatant.models.encoders.native_encoder import PatchConvolution, multiply_patches


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_equals_the_convolution(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias).to(dtype)
    swapped = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias).to(dtype)
    swapped.load_state_dict(plain.state_dict())
    multiply_patches(nn.Sequential(swapped))
    assert type(swapped) is PatchConvolution
    assert {name: tensor.shape for name, tensor in swapped.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    found = []
    for module in (plain, swapped):
        patches = torch.randn(5, 3, 2, 4, 4, generator=torch.manual_seed(1)).to(dtype).requires_grad_()
        rows = module(patches)
        assert rows.shape == (5, 8, 1, 1, 1)
        rows.float().square().sum().backward()
        found.append([rows, patches.grad, *(parameter.grad for parameter in module.parameters())])
    for expected, got in zip(*found, strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * scale)


def test_other_items_and_convolutions_stay_convolutions() -> None:
    whole = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    video = torch.randn(2, 3, 4, 8, 8)
    expected = whole(video)
    others = [nn.Conv3d(3, 8, 2, 1), nn.Conv3d(3, 8, 2, 2, padding=1), nn.Conv3d(4, 8, 2, 2, groups=2)]
    multiply_patches(nn.ModuleList([whole, *others]))
    assert torch.equal(whole(video), expected)
    assert all(type(other) is nn.Conv3d for other in others)


def test_a_tower_embeds_its_patches_by_products() -> None:
    tower = opened("qwen2_5_vl")["vision"].model
    kinds = {type(module) for module in tower.modules() if isinstance(module, nn.Conv3d)}
    assert kinds == {PatchConvolution}
