"""A model with an image generator: trained in any layout, exported, and used to generate a picture."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load, load_file
from transformers import CLIPVisionModel

from cases.models.tiny_nets import CLIP, KL, NETS, OF_FEATURES, SD3, SIZES
from cases.tiny_project import Dilatant, tiny_config, write_images
from cases.tiny_wholes import save_as_the_hub_does
from dilatant.hf.export import load_exported
from dilatant.models.generators.diffusion import SamplingSettings
from dilatant.training.evaluation.image_answers import generate_pictures

diffusers: Any = pytest.importorskip("diffusers", reason="nothing draws without diffusers")


def write_requests(folder: Path, count: int = 8) -> None:
    """Write samples that ask for the left or the right image in turn; some answers are only text."""
    write_images(folder, count)
    lines = []
    for number in range(count):
        picture = {"type": "image", "image": f"images/{number}.png"}
        answer: list[Any] = [{"type": "text", "text": "no"}] if number % 4 == 3 else [picture]
        asked = [{"role": "user", "content": f"draw {'lr'[number % 2]}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": asked}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def configure(folder: Path, generator: dict[str, Any] | None = None, **train: Any) -> Path:
    config = tiny_config(**{"steps": 4, "save_steps": 2, "keep_checkpoints": 9, **train})
    del config["model"]["encoders"]
    config["model"]["generators"] = {"image": {"config": SD3, "tokens_per_item": 2, **(generator or {})}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "config.yaml"


def losses(run: Path) -> list[dict[str, float]]:
    return [json.loads(line)["losses"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def drawing(tmp_path: Path) -> Path:
    write_requests(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_layouts_and_resumes_draw_the_same_noise(drawing: Path, dilatant: Dilatant) -> None:
    config = configure(drawing)
    assert dilatant("train", config, "--set", "parallel=single")[0] == 0
    alone = losses(drawing / "run")
    assert [sorted(step) for step in alone] == [["image", "language"]] * 4
    apart = ("--set", "parallel={units: {language: {pp: 2}, image: {pp: 1}}, microbatches: 2}")
    assert dilatant("train", config, "--set", "output_dir=apart", *apart)[0] == 0
    start = drawing / "run" / "checkpoints" / "step-00000002"
    assert start.is_dir()
    assert dilatant("train", config, "--set", "output_dir=resumed", "--set", f"train.resume={start}")[0] == 0
    for found, expected in ((losses(drawing / "apart"), alone), (losses(drawing / "resumed"), alone[2:])):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order, over four updates


def test_an_export_draws_as_trained_and_loads_in_diffusers(drawing: Path, dilatant: Dilatant) -> None:
    joined = {"connector": "transformer", "connector_layers": 1}
    config = configure(drawing, joined, steps=30, optimizer={"learning_rate": 0.02})
    assert dilatant("train", config, "--set", "parallel=single", "--set", "train.save_steps=null")[0] == 0
    export = drawing / "run" / "export"
    net = diffusers.SD3Transformer2DModel.from_pretrained(export / "image")
    (trained,) = (drawing / "run" / "checkpoints").glob("step-*/part-*/model.safetensors")
    stored = load_file(trained)
    for key, tensor in net.state_dict().items():
        ends = (f".net.{key}", f"image.{key.replace('transformer_blocks', 'layers')}")
        (found,) = (own for name, own in stored.items() if name.endswith(ends))
        assert torch.equal(tensor, found), key
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(export / "image" / "scheduler")
    assert scheduler.config.shift == 1.0
    code, out, _ = dilatant("generate", export, "--prompt", "draw l", "--out", drawing / "l.png", "--json")
    assert code == 0
    assert json.loads(out) == {"answer": f"[{drawing / 'l.png'}]", "images": [str(drawing / "l.png")]}
    first = np.asarray(Image.open(drawing / "l.png"))
    assert first.shape == (4, 4)
    dilatant("generate", export, "--prompt", "draw l", "--out", drawing / "again.png")
    assert np.array_equal(first, np.asarray(Image.open(drawing / "again.png")))
    dilatant("generate", export, "--prompt", "draw l", "--out", drawing / "other.png", "--seed", "1")
    assert not np.array_equal(first, np.asarray(Image.open(drawing / "other.png")))
    judged_by_a_function_of_ones_own(drawing, export, dilatant)


def judged_by_a_function_of_ones_own(folder: Path, export: Path, dilatant: Dilatant) -> None:
    """The function gets question, expected and generated parts of each held-out sample; its mean is the metric."""
    (folder / "own.py").write_text(
        "import json, helper\n"
        "def score(question, expected, answered):\n"
        "    kinds = [[p if isinstance(p, str) else p.size for p in parts] for parts in (expected, answered)]\n"
        "    with open(__file__ + '.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([question, *kinds]) + '\\n')\n"
        "    return helper.ONE if question == 'draw l' else 0\n"
        "def fails(*parts):\n"
        "    raise KeyError('lost')\n"
        "def unbounded(*parts):\n"
        "    return float('nan')\n"
    )
    (folder / "helper.py").write_text("ONE = 1\n")
    asked = ("evaluate", export, "--data", folder / "train.jsonl", "--limit", "4", "--drawing-steps", "2")
    code, out, err = dilatant(*asked, "--judge", folder / "own.py", "--json", "--out", folder / "scores.json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["mean"], record["samples"]) == (0.5, 4)
    assert [*record["scores"].values()] == [1.0, 0.0, 1.0, 0.0]
    assert json.loads((folder / "scores.json").read_text()) == record
    seen = [json.loads(line) for line in (folder / "own.py.jsonl").read_text().splitlines()]
    assert [question for question, _, _ in seen] == ["draw l", "draw r", "draw l", "draw r"]
    assert [expected for _, expected, _ in seen] == [[[8, 8]], [[8, 8]], [[8, 8]], ["no"]]
    assert seen[0][2] == [[4, 4]]
    for judge, said in (
        ("nowhere.py", "is no Python file"), ("own.py:score2", "has no function 'score2'"),
        ("own.py:fails", "the judge failed at train.jsonl:1: KeyError: 'lost'"),
        ("own.py:unbounded", "must give a finite number"),
    ):  # fmt: skip
        code, _, err = dilatant(*asked, "--judge", f"{folder}/{judge}")
        assert code != 0
        assert said in " ".join(err.split())
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "family", ["pixart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sana", "unet", "flux"))]
)
def test_pretrained_nets_and_autoencoders_start_unchanged(family: str, drawing: Path, dilatant: Dilatant) -> None:
    """The model starts from a pipeline folder of diffusers, and frozen weights are exported unchanged."""
    settings, vae = NETS[family]
    pipeline, export = drawing / "pipeline", drawing / "run" / "export" / "image"
    net = getattr(diffusers, settings["_class_name"]).from_config(settings)
    autoencoder = diffusers.AutoencoderKL.from_config(vae)
    net.save_pretrained(pipeline / ("unet" if family == "unet" else "transformer"))
    autoencoder.save_pretrained(pipeline / "vae")
    diffusers.DDPMScheduler(prediction_type="v_prediction").save_pretrained(pipeline / "scheduler")
    size = SIZES.get(settings["_class_name"])
    config = configure(drawing, {"config": None, "id": "pipeline", "sample_size": size}, steps=2)
    frozen = ("--set", "model.freeze=[image.generator]")
    code, _, err = dilatant("train", config, "--set", "parallel=single", *frozen)
    assert code == 0, err
    scheduler = json.loads((export / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    for model, folder in ((net, export), (autoencoder, export / "vae")):
        there = type(model).from_pretrained(folder).state_dict()
        for key, tensor in model.state_dict().items():
            assert torch.equal(there[key], tensor), key
    asked = ("--prompt", "draw l", "--out", drawing / "l.png")
    code, _, err = dilatant("generate", drawing / "run" / "export", *asked)
    assert code == 0, err
    assert "nothing was drawn: the answer does not hold '<draw>'" in " ".join(err.split())
    loaded = load_exported(drawing / "run" / "export").model["image"].model.encoder.state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in autoencoder.state_dict().items())


@pytest.mark.slow
def test_a_token_of_the_vocabulary_asks_as_well_as_queries(drawing: Path, dilatant: Dilatant) -> None:
    config = configure(drawing, {"token": "~", "objective": "epsilon"}, steps=2)
    assert dilatant("train", config, "--set", "parallel=single")[0] == 0
    manifest = json.loads((drawing / "run" / "export" / "multimodal.json").read_text())
    assert manifest["generators"]["image"]["token_id"] == ord("~")
    assert dilatant("generate", drawing / "run" / "export", "--prompt", "draw l", "--max-new-tokens", "2")[0] == 0


@pytest.mark.parametrize(
    ("generator", "said"),
    [
        ({"config": {"num_layers": 1}}, "needs '_class_name'"),
        ({"config": {**SD3, "patchsize": 2}}, "model.generators.image:\n  - 'patchsize' is not a setting"),
        ({"id": "nowhere"}, "either 'id'"),
        ({"config": None, "id": "./nowhere"}, "model.generators.image: './nowhere' is not here in diffusers' layout"),
        ({"vae": KL}, "model.generators.image.vae: its latents have 4 channels, but the net draws 1"),
        ({"target": {"encoder": CLIP}, "vae": KL}, "with 'target' the net draws features"),
        ({"target": {"encoder": CLIP}}, "set in_channels and out_channels to 8 and sample_size to 4"),
        ({"target": {"encoder": {"model_type": "llama"}}}, "model.generators.image.target.encoder"),
        ({"cache_latents": True}, "'cache_latents' needs an autoencoder with weights of its own"),
        ({"token": "two"}, "model.generators.image.token: 'two' is 3 tokens"),
        ({"drop": 2}, "model.generators.image.drop"),
        ({"size": 2}, "unknown key 'model.generators.image.size'"),
    ],
)  # fmt: skip
def test_a_generator_that_cannot_be_is_one_message(
    generator: dict[str, Any], said: str, drawing: Path, dilatant: Dilatant
) -> None:
    code, _, err = dilatant("train", configure(drawing, generator))
    assert code != 0
    assert said in err.replace("\n    ", " ")
    assert "Traceback" not in err
    assert not (drawing / "run" / "checkpoints").exists()


def test_data_without_a_picture_to_draw_are_told(drawing: Path, dilatant: Dilatant) -> None:
    (drawing / "train.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}) + "\n"
    )
    code, _, err = dilatant("train", configure(drawing))
    assert code != 0
    assert "model.generators.image: no sample of data.train has an image in an assistant's turn" in err


def test_diffusers_that_is_not_there_is_one_line(
    drawing: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    code, _, err = dilatant("train", configure(drawing))
    assert code != 0
    assert 'pip install "dilatant[generators]"' in err


def test_where_a_picture_goes_is_looked_at_first(tmp_path: Path, dilatant: Dilatant) -> None:
    for out, said in (("x.txt", "must end with an image format"), ("no/x.png", "the folder does not exist")):
        code, _, err = dilatant("generate", tmp_path, "--prompt", "draw", "--out", tmp_path / out)
        assert code != 0
        assert said in err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_whole_model_that_learns_to_draw_exports_both_parts(family: str, drawing: Path, dilatant: Dilatant) -> None:
    """Stages cut the denoiser, transformers and diffusers each load their part of the export, and it generates."""
    source = save_as_the_hub_does(family, drawing / "whole")
    lines = [json.loads(line) for line in (drawing / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):  # it sees a picture, and draws one
        seen = [{"type": "image", "image": f"images/{number}.png"}, {"type": "text", "text": "draw l"}]
        line["messages"][0]["content"] = seen
    (drawing / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = configure(drawing, steps=2, save_steps=None)
    tree = yaml.safe_load(config.read_text())
    generators = tree["model"]["generators"]
    tree["model"] = {"id": "whole", "generators": generators, "freeze": ["vision.encoder"]}
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    code, _, err = dilatant("train", config, "--set", "parallel=single", "--set", "output_dir=alone")
    assert code == 0, err
    apart = ("--set", "parallel={units: {vision: {}, language: {pp: 2}, image: {pp: 2}}, microbatches: 2}")
    code, _, err = dilatant("train", config, *apart)
    assert code == 0, err
    for step, wanted in zip(losses(drawing / "run"), losses(drawing / "alone"), strict=True):
        assert step == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order, over two updates
    export = drawing / "run" / "export"
    after = type(source).from_pretrained(export).state_dict()
    frozen = [key for key in after if ".vision_tower." in key or (".visual." in key and "merger" not in key)]
    assert frozen
    for key, parameter in source.named_parameters():
        assert torch.equal(after[key], parameter) == (key in frozen), key
    diffusers.SD3Transformer2DModel.from_pretrained(export / "image")
    asked = ("generate", export, "--prompt", "draw l", "--max-new-tokens", "3", "--out", drawing / "l.png")
    asked += ("--image", drawing / "images" / "1.png")
    code, _, err = dilatant(*asked, "--json")
    assert code == 0, err
    if family != "llava":  # which draws at once; the other would have to write what announces a picture
        assert np.asarray(Image.open(drawing / "l.png")).shape == (4, 4)


@pytest.mark.slow
def test_cached_latents_train_like_pixels_and_are_made_once(drawing: Path, dilatant: Dilatant) -> None:
    """Losses are equal, a resume or another layout decodes nothing again, and latents that are damaged, cut off or of
    another picture are made anew."""
    settings, vae = NETS["pixart"]
    diffusers.PixArtTransformer2DModel.from_config(settings).save_pretrained(drawing / "p/transformer")
    diffusers.AutoencoderKL.from_config(vae).save_pretrained(drawing / "p/vae")
    config = configure(drawing, {"config": None, "id": "p"}, steps=2)
    cached = ("--set", "model.generators.image.cache_latents=true", "--set", "data.cache_dir=cache")
    assert dilatant("train", config, "--set", "parallel=single", "--set", "output_dir=alone")[0] == 0
    code, _, err = dilatant("train", config, "--set", "parallel=single", *cached)
    assert code == 0, err
    assert "made the latents of 6 pictures" in err
    wanted = losses(drawing / "alone")
    for step, expected in zip(losses(drawing / "run"), wanted, strict=True):
        assert step == pytest.approx(expected, rel=1e-4)  # an autoencoder's sums of a picture among eight
    kept = sorted((drawing / "cache").rglob("*.safetensors"))
    assert len(kept) == 6
    before = [file.read_bytes() for file in kept]
    marks = [*(drawing / "cache").rglob("whole-*")]
    assert len(marks) == 1
    apart = ("--set", "parallel={units: {language: {pp: 2}, image: {pp: 2}}, microbatches: 2}")
    code, _, err = dilatant("train", config, *cached, *apart, "--set", "output_dir=apart")
    assert code == 0, err
    assert "made the latents" not in err
    for step, expected in zip(losses(drawing / "apart"), wanted, strict=True):
        assert step == pytest.approx(expected, rel=1e-4)
    damaged = bytearray(before[0])
    damaged[-3] ^= 1
    for file, wrong in zip(kept, (bytes(damaged), before[1][:40], before[3])):
        file.write_bytes(wrong)
    again = (*cached, "--set", "parallel=single", "--set", "output_dir=again")
    code, _, err = dilatant("train", config, *again)
    assert code != 0
    assert "are damaged or gone" in err.splitlines()[-1]
    assert "resume the run" in err.splitlines()[-1]
    assert "Traceback" not in err
    code, _, err = dilatant("resume", drawing / "again")
    assert code == 0, err
    assert "made the latents of 3 pictures" in err
    for file, first in zip(kept, before, strict=True):
        # An autoencoder's sums of a picture among fewer others.
        np.testing.assert_allclose(load_file(file)["latents"], load(first)["latents"], atol=1e-5)


KILLED_AT_THE_THIRD = """
import os, signal, sys
from dilatant.cli import app
from dilatant.data.media_units.image_target import Latents
keep, kept = Latents.keep, []
def counted(self, key, values):
    if len(kept) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    kept.append(key)
    keep(self, key, values)
Latents.keep = counted
app.run()
"""


@pytest.mark.slow
def test_a_run_killed_while_caching_latents_resumes_unchanged(drawing: Path, dilatant: Dilatant) -> None:
    """A run that is killed after three of six pictures, and again while it trains, has the losses of an undisturbed one
    and encodes no picture twice."""
    settings, vae = NETS["pixart"]
    diffusers.PixArtTransformer2DModel.from_config(settings).save_pretrained(drawing / "p/transformer")
    diffusers.AutoencoderKL.from_config(vae).save_pretrained(drawing / "p/vae")
    config = configure(drawing, {"config": None, "id": "p"}, steps=24, save_steps=4)
    cached = ("--set", "model.generators.image.cache_latents=true", "--set", "parallel=single")
    whole = (*cached, "--set", "output_dir=whole", "--set", "data.cache_dir=other")
    assert dilatant("train", config, *whole)[0] == 0
    wanted = losses(drawing / "whole")
    run = [str(word) for word in ("train", config, *cached, "--set", "data.cache_dir=cache")]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_THE_THIRD, *run], cwd=drawing, check=False)
    assert killed.returncode == -signal.SIGKILL
    made = {file: file.stat().st_mtime_ns for file in (drawing / "cache").rglob("*.safetensors")}
    assert len(made) == 3
    assert not [*(drawing / "cache").rglob("whole-*")]
    metrics = drawing / "run" / "metrics.jsonl"
    with (
        (drawing / "err").open("wb") as err,
        subprocess.Popen([sys.executable, "-m", "dilatant", *run, "--overwrite"], cwd=drawing, stderr=err) as training,
    ):
        while training.poll() is None and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        training.kill()
    assert training.returncode == -signal.SIGKILL
    assert "made the latents of 3 pictures" in (drawing / "err").read_text()
    code, _, said = dilatant("resume", drawing / "run")
    assert code == 0, said
    assert "made the latents" not in said
    files = {file: file.stat().st_mtime_ns for file in (drawing / "cache").rglob("*.safetensors")}
    assert len(files) == 6
    assert made.items() <= files.items()
    for step, expected in zip(losses(drawing / "run"), wanted, strict=True):
        assert step == pytest.approx(expected, rel=1e-4)  # an autoencoder's sums of a picture among fewer others


@pytest.mark.slow
def test_frozen_encoder_features_train_in_any_layout_and_export(drawing: Path, dilatant: Dilatant) -> None:
    """The denoiser's targets are the encoder's own patches; without a decoder no picture is generated."""
    asked = {"config": OF_FEATURES, "target": {"encoder": CLIP}, "connector": "transformer"}
    config = configure(drawing, asked, steps=2)
    code, _, err = dilatant("train", config, "--set", "parallel=single")
    assert code == 0, err
    apart = ("--set", "parallel={units: {language: {pp: 2}, image: {pp: 2}}, microbatches: 2}")
    code, _, err = dilatant("train", config, "--set", "output_dir=apart", *apart)
    assert code == 0, err
    for step, wanted in zip(losses(drawing / "apart"), losses(drawing / "run"), strict=True):
        assert step == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order, over two updates
    exports = [drawing / folder / "export" for folder in ("run", "apart")]
    encoders = [CLIPVisionModel.from_pretrained(export / "image" / "target") for export in exports]
    pixels = torch.randn(2, 3, 8, 8)
    patches = [encoder(pixels).last_hidden_state[:, 1:] for encoder in encoders]
    assert torch.equal(*patches)  # frozen, so as it began
    unit = load_exported(exports[0]).model["image"]
    drawn = unit.model.encode(pixels)
    assert torch.equal(drawn, patches[0].transpose(1, 2).unflatten(2, (4, 4)))
    rows = rows_of_start(unit)
    found = generate_pictures(unit, rows, SamplingSettings(2), ["a"])
    assert found.shape == (1, 8, 4, 4)
    asked = ("generate", exports[0], "--prompt", "draw l", "--out")
    code, _, err = dilatant(*asked, drawing / "l.png")
    assert code != 0
    assert "it draws features of clip_vision_model, and making pictures of them takes a decoder" in err
    assert dilatant(*asked, drawing / "l.npy")[0] == 0


def rows_of_start(unit: Any) -> torch.Tensor:
    return torch.randn(1, unit.tokens_per_item, unit.width_in)
