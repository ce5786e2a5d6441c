"""What people expect of a fine-tuning run: held-out data, losses by data set, the best checkpoint, averages, an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant, tiny_config, write_images
from dilatant.config import load_config
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import load_exported
from dilatant.planning.assemble import assemble_samples
from dilatant.training.evaluation.image_answers import generate_answers

CPU = torch.device("cpu")


def write(project: Path, data: dict[str, Any], evaluation: dict[str, Any], **train: Any) -> Path:
    tree = tiny_config(device="cpu", **train)
    tree["data"] |= data
    tree["evaluation"] = evaluation
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project / "config.yaml"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stored(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    return {
        key: value
        for part in sorted(folder.glob("part-*"))
        for key, value in load_file(part / f"{kind}.safetensors").items()
    }


def test_metrics_are_split_by_data_set_and_match_the_export(project: Path, dilatant: Dilatant) -> None:
    write_images(project, 9, "more.jsonl")
    (project / "mine.py").write_text(
        "import dilatant\n\n@dilatant.metric\ndef length(expected, written):\n"
        "    return sum(map(len, written)) / len(written)\n"
    )
    sets = [{"path": "train.jsonl"}, {"path": "more.jsonl", "name": "others"}]
    config = write(
        project,
        {"train": sets, "val_size": 3},
        {"steps": 3, "metrics": ["exact_match", "anls", "wer", "mine:length"], "max_new_tokens": 7},
        optimizer={"learning_rate": 0.01, "ema": 0.5},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        code, out, err = dilatant("train", config)
    assert code == 0, err
    records = lines(project / "run" / "metrics.jsonl")
    judged = [record for record in records if "evaluation" in record]
    for record in records:
        if record in judged:
            continue
        by_set = record["source_losses"]
        assert by_set.keys() <= {"train.jsonl", "others"}
        # fp32 sums in another order
        assert min(by_set.values()) - 1e-5 <= record["loss"] <= max(by_set.values()) + 1e-5
    found = json.loads((project / "run" / "eval.json").read_text())
    assert [{"step": each["step"], **each["evaluation"]} for each in judged] == found["history"]
    assert [entry["step"] for entry in found["history"]] == [3, 6]
    assert judged[-1]["by_data_set"] == found["by_data_set"]
    assert found["samples"] == 6
    assert found["by_data_set"].keys() == {"train.jsonl", "others"}
    (shown,) = (line for line in out.splitlines() if line.startswith("step 6: 6 held-out samples: loss"))
    assert "length" in shown, "it is not wrapped"
    halves = [figures["exact_match"] for figures in found["by_data_set"].values()]
    assert found["exact_match"] == pytest.approx(sum(halves) / 2)
    # The export is of the averages, and it writes what the evaluation said.
    exported = load_exported(project / "run" / "export")
    samples = assemble_samples(load_config(config))
    held_out = samples.held_out
    assert held_out is not None
    asked = {held_out[index].id: held_out[index] for index in range(len(held_out))}
    assert found["wrong_examples"], "this shows nothing if all is right"
    total = 0
    for example in found["wrong_examples"]:
        prompt = encode_prompt(asked[example["sample"]], exported.encoding)
        (answer,) = generate_answers(exported.model, exported.tokenizer, [prompt], CPU, 7)
        assert example["written"] == answer
        total += 1
    assert total >= 1
    newest = max((project / "run" / "checkpoints").glob("step-*"))
    averages = {key.removesuffix(".ema"): v for key, v in stored(newest, "optimizer").items() if key.endswith(".ema")}
    weights = stored(newest, "model")
    assert averages.keys() == {key for key in weights if key in averages}
    assert any(not torch.equal(weights[key], average) for key, average in averages.items())
    in_blocks = {
        key.replace("language.layers", "model.layers"): value
        for key, value in averages.items()
        if key.startswith("language.layers.")
    }
    written = load_file(project / "run" / "export" / "language" / "model.safetensors")
    assert len(in_blocks) > 8
    assert all(torch.equal(written[key], value) for key, value in in_blocks.items())


def test_the_best_checkpoint_is_exported_after_patience_ends(project: Path, dilatant: Dilatant) -> None:
    """A learning rate that ruins the model: nothing is ever better than the first evaluation."""
    config = write(
        project,
        {"val_size": 0.25},
        {"steps": 1, "keep_best": "loss", "patience": 3},
        steps=30,
        save_steps=1,
        keep_checkpoints=1,
        optimizer={"learning_rate": 3.0},
        schedule={"kind": "constant", "warmup_steps": 2},
    )
    code, out, err = dilatant("train", config, "--json")
    assert code == 0, err
    summary = json.loads(out)
    history = json.loads((project / "run" / "eval.json").read_text())["history"]
    best = min(history, key=lambda entry: entry["loss"])["step"]
    assert summary["best_step"] == best
    assert summary["steps"] == best + 3 < 30
    kept = {path.name for path in (project / "run" / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best:08d}", f"step-{best + 3:08d}"}
    weights = stored(project / "run" / "checkpoints" / f"step-{best:08d}", "model")
    exported = load_file(project / "run" / "export" / "language" / "model.safetensors")
    name = "language.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], exported[name.replace("language.layers", "model.layers")])
    # It is over: going on finds nothing to do, and what is exported by hand is the best one, too.
    code, out, err = dilatant("resume", project / "run", "--json")
    assert code == 0, err
    assert json.loads(out)["steps_here"] == 0
    code, out, err = dilatant("export", project / "run", "--to", project / "again", "--json")
    assert (code, json.loads(out)["step"]) == (0, best), err


@pytest.mark.slow
def test_a_resumed_run_keeps_weight_averages_and_best_step(project: Path, dilatant: Dilatant) -> None:
    settings = {"optimizer": {"learning_rate": 0.01, "ema": 0.9}, "save_steps": 3, "keep_checkpoints": 6}
    config = write(project, {"val_size": 2}, {"steps": 1, "keep_best": "loss"}, **settings)
    assert dilatant("train", config, "--set", "output_dir=whole")[0] == 0
    # The rate falls with the steps that there are in all, so the run is cut off, not made shorter.
    first = project / "whole" / "checkpoints" / "step-00000003"
    assert first.is_dir()
    code, _, err = dilatant("train", config, "--set", f"train.resume={first}")
    assert code == 0, err
    one, other = (project / name / "checkpoints" / "step-00000006" for name in ("whole", "run"))
    for kind in ("model", "optimizer"):
        expected, found = stored(one, kind), stored(other, kind)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    values = [json.loads((path / "manifest.json").read_text())["values"]["best"] for path in (one, other)]
    assert values[0] == values[1]


@pytest.mark.slow
def test_ranks_sharing_state_average_and_answer_as_one_process(project: Path, dilatant: Dilatant) -> None:
    """Two replicas of the language model share its optimizer state, and the second half of a run is one process's."""
    layout = {"units": {"vision": {}, "language": {"replicas": 2}}, "microbatches": 2}
    settings = {"optimizer": {"learning_rate": 0.01, "ema": 0.9}, "save_steps": 3, "keep_checkpoints": 6}
    metrics = {"steps": 3, "metrics": ["exact_match", "wer"], "max_new_tokens": 8, "keep_best": "loss"}
    config = write(project, {"val_size": 4}, metrics, **settings)
    assert dilatant("train", config, "--set", "output_dir=one")[0] == 0
    code, _, err = dilatant("train", config, "--set", "output_dir=two", "--set", f"parallel={json.dumps(layout)}")
    assert code == 0, err
    middle = project / "two" / "checkpoints" / "step-00000003"
    code, _, err = dilatant("train", config, "--set", "output_dir=three", "--set", f"train.resume={middle}")
    assert code == 0, err
    one, *others = (json.loads((project / name / "eval.json").read_text()) for name in ("one", "two", "three"))
    for other in others:
        # fp32: sums in another order, through six updates
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert other["wer"] == one["wer"]
        assert other["wrong_examples"] == one["wrong_examples"]
    exports = [
        load_file(project / name / "export" / "language" / "model.safetensors") for name in ("one", "two", "three")
    ]
    for key, tensor in exports[0].items():
        for other in exports[1:]:
            torch.testing.assert_close(other[key], tensor, rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 +", "SyntaxError"),
        ("score = 3", "not declared as a metric"),
        ("import dilatant\n@dilatant.metric\ndef score(expected):\n    return 1", "but takes (expected)"),
        ("import dilatant\n@dilatant.metric\ndef score(expected, written):\n    return 'good'", "ValueError"),
        ("import dilatant\n@dilatant.metric\ndef score(expected, written):\n    return float('nan')", "returned nan"),
    ],
)
def test_a_metric_that_is_none_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dilatant.config import UserError
    from dilatant.training.evaluation.answer_metrics import measure

    name = f"metric_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        measure(f"{name}:score", ["a"], ["b"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
