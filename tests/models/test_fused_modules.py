"""Fused kernels: replaced modules compute the same, hold the same weights, and can be put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModel, GemmaConfig, LlamaConfig, SiglipVisionConfig

from cases.attention.stand_in_kernels import FusedNorm, Rotation, stand_ins
from dilatant.config.errors import UserError
from dilatant.models.core.fused_modules import FusedSwiglu, fuse, kernel_set, rotating
from dilatant.runtime.state.weight_gradients import WeightGradients, accumulate, replace_linears

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES: dict[str, tuple[Any, int, int, int]] = {
    "llama": (LlamaConfig(**SMALL, num_key_value_heads=1, vocab_size=20), 4, 2, 2),
    # Its norms multiply by 1 + weight, and its activation is not silu.
    "gemma": (GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8, vocab_size=20), 4, 0, 2),
    "siglip": (SiglipVisionConfig(**SMALL, image_size=8, patch_size=4, vision_use_head=False), 4, 0, 0),
}


@pytest.mark.parametrize("family", CASES)
def test_fused_modules_compute_the_same_with_the_same_weights(family: str) -> None:
    config, norms, products, rotations = CASES[family]
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    plain = copy.deepcopy(model)
    [blocks] = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    rotated = []

    def rotate(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated.append(len(rows))
        return Rotation.apply(*rows)

    fused = fuse(blocks, {**stand_ins(), "rope": (lambda attention: rotating(attention, rotate),)})
    rotated.clear()
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(FusedNorm), kinds.count(FusedSwiglu)) == (norms, products)
    assert sum("forward" in module.__dict__ for module in model.modules()) == rotations
    assert model.state_dict().keys() == plain.state_dict().keys()
    gradients = WeightGradients()
    replace_linears(model, gradients)
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if family == "siglip" else {"input_ids": torch.arange(8)[None]}
    plain(**given).last_hidden_state.square().sum().backward()
    assert not rotated
    with gradients.deferring():  # kernels that write into saved tensors leave what is delayed alone
        model(**given).last_hidden_state.square().sum().backward()
    accumulate(gradients.take())
    assert len(rotated) == rotations
    theirs = dict(plain.named_parameters())
    for name, mine in model.named_parameters():
        assert (mine.grad is None) == (theirs[name].grad is None), name
        if mine.grad is not None:
            # fp32 sums in another order; a key's bias has no gradient but rounding.
            torch.testing.assert_close(mine.grad, theirs[name].grad, rtol=1e-4, atol=1e-4, msg=name)
    changed = next(iter(model.parameters()))
    fused.restore()
    kinds = [type(module) for module in model.modules()]
    assert FusedNorm not in kinds
    assert FusedSwiglu not in kinds
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert next(iter(model.parameters())) is changed


def test_a_kernel_that_computes_something_else_is_not_taken() -> None:
    model = AutoModel.from_config(CASES["llama"][0])
    wrong: dict[str, Any] = {
        "rms_norm": (lambda norm: FusedNorm(norm, 1.0),),
        "swiglu": (lambda mlp: FusedSwiglu(mlp, torch.mul),),
    }
    wrong["rope"] = (lambda attention: rotating(attention, lambda query, key, cos, sin: (query * cos[:, None], key)),)
    assert not fuse(model.layers, wrong).places


def test_liger_by_name_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"train.kernels: .* GPUs only"):
        kernel_set("liger", torch.device("cpu"))
    assert not kernel_set("auto", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", CASES)
def test_liger_computes_the_same_on_a_gpu(family: str) -> None:
    pytest.importorskip("liger_kernel")
    config, *places = CASES[family]
    torch.manual_seed(0)
    model = AutoModel.from_config(config).cuda()
    plain = copy.deepcopy(model)
    [blocks] = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    assert len(fuse(blocks, kernel_set("liger", torch.device("cuda"))).places) == sum(places)
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if family == "siglip" else {"input_ids": torch.arange(8)[None]}
    for one in (model, plain):
        one(**{key: value.cuda() for key, value in given.items()}).last_hidden_state.square().sum().backward()
    theirs = dict(plain.named_parameters())
    for name, mine in model.named_parameters():
        if mine.grad is not None:  # approximate exponentials of the kernels
            torch.testing.assert_close(mine.grad, theirs[name].grad, rtol=1e-3, atol=1e-3, msg=name)
