"""Adapters of experts are those of peft's `target_parameters`: same outputs, gradients, files and merged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig as LoraConfigOfPeft
from peft import PeftModel, get_peft_model
from torch.func import functional_call
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dilatant.config.errors import UserError
from dilatant.config.model import LoraConfig
from dilatant.models.adapters.lora import inject, merged_state, reset_adapters
from dilatant.models.experts.expert_lora import expert_key, to_peft

SIZES = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12, head_dim=8)
    ),
}
BOTH = ("experts.gate_up_proj", "experts.down_proj")
ALONE = {"r": 4, "lora_alpha": 6.0}


def adapted(family: str, weights: tuple[str, ...], **changes):
    """The plain model, and one with adapters that change it."""
    torch.manual_seed(0)
    plain = MODELS[family]()
    model = copy.deepcopy(plain)
    inject(model, LoraConfig(**ALONE, target_parameters=weights, **changes), {"language": ("",)})
    reset_adapters(model)
    return plain, model


@pytest.mark.parametrize("weights", [BOTH, BOTH[:1], BOTH[1:]], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_they_are_those_of_peft(family: str, weights: tuple[str, ...], tmp_path) -> None:
    """The oracle is the plain model whose weights are sums of their own and of the products of peft's matrices."""
    plain, model = adapted(family, weights)
    ids = torch.randint(0, 30, (2, 9))
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)  # B is 0
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == {name for name, _ in model.named_parameters() if "lora_" in name}
    for name, p in own.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(p, std=0.1)
    of_experts = {name.replace(".lora_A.", ".") for name in own if ".experts.lora_A." in name}
    assert len(of_experts) == 2 * len(weights)
    settings = LoraConfigOfPeft(
        r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[f"mlp.{name}" for name in weights],
    )  # fmt: skip
    theirs = get_peft_model(copy.deepcopy(plain), settings)
    there = dict(theirs.named_parameters())
    for name, p in own.items():
        is_expert = ".experts." in name
        key = expert_key(name, of_experts).replace(".weight", ".default.weight") if is_expert else name
        with torch.no_grad():
            there[f"base_model.model.{key}"].copy_(to_peft(name, p) if is_expert else p)
    theirs.save_pretrained(str(tmp_path))
    merged = PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path)).merge_and_unload().state_dict()
    for key, tensor in merged_state(model).items():
        torch.testing.assert_close(tensor, merged[key], msg=key)

    leaves = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    summed = dict(plain.named_parameters())
    for name, first in leaves.items():
        if ".lora_A." in name:
            second = leaves[name.replace(".lora_A.", ".lora_B.")]
            key = name.replace(".lora_A.default.", ".").replace(".lora_A.", ".")
            summed[key] = summed[key].detach() + 6 / 4 * second @ first
    expected = functional_call(plain, summed, (), {"input_ids": ids, "labels": ids}).loss
    expected.backward()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in own.items():
        torch.testing.assert_close(p.grad, leaves[name].grad, rtol=1e-4, atol=1e-6, msg=name)  # fp32, other sums


@pytest.mark.parametrize(
    ("weights", "changes", "said"),
    [
        (("experts.up_proj",), {}, "'experts.up_proj' names no weight of experts that share a tensor; there are"),
        (BOTH, {"use_dora": True}, "use_dora: peft has none of it on experts"),
        (BOTH, {"lora_dropout": 0.1}, "lora_dropout: peft has none of it on experts"),
    ],
)
def test_what_peft_has_not_is_refused(weights: tuple[str, ...], changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        adapted("mixtral", weights, **changes)
