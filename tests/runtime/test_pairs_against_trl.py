"""Losses of pairs, and of marked answers, have the values and gradients of TRL's trainers on the same data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from cases.cut_wholes import opened
from cases.engine_case import TEXT
from cases.tiny_wholes import WHOLES
from cases.tiny_wholes import reference as tiny_whole
from dilatant import MultimodalModel, ParallelSpec, parallelize
from dilatant.config.train import PreferencesConfig
from dilatant.data.sample import EncodedSample
from dilatant.data.text.tokenizer import byte_tokenizer
from dilatant.models.language.pair_loss import with_margins
from dilatant.models.row_attention import use_row_attention
from dilatant.runtime.runtime import Runtime
from dilatant.training.feeding.feed import StepInput
from dilatant.training.references import complete_samples
from harness.checked_steps import assert_close

PAIRS = [("one?", " two", " three!"), ("four", "five six", "7"), ("and now", "no", "something else")]
MARKED = [("one?", " two", True), ("four", "five six", False), ("and now", "no", True), ("then", " what", False)]


def common(folder: Path) -> dict[str, Any]:
    quiet = {"report_to": "none", "gradient_checkpointing": False}
    return {"output_dir": str(folder), "use_cpu": True, "bf16": False, **quiet}


def moved(model: Any, size: float = 0.02) -> Any:
    """Return a copy of a model with other weights, as a reference."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model


def text_models(size: float = 0.02) -> tuple[Any, MultimodalModel, Any, Any]:
    """Return the tokenizer, our model, transformers' model with the same weights, and the reference, `size` away."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = LlamaConfig(**{**TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 2})
    model = MultimodalModel({}, config, seed=0)
    theirs = copy.deepcopy(model.language.model)
    use_row_attention(model)
    return tokenizer, model, theirs, moved(theirs, size)


def log_probability(model: Any, ids: Sequence[int], answer: int, **media: Tensor) -> float:
    """Return the log-probability of the last `answer` tokens."""
    with torch.no_grad():
        likely = model(torch.tensor([ids]), **media).logits[0, -answer - 1 : -1].log_softmax(-1)
    return float(likely.gather(-1, torch.tensor(ids[-answer:])[:, None]).sum())


def sample_of(
    number: int,
    reference: Any,
    prompt: list[int],
    answers: Sequence[list[int]],
    pixels: Tensor | None = None,
    **known: Any,
) -> EncodedSample:
    """Return two answers behind a prompt as a sample of a step, with the reference's log-probabilities."""
    ids = [*prompt, *answers[0], prompt[-1], *answers[1]]
    labels = [*[-100] * len(prompt), *answers[0], -100, *answers[1]]
    media = {} if pixels is None else {"pixel_values": pixels}
    first, second = (log_probability(reference, prompt + each, len(each), **media) for each in answers)
    return EncodedSample(
        f"{number}",
        np.array(ids),
        np.array(labels),
        {"vision": {name: each.numpy() for name, each in media.items()}} if media else {},
        {"language": len(ids), **({"vision": known.pop("encoder_tokens")} if media else {})},
        number,
        branch=(len(prompt) - 1, len(prompt) + len(answers[0])),
        reference=(first, second),
        **known,
    )


def compare(
    model: MultimodalModel,
    how: PreferencesConfig,
    samples: list[EncodedSample],
    wanted: Tensor,
    theirs: Mapping[str, Any],
) -> dict[str, float]:
    """Compare our step with the loss and the gradients of TRL, and return what is measured. theirs: our name → weight
    of transformers' model."""
    model.use_preferences(how)
    wanted.backward()
    towers = {name: "language" for name in model.units if name != "language"}
    runtime: Runtime = parallelize(model, {name: ParallelSpec() for name in model.units}, colocated=towers)
    batch: Any = SimpleNamespace(samples=samples)
    step = StepInput(batch, runtime.plan_step(samples))
    found = runtime.execute(complete_samples(runtime, step), step.step)
    assert found.loss == pytest.approx(wanted.item(), rel=1e-5)  # sums of fp32 in another order
    gradients = {name: weight.grad for name, weight in theirs.items() if weight.grad is not None}
    assert len(gradients) > 20
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        own = runtime.parameters[name].grad
        assert_close(own, gradient, 1e-5 * gradient.norm().item() + 1e-6 * largest, name)
    runtime.close()
    return with_margins(found.losses)


def of_text(model: MultimodalModel, theirs: Any) -> dict[str, Any]:
    return {weight.canonical: theirs.get_parameter(weight.key) for weight in model.language.weights}


@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo", "orpo"])
def test_trl_has_the_same_losses_and_gradients(method: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is absent; not checked: losses of pairs against its trainers")
    tokenizer, model, theirs, reference = text_models()
    data = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in PAIRS])
    how, apart = PreferencesConfig(method=method), method in ("simpo", "orpo")
    trainer: Any
    if method == "simpo":
        cpo = pytest.importorskip("trl.experimental.cpo")
        judged = cpo.CPOConfig(**common(tmp_path), loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0)
        trainer = cpo.CPOTrainer(theirs, judged, train_dataset=data, processing_class=tokenizer)
    elif method == "orpo":
        orpo = pytest.importorskip("trl.experimental.orpo")
        trainer = orpo.ORPOTrainer(
            theirs, orpo.ORPOConfig(**common(tmp_path), beta=0.1), train_dataset=data, processing_class=tokenizer
        )
        how = PreferencesConfig(method=method, sft_weight=0.0)
    else:
        kind = {"dpo": "sigmoid"}.get(method, method)
        judged = trl.DPOConfig(**common(tmp_path), loss_type=kind, beta=0.1, max_length=None)
        trainer = trl.DPOTrainer(theirs, reference, judged, train_dataset=data, processing_class=tokenizer)
    rows = list(trainer.train_dataset)
    trainer.model.train()
    wanted = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    samples, conversations = [], []
    for number, row in enumerate(rows):
        suffix = "_input_ids" if apart else "_ids"
        prompt, *answers = (row[f"{name}{suffix}"] for name in ("prompt", "chosen", "rejected"))
        if apart:  # whole conversations
            answers = [answer[len(prompt) :] for answer in answers]
        conversations.append(torch.tensor(prompt + answers[0]))
        samples.append(sample_of(number, reference, prompt, answers))
    if (
        method == "orpo"
    ):  # TRL's cross entropy is the mean over all tokens of the batch, prompts too: see preferences.md
        logits = [trainer.model(ids[None]).logits[0, :-1] for ids in conversations]
        targets = torch.cat([ids[1:] for ids in conversations])
        wanted = wanted - torch.nn.functional.cross_entropy(torch.cat(logits), targets)
    compare(model, how, samples, wanted, of_text(model, trainer.model))


@pytest.mark.parametrize("size", [-0.02, 0.02])
def test_trl_has_the_same_kto(size: float, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is absent; not checked: KTO against its trainer")
    tokenizer, model, theirs, reference = text_models(size)
    data = Dataset.from_list([dict(zip(("prompt", "completion", "label"), each, strict=True)) for each in MARKED])
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    judged = trl.KTOConfig(**common(tmp_path), **weights, max_length=None, per_device_train_batch_size=len(MARKED))
    trainer: Any = trl.KTOTrainer(theirs, reference, judged, train_dataset=data, processing_class=tokenizer)
    rows = list(trainer.train_dataset)
    trainer.model.train()
    wanted = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    samples = []
    for number, row in enumerate(rows):
        answers = row["completion_ids"], row["KL_completion_ids"]
        assert answers[1] == rows[number - 1]["completion_ids"]  # as `Reader.contrasts` has them
        samples.append(sample_of(number, reference, row["prompt_ids"], answers, desired=row["label"]))
    how = PreferencesConfig(method="kto", **weights)
    measured = compare(model, how, samples, wanted, of_text(model, trainer.model))
    (theirs_of,) = [{name: of_step[-1] for name, of_step in trainer._metrics["train"].items()}]
    assert (theirs_of["kl"] > 0.01) == (size < 0)  # one way the mean is below 0, and then 0 counts
    assert measured["rewards/kl"] == pytest.approx(theirs_of["kl"], rel=1e-4)  # a difference of sums
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert measured[name] == pytest.approx(theirs_of[name], abs=1e-5), name  # differences of sums, too


def test_trl_has_the_same_dpo_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="trl is absent; not checked: DPO with images against its trainer")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.image_token, tokenizer.image_token_id = "<image>", image_id
    settings = {**WHOLES["llava"], "image_token_id": image_id}
    settings["text_config"] = {**settings["text_config"], "vocab_size": len(tokenizer)}
    monkeypatch.setitem(WHOLES, "llava", settings)
    size = {"height": 8, "width": 8}
    pictures = LlavaImageProcessorPil(size={"shortest_edge": 8}, crop_size=size)
    processor = LlavaProcessor(
        pictures, tokenizer, patch_size=2, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    theirs = tiny_whole("llava")
    model = opened("llava", {key: tensor.clone() for key, tensor in theirs.state_dict().items()})
    reference, random = moved(theirs), np.random.default_rng(0)
    records = [
        {"images": [Image.fromarray(random.integers(0, 255, (8, 8, 3), np.uint8))], "prompt": f"<image>{prompt}",
         "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in PAIRS
    ]  # fmt: skip
    judged = trl.DPOConfig(**common(tmp_path), beta=0.1, max_length=None)
    data = Dataset.from_list(records)
    trainer: Any = trl.DPOTrainer(theirs, reference, judged, train_dataset=data, processing_class=processor)
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    wanted = trainer.compute_loss(trainer.model, dict(batch))
    samples, geometry = [], model["vision"].geometry
    for number in range(len(PAIRS)):
        prompt, answers = [], []
        for row in (number, number + len(PAIRS)):
            ids, is_answer = batch["input_ids"][row], batch["completion_mask"][row] > 0
            is_prompt = (batch["attention_mask"][row] > 0) & ~is_answer
            prompt, answers = ids[is_prompt].tolist(), [*answers, ids[is_answer].tolist()]
        assert prompt.count(image_id) == geometry.tokens_per_row
        pixels = batch["pixel_values"][number : number + 1]
        known = {"encoder_tokens": geometry.encoder_tokens}
        samples.append(sample_of(number, reference, prompt, answers, pixels, **known))
    named = dict(trainer.model.named_parameters())
    keys = {
        weight.canonical: model.whole.key_of(unit, weight) for unit in model.units.values() for weight in unit.weights
    }
    compare(model, PreferencesConfig(), samples, wanted, {own: named[key] for own, key in keys.items() if key in named})
