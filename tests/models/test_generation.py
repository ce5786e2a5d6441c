"""Batched generation gives what choosing the likeliest token step by step gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases.tiny_models import LANGUAGE_FAMILIES, images, tokens, vision_language
from dilatant.models.multimodal import MultimodalModel


def greedy(mllm, ids: torch.Tensor, inputs, steps: int) -> list[int]:
    """One sample, whole forward every step."""
    mllm.eval()
    chosen: list[int] = []
    for _ in range(steps):
        logits = mllm(ids, encoder_inputs=inputs).logits
        chosen.append(int(logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[chosen[-1]]])], dim=1)
    return chosen


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_left_padded_generation_equals_each_sample_alone(family: str) -> None:
    mllm = vision_language(family)
    for parameter in mllm.parameters():  # larger weights, so that likeliest tokens are clear and vary
        parameter.data *= 3
    placeholder = torch.full((1, 16), mllm.placeholder_ids["vision"])
    samples = [
        torch.cat([tokens(1, 2), placeholder, tokens(1, 3, seed=1)], dim=1),
        tokens(1, 8, seed=2),
        torch.cat([placeholder, tokens(1, 2, seed=3)], dim=1),
    ]
    pictures = [images(1), images(0), images(1, seed=1)]
    longest = max(sample.shape[1] for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for line, sample in enumerate(samples):
        ids[line, longest - sample.shape[1] :] = sample[0]
        mask[line, longest - sample.shape[1] :] = 1
    inputs = {"vision": {"pixel_values": torch.cat(pictures)}}
    mllm.train()
    given = mllm.generate(
        ids,
        encoder_inputs=inputs,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert mllm.training
    expected = [
        greedy(mllm, sample, {"vision": {"pixel_values": picture}}, 6)
        for sample, picture in zip(samples, pictures, strict=True)
    ]
    assert given.tolist() == expected
    assert len({token for line in expected for token in line}) > 3


def test_prepended_images_reach_generation() -> None:
    mllm = vision_language(merge="prepend")
    written = vision_language()
    ids = tokens(2, 4)
    inputs = {"vision": {"pixel_values": images(2)}}
    settings = {"max_new_tokens": 4, "do_sample": False, "encoder_inputs": inputs}
    placeholder = torch.full((2, 16), 64)
    expected = written.generate(torch.cat([placeholder, ids], dim=1), **settings)
    assert torch.equal(mllm.generate(ids, **settings), expected)


def test_a_real_language_model_generates_the_transformers_text() -> None:
    """Real weights: cut into stages they give the same logits, and `generate` the same greedy text."""
    root = Path(os.environ.get("DILATANT_SHARED") or Path(__file__).resolve().parents[3] / "shared")
    folder = root / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: generation with trained weights was not checked")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mllm = MultimodalModel({}, str(folder))
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    settings = {"max_new_tokens": 30, "do_sample": False}
    expected = plain.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :]
    assert torch.equal(mllm.generate(prompt["input_ids"], **settings)[0], expected)
    unit = mllm.language
    ids = torch.cat([prompt["input_ids"], expected[None]], dim=1)
    hidden = unit.stage(0, 3)(ids)
    assert torch.equal(unit.stage(3, len(unit.layers))(hidden=hidden).logits, plain(input_ids=ids).logits)
