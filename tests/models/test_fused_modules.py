"""Fused kernels: replaced modules compute the same, hold the same weights, and can be put back."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, GemmaConfig, LlamaConfig, LlamaModel, SiglipVisionConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cases.attention.stand_in_kernels import FusedNorm, Rotation, stand_ins
from dilatant.config.errors import UserError
from dilatant.models.core.fused_modules import FusedSwiglu, compile_ahead, fuse, kernel_set, liger, rotating, row_counts
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


def variant(count: int, processors: int, width: int) -> tuple[Any, ...]:
    """What Liger hands Triton for a norm of so many rows: the kernels, and what of its numbers Triton compiles for."""
    kinds = tuple((number == 1, number % 16 == 0) for number in (count, math.ceil(count / processors)))
    return (True, kinds[0]) if width <= 256 and count >= 32768 else (False, *kinds)


@pytest.mark.parametrize("width", [128, 4096])
def test_few_row_counts_stand_for_all_of_a_norm(width: int) -> None:
    for processors in (16, 46, 108, 132, 148):
        chosen = row_counts(processors, width)
        assert max(chosen) * width < 1 << 24  # numbers
        asked = {variant(count, processors, width) for count in (*range(1, 40000), *range(40000, 1 << 20, 97))}
        assert asked <= {variant(count, processors, width) for count in chosen}


class Counted:
    """A kernel that computes nothing and keeps what Triton compiles it for: kinds of numbers, dtypes and constants."""

    def __init__(self, kernel: Any, variants: set[Any]) -> None:
        self._kernel, self._variants = kernel, variants

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        kinds: list[Any] = []
        fixed = {parameter.name for parameter in self._kernel.params if parameter.is_constexpr}
        for name, value in zip(self._kernel.arg_names, arguments):
            if isinstance(value, torch.Tensor):
                kinds.append(value.dtype)
            elif isinstance(value, int) and name not in fixed:
                kinds.append((name, value == 1, value % 16 == 0))
            else:
                kinds.append((name, str(value)))
        self._variants.add((self._kernel.fn.__name__, *kinds, *map(str, sorted(constants.items()))))


def test_ligers_later_rows_ask_for_no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = pytest.importorskip("liger_kernel.ops.rms_norm", reason="liger-kernel is not installed: nothing counted")
    from liger_kernel.ops import rope

    variants: set[Any] = set()
    for library in (norms, rope):
        for name in [name for name in vars(library) if name.endswith(("_kernel", "_triton_rope"))]:
            monkeypatch.setattr(library, name, Counted(getattr(library, name), variants))
    # On a CPU Liger counts one processor.
    monkeypatch.setattr(norms, "math", SimpleNamespace(ceil=lambda rows: math.ceil(rows / 132)))
    kernels = liger()
    config = LlamaConfig(**SMALL)
    attention = LlamaModel(config).layers[0].self_attn
    for width, trains in ((128, True), (128, False), (640, True)):
        norm = kernels["rms_norm"][0](LlamaRMSNorm(width).requires_grad_(trains))
        compile_ahead(norm, 132)
        compiled = set(variants)
        for count in (1, 7, 48, 133, 400, 2111, 5000, 8192, 32768, 70001):
            norm(torch.zeros(count, width, requires_grad=True)).sum().backward()
        assert variants == compiled
    fused = kernels["rope"][0](attention)
    rotate = fused.forward.__func__.__globals__["apply_rotary_pos_emb"]
    for count in (5, 1, 32, 40, 77):
        rows = torch.zeros(1, 4, count, 8, requires_grad=True)
        angles = torch.zeros(1, count, 8)
        sum(part.sum() for part in rotate(rows, rows[:, :2], angles, angles)).backward()
        if count == 5:
            compiled = set(variants)
    assert variants == compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: Liger's kernels did not run")
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
