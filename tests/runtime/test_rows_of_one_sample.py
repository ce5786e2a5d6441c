"""Families whose mask knows nothing of positions train on each sample as if it were alone, whatever shares the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec
from dilatant.runtime.layouts import layout_problems
from dilatant.training.parallelize import parallelize

_TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    # Its own declaration is eager attention, which nobody asked for.
    "gpt_oss": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SHARES_ROWS = {"gpt_oss"}


def opened(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**_TEXT, **FAMILIES[family]), **settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def samples() -> list[EncodedSample]:
    drawn = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate((17, 5, 11)):
        ids = torch.randint(3, 64, (length,), generator=drawn).numpy()
        labels = ids.copy()
        labels[0] = -100
        made.append(EncodedSample(f"{number}", ids, labels, sizes={"language": length}, draw=number + 1))
    return made


def alone_in_transformers(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    total = sum(sample.target_tokens for sample in samples())
    loss = torch.zeros(())
    for sample in samples():
        ids = torch.as_tensor(sample.input_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = loss + functional.cross_entropy(logits, ids[1:], reduction="sum") / total
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


@pytest.mark.filterwarnings("ignore:rung 1 of 3")
@pytest.mark.parametrize(("family", "attention"), [*((name, None) for name in FAMILIES), ("gpt_oss", "eager")])
def test_a_step_has_the_loss_and_gradients_of_samples_alone(family: str, attention: str | None) -> None:
    model = opened(family, **({} if attention is None else {"attn_implementation": attention}))
    loss, gradients = alone_in_transformers(model)
    mllm = MultimodalModel({}, model)
    runtime = parallelize(mllm, {"language": ParallelSpec()})
    assert mllm.language.packs_rows == (family in SHARES_ROWS)
    assert runtime.execute(samples()).loss == pytest.approx(loss, rel=1e-5)  # sums in another order
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-5 * largest, msg=name)


def test_model_refuses_packed_row_whose_samples_would_interact() -> None:
    mllm = MultimodalModel({}, opened("bloom"))
    ids, places = torch.arange(3, 11)[None], torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    with pytest.raises(UserError, match="samples would reach each other under transformers' own mask"):
        mllm(ids, position_ids=places)
    assert mllm(ids, position_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_layout_that_splits_an_unsplittable_unit_is_refused() -> None:
    mllm = MultimodalModel({}, opened("bloom"))
    mllm.language.uncut = "the loss changes"
    layers = {"language": len(mllm.language.layers)}
    cut, whole = (plan_from_specs(layers, {"language": ParallelSpec(pp=stages)}, mllm.graph.feeds) for stages in (2, 1))
    (problem,) = layout_problems(cut, mllm.units)
    assert "language: cut into stages" in problem
    assert "the loss changes" in problem
    assert not layout_problems(whole, mllm.units)
