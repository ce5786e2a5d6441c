"""A whole model by one id: trained in stages, exported as the class of transformers that it came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import soundfile
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText

from cases.tiny_project import Dilatant
from cases.tiny_wholes import IMAGE, WHOLES, save_as_the_hub_does, whole_config
from cases.whole_samples import transformers_loss
from dilatant.config import load_config
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encode import encode_sample
from dilatant.models.families.families import FAMILIES
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.planning.assemble import assemble_samples

STAGES = {"units": {"vision": {"pp": 2}, "language": {"pp": 2}}, "microbatches": 2}
families = pytest.mark.parametrize(
    "family", [name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow) for name in WHOLES]
)


def config_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": "run",
        "model": {"id": "whole", "freeze": ["vision.encoder"]},
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 96, "workers": 0},
        "train": {
            "steps": 2,
            "global_batch_size": 12,  # all samples
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"kind": "constant"},
            "report_to": [],
            "device": "cpu",
        },
        **more,
    }


def write(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"


@torch.no_grad()
def loss_in_transformers(config: Path, model: Any, family: str) -> float:
    samples = assemble_samples(load_config(config))
    total = targets = 0.0
    for index in range(len(samples.train)):
        encoded = encode_sample(samples.train[index], samples.encoding)
        given = {}
        if "omni" in family:  # which tells positions from tokens around items that no tokenizer of bytes has
            places = PretrainedModel.of(whole_config(family), "model").positions(replace_ids(encoded))
            given["position_ids"] = torch.from_numpy(places[1:, None])
        total += float(transformers_loss(model, family, encoded, image=299, **given))
        targets += encoded.target_tokens
    return total / targets


def replace_ids(sample: EncodedSample) -> EncodedSample:
    """With the id of a row of an image that the config of tiny models has."""
    ids = np.where(sample.input_ids == 299, IMAGE, np.where(sample.input_ids == IMAGE, 0, sample.input_ids))
    return replace(sample, input_ids=ids)


@families
def test_a_staged_run_exports_a_model_transformers_loads(family: str, project: Path, dilatant: Dilatant) -> None:
    source = save_as_the_hub_does(family, project / "whole")
    before = source.state_dict()
    for number in range(12):  # of unlike sizes
        image = Image.open(project / "images" / f"{number}.png").resize((8 + 3 * number, 8 + number % 5))
        image.save(project / "images" / f"{number}.png")
    towers = [unit for unit in ("vision", "audio") if unit in FAMILIES[family].towers]
    if "audio" in towers:
        write_sounds(project, every=1 if towers == ["audio"] else 2)
    if sees_clips(family):
        write_clip(project, 4)
    units = {key: {"pp": 2} for key in (*towers, "language")}
    freeze = [f"{unit}.encoder" for unit in towers]
    tree = config_of(project, parallel={**STAGES, "units": units})
    tree["model"]["freeze"] = freeze
    tree["data"]["max_length"] = 320  # a token for each letter of what is written around frames
    if sees_clips(family) and "qwen" not in family:
        tree["model"]["processor"] = {"num_frames": 3}
    elif sees_clips(family):
        limits = {"video_min_pixels": 64, "video_max_pixels": 512, "max_frames": 6}
        tree["model"]["processor"] = limits
    config = write(project, tree)
    code, _, err = dilatant("train", config)
    if "in this version of transformers; install a later one" in err:
        pytest.skip(f"{family} was not trained: {err}")
    assert code == 0, err
    exported = type(source).from_pretrained(project / "run" / "export")
    assert type(exported) is type(source)
    after = exported.state_dict()
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    inside = (".vision_tower.", ".vision_model.", ".visual.", ".audio_tower.")
    mergers = (".merger.", ".deepstack_merger_list.", ".audio_tower.proj.")
    frozen = {k for k in before if any(t in k for t in inside) and not any(m in k for m in mergers)}
    assert not changed & frozen
    trained = {key for key, weight in source.named_parameters() if key not in frozen}
    assert trained - changed == set(), "every trained weight is in the export"

    code, _, err = dilatant(
        *("train", write(project, {**tree, "parallel": "single"}), "--set", "train.steps=3", "--overwrite")
    )
    assert code == 0, err
    lines = (project / "run" / "metrics.jsonl").read_text().splitlines()
    third = json.loads(lines[2])["loss"]  # of one process, of what two steps have made
    assert loss_in_transformers(config, exported.eval(), family) == pytest.approx(third, rel=1e-4)

    code, out, err = dilatant(
        *("generate", project / "run" / "export", "--prompt", "Side?", "--max-new-tokens", 3, "--json"),
        *(("--audio", project / "1.wav") if "audio" in towers else ("--image", project / "images" / "0.png")),
    )
    assert code == 0, err
    assert "answer" in json.loads(out)
    if sees_clips(family):
        code, out, err = dilatant(
            *("generate", project / "run" / "export", "--prompt", "Side?", "--max-new-tokens", 3, "--json"),
            *("--video", project / "4.gif"),
        )
        assert code == 0, err


def sees_clips(family: str) -> bool:
    return FAMILIES[family].clips is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "degree"),
    [
        *(("llava", "tp"), ("gemma3", "tp"), ("qwen2_5_vl", "tp"), ("internvl", "tp")),
        *(("gemma4", "cp"), ("qwen2_5_vl", "cp"), ("qwen3_5", "cp"), ("qwen2_audio", "cp")),
    ],
)
def test_ranks_that_share_the_text_model_train_it_alike(
    family: str, degree: str, project: Path, dilatant: Dilatant
) -> None:
    save_as_the_hub_does(family, project / "whole")
    losses = []
    towers = [unit for unit in ("vision", "audio") if unit in FAMILIES[family].towers]
    if "audio" in towers:
        write_sounds(project, every=1 if towers == ["audio"] else 2)
    of_tower = {"pp": 2, "cp": 2} if degree == "cp" else {}  # images and sounds of unlike sizes among ranks
    apart = {"units": {**dict.fromkeys(towers, of_tower), "language": {degree: 2}}, "microbatches": 2}
    for parallel in (apart, "single"):
        tree = config_of(project, parallel=parallel)
        tree["model"]["freeze"] = [f"{towers[0]}.encoder"]
        tree["data"]["max_length"] = 320
        config = write(project, tree)
        code, _, err = dilatant("train", config, "--set", "train.steps=3", "--overwrite")
        assert code == 0, err
        lines = (project / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([each["loss"] for each in map(json.loads, lines) if "loss" in each])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_shared_tower_resumes_at_another_degree_and_exports(project: Path, dilatant: Dilatant) -> None:
    source = save_as_the_hub_does("qwen2_5_vl", project / "whole")
    shared = {"units": {"vision": {"tp": 2}, "language": {"tp": 2}}, "microbatches": 2}
    turned = {"units": {"vision": {"pp": 2}, "language": {}}, "microbatches": 2}
    losses, exports = {}, {}
    for name, first, second in (("one", "single", "single"), ("two", shared, turned)):
        tree = config_of(project, parallel=first) | {"output_dir": name}
        tree["model"] = {"id": "whole"}  # the tower trains
        code, _, err = dilatant("train", write(project, tree))
        assert code == 0, err
        more = () if second == "single" else ("--set", f"parallel={json.dumps(second)}")
        code, _, err = dilatant("resume", project / name, "--set", "train.steps=4", *more)
        assert code == 0, err
        lines = (project / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        exports[name] = type(source).from_pretrained(project / name / "export").state_dict()
    assert len(losses["two"]) == 4
    # fp32 sums in another order, which four optimizer steps amplify.
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    changed = [key for key, weight in source.state_dict().items() if not weight.equal(exports["two"][key])]
    assert any(".visual.blocks." in key for key in changed)
    assert exports["two"].keys() == exports["one"].keys()


def write_clip(folder: Path, number: int) -> None:
    """Let a sample see a clip of 9 frames instead of an image."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    frames = np.random.default_rng(number).integers(0, 256, (9, 14, 20, 3), np.uint8)
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(folder / f"{number}.gif", save_all=True, append_images=others, duration=200)
    lines[number]["messages"][0]["content"][0] = {"type": "video", "video": f"{number}.gif"}
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_sounds(folder: Path, every: int) -> None:
    """Let every so many-th sample hear a sound of a length of its own instead of seeing an image."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number in range(1, len(lines), every) if every > 1 else range(len(lines)):
        samples = np.random.default_rng(number).normal(0, 0.1, 600 + 700 * number)
        soundfile.write(folder / f"{number}.wav", samples, 16000)
        lines[number]["messages"][0]["content"][0] = {"type": "audio", "audio": f"{number}.wav"}
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_mistakes_about_a_whole_model_are_said_by_their_keys(project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("llava", project / "whole")
    parts = {"language_model": {"id": "whole"}}
    for model, text in (
        ({"id": "whole", **parts}, "give one of 'id'"),
        ({}, "give one of 'id'"),
        ({"tokenizer": "bytes", **parts}, "'tokenizer' here is for a whole model"),
        ({"config": {"model_type": "qwen2"}, "tokenizer": "bytes"}, "'qwen2' is not a family that opens whole"),
        ({"id": "nowhere"}, "nowhere"),
        ({"id": "whole", "processor": {"fps": 2}}, "fps says nothing to llava, which sees no clips"),
        ({"id": "whole", "freeze": ["vison"]}, "did you mean 'vision'"),
    ):
        code, _, err = dilatant("train", write(project, {**config_of(project), "model": model}))
        assert code == 2
        assert text in err.replace("\n", " ")
    wrong = {"units": {"vison": {}, "language": {}}}
    code, _, err = dilatant("train", write(project, config_of(project, parallel=wrong)))
    assert code == 2
    assert "'vison' is no unit of this model; did you mean 'vision'?" in err


@pytest.mark.slow
def test_staged_adapters_and_peft_adapters_are_interchangeable(project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("qwen2_5_vl", project / "whole")
    lora = {"r": 4, "units": ["vision", "language"], "train": ["language.head"]}
    tree = config_of(project, parallel=STAGES)
    tree["model"] = {"id": "whole", "lora": lora}
    code, _, err = dilatant("train", write(project, tree))
    assert code == 0, err
    export = project / "run" / "export"
    merged = AutoModelForImageTextToText.from_pretrained(export).eval()
    plain = AutoModelForImageTextToText.from_pretrained(project / "whole")
    adapted = peft.PeftModel.from_pretrained(plain, export / "adapter").eval()
    config = project / "config.yaml"
    loss = loss_in_transformers(config, adapted, "qwen2_5_vl")
    # Merged weights are rounded once more.
    assert loss_in_transformers(config, merged, "qwen2_5_vl") == pytest.approx(loss, rel=1e-5)

    saved = project / "saved"
    adapted.save_pretrained(saved)
    tree["model"]["lora"] = {**lora, "adapter": "saved", "merge": False}
    tree |= {"parallel": "single", "output_dir": "again"}
    code, _, err = dilatant("train", write(project, tree))
    assert code == 0, err
    lines = (project / "again" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx(loss, rel=1e-5)
    assert (project / "again" / "export" / "adapter_model.safetensors").is_file()
    assert not (project / "again" / "export" / "model.safetensors").exists()

    code, out, err = dilatant("generate", project / "again" / "export", "--prompt", "Side?", "--json")
    assert code == 0, err
    assert isinstance(json.loads(out)["answer"], str)

    tree["model"]["lora"]["r"] = 8
    code, _, err = dilatant("train", write(project, tree), "--overwrite")
    assert code == 2
    assert "r is 4 there and 8 here" in err


@pytest.mark.slow
def test_shared_linear_attention_heads_train_adapters_alike(project: Path, dilatant: Dilatant) -> None:
    save_as_the_hub_does("qwen3_5", project / "whole")
    losses = {}
    shared = {"units": {"vision": {}, "language": {"tp": 2}}, "microbatches": 2}
    for name, parallel in (("one", "single"), ("two", shared)):
        tree = config_of(project, parallel=parallel) | {"output_dir": name}
        tree["model"] = {"id": "whole", "lora": {"r": 4, "units": ["language"]}}
        tree["train"]["steps"] = 3
        code, _, err = dilatant("train", write(project, tree))
        assert code == 0, err
        lines = (project / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    # fp32 sums in another order, which three optimizer steps amplify.
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
