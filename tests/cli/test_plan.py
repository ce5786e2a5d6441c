"""`dilatant plan`: a plan with its page, shared cost files, partly specified layouts, mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from cases.planning.planning_verbs import FEW, H100, planned
from cases.tiny_project import Dilatant, tiny_config, write_images
from dilatant.config import load_config
from dilatant.cost.model import load_costs
from dilatant.plan import Plan
from dilatant.planning.layout import TrainingPlan
from dilatant.report.plan_report import PlanReport
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.schedule import MeasuredStep
from dilatant.schedule.trainability import Trainability
from dilatant.training.prepare import prepare
from harness.refused import refused


def test_a_plan_is_found_and_left_in_the_run_folder(project: Path, dilatant: Dilatant) -> None:
    wanted = "vision: {tp: 1}, language: {pp: 2}"
    asked = ("--why-not", wanted, "--why-not", "language: {tp: 8}")
    code, out, err = dilatant("plan", project / "config.yaml", *H100, "--set", "cluster.gpus_per_node=2", *asked)
    assert code == 0, err
    assert "samples per second" in out
    assert f"Why not {wanted}?" in out
    assert "This plan and the runners-up" in out
    assert re.search(r"Decoding takes .* of a processor a sample", " ".join(out.split()))
    folder = project / "run" / "plan"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"plan.json", "plan.html", "report.json", "costs.yaml", "config.yaml"}
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.ranks == (0, 1)
    assert [unit.name for unit in plan.units] == ["vision", "language"]
    report = PlanReport.from_json((folder / "report.json").read_text())
    assert report.plan == plan
    assert report.global_batch == 4
    assert "analytic" in report.cost_source
    assert "not measured" in report.cost_source
    page = (folder / "plan.html").read_text()
    assert "language" in page
    first, second = report.why_not
    assert first.asked == wanted
    assert first.answer
    assert "language: tp 8 was not offered" in " ".join(second.answer)
    assert f"Why not {wanted}?" in page
    assert sum(group.candidates for group in report.groups) >= len(report.candidates)
    assert "What was searched" in page
    assert "Ranks, nodes and ports" in page


def test_the_page_the_plan_and_json_say_the_same(project: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    out, page = tmp_path / "elsewhere.json", tmp_path / "elsewhere.html"
    report = planned(dilatant, project / "config.yaml", *H100, *FEW, "--out", out, "--page", page)
    assert Plan.from_json(out.read_text()) == report.plan
    step = json.loads(out.read_text())["step"]
    assert step["predicted_seconds"] == report.candidates[0].step_seconds
    assert page.read_text().startswith("<!doctype html>")


def test_a_layout_in_part_is_completed_cut_timed_and_trains(project: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    """`--like` may name degrees that are not searched by default, such as tp 2 on a CPU."""
    tree = tiny_config()
    tree["model"]["language_model"]["config"] |= {"num_hidden_layers": 4}
    tree |= {
        "cluster": {"hardware": "CPU", "gpus_per_node": 6},
        "plan": {"measure_seconds": 0},
        "debug": {"planned_steps": 1},
    }
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    out, plan = tmp_path / "like.json", ("plan", project / "config.yaml")
    report = planned(dilatant, plan[1], "--like", "language: {tp: 2, pp: 2, chunks: 1}", "--out", out)
    stages = [one.stage for one in report.plan.stages() if one.unit == "language"]
    assert [(stage.tp, len(stage.ranks)) for stage in stages] == [(2, 2)] * 2
    assert stages[1].first not in (0, 1, 5)  # embedding or head alone: blocks are what takes time
    assert report.candidates[0].step_seconds > 0
    assert max(use.peak_bytes for use in report.memory) > 0
    assert "fastest plan like 'language: {tp: 2, pp: 2, chunks: 1}'" in " ".join(report.reasons)
    run = load_config(project / "config.yaml", [f"parallel={{plan: {out}}}"])
    found = prepare(run).planned
    assert found.plan == report.plan
    assert found.predicted_seconds == report.candidates[0].step_seconds
    mine = planned(dilatant, plan[1], "--like", "language: {tp: 2, pp: 2, cuts: [0, 1]}")
    assert [one.stage.first for one in mine.plan.stages() if one.unit == "language"] == [0, 1]
    assert mine.candidates[0].step_seconds > report.candidates[0].step_seconds
    for cuts, says in (
        ("pp: 2, cuts: [1, 9]", "cuts is [1, 9]; it must be the first layers of its stages"),
        ("cuts: [0, a]", "cuts is [0, 'a']; it must be the first layers of its stages"),
        ("cuts: [0, 9]", "cuts [0, 9] are not of its 6 layers into 2 stages"),
        ("pp: 3, cuts: [0, 2]", "cuts [0, 2] are not of its 6 layers into 3 stages"),
    ):
        refused(dilatant(*plan, "--like", f"language: {{{cuts}}}"), says)
    refused(dilatant(*plan, "--like", "audio: {pp: 2}, language: {pipe: 2}"), "'audio' is no unit", "'pipe'")
    refused(dilatant(*plan, "--like", "language: {tp: 2, pp: 4}"), "it takes 8 devices, and there are 6")
    refused(dilatant(*plan, "--like", "language: {pp: 2}", "--why-not", "language: {pp: 2}"), "--like")


def test_layers_are_measured_once_and_shared_as_a_file(project: Path, dilatant: Dilatant) -> None:
    costs = project / "shared.yaml"
    settings = ("--set", "cluster.gpus_per_node=2")
    code, out, err = dilatant(
        "profile", project / "config.yaml", *settings, "--out", costs, "--tokens", "8,16", "--repeats", 1
    )
    assert code == 0, err
    assert "llama block 16" in out
    assert (choice := re.search(r"attention over causal rows with heads of 8: (sdpa|blockwise), .* as fast as", out))
    measured = load_costs(costs)
    assert measured.origin == "measured"
    assert {cost.parameters for cost in measured.layers["llama block 16"].values()} == {2336}
    report = planned(dilatant, project / "config.yaml", *settings, *FEW, "--costs", costs)
    assert report.cost_source.startswith("measured; attention by ")
    assert re.search(rf"{choice[1]} for ([a-z]+ and )?causal( and [a-z]+)? rows", report.cost_source)
    assert load_costs(project / "run" / "plan" / "costs.yaml") == measured


@pytest.mark.slow
def test_the_plan_uses_costs_of_tensor_parallel_groups(project: Path, dilatant: Dilatant) -> None:
    costs = project / "groups.yaml"
    profile = ("profile", project / "config.yaml", "--out", costs, "--tokens", "8,16", "--repeats", 1)
    refused(dilatant(*profile, "--tp", "1,3"), "language: 2 attention heads", "it takes tp 1, 2")
    two = (*("--set", "cluster.gpus_per_node=2"),)
    code, out, err = dilatant(*profile, *two, "--tp", "2", "--cp", "1,2")
    assert code == 0, err
    assert "llama block 16 tp 2" in out
    degrees = {degree for known in load_costs(costs).layers.values() for degree in known}
    assert {(degree.tp, degree.cp, degree.ep) for degree in degrees} == {(2, 1, 1), (2, 2, 1)}
    report = planned(dilatant, project / "config.yaml", *two, "--costs", costs)
    assert {(placed.stage.tp, placed.stage.cp) for placed in report.plan.stages()} == {(2, 1)}
    code, _, err = dilatant(
        "train", project / "config.yaml", *two, "--set", "train.steps=1",
        "--set", f"parallel={{plan: {project / 'run' / 'plan' / 'plan.json'}}}",
    )  # fmt: skip
    assert code == 0, err


def slow_alone(costs: Path) -> None:
    """Make cp 1 take a thousand times as long as it did."""
    tree = yaml.safe_load(costs.read_text())
    for degrees in tree["layers"].values():
        for name in ("forward", "input_gradient", "weight_gradient", "first_trainable"):
            degrees["tp1 cp1"][name] = [1000 * value for value in degrees["tp1 cp1"][name]]
    costs.write_text(yaml.safe_dump(tree))


@pytest.mark.slow
def test_context_parallelism_is_planned_where_it_pays_and_trains(project: Path, dilatant: Dilatant) -> None:
    config, costs = project / "config.yaml", project / "costs.yaml"
    wide = ("--set", "plan.context_parallel=[1,2]", "--set", "model.language_model.config.num_key_value_heads=2")
    two = (*H100, "--set", "cluster.gpus_per_node=2", "--set", "plan.tensor_parallel=[1]", *wide)
    layers_of_a_few_weights = planned(dilatant, config, *two).plan
    assert {placed.stage.cp for placed in layers_of_a_few_weights.stages()} == {1}
    assert dilatant("profile", config, *two, "--out", costs)[0] == 0
    slow_alone(costs)
    code, _, err = dilatant("plan", config, *two, "--costs", costs)
    assert code == 0, err
    folder = project / "run" / "plan"
    report = PlanReport.from_json((folder / "report.json").read_text())
    assert 2 in {placed.stage.cp for placed in report.plan.stages()}
    trains = ("--set", "train.device=cpu", "--set", "train.steps=1", *wide[2:])
    plan = f"parallel={{plan: {folder / 'plan.json'}}}"
    code, _, err = dilatant("train", config, *trains, "--set", plan)
    assert code == 0, err
    other = ("--set", "model.language_model.attn_implementation=sdpa", "--set", "output_dir=other")
    refused(dilatant("plan", config, *two, *other, "--costs", costs), "needs attention over block tables")
    refused(dilatant("train", config, *trains, *other, "--set", plan), "needs attention over block tables")


@pytest.mark.slow
def test_recomputation_for_tight_memory_is_saved_and_trains(project: Path, dilatant: Dilatant) -> None:
    config = project / "config.yaml"
    settings = (
        *("--set", "model.language_model.config.num_hidden_layers=12"),
        *("--set", "plan.microbatch_sizes=[4]", "--set", "cluster.gpus_per_node=1"),
    )
    free = planned(dilatant, config, *H100, *settings)
    assert not any(how != "none" for unit in free.plan.units for how in unit.recompute)
    peak = max(one.peak_bytes - one.bytes_by_use["reserve"] for one in free.memory)
    little = (*H100, *settings, "--set", f"cluster.memory_gib={0.95 * peak / 2**30}")
    report = planned(dilatant, config, *little)
    again = report.plan.unit("language").recompute
    assert {*again} - {"none"}
    assert again[0] == again[-1] == "none", "only blocks are recomputed"
    refused(dilatant("plan", config, *little, "--set", "train.recompute=none"), "no plan fits memory")
    file = f"parallel={{plan: {project / 'run' / 'plan' / 'plan.json'}}}"
    trains = ("--set", "train.device=cpu", "--set", "train.steps=1", *settings[:2])
    code, _, err = dilatant("train", config, *trains, "--set", file)
    assert code == 0, err
    assert Plan.from_json((project / "run" / "plan.json").read_text()).unit("language").recompute == again
    refused(
        dilatant("train", config, *trains[:-2], "--set", file, "--set", "output_dir=other"),
        "unit 'language' says of 14 layers what is recomputed, but has 3",
    )


@pytest.mark.slow
def test_a_plan_measures_this_machine_when_nothing_else_is_said(project: Path, dilatant: Dilatant) -> None:
    report = planned(
        dilatant,
        project / "config.yaml",
        "--set",
        "data.max_length=32",
        "--set",
        "plan.measure_seconds=600",
        "--set",
        "cluster.gpus_per_node=1",
        *FEW,
    )
    assert report.cost_source.startswith("measured")
    assert load_costs(project / "run" / "plan" / "costs.yaml").origin == "measured"


@pytest.mark.slow
def test_a_chosen_zero_bubble_schedule_trains_as_one_process(project: Path, dilatant: Dilatant) -> None:
    """Five samples do not divide among two pipelines, so the plan is two stages, where split backwards pay."""
    tree = tiny_config(global_batch_size=5, steps=3)
    tree["model"]["language_model"]["config"] |= {"num_hidden_layers": 4, "tie_word_embeddings": False}
    tree["plan"] = {"microbatch_sizes": [1], "microbatch_tokens": []}
    config = project / "config.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    # Split backwards launch more kernels, which on a GPU is all that layers of a few weights take.
    shipped = yaml.safe_load((files("dilatant.cost") / "hardware.yaml").read_text(encoding="utf-8"))
    links = {"inside": {"bandwidth": 3e11, "latency": 1e-12}}
    quick = shipped["H100"] | {"host": 1e-12, "launch": 1e-12} | links
    (project / "quick.yaml").write_text(yaml.safe_dump({"quick H100": quick}), encoding="utf-8")
    named = ("--set", "cluster.hardware=quick H100", "--set", f"cluster.hardware_file={project / 'quick.yaml'}")
    report = planned(dilatant, config, *named, "--set", "cluster.gpus_per_node=2")
    file = project / "run" / "plan" / "plan.json"
    found = TrainingPlan.from_json(file.read_text())
    assert found.schedule == report.schedule
    assert found.schedule in ("zb-h1", "zb-h2")
    assert found.plan.ranks == (0, 1)
    code, out, err = dilatant("train", config, "--set", f"parallel={{plan: {file}}}", "--set", "output_dir=trained")
    assert code == 0, err
    assert f"schedule {found.schedule}, " in " ".join(out.split())
    run = project / "trained"
    assert TrainingPlan.from_json((run / "plan.json").read_text()).schedule == found.schedule
    step = MeasuredStep.from_json((run / "step.json").read_text())
    trains = Trainability((True,) * 3, (True,) * 3)
    expected = FAMILIES[found.schedule](found.plan, step.assignment, trains)
    assert step.schedule == expected
    assert {action.kind for actions in step.schedule.actions.values() for action in actions} == {"F", "I", "W"}
    code, _, err = dilatant("train", config, "--set", "parallel=single", "--set", "output_dir=one")
    assert code == 0, err
    losses = [
        [
            record["loss"]
            for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            if "loss" in record  # others are evaluations
        ]
        for folder in (run, project / "one")
    ]
    assert len(losses[0]) == 3
    # fp32 sums in another order, which optimizer steps amplify.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_links_are_measured_into_a_hardware_file(project: Path, dilatant: Dilatant) -> None:
    costs, links = project / "costs.yaml", project / "hardware.yaml"
    sizes = ("--tokens", "8,16", "--repeats", 1, "--out", costs, "--set", "cluster.gpus_per_node=2")
    code, out, err = dilatant("profile", project / "config.yaml", *sizes, "--links", links)
    assert code == 0, err
    assert "links inside a node:" in out
    assert "links between nodes: not measured" in out
    (name,) = yaml.safe_load(links.read_text())
    mine = f"cluster={{hardware: {name}, hardware_file: {links}, gpus_per_node: 2}}"
    report = planned(dilatant, project / "config.yaml", *FEW, "--set", mine, "--costs", costs)
    assert report.cost_source.startswith("measured")
    refused(dilatant("profile", project / "config.yaml", *H100, "--links", links), "cannot be measured")


def test_freezing_makes_a_plan_faster(project: Path, planned_two: Path, dilatant: Dilatant) -> None:
    whole = PlanReport.from_json((planned_two / "run" / "plan" / "report.json").read_text())
    two = (*H100, *FEW, "--set", "cluster.gpus_per_node=2")
    frozen = planned(dilatant, project / "config.yaml", *two, "--set", "model.freeze=[vision.encoder, language]")
    assert frozen.step_seconds < whole.step_seconds
    trained = {unit.name: unit.trainable_parameters for unit in frozen.units}
    assert trained["language"] == 0 < trained["vision"]  # the projector


def test_too_little_memory(project: Path, dilatant: Dilatant) -> None:
    result = dilatant("plan", project / "config.yaml", *H100, "--set", "cluster.memory_gib=0.00001")
    refused(result, "no plan fits memory", "unit 'language' needs", "more than")


def test_a_batch_that_does_not_divide(project: Path, dilatant: Dilatant) -> None:
    settings = ("--set", "train.global_batch_size=10", "--set", "plan.microbatch_sizes=[4]")
    refused(
        dilatant("plan", project / "config.yaml", *H100, *settings),
        "train.global_batch_size",
        "a global batch of 10",
        "8 and 12",
    )


def test_costs_of_other_hardware_and_of_another_model(project: Path, dilatant: Dilatant) -> None:
    costs = project / "a40.yaml"
    other = ("--set", "cluster.hardware=A40")
    code, out, err = dilatant("profile", project / "config.yaml", *other, "--out", costs)
    assert code == 0, err
    assert "not measured" in out
    refused(dilatant("plan", project / "config.yaml", *H100, "--costs", costs), "'A40'", "'H100'")
    wider = ("--set", "model.language_model.config.intermediate_size=64")
    refused(
        dilatant("plan", project / "config.yaml", *other, *wider, "--costs", costs),
        "of another model",
        "'llama block 16' has",
    )


FOUR = ("--set", "cluster.gpus_per_node=4")
"""Of four devices the encoder of `uneven` gets one or two, as the images of a batch are few or many."""


def test_a_data_set_too_small_for_a_stable_ratio_is_reported(project: Path, dilatant: Dilatant) -> None:
    uneven(project, 8)
    report = planned(dilatant, project / "config.yaml", *H100, *FOUR, *FEW, "--set", "train.global_batch_size=8")
    assert report.ratio is not None
    assert report.ratio.samples == 8
    assert any("too small for a stable ratio" in text and "% of the cases" in text for text in report.warnings)


@pytest.mark.slow
def test_a_global_batch_below_the_stable_one_is_said(project: Path, dilatant: Dilatant) -> None:
    uneven(project, 400)
    small = planned(dilatant, project / "config.yaml", *H100, *FOUR)
    assert small.ratio is not None
    assert small.ratio.stable_batch is not None
    assert any(f"is below the {small.ratio.stable_batch} samples" in text for text in small.warnings)
    batch = f"train.global_batch_size={(small.ratio.stable_batch + 7) // 8 * 8}"
    large = planned(dilatant, project / "config.yaml", *H100, *FOUR, "--set", batch)
    assert not any("is below the" in text for text in large.warnings)


def uneven(project: Path, count: int) -> None:
    """Write samples of which half have an image and hardly any text, and half the reverse."""
    path = write_images(project, count)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        if number % 2:
            line["messages"][0]["content"] = "word " * 8
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def test_a_broken_sample_stops_a_plan_unless_it_may_be_skipped(project: Path, dilatant: Dilatant) -> None:
    (project / "images" / "3.png").unlink()
    refused(dilatant("plan", project / "config.yaml", *H100), "cannot be trained on", "images/3.png")
    report = planned(dilatant, project / "config.yaml", *H100, *FEW, "--set", "data.on_error=skip")
    assert any("left out" in warning for warning in report.warnings)


def test_samples_longer_than_training_takes_are_not_planned_for(project: Path, dilatant: Dilatant) -> None:
    short = "--set", "data.max_length=8"
    refused(dilatant("plan", project / "config.yaml", *H100, *short), "cannot be trained on", "more than the 8 allowed")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "cluster.hardwear=H100"), "did you mean 'cluster.hardware'?"),
        (("--set", "cluster.hardware=H1000"), "it has 'A100 40GB', 'A100', 'A40', 'A800',"),
        (("--set", "cluster.hardware=A100-80GB"), "did you mean 'A100'?"),
        (("--set", "cluster.hardware=T4", "--set", "train.precision=fp8"), "train.precision: fp8: T4 does not"),
        (("--set", "model.lora.rank=8"), "write 'model.lora.r'"),
        (("--set", "cluster={hardware: mine, hardware_file: none.yaml}"), "does not exist"),
        (("--set", "plan.microbatch_sizes=[0]"), "numbers from 1 on"),
        (("--costs", "nowhere.yaml"), "cannot be read"),
    ],
)
def test_mistakes_in_the_config(project: Path, dilatant: Dilatant, arguments: tuple[str, ...], says: str) -> None:
    refused(dilatant("plan", project / "config.yaml", *arguments), says)


def test_a_hardware_file_of_ones_own(project: Path, dilatant: Dilatant) -> None:
    shipped = yaml.safe_load((files("dilatant.cost") / "hardware.yaml").read_text(encoding="utf-8"))
    (project / "mine.yaml").write_text(yaml.safe_dump({"B300": {**shipped["H200"], "source": "a guess"}}))
    report = planned(
        dilatant,
        project / "config.yaml",
        *FEW,
        "--set",
        "cluster={hardware: B300, hardware_file: mine.yaml, nodes: 2, gpus_per_node: 1}",
    )
    assert "B300" in report.hardware
    assert report.hardware.startswith("2 nodes")


def test_help_needs_nothing_that_takes_long_to_import() -> None:
    slow = {"torch", "numba", "transformers", "pydantic", "numpy"}
    code = f"import sys; import dilatant.cli.app; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
