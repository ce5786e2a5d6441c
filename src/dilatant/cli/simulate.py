"""`dilatant simulate`: predict the step time of a plan on any cluster, including hardware that is not here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dilatant.cli.options import AsJson, Overrides, Trust, read_config, say_loading, show_places
from dilatant.cli.plan import Page, open_problem
from dilatant.config.degrees import AXES
from dilatant.config.errors import UserError
from dilatant.config.files.own_files import read_text
from dilatant.config.memory_modes import Shard
from dilatant.report.say import open_console, plain_table, print_line, print_table, say, show_progress
from dilatant.report.text.wording import bytes_text, count_text, counted, origin_text, percent_text, seconds_text

if TYPE_CHECKING:
    from dilatant.config import Config
    from dilatant.cost.memory import Zero
    from dilatant.plan.costs.score import PlanScore
    from dilatant.plan.plan import Plan
    from dilatant.plan.replay.node_trace import NodeTrace
    from dilatant.plan.templates.membership import ChainCosts
    from dilatant.planning.planning import PlannedRun, PlanningProblem
    from dilatant.report.plan_report import PlanReport
    from dilatant.report.step_comparison import Prediction
    from dilatant.schedule.schedule import MeasuredStep


def simulate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_CONFIG",
            help="A plan.json that `dilatant plan` wrote, its folder, the folder of a run, or a YAML file.",
            show_default=False,
        ),
    ],
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    cluster: Annotated[
        str, typer.Option(help="Nodes × devices, and what they are, as in 16x8:H100.", show_default=False)
    ] = "",
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of a step and pipeline.", show_default=False)
    ] = None,
    failures: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Replay a trace of nodes that come and go.", show_default=False)
    ] = None,
    trace_unit: Annotated[
        str | None,
        typer.Option(
            help="With --failures: the unit of the trace's times (ms, s or h), where it has none of its own.",
            show_default=False,
        ),
    ] = None,
    fault_tolerance: Annotated[
        int | None, typer.Option(min=0, help="With --failures: as resilience.fault_tolerance.", show_default=False)
    ] = None,
    page: Page = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Predict the step time of a plan on any cluster. For a YAML file, the best plan for its cluster is simulated. For
    the folder of a multi-process run, its last measured step is simulated and shown beside the measurement.

    Costs of hardware other than this machine are modelled, unless `--set plan.costs=FILE` gives them. With --failures,
    nodes join and leave the cluster as in the trace; the result is throughput over time with pipeline templates and
    with restarts.
    """
    if trace_unit is not None and failures is None:
        raise UserError("--trace-unit is of a trace: give one with --failures, or leave it out")
    run = _read(source, [*_cluster(cluster), *overrides], trust)

    from dilatant.plan.replay.node_trace import UNITS, load_node_trace
    from dilatant.planning.memberships import best_plan
    from dilatant.planning.planning import time_plan

    console = open_console(stderr=as_json)
    trace = None if failures is None else load_node_trace(failures, seed=run.config.seed, unit=trace_unit)
    if trace is not None and trace.unit and trace_unit is None:
        say(console, f"{failures}: times are taken to be {UNITS[trace.unit]}; --trace-unit says otherwise")
    problem = open_problem(run.config, searches=run.plan is None)
    if run.zero is not None:
        problem = problem.sharing(run.zero, run.shard)
    if trace is not None:
        _replay(problem, run, trace, fault_tolerance, page, as_json, console)
        return
    with show_progress(open_console(stderr=True), "simulating"):
        if run.plan is None:
            planned = best_plan(problem)
            if microbatches:
                shared = planned.result.winner.zero, dict(planned.problem.target.rules.shard)
                planned = time_plan(problem.sharing(*shared), planned.result.winner.plan, microbatches)
        elif microbatches:
            planned = time_plan(problem, run.plan, microbatches)
        else:
            planned = time_plan(problem, run.plan, run.step.get("num_microbatches"), run.step.get("row_tokens"))
    if run.measured is not None and page is None and not as_json:
        page = run.folder / "plan.html"
    _show(planned, run, page, as_json, console)


@dataclass(frozen=True, slots=True)
class _SimulatedRun:
    """The input of a simulation: a config, or the plan of a plan file with its `step` section and, for a run, its
    measured step. name, folder: name and location of the run or file. chain: the plan's costs of memberships, if
    nothing was overridden."""

    config: Config
    name: str
    folder: Path
    plan: Plan | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    measured: MeasuredStep | None = None
    zero: Zero | None = None
    shard: Mapping[str, Shard] | None = None
    chain: ChainCosts | None = None


def _read(source: Path, overrides: list[str], trust: bool) -> _SimulatedRun:
    path = source / "plan.json" if source.is_dir() else source
    folder = path.parent
    if path.suffix != ".json":
        return _SimulatedRun(read_config(path, overrides, trust or None, loads=True), path.stem, folder)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError):
        raise UserError(f"plan {str(path)!r} cannot be read; `dilatant plan CONFIG` writes one") from None
    say_loading()
    try:
        from dilatant.planning.layout import TrainingPlan

        trained, step = TrainingPlan.from_json(text), json.loads(text).get("step", {})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    beside = folder / "config.yaml"
    if not beside.is_file():
        raise UserError(
            f"{path} needs the config.yaml that `dilatant plan` writes beside it: model and data are read from there"
        )
    plan, config = trained.plan, read_config(beside, overrides, trust)
    keys = {entry.partition("=")[0] for entry in overrides}
    measured = _measured(folder)
    sized = config.cluster.groups or any(key.partition(".")[0] == "cluster" for key in keys)
    if measured is not None and not sized:
        config = _with(config, "cluster", gpus_per_node=plan.ranks[-1] + 1)
    if not {"plan", "plan.costs"} & keys and (costs := _costs_beside(folder, config)):
        config = _with(config, "plan", costs=costs)
    for name, key in AXES.items():  # costs are needed at these, too
        degrees = {getattr(placed.stage, name) for placed in plan.stages()}
        if degrees != {1} and not {"plan", f"plan.{key}"} & keys:
            config = _with(config, "plan", **{key: tuple(sorted({1, *degrees}))})
    name = folder.resolve().name if source.is_dir() or measured is not None else path.stem
    zero, chain = config.train.zero or trained.zero, None if overrides else trained.chain
    shard = trained.shard if config.train.shard is None else None
    return _SimulatedRun(config, name, folder, plan, step, measured, zero, shard, chain)


def _with(config: Config, section: str, **values: Any) -> Config:
    """Return the config with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _measured(folder: Path) -> MeasuredStep | None:
    """Return the step that a run measured, or None if the folder has none."""
    from dilatant.schedule.schedule import MeasuredStep

    path = folder / "step.json"
    if not path.is_file():
        return None
    try:
        return MeasuredStep.from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def _costs_beside(folder: Path, config: Config) -> str | None:
    """Return the costs with which the plan was made if they are for the requested hardware, else None."""
    from dilatant.cost.model import load_costs
    from dilatant.planning.problem.planned_hardware import is_same_hardware, target_of_run

    path = next((p for p in (folder / "costs.yaml", folder / "plan" / "costs.yaml") if p.is_file()), None)
    if path is None:
        return None
    target = target_of_run(config)
    costs = load_costs(path)
    kinds = [own.hardware for own in costs.groups.values()] or [costs.hardware]
    wanted = [own.requested for own in target.groups] or [target.requested]
    same = any(is_same_hardware(kind, device) for kind in kinds for device in wanted)
    return str(path.resolve()) if same and costs.dtype == target.dtype else None


def _cluster(text: str) -> list[str]:
    """Convert `16x8:H100` to overrides of the cluster section."""
    if not text:
        return []
    found = re.fullmatch(r"(\d+)[x×](\d+)(?::(.+))?", text)
    if found is None:
        raise UserError(f"--cluster {text!r} must look like 16x8 or 16x8:H100 (nodes × devices per node)")
    nodes, devices, hardware = found.groups()
    entries = ["cluster.groups=null", f"cluster.nodes={nodes}", f"cluster.gpus_per_node={devices}"]
    return [*entries, f"cluster.hardware={hardware}"] if hardware else entries


def _show(planned: PlannedRun, run: _SimulatedRun, page: Path | None, as_json: bool, console: Console) -> None:
    from dilatant.planning.plan_advice import compare_schedules
    from dilatant.planning.planned_run import fixed_plan_report, plan_report
    from dilatant.planning.planning import scorer_of
    from dilatant.report.gantt import measured_chart, predicted_chart
    from dilatant.report.pages.plan_page import print_plan

    winner = planned.result.winner
    report, prediction = fixed_plan_report(plan_report(planned, run.name)), None
    if run.measured is not None:
        prediction = _prediction(planned, report.plan, run.measured)
        report = replace(
            report,
            schedule=run.step.get("schedule") or report.schedule,
            remodelled=predicted_chart(prediction.timeline),
            measured=measured_chart(run.measured.actions, report.plan),
        )
    scorer = scorer_of(planned.problem, winner.score.schedule or None)
    steps = [step.seconds for step in scorer.steps(winner.plan, winner.num_microbatches, winner.row_tokens)]
    schedules = compare_schedules(planned.problem, winner)
    written = {} if page is None else _write_pages(page, report, run, prediction)
    if as_json:
        facts: dict[str, Any] = {
            "report": json.loads(report.to_json()),
            "num_microbatches": winner.num_microbatches,
            "row_tokens": winner.row_tokens,
            "step_seconds": steps,
            "schedules": {
                name: {"seconds": score.seconds, "peak_bytes": max(score.peak_bytes, default=0.0)}
                for name, score in schedules.items()
            },
        }
        print(json.dumps(facts))
        return
    print_plan(report, console)
    _print_steps(steps, schedules, planned.problem, console)
    if written:
        console.print()
        show_places(console, written)


def _prediction(planned: PlannedRun, plan: Plan, measured: MeasuredStep) -> Prediction:
    """Predict exactly the actions that were measured, instead of a typical step."""
    from dilatant.planning.planning import predicted_step
    from dilatant.report.step_comparison import Prediction

    try:
        step = predicted_step(planned.problem, plan, measured)
    except (KeyError, IndexError) as error:
        raise UserError(f"step.json is of another plan than plan.json: it lacks {error}; remove it") from None
    return Prediction(step, origin_text(planned.problem.measured.origin))


def _write_pages(page: Path, report: PlanReport, run: _SimulatedRun, prediction: Prediction | None) -> dict[Path, str]:
    """Write the plan's page; for a run with a measured step also that step's page, with its prediction."""
    from dilatant.report.pages.page import write_page
    from dilatant.report.pages.page_links import link_pages
    from dilatant.report.pages.plan_page import render_step_page, write_plan_page

    written = {write_plan_page(report, page): "the same as a page: open it in a browser"}
    if run.measured is not None and page.parent == run.folder:
        title, path = f"{run.name}: the last step", run.folder / "timeline.html"
        measured, waits = run.measured.actions, run.measured.waits
        write_page(path, render_step_page(measured, report.plan, title, prediction, waits))
        written[path] = "the measured step, now beside its prediction"
    link_pages(run.folder)
    return written


def _print_steps(
    steps: list[float], schedules: dict[str, PlanScore], problem: PlanningProblem, console: Console
) -> None:
    mean = sum(steps) / len(steps)
    print_line(
        console,
        f"{counted(len(steps), 'global batch')} of {problem.global_batch:,} samples: {seconds_text(min(steps))} to "
        f"{seconds_text(max(steps))} a step, {seconds_text(mean)} on average, "
        f"{count_text(problem.global_batch / mean)} samples per second",
    )
    figures = ("a step", "fullest rank", "of its memory")
    table = plain_table(("schedule", *figures), right=figures, whole=("schedule", *figures))
    capacity = problem.target.cluster.bytes_per_device
    for name, score in sorted(schedules.items(), key=lambda item: item[1].seconds):
        seconds, peak = score.seconds, max(score.peak_bytes, default=0.0)
        style = "red" if peak > capacity else None
        table.add_row(name, seconds_text(seconds), bytes_text(peak), percent_text(peak / capacity), style=style)
    print_table(console, table)


def _replay(
    problem: PlanningProblem,
    run: _SimulatedRun,
    trace: NodeTrace,
    fault_tolerance: int | None,
    page: Path | None,
    as_json: bool,
    console: Console,
) -> None:
    from dilatant.planning.failures import replay_failures
    from dilatant.report.pages.page import write_page
    from dilatant.report.pages.page_links import link_pages
    from dilatant.report.pages.replay_page import render_replay_page, replay_parts, replays_to_plain
    from dilatant.report.printed_parts import print_parts
    from dilatant.report.run_folder import RunFolder

    with show_progress(open_console(stderr=True), "replaying"):
        found = replay_failures(problem, trace, fault_tolerance, run.chain)
    setting = found.sentences(problem)
    if page is None:
        page = RunFolder(Path(problem.config.output_dir) / "plan").path / "failures.html"
    written = write_page(page, render_replay_page(found.replays, found.title(problem, run.name), setting))
    link_pages(Path(problem.config.output_dir))
    if as_json:
        print(json.dumps(replays_to_plain(found.replays, setting)))
        return
    print_parts(console, replay_parts(found.replays, setting))
    console.print()
    show_places(console, {written: "the same as a page: open it in a browser"})
