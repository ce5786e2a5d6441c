"""Losses of pairs, and of marked answers, have the values and gradients of TRL's trainers on the same data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from cases.whole_samples import transformers_inputs
from dilatant import MultimodalModel, ParallelSpec, parallelize
from dilatant.config.own_parts import OwnPart
from dilatant.config.train import PreferencesConfig
from dilatant.data.media.pixels import as_array
from dilatant.data.order.blend import Blend, open_own_data
from dilatant.data.sample import EncodedSample
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import byte_tokenizer
from dilatant.models.families.media_units import units_of_pretrained
from dilatant.models.language.pair_loss import with_margins
from dilatant.models.row_attention import use_row_attention
from dilatant.runtime.runtime import Runtime
from dilatant.training.feeding.feed import StepInput
from dilatant.training.references import complete_samples
from harness.checked_steps import assert_close

PAIRS = [("one?", " two", " three!"), ("four", "five six", "7"), ("and now", "no", "something else")]
MARKED = [("one?", " two", True), ("four", "five six", False), ("and now", "no", True), ("then", " what", False)]

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


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


def with_references(model: Any, sample: EncodedSample) -> EncodedSample:
    """Return a sample with a reference's log-probabilities of both answers, each behind the prompt and its pictures."""
    found = []
    for place, each in enumerate(sample.sequences()):
        media = {unit: {name: as_array(value) for name, value in own.items()} for unit, own in sample.media.items()}
        if not sample.shared_tokens:  # each answer has its own copy of the prompt
            media = {u: {name: np.array_split(v, 2)[place] for name, v in own.items()} for u, own in media.items()}
        inputs = transformers_inputs("llava", replace(each, media=media))
        targets = torch.from_numpy(each.labels)[1:]
        with torch.no_grad():
            likely = model(**inputs).logits[0, :-1].log_softmax(-1)
        carries = targets != -100
        found.append(float(likely[carries].gather(-1, targets[carries, None]).sum()))
    return replace(sample, reference=(found[0], found[1]))


def sample_of(
    number: int, prompt: list[int], answers: Sequence[list[int]], desired: bool | None = None
) -> EncodedSample:
    """Return two answers behind a prompt as a sample of a step."""
    ids = np.array([*prompt, *answers[0], prompt[-1], *answers[1]])
    labels = np.array([*[-100] * len(prompt), *answers[0], -100, *answers[1]])
    branch = len(prompt) - 1, len(prompt) + len(answers[0])
    return EncodedSample(f"{number}", ids, labels, {}, {"language": len(ids)}, number, branch=branch, desired=desired)


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
        samples.append(with_references(reference, sample_of(number, prompt, answers)))
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
        sample = sample_of(number, row["prompt_ids"], answers, row["label"])
        samples.append(with_references(reference, sample))
    how = PreferencesConfig(method="kto", **weights)
    measured = compare(model, how, samples, wanted, of_text(model, trainer.model))
    (theirs_of,) = [{name: of_step[-1] for name, of_step in trainer._metrics["train"].items()}]
    assert (theirs_of["kl"] > 0.01) == (size < 0)  # one way the mean is below 0, and then 0 counts
    assert measured["rewards/kl"] == pytest.approx(theirs_of["kl"], rel=1e-4)  # a difference of sums
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert measured[name] == pytest.approx(theirs_of[name], abs=1e-5), name  # differences of sums, too


@dataclass(frozen=True)
class Pictured:
    """A vision-language model, transformers' one with the same weights, a reference, and what reads records for both.
    folder: has the processor."""

    model: MultimodalModel
    theirs: Any
    reference: Any
    processor: Any
    folder: Path

    def samples(self, data: Dataset, how: PreferencesConfig) -> list[EncodedSample]:
        """Return the records as samples of a step, read by our own reader and processor."""
        marks = how.method == "kto"
        blend = open_own_data(OwnPart("train_data", data))
        assert isinstance(blend, Blend)
        blend = blend.contrasted() if marks else blend
        tokenizer, whole = self.processor.tokenizer, self.model.whole
        assert whole is not None
        units = units_of_pretrained(whole, str(self.folder), tokenizer)
        chat = chat_tokenizer(tokenizer, processed=True)
        encoding = Encoding(chat, units, pairs=True, marks=marks, shares_prompt=how.share_prompt)
        found = []
        for number in range(len(blend)):
            record = blend[number]
            sample = replace(encode_sample(record, encoding), draw=number, desired=record.desired)
            found.append(with_references(self.reference, sample))
        return found

    def weights(self) -> dict[str, Any]:
        """Return our name of each weight → transformers' weight."""
        named, whole = dict(self.theirs.named_parameters()), self.model.whole
        assert whole is not None
        return {
            weight.canonical: named[key]
            for unit in self.model.units.values()
            for weight in unit.weights
            if (key := whole.key_of(unit, weight)) in named
        }


@pytest.fixture
def pictured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pictured:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<user>", "<assistant>"]})
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.chat_template = TEMPLATE
    settings = {**WHOLES["llava"], "image_token_id": tokenizer.image_token_id}
    settings["text_config"] = {**settings["text_config"], "vocab_size": len(tokenizer)}
    monkeypatch.setitem(WHOLES, "llava", settings)
    pictures = LlavaImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(
        pictures, tokenizer, patch_size=2, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor.chat_template = TEMPLATE
    processor.save_pretrained(tmp_path / "processor")
    theirs = tiny_whole("llava")
    model = opened("llava", {key: tensor.clone() for key, tensor in theirs.state_dict().items()})
    return Pictured(model, theirs, moved(theirs), processor, tmp_path / "processor")


def records(answers: Sequence[tuple[Any, ...]], names: tuple[str, ...]) -> Dataset:
    """Return conversations in the form of TRL: with a picture, with two, without, and with one."""
    random, found = np.random.default_rng(0), []
    for (prompt, *rest), count in zip(answers, (1, 2, 0, 1), strict=False):
        images = [Image.fromarray(random.integers(0, 255, (9, 8 + at, 3), np.uint8)) for at in range(count)]
        content = [{"type": "image", "text": ""}] * count + [{"type": "text", "text": prompt}]
        said = [
            [{"role": "assistant", "content": [{"type": "text", "text": each}]}] if isinstance(each, str) else each
            for each in rest
        ]
        talk = {"images": images, "prompt": [{"role": "user", "content": content}]}
        found.append({**talk, **dict(zip(names, said, strict=True))})
    return Dataset.from_list(found)


def check_tokens(samples: Sequence[EncodedSample], first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Check that both answers of each sample have the tokens of a row of TRL's batches. first, second: `input_ids`,
    `attention_mask` and `completion_mask`, [samples, tokens] each."""
    for number, sample in enumerate(samples):
        for own, batch in zip(sample.sequences(), (first, second), strict=True):
            is_token = batch["attention_mask"][number] > 0
            assert own.input_ids.tolist() == batch["input_ids"][number][is_token].tolist()
            assert (own.labels != -100).tolist() == (batch["completion_mask"][number][is_token] > 0).tolist()


@pytest.mark.parametrize(
    ("method", "shares"),
    [("dpo", True), ("dpo", False), ("ipo", True), ("simpo", True), ("orpo", True)],
    ids=["dpo", "dpo, prompts apart", "ipo", "simpo", "orpo"],
)
def test_trl_has_the_same_losses_of_pictures(method: Any, shares: bool, pictured: Pictured, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is absent; not checked: losses of pairs with images")
    data = records(PAIRS, ("chosen", "rejected"))
    kind = "ipo" if method == "ipo" else "sigmoid"
    judged = trl.DPOConfig(**common(tmp_path), loss_type=kind, beta=0.1, max_length=None)
    trainer: Any = trl.DPOTrainer(
        pictured.theirs, pictured.reference, judged, train_dataset=data, processing_class=pictured.processor
    )
    batch = dict(trainer.data_collator(list(trainer.train_dataset)))
    trainer.model.train()
    rows = {name: batch[name].chunk(2) for name in ("input_ids", "attention_mask", "completion_mask")}
    first, second = ({name: halves[at] for name, halves in rows.items()} for at in (0, 1))
    how = PreferencesConfig(method=method, share_prompt=shares)
    samples = pictured.samples(data, how)
    assert all((sample.shared_tokens > 0) == shares for sample in samples)
    check_tokens(samples, first, second)
    if method in ("dpo", "ipo"):
        wanted = trainer.compute_loss(trainer.model, batch)
    else:
        wanted = loss_without_pictures(method, pictured, first, second, batch["pixel_values"], tmp_path)
    measured = compare(pictured.model, how, samples, wanted, pictured.weights())
    assert 0 <= measured["rewards/accuracies"] <= 1


def loss_without_pictures(
    method: str, pictured: Pictured, first: Mapping[str, Tensor], second: Mapping[str, Tensor], pixels: Tensor, to: Path
) -> Tensor:
    """Return the loss of a trainer of TRL that knows no pictures, whose model sees them. pixels: of the rows of `first`
    and `second`."""
    experimental = pytest.importorskip(f"trl.experimental.{'cpo' if method == 'simpo' else method}")
    text = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), PAIRS[0], strict=True))])
    batch: dict[str, Tensor] = {}
    for side, rows in (("chosen", first), ("rejected", second)):
        labels = rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)
        whole = {**rows, "labels": labels}
        batch |= {f"{side}_{name}": whole[name] for name in ("input_ids", "attention_mask", "labels")}

    def seeing(ids: Tensor, **settings: Any) -> Any:
        return pictured.theirs(input_ids=ids, pixel_values=pixels, **settings)

    settings = {"train_dataset": text, "processing_class": pictured.processor.tokenizer}
    trainer: Any
    if method == "simpo":
        judged = experimental.CPOConfig(**common(to), loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0)
        trainer = experimental.CPOTrainer(pictured.theirs, judged, **settings)
        return trainer.compute_loss(seeing, batch)
    judged = experimental.ORPOConfig(**common(to), beta=0.1)
    trainer = experimental.ORPOTrainer(pictured.theirs, judged, **settings)
    chosen, rejected, *_ = trainer.concatenated_forward(seeing, batch)
    ratios, *_ = trainer.odds_ratio_loss(chosen, rejected)
    return -ratios.mean() - chosen.mean()  # cross entropy: a mean per pair, see preferences.md


@pytest.mark.parametrize("size", [-0.02, 0.02])
def test_trl_has_the_same_kto_of_pictures(size: float, pictured: Pictured, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is absent; not checked: KTO with images")
    pictured = replace(pictured, reference=moved(pictured.theirs, size))
    data = records(MARKED, ("completion", "label"))
    judged = trl.KTOConfig(**common(tmp_path), max_length=None, per_device_train_batch_size=len(MARKED))
    trainer: Any = trl.KTOTrainer(
        pictured.theirs, pictured.reference, judged, train_dataset=data, processing_class=pictured.processor
    )
    batch = dict(trainer.data_collator(list(trainer.train_dataset)))
    trainer.model.train()
    how = PreferencesConfig(method="kto")
    samples = pictured.samples(data, how)
    check_tokens(samples, batch, {name: batch[f"KL_{name}"] for name in batch if f"KL_{name}" in batch})
    wanted = trainer.compute_loss(trainer.model, batch)
    measured = compare(pictured.model, how, samples, wanted, pictured.weights())
    (theirs_of,) = [{name: of_step[-1] for name, of_step in trainer._metrics["train"].items()}]
    assert (theirs_of["kl"] > 0.01) == (size < 0)  # one way the mean is below 0, and then 0 counts
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/kl"):
        known = theirs_of[name.replace("rewards/kl", "kl")]
        assert measured[name] == pytest.approx(known, rel=1e-4, abs=1e-5), name  # differences of sums
