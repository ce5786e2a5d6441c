"""`dilatant plan`: who should do what, before anything trains."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilatant.cli.options import AsJson, ConfigPath, Overrides, output_file, read_config

if TYPE_CHECKING:
    from rich.console import Console

    from dilatant.config import Config
    from dilatant.profiling.planning import PlannedRun, PlanningProblem
    from dilatant.report.plan_report import PlanReport

Page = Annotated[
    Path | None, typer.Option(help="Where to write the page.", callback=output_file, show_default=False)
]


def plan(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    costs: Annotated[
        Path | None,
        typer.Option(help="Layer costs from `dilatant profile`; as plan.costs.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the plan.", callback=output_file, show_default=False)
    ] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a model, its data and a cluster, and say why. Nothing is trained.

    Writes plan.json, plan.html, report.json, costs.yaml and config.yaml into the run folder's plan/.
    """
    from rich.console import Console

    from dilatant.profiling.planning import plan_run
    from dilatant.report.page_links import link_pages
    from dilatant.report.plan_page import write_plan_page
    from dilatant.report.plan_table import print_plan
    from dilatant.report.terminal import print_indented, print_line

    console = Console(stderr=as_json)
    resolved = with_costs(read_config(config, overrides), costs)
    problem = open_problem(resolved, console)
    with console.status("searching"):
        planned = plan_run(problem)
    report = plan_report(planned, config.stem)
    folder = write_plan_folder(planned, report)
    if out is not None:
        out.write_text(plan_document(planned), encoding="utf-8")
    written = write_plan_page(report, page or folder / "plan.html")
    link_pages(folder.parent)
    if as_json:
        print(report.to_json())
        return
    print_plan(report, console)
    print_line(console, ("Why this plan", "bold"))
    for sentence in report.reasons:
        print_indented(console, sentence)
    show_places(
        console,
        {
            out or folder / "plan.json": "the plan",
            written: "the same as a page: open it in a browser",
            folder / "costs.yaml": f"what layers take ({problem.measured.origin}); share it, or edit it",
        },
    )
    if problem.target.is_local and len(planned.result.winner.plan.ranks) > 1:
        print_line(console, "\nTo train with it:")
        command = train_command(config, out or folder / "plan.json")
        print_line(console, f"  {command}", wrap=False)


def with_costs(config: Config, costs: Path | None) -> Config:
    """The config with another cost file, if one is given."""
    if costs is None:
        return config
    return config.model_copy(update={"plan": config.plan.model_copy(update={"costs": str(costs.resolve())})})


def open_problem(config: Config, console: Console) -> PlanningProblem:
    """What is to be planned, with a progress line while samples and layers are measured."""
    from dilatant.profiling.assemble import assemble_samples
    from dilatant.profiling.planning import planning_problem

    with console.status("opening the data") as status:
        return planning_problem(
            config,
            assemble_samples(config),
            say=lambda layer: status.update(f"measuring {layer}"),
            progress=lambda done, total: status.update(f"measuring samples: {done:,} of {total:,}"),
        )


def plan_report(planned: PlannedRun, title: str) -> PlanReport:
    """The report of a planned run, with warnings about its data and its costs."""
    from dilatant.report.search_report import search_report
    from dilatant.report.wording import origin_text

    problem, cluster = planned.problem, planned.problem.target.cluster
    samples = problem.samples
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    report = search_report(
        title,
        f"{nodes} of {cluster.gpus_per_node} × {problem.target.hardware.name}",
        origin_text(problem.measured.origin),
        planned.result,
        planned.typical,
        problem.model.spec,
        cluster,
        samples.first(samples.available),
        planned.work,
        problem.global_batch,
        names=problem.model.names,
        stable=planned.stable,
        rules=problem.target.rules,
    )
    # A tied weight counts in every layer that needs it; a reader expects it once.
    units = tuple(
        replace(unit, parameters=whole, trainable_parameters=trainable)
        for unit in report.units
        for whole, trainable in [problem.model.parameters[unit.name]]
    )
    return replace(report, units=units, warnings=(*report.warnings, *_warnings(planned)))


def _warnings(planned: PlannedRun) -> list[str]:
    from dilatant.report.wording import counted

    problem = planned.problem
    poor, notable, fixed_at_most = 0.3, 0.1, 0.25
    parts = problem.forward_seconds(planned.result.winner.microbatch_size)
    whole = sum(seconds for seconds, _ in parts.values())
    worst = [
        (cost.fit_error, kind)
        for kind, degrees in problem.measured.layers.items()
        for cost in degrees.values()
        if cost.fit_error is not None and cost.fit_error > poor
    ]
    share = sum(parts[kind][0] for kind in {kind for _, kind in worst} & parts.keys()) / whole
    warnings = []
    if share > notable:
        error, kind = max(worst)
        warnings.append(
            f"measured times of {counted(len(worst), 'layer type')}, {share:.0%} of the work, scatter (worst: {kind}, "
            f"whose fit is off by {error:.0%}): the machine was busy, or the layers are tiny; predictions are as "
            "rough. Measure again with `dilatant profile`"
        )
    fixed = sum(constant for _, constant in parts.values()) / whole
    if fixed > fixed_at_most and problem.target.is_local:
        warnings.append(
            f"this model is tiny: {fixed:.0%} of its time are calls, not arithmetic; real steps take longer than "
            "predicted, for calls also take time between layers"
        )
    if problem.samples.left_out:
        warnings.append(f"{problem.samples.left_out:,} samples could not be measured and were left out")
    return warnings


def train_command(config: Path, plan_file: Path) -> str:
    """The command that trains with a plan as it was simulated: microbatches, schedule and policy are in the file."""
    # The whole section, so that a layout in the file gives way. Its paths are relative to the YAML file.
    path = os.path.relpath(plan_file.resolve(), config.resolve().parent)
    return f"dilatant train {config} --set 'parallel={{plan: {path}}}'"


def _seen_from_here(path: Path) -> Path:
    whole = path.resolve()
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def plan_document(planned: PlannedRun) -> str:
    """plan.json: the plan, and under `step` how a step runs it."""
    from dilatant.profiling.planning import costs_of_plan

    winner = planned.result.winner
    step = {
        "num_microbatches": winner.num_microbatches,
        "schedule": winner.score.schedule,
        "assignment": planned.problem.policy,
        "global_batch": planned.problem.global_batch,
        "predicted_seconds": winner.score.seconds,
        "costs": costs_of_plan(planned.problem, winner.plan).to_document(),
    }
    return json.dumps({**json.loads(winner.plan.to_json()), "step": step}, indent=1) + "\n"


def write_plan_folder(planned: PlannedRun, report: PlanReport) -> Path:
    """Write what `dilatant simulate` and a reader need into the run folder's plan/; returns that folder."""
    from dilatant.cost.model import save_costs
    from dilatant.report.run_folder import RunFolder

    problem = planned.problem
    folder = RunFolder(Path(problem.config.output_dir) / "plan").path
    (folder / "plan.json").write_text(plan_document(planned), encoding="utf-8")
    (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    (folder / "config.yaml").write_text(problem.config.to_yaml(), encoding="utf-8")
    save_costs(problem.measured, folder / "costs.yaml")
    return folder


def show_places(console: Console, places: dict[Path, str]) -> None:
    """The files that were written, and what each is."""
    from dilatant.report.terminal import print_line

    console.print()
    for path, what in places.items():
        print_line(console, f"  {_seen_from_here(path)}  ", (what, "dim"), wrap=False)
