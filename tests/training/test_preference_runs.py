"""A run on pairs learns to prefer, judges held-out pairs, and resumes with the log-probabilities that it began with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from cases.tiny_project import SIDES, tiny_config, write_images
from dilatant import train
from dilatant.config import UserError, parse_config
from dilatant.models.language.pair_loss import MEASURES
from dilatant.planning.assemble import assemble_samples, with_sizes
from dilatant.training.references import FILE, References
from harness.command_line import run_command
from harness.faults.chaos import Fault, run_with_faults

RATE = {"learning_rate": 0.02}


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write pairs about 12 images: the right side is chosen, the other one rejected."""
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    write_images(tmp_path, 12)
    lines = []
    for number in range(12):
        fields = {"image": f"images/{number}.png", "prompt": "Side?"}
        answers = {"chosen": SIDES[number % 2], "rejected": SIDES[1 - number % 2]}
        lines.append(json.dumps({**fields, **answers}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "pairs.jsonl"


def project(file: Path, name: str, **changes: Any) -> dict[str, Any]:
    tree = tiny_config(**{"preferences": {}, "optimizer": RATE, "schedule": {"kind": "constant"}, **changes})
    data = {**tree["data"], "train": [{"path": str(file)}], "eval": [{"path": str(file)}]}
    return {**tree, "data": data, "output_dir": str(file.parent / name)}


def steps(file: Path, name: str) -> list[dict[str, Any]]:
    lines = (file.parent / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_a_run_learns_to_prefer_and_judges_pairs(pairs: Path) -> None:
    result = train(project(pairs, "run", steps=16, global_batch_size=12))
    first, *_, last = steps(pairs, "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the start model is the reference
    assert first["rewards"]["margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards"]["accuracies"] == pytest.approx(1)
    assert last["loss"] < 0.5
    assert result.evaluation is not None
    figures = result.evaluation.figures
    assert figures["rewards/accuracies"] == 1
    assert figures["loss"] < last["loss"]  # one update later
    record = json.loads((pairs.parent / "run" / "eval.json").read_text(encoding="utf-8"))
    assert (record["samples"], record["wrong_examples"]) == (12, [])


def marks(pairs: Path, kind: str = "both") -> Path:
    """Write every pair as two records with marked answers, first the good ones; these only, one without its mark, or
    bad ones that are too long."""
    records = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    lines = []
    for mark, name in ((True, "chosen"), (False, "rejected")) if kind != "good" else ((True, "chosen"),):
        for number, record in enumerate(records):
            label = "good" if kind == "unmarked" and number == 3 else mark
            answer = record[name] * (1 if mark or kind != "long" else 40)
            fields = {"image": record["image"], "prompt": record["prompt"], "completion": answer}
            lines.append(json.dumps({**fields, "label": label}))
    file = pairs.parent / "marks.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_run_on_marked_answers_learns_them(
    pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kto = marks(pairs), {"method": "kto", "beta": 0.5, "desirable_weight": 1.5}
    result = train(project(file, "run", steps=16, global_batch_size=24, preferences=kto))
    first, *_, last = steps(file, "run")
    assert first["loss"] == pytest.approx((1.5 / 2 + 1 / 2) / 2, abs=1e-5)  # the start model is the reference
    assert [first["rewards"][name] for name in ("kl", "margins")] == pytest.approx([0, 0], abs=1e-4)
    assert last["rewards"]["margins"] > 1
    assert last["rewards"]["margins"] == pytest.approx(last["rewards"]["chosen"] - last["rewards"]["rejected"])
    assert result.evaluation is not None
    figures = result.evaluation.figures
    assert [*figures] == ["loss", *MEASURES, "rewards/kl"]
    assert figures["rewards/accuracies"] == 1
    assert figures["rewards/margins"] == figures["rewards/chosen"] - figures["rewards/rejected"] > 1
    record = json.loads((file.parent / "run" / "eval.json").read_text(encoding="utf-8"))
    assert (record["samples"], record["wrong_examples"]) == (24, [])
    assert run_command(monkeypatch, "evaluate", file.parent / "run") == 0
    said = capsys.readouterr()
    assert "of 12 answers" in said.out  # the other 12 are not what is expected
    assert "samples with answers that are marked as bad are left out" in " ".join(said.err.split())


def test_a_step_reports_rewards_of_the_marks_it_has(pairs: Path) -> None:
    tree = project(marks(pairs), "run", steps=2, global_batch_size=1, preferences={"method": "kto"})
    train({**tree, "data": {**tree["data"], "eval": []}})
    for step in steps(pairs, "run"):
        assert len(step["rewards"].keys() & {"chosen", "rejected", "margins"}) == 1, step["rewards"]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("good", "data.train: all answers are marked true, and kto learns from good and bad ones"),
        ("unmarked", "marks.jsonl:4: has no mark of its answer"),
        ("long", "data.train: all answers are marked true"),
    ],
)
def test_data_without_both_marks_are_refused(pairs: Path, kind: str, problem: str) -> None:
    file = marks(pairs, kind)
    tree = project(file, "run", steps=1, preferences={"method": "kto"})
    with pytest.raises(UserError, match=problem):
        train({**tree, "data": {**tree["data"], "on_error": "skip" if kind == "long" else "error"}})


@pytest.mark.parametrize("begins", ["kto", "dpo"])
def test_a_run_does_not_go_on_with_other_kinds_of_answers(pairs: Path, begins: str) -> None:
    """Also where `data.on_error: skip` would leave out all that the other kind cannot read."""
    files = {"dpo": pairs, "kto": marks(pairs)}
    train(project(files[begins], "run", steps=1, preferences={"method": begins}))
    for method in {"kto", "dpo"} - {begins}:
        for file in files.values():
            tree = project(file, "run", steps=2, preferences={"method": method}, resume="auto")
            with pytest.raises(UserError, match=r"^train\.preferences: .*learned from .* would learn from .* answers"):
                train({**tree, "data": {**tree["data"], "on_error": "skip"}})
    tree = project(files["kto"], "run", steps=2, resume="auto", preferences=None)
    with pytest.raises(UserError, match="would learn from single answers; set it as it was, or begin a new run"):
        train(tree)


def test_changed_data_are_named_before_a_rank_starts(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(project(pairs, "run", steps=1))
    lines = pairs.read_text(encoding="utf-8").splitlines(keepends=True)
    pairs.write_text("".join([lines[0].replace("Side?", "Which?"), *lines[1:]]), encoding="utf-8")
    monkeypatch.delattr("dilatant.training.run.launch")  # of ranks
    layout = {"parallel": {"units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}}}
    with pytest.raises(UserError, match=r"source .pairs\.jsonl. has 12 samples as before, but other ones"):
        train({**project(pairs, "run", steps=2, resume="auto"), **layout})


@pytest.mark.slow
def test_a_resumed_run_compares_with_the_model_that_it_began_with(pairs: Path) -> None:
    adapters = {"lora": {"r": 2}}
    for name, parts in (("whole", ({"steps": 6},)), ("parts", ({"steps": 3}, {"steps": 6, "resume": "auto"}))):
        for changes in parts:
            tree = project(pairs, name, **changes)
            train({**tree, "model": {**tree["model"], **adapters}})
    assert [step["loss"] for step in steps(pairs, "parts")] == [step["loss"] for step in steps(pairs, "whole")]
    # If the file is damaged, resuming computes the same again, before it reads the trained weights.
    file = pairs.parent / "parts" / "references.json"
    written = file.read_bytes()
    file.write_text("{", encoding="utf-8")
    tree = project(pairs, "parts", steps=7, resume="auto")
    train({**tree, "model": {**tree["model"], **adapters}})
    assert file.read_bytes() == written


@pytest.mark.slow
@pytest.mark.parametrize("preferences", [{"method": "orpo", "share_prompt": False}, {"method": "simpo"}])
def test_methods_without_a_reference_learn_without_one(pairs: Path, preferences: dict[str, Any]) -> None:
    train(project(pairs, "run", steps=30, global_batch_size=12, preferences=preferences))
    first, *_, last = steps(pairs, "run")
    assert last["loss"] < first["loss"]
    assert last["rewards"]["accuracies"] == pytest.approx(1)
    assert not (pairs.parent / "run" / "references.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_pipeline_on_pairs_learns_what_one_process_learns(pairs: Path, method: str) -> None:
    file, settings = marks(pairs) if method == "kto" else pairs, {"preferences": {"method": method}, "steps": 3}
    train(project(file, "one", **settings))
    units = {"vision": {}, "language": {"pp": 2}}
    train({**project(file, "three", **settings), "parallel": {"units": units, "microbatches": 2}})
    for one, three in zip(steps(file, "one"), steps(file, "three"), strict=True):
        assert three["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert three["rewards"] == pytest.approx(one["rewards"], abs=1e-5)


def test_ranks_that_go_on_with_a_run_read_its_references(pairs: Path) -> None:
    config = parse_config(project(pairs, "run", steps=2), pairs.parent)
    train(config)
    samples = with_sizes(config, assemble_samples(config))
    found: dict[str, Any] = {}
    inputs: Any = SimpleNamespace(use_references=found.update)
    References(samples, inputs, pairs.parent / "run" / FILE).read()
    drawn = ~np.isnan(found["train"]).any(axis=1)
    assert (int(drawn.sum()), len(drawn)) == (8, 12)  # two steps of four samples
    np.testing.assert_allclose(found["train"][drawn], found["eval"][drawn], rtol=1e-6)  # other rows, other roundings
    less = config.model_copy(update={"data": config.data.model_copy(update={"max_samples": 8})})
    with pytest.raises(UserError, match=r"references\.json' lacks log-probabilities of pairs"):
        References(with_sizes(less, assemble_samples(less)), inputs, pairs.parent / "run" / FILE).read()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_run_on_pairs_survives_the_loss_of_a_rank(pairs: Path, method: str) -> None:
    pairs = marks(pairs) if method == "kto" else pairs
    few = {"steps": 8, "optimizer": {"learning_rate": 0.002}, "preferences": {"method": method}}
    train(project(pairs, "alone", **few))
    layout = {"units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}, "microbatches": 2}
    limits = {"enabled": True, "lease_seconds": 10.0, "fence_seconds": 60.0, "salvage": method != "kto"}
    tree = {**project(pairs, "run", **few), "parallel": layout, "resilience": limits}
    (pairs.parent / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended = run_with_faults(pairs.parent, Fault(3, "worker:1"))
    assert (ended.exit_code, ended.injected) == (0, 1), ended.output
    wanted = [step["loss"] for step in steps(pairs, "alone")]
    # First gradients of AdamW are scaled to 1, and so is the noise of sums in another order.
    assert ended.losses == pytest.approx(wanted, rel=1e-4)
