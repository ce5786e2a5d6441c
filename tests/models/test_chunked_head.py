"""The loss of a long row by chunks of its targets: equal numbers, and logits of only one chunk at a time."""

from __future__ import annotations

import pytest
import torch

from cases.often import often
from cases.tiny_models import LANGUAGE_MODELS, language_only, positions, tokens
from dilatant.models.multimodal import MultimodalModel
from dilatant.runtime.state.weight_gradients import WeightGradients, accumulate, replace_linears
from oracles.live_storages import LiveStorages

MORE_FAMILIES = {
    "gemma": {"head_dim": 8},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "do_layer_norm_before": True, "word_embed_proj_dim": 32},
    "gemma2 with a low cap": {"head_dim": 8, "final_logit_softcapping": 2.0},
}
KINDS = ("llama_tied", "granite", "cohere", "opt", "gemma2 with a low cap")
"""Families whose heads do more than multiply, or stand elsewhere."""


def _model(family: str) -> MultimodalModel:
    if family in LANGUAGE_MODELS:
        return language_only(family)
    settings = {**LANGUAGE_MODELS["llama"], **MORE_FAMILIES[family], "model_type": family.split()[0]}
    if family == "opt":
        del settings["num_key_value_heads"], settings["intermediate_size"]
    return MultimodalModel({}, settings, seed=0)


@pytest.mark.parametrize("family", often([*LANGUAGE_MODELS, *MORE_FAMILIES], *KINDS))
def test_chunks_give_the_loss_and_the_gradients_of_transformers(family: str) -> None:
    mllm = _model(family).eval()
    ids = tokens(1, 23)
    labels = ids.clone()
    labels[0, [0, 2, 5, 6, 14, 17]] = -100
    said, targets = mllm.language.model(input_ids=ids).logits[0, :-1].log_softmax(-1), labels[0, 1:]
    has_target = targets != -100
    expected = -said[has_target].gather(1, targets[has_target][:, None]).sum() / 10
    expected.backward()
    gradients = {name: p.grad for name, p in mllm.named_parameters() if p.grad is not None}
    mllm.zero_grad()
    mllm.language.loss_chunk = 4
    loss = mllm(ids, position_ids=positions(23), labels=labels, loss_denominator=10.0, return_logits=False).loss
    loss.backward()
    # fp32: sums of some hundred terms in another order
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in mllm.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if parameter.grad is not None:
            difference = (parameter.grad - gradients[name]).norm()
            assert difference <= 1e-5 * gradients[name].norm() + 1e-7, name


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(
    ("tied", "frozen"), [(True, None), (False, None), (False, "language.head"), (False, "language.layers")]
)
def test_chunks_work_with_split_backward(tied: bool, defer: bool, frozen: str | None) -> None:
    results = []
    for chunk in (None, 3):
        mllm = language_only("llama_tied" if tied else "llama")
        if frozen:
            mllm.freeze([f"{frozen}*"])
        unit = mllm.language
        unit.loss_chunk = chunk
        stage = unit.stage(0, len(unit.layers))
        gradients = WeightGradients()
        replace_linears(stage, gradients, stage.undeferred)
        loss = stage(tokens(1, 11), labels=tokens(1, 11), return_logits=False).loss
        if defer:
            with gradients.deferring():
                loss.backward()
            accumulate(gradients.take())
        else:
            loss.backward()
        results.append({name: p.grad for name, p in stage.named_logical_parameters()})
    for name, gradient in results[1].items():
        assert (gradient is None) == (results[0][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, results[0][name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("defer", [False, True])
def test_a_chunk_bounds_what_the_loss_takes(dtype: torch.dtype, defer: bool) -> None:
    """8k targets and a vocabulary of 152k in chunks of 1,024, scaled down: 8 bytes per logit of one chunk (logits and
    their gradient, with bf16 both once more in fp32), 10 with bf16 on a CPU, whose products are in fp32."""
    vocabulary, width, count, chunk = 9_504, 16, 512, 64
    settings = {**LANGUAGE_MODELS["llama"], "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": 1}
    mllm = MultimodalModel({}, settings, seed=0)
    for parameter in mllm.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.grad_dtype = torch.float32
    unit = mllm.language
    unit.loss_chunk = chunk
    stage = unit.stage(2, 3)
    gradients = WeightGradients()
    replace_linears(stage, gradients, stage.undeferred)
    hidden = torch.randn(1, count, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (1, count))
    with LiveStorages([*mllm.parameters(), *mllm.buffers(), hidden, labels]) as live:
        loss = stage(None, None, hidden, labels=labels, return_logits=False).loss
        if defer:
            with gradients.deferring():
                loss.backward()
        else:
            loss.backward()
    weight_gradient = 4 * vocabulary * width
    logits = chunk * vocabulary
    assert live.peak <= (8 if dtype == torch.float32 else 10) * logits + weight_gradient + 64 * count * width
    assert live.peak < 4 * count * vocabulary  # all logits, once
