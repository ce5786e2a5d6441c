"""`dilatant plan` as a calculator: models without data, layouts that are asked about, other frameworks, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cases.planning.planning_verbs import FEW, H100, planned
from cases.tiny_project import Dilatant
from dilatant.cli.plan import LONGEST
from dilatant.cost.hardware import load_hardware, save_hardware
from dilatant.report.plan_report import PlanReport
from dilatant.report.text.wording import seconds_text
from harness.refused import refused


def test_a_model_alone_is_planned_in_one_line(tmp_path: Path, dilatant: Dilatant) -> None:
    from cases.tiny_wholes import save_as_the_hub_does

    save_as_the_hub_does("llava", tmp_path / "tiny")
    asked = ("plan", "--model", tmp_path / "tiny", "--gpus", "2xH100", *FEW)
    code, out, err = dilatant(
        *asked, "--images", 1, "--image-size", "16x8", "--text", 4, "--why-not", "vision: {pp: 9}"
    )
    assert code == 0, err
    line, why = out.splitlines()
    assert why.startswith("Why not vision: {pp: 9}? No plan is like that: ")
    assert re.match(
        ".*tiny on 1 node of 2 × H100: One step should take .* for 8 samples.* Memory fits: .* pipelines?,", line
    )
    assert "Of 1, 2, 4, … devices it fits from 1 on, where a step takes" in line
    code, out, err = dilatant(*asked, "--images", 1, "--image-size", "16x8", "--text", 4, "--json")
    assert code == 0, err
    fewest, found = json.loads(out)["fewest"], json.loads(out)
    assert fewest["devices"] == 1
    assert fewest["step_seconds"] > 0.0
    assert len(found["plan"]["units"]) == 2
    refused(dilatant("plan"), "name the CONFIG")
    refused(
        dilatant("plan", project_file := tmp_path / "none.yaml", "--model", "x"), "or a model with --model, not both"
    )
    assert not project_file.exists()
    code, out, err = dilatant(*asked[:3], "--gpus", "2xh100", *FEW, "--fault-tolerance", 1, "--text", 4)
    assert code == 0, err
    assert "on 1 node of 2 × H100: One step" in out
    assert "devices it fits from" not in out  # one device may not be lost
    code, out, err = dilatant(*asked[:3], "--gpus", "1xA100,1xH100", *FEW, "--text", 4)
    assert code == 0, err
    assert "on A100: 1 node of 1 × A100; H100: 1 node of 1 × H100: One step should take " in out
    assert "for 8 samples" in out
    save_hardware(load_hardware("H100"), "X100", tmp_path / "own.yaml")
    own = ("--set", f"cluster.hardware_file={tmp_path / 'own.yaml'}")
    code, out, err = dilatant(*asked[:3], "--gpus", "2xX100", *FEW, "--text", 4, *own)
    assert code == 0, err
    assert "on 1 node of 2 × X100: One step should take " in out
    code, out, err = dilatant(*asked[:3], "--gpus", "24xH100", *FEW, "--text", 4)
    assert code == 0, err
    assert "for 96 samples" in out  # 64 are written
    code, out, err = dilatant(*asked[:3], "--gpus", "2xCPU", *FEW, "--text", 4, "--json")
    assert code == 0, err
    assert json.loads(out)["cost_source"].startswith("analytic")  # rows of LONGEST would be measured for minutes
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model_type": "llama"}')
    refused(dilatant("plan", "--model", tmp_path / "text", "--images", 1), "--images 1: ", "reads none; leave it out")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 300, **sizes}
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    code, out, err = dilatant("plan", "--model", tmp_path / "text", "--gpus", "2xH100", *FEW, "--text", 9, "--json")
    assert code == 0, err
    assert "no tokenizer in" in err
    length = json.loads(out)["sizes"][0]
    assert 9 <= length["median"] < 12 + 9  # tokens of the answer, and those that the byte template adds
    long = ("--gpus", "1xH100", *FEW, "--text", LONGEST, "--json")
    code, out, err = dilatant("plan", "--model", tmp_path / "text", *long)
    assert code == 0, err
    assert json.loads(out)["sizes"][0]["median"] > LONGEST
    refused(dilatant(*asked, "--for", "nanotron"), "--for nanotron: there are megatron, ")
    refused(dilatant("plan", "--model", "x", "--gpus", "H100"), "--gpus 'H100': write it like 64xH100")
    refused(dilatant("plan", "--model", "x", "--gpus", "12xH100"), "a multiple of 8")
    refused(dilatant("plan", "--model", "x", "--gpus", "6xGB200"), "a multiple of 4")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--image-size", "0x8", "--images", 1), "--image-size 0x8: an image has from 1 to"),
        (("--image-size", "99999x99999", "--images", 1), "--image-size 99999x99999: an image has from 1 to"),
        (("--image-size", "-1x8", "--images", 1), "write it like 1024x768"),
        (("--image-size", "16x8"), "--image-size belongs to --images"),
        (("--gpus", "0xH100"), "name from 1 to 8, or a multiple of 8"),
        (("--gpus", "8xH100,8"), "--gpus '8': write it like 64xH100, or 32xH100,32xA100"),
        (("--gpus", "8xH100,8xH100"), "name H100 once"),
        (("--gpus", "8xH100,"), "--gpus '': write it like 64xH100"),
        (("--gpus", "8xX100", "--set", "cluster.hardware_file=none.yaml"), "'none.yaml' does not exist"),
        (("--text", 0), "--text 0: a sample has from 1 to 131,072 words"),
        (("--images", -1), "--images -1: a sample has from 0 to 4,096 images"),
        (("--set", "train.steps=many"), "--set has a mistake"),
        (("--gpus", f"{'9' * 5000}xH100"), "write it like 64xH100"),
        (("--gpus", "800000000xH100"), "plans are made for at most 131,072 devices"),
    ],
)
def test_what_nobody_can_imagine_is_refused(dilatant: Dilatant, arguments: tuple[str, ...], says: str) -> None:
    refused(dilatant("plan", "--model", "x", *arguments), says)


def test_a_model_that_is_no_folder_is_refused_with_its_option(dilatant: Dilatant, tmp_path: Path) -> None:
    refused(dilatant("plan", "--model", "a" * 300), "--model: model 'aaa", "neither a local folder nor")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    refused(dilatant("plan", "--model", file), f"--model: {str(file)!r} is a file; name the folder that it is in")


def test_a_full_disk_is_named_with_its_option(project: Path, dilatant: Dilatant) -> None:
    for option, says in (("--out", "--out '/dev/full' cannot be written"), ("--page", "'/dev/full' cannot be written")):
        asked = ("plan", project / "config.yaml", *H100, *FEW, "--set", "cluster.gpus_per_node=1")
        refused(dilatant(*asked, option, "/dev/full"), says)


def test_a_wrong_layout_is_refused_before_anything_is_opened(project: Path, dilatant: Dilatant) -> None:
    (project / "train.jsonl").unlink()
    for asked in ("--why-not", "--like"):
        answer = dilatant("plan", project / "config.yaml", asked, "language: {pp: 0}, audio: {pp: 2}")
        refused(answer, "pp is 0", "'audio' is no unit of this model")


def test_a_folder_instead_of_a_config_is_refused_with_what_to_name(dilatant: Dilatant, tmp_path: Path) -> None:
    refused(dilatant("plan", tmp_path), f"{str(tmp_path)!r} is a folder; name a YAML file", "by `--model`")
    (tmp_path / "a.yaml").write_text("model: {}")
    refused(dilatant("plan", tmp_path), f"name a file in it, such as {str(tmp_path / 'a.yaml')!r}")
    (tmp_path / "config.json").write_text("{}")
    refused(dilatant("plan", tmp_path), f"`dilatant plan --model {tmp_path}`")


def test_options_of_a_model_beside_a_config_are_refused(project: Path, dilatant: Dilatant) -> None:
    answer = dilatant("plan", project / "config.yaml", *FEW, "--gpus", "64xH100", "--text", 9)
    refused(answer, "--gpus, --text belongs to --model")


def test_another_framework_is_planned_for(project: Path, dilatant: Dilatant) -> None:
    asked = (project / "config.yaml", *H100, *FEW, "--set", "cluster.gpus_per_node=2")
    code, out, err = dilatant("plan", *asked, "--for", "megatron")
    assert code == 0, err
    line = next(line for line in out.splitlines() if "--tensor-model-parallel-size" in line)
    report = PlanReport.from_json((project / "run" / "plan" / "report.json").read_text())
    other = report.framework
    assert other is not None
    assert line.strip() == other.command
    assert other.step_seconds > 0
    assert "kernels modelled as those of megatron" in other.sentences[0]
    own = seconds_text(report.step_seconds)
    assert f" ({own} with our own): " in other.sentences[-1]
    assert "times as fast" in other.sentences[-1]
    assert other.models.startswith("megatron-core 0.16.1 runs llama by its GPTModel")
    assert out.index(other.models) < out.index(other.command)
    named = "train.precision: fp8, train.optimizer.name: adamw_8bit, train.deterministic and train.label_smoothing"
    assert not any("beside them" in one for one in other.sentences)
    assert "For megatron" in (project / "run" / "plan" / "plan.html").read_text()
    eight_bits = "--set", "train.precision=fp8", "--set", "train.optimizer.name=adamw_8bit", "--set", "train.zero=none"
    repeatable = "--set", "train.deterministic=true", "--set", "train.label_smoothing=0.1"
    more = planned(dilatant, *asked, *eight_bits, *repeatable, "--for", "megatron").framework
    assert more is not None
    assert any(named in one for one in more.sentences)
    assert any(one.endswith("not from train.zero.") for one in more.sentences)
    frozen = "--set", "model.freeze=[vision, language]"
    refused(dilatant("plan", *asked, *frozen), "model.freeze leaves nothing to train")
    refused(dilatant("plan", *asked, "--for", "megatron", "--like", "language: {tp: 2}"), "ask it without --like")


def test_a_framework_that_nothing_fits_says_so(project: Path, dilatant: Dilatant) -> None:
    """Three devices cannot share four samples evenly, and VeOmni has no pipelines."""
    asked = (project / "config.yaml", *H100, *FEW, "--set", "cluster.gpus_per_node=3")
    other = planned(dilatant, *asked, "--for", "veomni").framework
    assert other is not None
    assert (other.step_seconds, other.flags) == (None, {})
    (only,) = other.sentences
    assert only.startswith("Nothing fits under the limits of veomni: ")
