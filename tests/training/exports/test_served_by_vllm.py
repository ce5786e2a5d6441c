"""vLLM loads an export of a run, and gives tokens the log-probabilities that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cases.tiny_project import write_images
from dilatant import train
from dilatant.data.text.tokenizer import byte_tokenizer
from harness.vllm_python import ask_vllm

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest one of vLLM's kernels for CPUs
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
}
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],  # what this file leaves out, vLLM does not normalise by
    "image_std": [0.2, 0.3, 0.4],
}
QUESTION = "Which side is bright?"


def write_source(kind: str, folder: Path) -> Any:
    """Write a random model as the hub has it, and return its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS.values()]})
    text = {**TEXT, "vocab_size": len(tokenizer), "tie_word_embeddings": kind == "qwen3"}
    torch.manual_seed(0)
    if kind == "qwen3":
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**text))
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
        text_config = {"model_type": "qwen2_5_vl_text", **text, "rope_parameters": rope}
        settings: dict[str, Any] = {"vision_config": VISION, "text_config": text_config, **ids}
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**settings))
    for weight in model.parameters():  # norms and biases differ, too, and no answer is as likely as another
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    if kind != "qwen3":
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return tokenizer


def export_of_a_run(kind: str, folder: Path) -> tuple[Path, Any]:
    """Train a few steps and return the transformers folder of the export, and its tokenizer."""
    tokenizer = write_source(kind, folder / "source")
    lines = write_images(folder, 4).read_text(encoding="utf-8").splitlines()
    if kind == "qwen3":
        texts = [{"prompt": QUESTION, "completion": f"{number}."} for number in range(4)]
        lines = [json.dumps(each) for each in texts]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = {"id": str(folder / "source")}
    result = train(
        {
            "output_dir": str(folder / "run"),
            "model": {"language_model": source} if kind == "qwen3" else source,
            "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": 256, "workers": 0},
            "train": {"steps": 2, "global_batch_size": 4, "optimizer": {"learning_rate": 0.01}, "report_to": []},
        }
    )
    return result.folder / "export" / ("language" if kind == "qwen3" else ""), tokenizer


@torch.no_grad()
def by_transformers(folder: Path, ids: list[int], image: str | None, placeholder: int) -> list[float]:
    """Return the log-probabilities of the tokens but the first; see `harness.vllm_reader`."""
    if image is None:
        given, model = {}, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
        given = dict(processor(images=[Image.open(image)], return_tensors="pt"))
        rows = int(given["image_grid_thw"].prod()) // 4
        at = ids.index(placeholder)
        ids = [*ids[:at], *[placeholder] * rows, *ids[at + 1 :]]
        given["mm_token_type_ids"] = (torch.tensor([ids]) == placeholder).long()
    tokens = torch.tensor([ids])
    likely = model(input_ids=tokens, **given).logits[0, :-1].log_softmax(-1)
    return likely.gather(-1, tokens[0, 1:, None])[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_5_vl"])
def test_vllm_reads_an_export_as_transformers_does(kind: str, tmp_path: Path) -> None:
    ask = ask_vllm("exports of a text model and of a vision-language model against its loader")
    folder, tokenizer = export_of_a_run(kind, tmp_path)
    image, text = None, QUESTION
    if kind != "qwen3":
        image, text = str(tmp_path / "seen.png"), f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}"
        # Of a size that no processor changes: 4 by 6 patches.
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), np.uint8)).save(image)
    ids = tokenizer(text)["input_ids"]
    limits = {"image": 1, "video": 0} if image else {}
    settings = {"max_model_len": 256, "max_num_seqs": 2, **({"limit_mm_per_prompt": limits} if image else {})}
    (found,) = ask({"folder": str(folder), "prompts": [(ids, image)], "settings": settings})
    wanted = by_transformers(folder, ids, image, tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    assert len(found) == len(wanted) == len(QUESTION) - 1 + (3 + 5 if image else 0)
    assert max(wanted) - min(wanted) > 1
    # fp32 kernels that sum in another order; a weight in the wrong place moves them by tenths.
    assert found == pytest.approx(wanted, abs=1e-4)
