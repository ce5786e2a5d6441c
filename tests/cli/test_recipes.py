"""Recipes train as they are written, made small: data in the form that they name, tiny models of the same families."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

import dilatant as package
from cases.data_builders import image_bytes, wav_bytes, write_lines, write_tar
from cases.models.tiny_nets import KL, SANA, SD3
from cases.planning.planning_verbs import FEW, H100, planned
from cases.tiny_project import Dilatant
from cases.tiny_wholes import save_as_the_hub_does
from dilatant.config import Config, load_config, parse_config
from dilatant.plan import Plan
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.training.prepare import prepare
from dilatant.training.run import RunResult, train

_FOLDER = Path(package.__file__).parent / "recipes"
RECIPES = {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"), key=lambda path: path.stem)}
CLUSTERS = ("cluster-64", "spot-nodes")
"""Recipes whose model and data are those of others, and whose layouts are what is tried."""
LIKE_OTHERS = ("chart-qa", "preferences", "robot", "robot-actions", "sharded-8", "video", "vlm-lora")
"""Recipes that train as others do: by default only their data, models and plans are opened."""
RARELY = (*LIKE_OTHERS, "interleaved", "omni-drawing")
"""Recipes that train only as slow tests."""
SAMPLES = 6
PACKAGES = {"lora": "peft", "generators": "diffusers"}
"""Section of the model → the package that it needs."""

WIDTH = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {"image_size": 8, "patch_size": 4, **WIDTH}
WHISPER = {
    "model_type": "whisper", "num_mel_bins": 8, "max_source_positions": 50, "d_model": 16, "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_attention_heads": 2,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "openai/clip-vit-large-patch14-336": {"model_type": "clip_vision_model", **VISION},
    "google/siglip2-base-patch16-224": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
    "openai/whisper-small": WHISPER,
    "lmsys/vicuna-7b-v1.5": {"model_type": "llama", **WIDTH},
    "Qwen/Qwen3-0.6B": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 8, **WIDTH},
}
"""Id of a part in a recipe → config of a small model of its family."""
FAMILIES = {"Qwen/Qwen2.5-VL-": "qwen2_5_vl", "OpenGVLab/InternVL3-": "internvl"}
"""Beginning of the id of a whole model → its family."""


def asked(item: dict[str, str], answer: str = "yes") -> dict[str, Any]:
    question = {"role": "user", "content": [item, {"type": "text", "text": "?"}]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def of_assistant(*content: dict[str, str], question: str = "") -> dict[str, Any]:
    before = [{"role": "user", "content": question}] if question else []
    return {"messages": [*before, {"role": "assistant", "content": list(content)}]}


PICTURE = {"type": "image", "image": "images/1.png"}
CHUNK = {"type": "image", "image": "images/chunk.png"}
ACTIONS = np.where(np.indices((8, 8)).sum(axis=0) % 2, 255, 0).astype(np.uint8)
"""Each at an end of its range, so that the square of each is 1."""
TEXT = {"type": "text", "text": "A heron"}
LLAVA = {
    "id": "1",
    "image": "images/1.png",
    "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bird."}],
}
RECORDS: dict[str, dict[str, Any]] = {
    "train.jsonl": asked(PICTURE),
    "blip_laion_cc_sbu_558k.json": LLAVA,
    "llava_v1_5_mix665k.json": LLAVA,
    "speech.jsonl": {"audio": "sounds/1.wav", "text": "seven"},
    "photos.jsonl": {"image": "images/1.png", "caption": "a heron"},
    "drawings.jsonl": of_assistant(PICTURE, question="Draw a cat."),
    "pairs.jsonl": {"image": "images/1.png", "question": "What?", "chosen": "A heron.", "rejected": "A stork."},
    "actions.jsonl": asked(PICTURE, "132 114 128 25 156 127 255"),
    "chunks.jsonl": {"messages": [*asked(PICTURE)["messages"][:1], *of_assistant(CHUNK)["messages"]]},
    "clips.jsonl": asked({"type": "video", "video": "clips/1.gif"}),
    "documents.jsonl": of_assistant(TEXT, PICTURE, TEXT),
}
"""File in `data` → a record in the form that recipes say it has."""


def write_data(folder: Path) -> None:
    """Write all data that recipes name, of `SAMPLES` samples each."""
    for kind in ("images", "sounds", "clips"):
        (folder / kind).mkdir(parents=True)
    picture = image_bytes(12, 10)
    (folder / "images" / "1.png").write_bytes(picture)
    Image.fromarray(ACTIONS).save(folder / "images" / "chunk.png")
    (folder / "sounds" / "1.wav").write_bytes(wav_bytes(0.4))
    frames = np.random.default_rng(0).integers(0, 256, (9, 10, 12, 3), np.uint8)
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(folder / "clips" / "1.gif", save_all=True, append_images=others, duration=300)
    for name, record in RECORDS.items():
        if name.endswith(".jsonl"):
            write_lines(folder / name, [record] * SAMPLES)
        else:
            (folder / name).write_text(json.dumps([record] * SAMPLES))
    for shard in range(2):
        texts = {f"{n}.txt": b"a heron" for n in range(SAMPLES)}
        images = {f"{n}.jpg": image_bytes(12, 10, "JPEG", n) for n in range(SAMPLES)}
        members = {**texts, **images}
        write_tar(folder / f"photos-{shard}.tar", {name: members[name] for name in sorted(members)})
    charts = {"image": {"bytes": picture, "path": None}, "query": "How many?", "label": ["7"], "human_or_machine": 0}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([charts] * SAMPLES), folder / "charts.parquet")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data as recipes name them; tests write their run folders into it."""
    folder = tmp_path_factory.mktemp("recipes")
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def whole(workplace: Path) -> Callable[[str], str]:
    """Function that returns a folder with a small whole model of the family of an id, made once."""
    made: dict[str, str] = {}

    def of(model: str) -> str:
        family = next(each for begin, each in FAMILIES.items() if model.startswith(begin))
        if family not in made:
            save_as_the_hub_does(family, workplace / family)
            made[family] = str(workplace / family)
        return made[family]

    return of


Trained = Callable[[str], RunResult]


@pytest.fixture(scope="module")
def trained(workplace: Path, whole: Callable[[str], str]) -> Trained:
    """Function that trains a recipe, made small, for a step, unless it was trained."""
    done: dict[str, RunResult] = {}

    def one(name: str) -> RunResult:
        if name not in done:
            if (source := yaml.safe_load(RECIPES[name].read_text())["model"].get("id", "")).startswith("runs/"):
                one(Path(source).parent.name)  # that this recipe goes on from
            done[name] = train(small(name, workplace, whole))
        return done[name]

    return one


def small(name: str, folder: Path, whole: Callable[[str], str], **sections: Any) -> Config:
    """The recipe in a folder of small data and models, for a step on the CPU: of one process, or of two replicas."""
    tree = yaml.safe_load(RECIPES[name].read_text())
    model, data, train, judged = (tree.get(key, {}) for key in ("model", "data", "train", "evaluation"))
    for section, needed in PACKAGES.items():
        if section in model:
            pytest.importorskip(needed, reason=f"the recipe {name} is not trained without it")
    for part in (*model.get("encoders", {}).values(), model.get("language_model", {})):
        if part:
            part["config"] = SMALL[part.pop("id")]
    if "language_model" in model:
        model["language_model"]["tokenizer"] = "bytes"
    for generator in model.get("generators", {}).values():
        if source := generator.pop("id", None):
            assert "Sana" in source
            generator |= {"config": SANA, "vae": KL}
        else:
            net = generator["config"]
            generator["config"] = SD3 | {key: net[key] for key in ("sample_size", "patch_size", "pos_embed_max_size")}
    if "id" in model and not model["id"].startswith("runs/"):
        model["id"] = whole(model["id"])
    if "fps" in model.get("processor", {}):
        model["processor"] |= {"video_min_pixels": 64, "video_max_pixels": 512}
    data["train"] = [{"path": "data/charts.parquet"} if "id" in each else each for each in data["train"]]
    data |= {"workers": 0, "on_error": "error"}
    if "val_size" in data:
        data["val_size"] = 1
    train.pop("epochs")
    train |= {"steps": 1, "global_batch_size": 4, "device": "cpu", "report_to": [], "save_steps": None}
    if judged:
        judged |= {"steps": 1, "limit": 1, "max_new_tokens": 2}
    for key in ("cluster", "resilience"):
        tree.pop(key, None)
    if "units" in (layout := tree.pop("parallel", None) or {}):
        layout["units"]["language"]["replicas"] = 2
        tree["parallel"] = layout
    return parse_config({**tree, **sections}, folder)


@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_data_model_and_plan_of_a_recipe_open(name: str, workplace: Path, whole: Callable[[str], str]) -> None:
    prepared = prepare(small(name, workplace, whole))
    assert prepared.warnings == () or all("warm" in each for each in prepared.warnings)
    assert prepared.samples.train_sizes is not None
    assert prepared.samples.train_sizes.of("vision").all(), "every sample shows something"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in RARELY else name
        for name in RECIPES
        if name not in CLUSTERS
    ],
)
def test_a_recipe_trains_on_data_in_its_form(name: str, workplace: Path, trained: Trained) -> None:
    result = trained(name)
    assert result.step == 1
    assert result.loss is not None
    assert math.isfinite(result.loss)
    assert result.folder == workplace / "runs" / name
    assert any((result.folder / "export").iterdir())


@pytest.mark.parametrize("name", ["captioning", "llava-stage1", pytest.param("vlm-lora", marks=pytest.mark.slow)])
def test_random_weights_begin_at_the_loss_that_headers_tell(name: str, trained: Trained, workplace: Path) -> None:
    loss = trained(name).loss
    found = [json.loads(file.read_text()) for file in (workplace / "runs" / name / "export").rglob("config.json")]
    (size,) = {
        each["vocab_size"] for tree in found for each in (tree, tree.get("text_config", {})) if "vocab_size" in each
    }
    # Initial weights of 0.02 in a width of 16 leave all tokens alike.
    assert loss == pytest.approx(math.log(size), rel=0.05)


@pytest.mark.slow
def test_pairs_begin_at_the_loss_that_their_header_tells(trained: Trained) -> None:
    assert trained("preferences").loss == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_actions_begin_at_the_loss_that_their_header_tells(trained: Trained, workplace: Path) -> None:
    trained("robot-actions")
    line = (workplace / "runs/robot-actions/metrics.jsonl").read_text().splitlines()[0]
    # Four chunks of 64 numbers: the mean of 256 squares varies by 9 %, and a net of random weights adds a little.
    assert json.loads(line)["losses"]["action"] == pytest.approx(1 + 1, rel=0.25)


def test_headers_tell_which_loss_to_expect() -> None:
    examples = Path(__file__).parents[2] / "examples"
    for file in (*RECIPES.values(), *examples.glob("*.yaml")):
        header = file.read_text().partition("\noutput_dir:")[0]
        assert "\n# Loss: " in header, file
        assert all(line.startswith("#") for line in header.splitlines()), file


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_layout_of_a_cluster_is_planned_anywhere(
    name: str, workplace: Path, whole: Callable[[str], str], dilatant: Dilatant
) -> None:
    tree = yaml.safe_load(RECIPES[name].read_text())
    sections = {key: tree[key] for key in ("parallel", "cluster", "resilience") if key in tree}
    config = small(name, workplace, whole, output_dir=f"planned/{name}", **sections)
    file = workplace / f"{name}.yaml"
    file.write_text(config.to_yaml())
    of_run = ("--set", "train.device=auto", "--set", "train.global_batch_size=128")
    of_search = [f"plan.{key}_parallel=[1]" for key in ("tensor", "context")] + ["plan.chunks=[1]", "debug.finalists=2"]
    of_run += tuple(part for each in of_search for part in ("--set", each))
    planned(dilatant, file, *H100, *FEW, *of_run)
    plan = Plan.from_json((Path(config.output_dir) / "plan" / "plan.json").read_text())
    cluster = config.cluster
    assert cluster.gpus_per_node is not None
    assert max(plan.ranks) < cluster.nodes * cluster.gpus_per_node
    assert max(plan.ranks) >= (cluster.nodes - 1) * cluster.gpus_per_node, "the last machine has work"
    lost = config.resilience.fault_tolerance if config.resilience.enabled else 0
    assert min(copies_on_nodes(plan, cluster.gpus_per_node).values()) > lost


def test_the_recipes_are_listed_with_a_line_each(dilatant: Dilatant) -> None:
    code, out, err = dilatant("init")
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [*RECIPES]
    assert all(line.endswith(".") and len(line) < 120 for line in lines)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_written_with_values_of_ones_own(
    name: str, dilatant: Dilatant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kept in ("mine.jsonl", "sub/config.json"):
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("{}")
    given = ("--model", "a-lab/a-model", "--data", "mine.jsonl", "--data", "a-lab/some: set", "--output", "out")
    code, out, err = dilatant("init", name, "--to", "sub/own.yaml", *given)
    assert code == 0, err
    assert "dilatant train sub/own.yaml" in out
    original, own = RECIPES[name], tmp_path / "sub" / "own.yaml"
    before, after = load_config(original), load_config(own)
    assert after.output_dir == str(tmp_path / "out")
    assert [each.path or each.id for each in after.data.train] == [str(tmp_path / "mine.jsonl"), "a-lab/some: set"]
    if len(before.data.train) == 1:
        assert {each.prompt for each in after.data.train} == {before.data.train[0].prompt}
    assert after.model.text.id == "a-lab/a-model"
    assert after.train == before.train
    assert original.read_text().count("#") == own.read_text().count("#")
    assert f"{name}.yaml" not in own.read_text()


def test_a_recipe_is_fitted_to_an_export_of_parts(workplace: Path, trained: Trained, dilatant: Dilatant) -> None:
    pytest.importorskip("peft")
    export, file = trained("llava-stage1").folder / "export", workplace / "own.yaml"
    code, _, err = dilatant("init", "chart-qa", "--model", export, "--data", workplace / "data", "--to", file)
    assert code == 0, err
    assert "processor" not in file.read_text()
    tried = ("train.steps=1", "train.epochs=null", "train.global_batch_size=2", "train.device=cpu", "data.val_size=1",
             f"data.train.0.path={workplace / 'data' / 'charts.parquet'}", f"output_dir={workplace / 'fitted'}",
             "evaluation.max_new_tokens=2", "train.report_to=[]", "data.workers=0")  # fmt: skip
    code, _, err = dilatant("train", file, *(part for each in tried for part in ("--set", each)))
    assert code == 0, err
    language = export / "language"
    for line, says in (
        (("video", export), "reads no clips, and 'video' is about clips; give a whole model that reads them"),
        (("speech-recognition", export), f"or give a language model, such as {language}"),
        (("chart-qa", language), f"`dilatant init llava-stage1 --model {language}` gives it an encoder"),
    ):
        code, _, err = dilatant("init", line[0], "--model", line[1], "--to", "-")
        assert (code, says in " ".join(err.split())) == (2, True), err
    code, _, err = dilatant("init", "speech-recognition", "--model", language, "--to", "-")
    assert code == 0, err


def test_a_recipe_fits_whole_models_by_what_they_read(
    workplace: Path, whole: Callable[[str], str], dilatant: Dilatant
) -> None:
    model = whole("OpenGVLab/InternVL3-1B-hf")
    code, out, err = dilatant("init", "chart-qa", "--model", model, "--data", "s3://bucket/a.parquet", "--to", "-")
    assert code == 0, err
    assert yaml.safe_load(out)["model"]["id"].endswith("internvl")
    code, _, err = dilatant("init", "speech-recognition", "--model", model, "--to", "-")
    assert (code, "reads image itself" in err) == (2, True), err
    code, out, err = dilatant("init", "vlm-lora", "--data", "s3://bucket/a.parquet", "--to", workplace / "remote.yaml")
    assert (code, "not there yet" in out) == (0, False), err


def test_the_encoder_of_an_export_may_have_any_name(tmp_path: Path, dilatant: Dilatant) -> None:
    (tmp_path / "photo").mkdir()
    (tmp_path / "photo" / "config.json").write_text("{}")
    entry = {"features": "all", "merge": "placeholder", "code": []}
    (tmp_path / "multimodal.json").write_text(json.dumps({"encoders": {"photo": entry}, "code": []}))
    code, out, err = dilatant("init", "vlm-lora", "--model", tmp_path, "--to", "-")
    assert code == 0, err
    tree = yaml.safe_load(out)
    assert tree["model"]["lora"]["train"] == ["photo.projector"]
    assert "photo.projector" in tree["train"]["optimizer"]["groups"]
    assert "vision" not in out


def test_a_recipe_is_written_beside_the_user_by_default(
    dilatant: Dilatant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dilatant("init", "vlm-lora")
    assert code == 0, err
    assert (tmp_path / "vlm-lora.yaml").read_text() == RECIPES["vlm-lora"].read_text()
    assert f"{tmp_path / 'data/train.jsonl'} is not there yet" in out
    assert "dilatant train vlm-lora.yaml --set train.steps=10 --set train.schedule.warmup_steps=2  a trial" in out
    assert dilatant("init", "vlm-lora", "--to", "-")[1] == RECIPES["vlm-lora"].read_text()
    for line, text in (
        (("vlm-lora",), "'vlm-lora.yaml' is there already"),
        (("vlm-lora", "--to", "none/a.yaml"), "cannot be written: No such file or directory"),
        (("vlm-lor",), "there is no recipe 'vlm-lor'; did you mean 'vlm-lora'?"),
        (("zzz",), "there are captioning, "),
        (("--model", "a"), "name the recipe to write"),
        (("vlm-lora", "--to", "b.yaml", "--data", ""), "must not be empty"),
    ):
        code, _, err = dilatant("init", *line)
        assert code == 2, line
        assert text in " ".join(err.split()), line
    assert [path.name for path in tmp_path.iterdir()] == ["vlm-lora.yaml"]
