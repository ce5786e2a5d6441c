"""A multimodal model whose family no code here names: opened, proven, trained in stages and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_torchvision_available

from cases.generic_steps import GENERIC, inputs_of
from cases.tiny_project import Dilatant
from dilatant.config import load_config
from dilatant.data.text.encode import encode_prompt, encode_sample
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.hf.export import load_exported
from dilatant.models.encoders.narrow_encoder import auto_class
from dilatant.models.families.families import FAMILIES
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_answers import composite_inputs
from dilatant.planning.assemble import assemble_samples
from dilatant.training.evaluation.image_answers import generate_answers
from harness.shared_data import need

TEXT = {
    "model_type": "mistral",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 12,
    "image_size": 32,
    "patch_size": 4,
}


def tiny_config() -> Any:
    return CONFIG_MAPPING["mistral3"](
        text_config=TEXT, vision_config=VISION, image_token_index=299, spatial_merge_size=2
    )


def save(folder: Path, config: Any = None, processor: dict[str, Any] | None = None) -> Any:
    """A tiny Mistral 3 with vision, or another model, as the hub has it."""
    config = config or tiny_config()
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(str(folder))
    size = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}}
    processor = processor or {**size, "patch_size": {"height": 4, "width": 4}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@torch.no_grad()
def loss_of(config: Path, model: Any) -> float:
    """The loss of all samples in transformers' own forward, one by one."""
    whole = PretrainedModel.of(model.config, "model")
    samples = assemble_samples(load_config(config))
    total = targets = 0.0
    for index in range(len(samples.train)):
        encoded = encode_sample(samples.train[index], samples.encoding)
        ids, labels = (torch.as_tensor(each)[None] for each in (encoded.input_ids, encoded.labels))
        media = {
            unit: {name: torch.as_tensor(np.asarray(each)) for name, each in inputs.items()}
            for unit, inputs in encoded.media.items()
        }
        logits = model(**composite_inputs(whole, ids, media, torch.float32)).logits
        total += float(functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        targets += encoded.target_tokens
    return total / targets


@pytest.mark.slow
def test_a_family_that_is_not_named_is_trained_in_stages_and_exported(project: Path, dilatant: Dilatant) -> None:
    assert "mistral3" not in FAMILIES
    source = save(project / "whole")
    for number in range(12):  # of unlike sizes
        image = Image.open(project / "images" / f"{number}.png").resize((16 + 3 * number, 16 + number % 5))
        image.save(project / "images" / f"{number}.png")
    parallel = {"units": {"vision": {"pp": 2}, "language": {"pp": 2}}, "microbatches": 2}
    changed = trained(project, dilatant, source, ["vision.encoder"], parallel)
    assert not any("vision_tower" in key for key in changed)
    assert any("multi_modal_projector" in key for key in changed)


def trained(project: Path, dilatant: Dilatant, source: Any, freeze: list[str], parallel: dict[str, Any]) -> set[str]:
    """The weights that a run of two steps changes; its losses are those of transformers, and its export loads."""
    tree = {
        "output_dir": "run",
        "model": {"id": "whole", "freeze": freeze},
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 320, "workers": 0},
        "train": {
            "steps": 2,
            "global_batch_size": 12,
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"kind": "constant"},
            "report_to": [],
            "device": "cpu",
        },
        "parallel": parallel,
    }
    config = project / "config.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    code, _, err = dilatant("train", config)
    assert code == 0, err
    exported = AutoModelForImageTextToText.from_pretrained(project / "run" / "export")
    before, after = source.state_dict(), exported.state_dict()
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any("lm_head" in key for key in changed)
    steps = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert abs(losses[0] - loss_of(config, source.eval())) < 1e-4
    assert loss_of(config, exported.eval()) < losses[0]
    return changed


@pytest.mark.slow
def test_a_family_that_is_right_only_whole_trains_as_one_unit(project: Path, dilatant: Dilatant) -> None:
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 7, "vocab_size": 20}
    config = CONFIG_MAPPING["ovis2"](  # which embeds the tokens around an image in its own way
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=299,
        visual_indicator_token_ids=[290, 291, 292, 293, 294],
        hidden_size=TEXT["hidden_size"],
        vocab_size=300,
    )
    size = {"image_processor_type": "Ovis2ImageProcessor", "size": {"height": 28, "width": 28}}
    source = save(project / "whole", config, size)
    changed = trained(project, dilatant, source, [], {"units": {"language": {"replicas": 2}}, "microbatches": 2})
    assert any("vision_tower" in key for key in changed)


def config_of_bytes(family: str) -> Any:
    """A small config for a tokenizer of bytes, whose ids end before 290."""
    settings = {**GENERIC[family], "text_config": {**GENERIC[family]["text_config"], "vocab_size": 300}}
    settings |= {key: 299 - (127 - own) for key, own in settings.items() if key.endswith(("_id", "_index"))}
    return CONFIG_MAPPING[family](**settings)


@pytest.mark.slow
def test_clips_train_a_family_that_is_not_named(project: Path, dilatant: Dilatant) -> None:
    size = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": 64, "longest_edge": 4096}
    images = {"image_processor_type": "Glm4vImageProcessor", **size, "size": limits}
    source = save(project / "whole", config_of_bytes("glm4v"), images)
    clips = {"video_processor_type": "Glm4vVideoProcessor", **size, "size": limits}
    (project / "whole" / "video_preprocessor_config.json").write_text(json.dumps(clips))
    lines = []
    for number in range(12):
        frames = [Image.new("RGB", (16 + 4 * (number % 3), 16), (20 * each, 9 * number, 90)) for each in range(8)]
        frames[0].save(project / f"{number}.gif", save_all=True, append_images=frames[1:], duration=250)
        question = [{"type": "video", "video": f"{number}.gif"}, {"type": "text", "text": "Colour?"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{number}"}]
        lines.append(json.dumps({"messages": messages}))
    (project / "train.jsonl").write_text("\n".join(lines))
    parallel = {"units": {"vision": {"pp": 2}, "language": {"pp": 2}}, "microbatches": 2}
    if not is_torchvision_available():
        with pytest.raises(AssertionError, match=r"clips of glm4v .* needs torchvision"):
            trained(project, dilatant, source, [], parallel)
        pytest.skip("torchvision is absent; not checked: that clips train a family that is not named")
    changed = trained(project, dilatant, source, [], parallel)
    assert any("visual" in key for key in changed)


REAL = {
    "glmasr": ("fsdd_mini", {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8}),
    "mistral3": ("chartqa_mini", None),
}
"""Families that are not named → data of people, and the settings of a processor."""


@pytest.mark.slow
@pytest.mark.parametrize("family", REAL)
@torch.no_grad()
def test_real_media_train_a_family_that_is_not_named_and_answers_stay(
    family: str, tmp_path: Path, dilatant: Dilatant
) -> None:
    data, processor = REAL[family]
    source = need(f"data/{data}", f"that {family}, which no code names, trains on {data} and answers in transformers")
    config = config_of_bytes(family)
    before = save(tmp_path / "whole", config, processor).state_dict()
    line = ("train", "--model", tmp_path / "whole", "--data", source, "--output", tmp_path / "run")
    tree = {
        "data.train.0.prompt": "Which digit?",
        "data.val_size": 6,
        "data.workers": 0,
        "data.max_length": 1024,
        "train.steps": 4,
        "train.global_batch_size": 8,
        "train.device": "cpu",
        "train.optimizer.learning_rate": 0.01,
    }
    if family == "mistral3":
        del tree["data.train.0.prompt"]
    options = [part for key, value in tree.items() for part in ("--set", f"{key}={value}")]
    code, _, err = dilatant(*line, *options)
    assert code == 0, err
    steps = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses[-1] < losses[0]
    export = tmp_path / "run" / "export"
    reloaded = auto_class(config).from_pretrained(export).eval()
    after = reloaded.state_dict()
    assert after.keys() == before.keys()
    assert {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])} == {"model", "lm_head"}
    exported = load_exported(export)
    held_out = assemble_samples(load_config(tmp_path / "run" / "config.yaml")).held_out
    assert held_out is not None
    longest = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 258, "pad_token_id": 258}
    for index in range(3):
        prompt = encode_prompt(held_out[index], exported.encoding)
        (ours,) = generate_answers(exported.model, exported.tokenizer, [prompt], torch.device("cpu"), 8)
        given = inputs_of(family, prompt.sample)
        written = reloaded.generate(**given, **longest)[:, given["input_ids"].shape[1] :]
        assert exported.tokenizer.batch_decode(written, skip_special_tokens=True) == [ours]


def test_check_model_needs_no_more_than_a_config(tmp_path: Path, dilatant: Dilatant) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    code, out, err = dilatant("check-model", tmp_path / "model", "--json")
    assert code == 0, err
    check = json.loads(out)
    assert (check["rung"], check["refusals"]) == (3, {})
    assert check["found"]["vision"].startswith("model.vision_tower, 5 layers")
    assert check["proven"]["export"] == "yes"
    assert check["proven"]["LoRA"] == "yes, in vision, language"
    assert check["proven"]["tp"] == "yes, in vision, language"
    code, out, _ = dilatant("check-model", tmp_path / "model")
    assert code == 0
    assert "3: encoders cut between blocks, packed rows" in out


@pytest.mark.slow
def test_check_model_proves_a_declared_family_whose_pixels_are_normalised_later(
    tmp_path: Path, dilatant: Dilatant
) -> None:
    vision = {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}
    config = CONFIG_MAPPING["llava"](text_config=TEXT, vision_config=vision, image_token_index=299)
    config.save_pretrained(tmp_path / "model")  # the image units of this family keep pixels as uint8
    code, out, err = dilatant("check-model", tmp_path / "model", "--json")
    assert code == 0, err
    assert (json.loads(out)["rung"], json.loads(out)["refusals"]) == (3, {})


def test_check_model_refuses_in_one_line_what_cannot_train(tmp_path: Path, dilatant: Dilatant) -> None:
    CONFIG_MAPPING["blip"]().save_pretrained(tmp_path / "model")
    code, out, err = dilatant("check-model", tmp_path / "model")
    assert (code, out) == (2, "")
    assert "(blip) cannot be trained: " in err
    assert "\n" not in err.removeprefix("loading torch and transformers\n").strip()
