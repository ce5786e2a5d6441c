"""LoRA as a user runs it: it goes on where it was, ranks share it, and models of parts have it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cases.tiny_project import Dilatant, tiny_config
from cases.tiny_wholes import save_as_the_hub_does
from cases.whole_samples import transformers_inputs
from dilatant.config import load_config
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import load_exported
from dilatant.planning.assemble import assemble_samples
from dilatant.training.evaluation.image_answers import generate_answers
from harness.shared_data import need

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Dettmers et al. 2023, appendix E."""
NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: training on a base in four bits was not checked",
)
SHARED = {"units": {"vision": {}, "language": {"tp": 2, "pp": 2}}, "microbatches": 2}


def write(project: Path, tree: dict[str, Any]) -> Path:
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project / "config.yaml"


def whole_with_lora() -> dict[str, Any]:
    return {
        "output_dir": "run",
        "model": {
            "id": "whole",
            "lora": {
                "r": 4,
                "units": ["vision.encoder", "language"],
                "use_rslora": True,
                "train": ["vision.projector"],
            },
        },
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 96, "workers": 0},
        "train": {
            "steps": 4,
            "global_batch_size": 6,
            "save_steps": 2,
            "keep_checkpoints": 4,
            "optimizer": {"learning_rate": 0.01},
            "report_to": [],
            "device": "cpu",
        },
    }


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
def test_adapters_go_on_where_they_were(project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("llava", project / "whole")
    tree = whole_with_lora()
    tree["model"]["lora"] |= {"use_dora": True, "use_rslora": False}
    config = write(project, tree)
    code, _, err = dilatant("train", config)
    assert code == 0, err
    middle = project / "run" / "checkpoints" / "step-00000002"
    code, _, err = dilatant("train", config, "--set", f"train.resume={middle}", "--set", "output_dir=again")
    assert code == 0, err
    one, other = (
        load_file(project / name / "export" / "adapter" / "adapter_model.safetensors") for name in ("run", "again")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert losses(project / "again") == losses(project / "run")[2:]
    # Magnitudes began as the lengths of what was read: four updates move them by 0.01 at most.
    plain = AutoModelForImageTextToText.from_pretrained(project / "whole").state_dict()
    magnitudes = {key: tensor for key, tensor in one.items() if "magnitude" in key}
    assert magnitudes
    for key, tensor in magnitudes.items():
        weight = plain[key.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        torch.testing.assert_close(tensor, weight.norm(dim=1), rtol=0, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_ranks_that_share_layers_share_their_adapters(dora: bool, project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("llava", project / "whole")
    tree = whole_with_lora()
    tree["model"]["lora"] |= {"use_dora": dora, "use_rslora": not dora}
    assert dilatant("train", write(project, tree))[0] == 0
    code, _, err = dilatant("train", write(project, {**tree, "output_dir": "shared", "parallel": SHARED}))
    assert code == 0, err
    # fp32: sums in another order, through four updates
    assert losses(project / "shared") == pytest.approx(losses(project / "run"), rel=1e-4)
    one, other = (
        load_file(project / name / "export" / "adapter" / "adapter_model.safetensors") for name in ("run", "shared")
    )
    for key, tensor in one.items():
        torch.testing.assert_close(other[key], tensor, rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.slow
@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("dora", [False, True])
def test_ranks_share_a_base_in_four_bits_by_whole_blocks(dora: bool, project: Path, dilatant: Dilatant) -> None:
    tree = tiny_config(steps=4, device="cpu", optimizer={"learning_rate": 0.01})
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    tree["model"]["language_model"]["config"] |= sizes
    tree["model"]["lora"] = {"r": 4, "use_dora": dora, "load_in_4bit": True}
    assert dilatant("train", write(project, tree))[0] == 0
    code, _, err = dilatant("train", write(project, {**tree, "output_dir": "shared", "parallel": SHARED}))
    assert code == 0, err
    # fp32: sums in another order, through four updates
    assert losses(project / "shared") == pytest.approx(losses(project / "run"), rel=1e-5)
    tree["model"]["language_model"]["config"]["hidden_size"] = 64  # of two heads of 32
    code, _, err = dilatant("train", write(project, {**tree, "output_dir": "narrow", "parallel": SHARED}))
    assert code == 2
    assert "within the blocks of 64 numbers that have one scale" in err


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight in NF4, in blocks of 64 numbers."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - torch.tensor(NF4)).abs().argmin(dim=-1)
    return (torch.tensor(NF4)[nearest] * scales).flatten()[: weight.numel()].view(weight.shape)


@pytest.mark.slow
@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_a_four_bit_base_trains_rounded_and_exports_plain(kind: str, project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("qwen2_5_vl", project / "whole")
    tree = whole_with_lora()
    tree["model"]["lora"] |= {"use_rslora": False, kind: True, "load_in_4bit": True, "units": ["language"]}
    config = write(project, tree)
    code, _, err = dilatant("train", config)
    assert code == 0, err
    middle = project / "run" / "checkpoints" / "step-00000002"
    code, _, err = dilatant("train", config, "--set", f"train.resume={middle}", "--set", "output_dir=again")
    assert code == 0, err
    assert losses(project / "again") == losses(project / "run")[2:]
    staged = {**tree, "output_dir": "staged", "parallel": {"units": {"vision": {}, "language": {"pp": 2}}}}
    staged["parallel"] |= {"microbatches": 2, "schedule": "zb-h1"}
    code, _, err = dilatant("train", write(project, staged))
    assert code == 0, err
    # fp32: sums in another order, through four updates
    assert losses(project / "staged") == pytest.approx(losses(project / "run"), rel=1e-4)
    kept = [file.stat().st_size for file in (project / "run" / "checkpoints" / "frozen").iterdir()]
    plain = AutoModelForImageTextToText.from_pretrained(project / "whole").eval()
    quantised = {key for key in plain.state_dict() if ".language_model.layers." in key and key.endswith("_proj.weight")}
    assert len(quantised) == 7 * plain.config.text_config.num_hidden_layers
    rest = sum(t.nbytes for key, t in plain.state_dict().items() if key not in quantised)
    assert sum(kept) < rest + 100_000
    # The adapter lies on the plain weights, which are exported as they were.
    merged = AutoModelForImageTextToText.from_pretrained(project / "run" / "export").eval()
    adapted = peft.PeftModel.from_pretrained(plain, project / "run" / "export" / "adapter").eval()
    ids = torch.arange(40)[None]
    torch.testing.assert_close(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    rounds = AutoModelForImageTextToText.from_pretrained(project / "whole")
    with torch.no_grad():
        for key, weight in rounds.state_dict().items():
            if key in quantised:
                weight.copy_(rounded(weight))
    for file in ("model.safetensors", "config.json"):
        (project / "whole" / file).unlink()
    rounds.save_pretrained(project / "whole")
    tree["model"]["lora"]["load_in_4bit"] = False
    code, _, err = dilatant("train", write(project, {**tree, "output_dir": "rounded"}))
    assert code == 0, err
    # Magnitudes begin as the lengths of the plain rows in one run and of the rounded ones in the other.
    assert losses(project / "rounded") == pytest.approx(
        losses(project / "run"), rel=1e-5 if kind == "use_rslora" else 1e-2
    )


def test_parts_have_adapters_that_peft_loads_and_export_merged(project: Path, dilatant: Dilatant) -> None:
    tree = tiny_config(steps=3, device="cpu", optimizer={"learning_rate": 0.02})
    tree["model"]["lora"] = {"r": 2, "units": ["language", "vision"], "use_dora": True}
    config = write(project, tree)
    code, _, err = dilatant("train", config)
    assert code == 0, err
    export = project / "run" / "export"
    merged = AutoModelForCausalLM.from_pretrained(export / "language").eval()
    plain = AutoModelForCausalLM.from_config(merged.config).eval()
    # The adapter lies on the weights that the run began with, whatever these are.
    start = {**tree, "output_dir": "start", "train": {**tree["train"], "steps": 1}}
    start["train"]["optimizer"] = {"learning_rate": 1e-30}
    assert dilatant("train", write(project, start))[0] == 0
    plain.load_state_dict(load_file(project / "start" / "export" / "language" / "model.safetensors"), strict=False)
    plain.tie_weights()
    adapted = peft.PeftModel.from_pretrained(plain, export / "adapter" / "language").eval()
    ids = torch.arange(40)[None] % 30
    said = merged(input_ids=ids).logits
    torch.testing.assert_close(adapted(input_ids=ids).logits, said, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted.unload()(input_ids=ids).logits, said, rtol=1e-4, atol=1e-5)
    assert (export / "adapter" / "vision" / "adapter_model.safetensors").is_file()
    code, _, err = dilatant("generate", export, "--prompt", "Side?", "--image", project / "images" / "0.png")
    assert code == 0, err
    # Another run begins with the adapters of this one.
    again = {**tree, "output_dir": "again"}
    again["model"] = {**tree["model"], "lora": {**tree["model"]["lora"], "adapter": str(export / "adapter")}}
    code, _, err = dilatant("train", write(project, again), "--set", "train.steps=1")
    assert code == 0, err
    assert losses(project / "again")[0] < losses(project / "run")[0]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"merge": False}, "'lora.merge: false' is for whole models"),
        ({"units": ["visoin"]}, "there are language, vision, vision.encoder"),
        ({"target_modules": ["q_porj"]}, "names no linear layer"),
        pytest.param(
            {"load_in_4bit": True},
            "pip install 'dilatant[bnb]'",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed"
            ),
        ),
        ({"use_dorra": True}, "use_dorra"),
        ({"train": ["language.layers.0"]}, "would train whole ('train') and has an adapter ('units')"),
    ],
)
def test_what_parts_cannot_have_is_said(lora: dict[str, Any], said: str, project: Path, dilatant: Dilatant) -> None:
    tree = tiny_config(device="cpu")
    tree["model"]["lora"] = lora
    code, _, err = dilatant("train", write(project, tree))
    assert code == 2
    assert said in err


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_chart_adapters_answer_alike_in_transformers_and_peft(kind: str, project: Path, dilatant: Dilatant) -> None:
    charts = need("data/chartqa_mini", "LoRA on real charts, exported and loaded by transformers and peft")
    save_as_the_hub_does("qwen2_5_vl", project / "whole")
    tree = whole_with_lora() | {
        "data": {"train": [{"path": str(charts)}], "val_size": 8, "max_length": 1024, "workers": 0},
        "parallel": {"units": {"vision": {}, "language": {"pp": 2}}, "microbatches": 2},
        "evaluation": {"limit": 8, "max_new_tokens": 8, "metrics": ["exact_match", "anls"]},
    }
    tree["train"] |= {"steps": 6, "optimizer": {"learning_rate": 0.01}}
    tree["model"]["lora"] |= {"use_rslora": False, kind: True}
    tree["parallel"]["schedule"] = "zb-h1" if kind == "use_dora" else "1f1b"
    config = write(project, tree)
    code, _, err = dilatant("train", config)
    assert code == 0, err
    assert losses(project / "run")[-1] < losses(project / "run")[0]
    export = project / "run" / "export"
    exported = load_exported(export)
    held_out = assemble_samples(load_config(config)).held_out
    assert held_out is not None
    merged = AutoModelForImageTextToText.from_pretrained(export).eval()
    plain = AutoModelForImageTextToText.from_pretrained(project / "whole")
    adapted = peft.PeftModel.from_pretrained(plain, export / "adapter").eval()
    longest = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 258, "pad_token_id": 258}
    for index in range(3):
        prompt = encode_prompt(held_out[index], exported.encoding)
        (ours,) = generate_answers(
            exported.model, exported.tokenizer, [prompt], torch.device("cpu"), longest["max_new_tokens"]
        )
        given = transformers_inputs("qwen2_5_vl", prompt.sample, 299)
        for theirs in (merged, adapted):
            written = theirs.generate(**given, **longest)[:, given["input_ids"].shape[1] :]
            assert exported.tokenizer.batch_decode(written, skip_special_tokens=True) == [ours]
        logits = [theirs(**given).logits for theirs in (merged, adapted)]
        # Merged weights are rounded once more.
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-4)
