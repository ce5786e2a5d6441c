"""Planning process: plan a run in a child process of the launcher, which ends with the launcher.

Layers are measured on a GPU. A process that has used a GPU keeps a context there until it ends, with hundreds of
megabytes that the rank on that GPU needs; so the launcher itself never touches a GPU.
"""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dilatant.comm.errors import WorkerFailed
from dilatant.comm.fork_server import (
    NO_GUARD,
    NO_GUARD_EXIT,
    end_with_launcher,
    heed_launcher,
    multiprocessing_folder,
    warm_up,
)
from dilatant.config import Config, UserError
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.memberships import best_plan
from dilatant.planning.planned_run import plan_report, training_plan, write_plan_folder
from dilatant.planning.planning import PlannedRun, planning_problem
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.report.plan_report import PlanReport
from dilatant.report.text.search_reasons import cut_text, layout_text
from dilatant.report.text.wording import count_text, seconds_text

REASONS = 3
"""Number of a plan's reasons that are printed before training; its page has all of them."""


@dataclass(frozen=True, slots=True)
class PlanningJob:
    """Input of the planning process. config: its `cluster` is the devices at hand. launcher: name of the program that
    started one process per device, or empty. folder: the run folder."""

    config: Config
    launcher: str
    folder: Path


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """Result of the planning process. plan_json: a `TrainingPlan`. lines: the plan and its reasons, for the user."""

    plan_json: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    details: str


def plan_in_process(job: PlanningJob, progress: Callable[[str], None]) -> ChosenPlan:
    """Plan a run and write its plan folder, in a separate process. progress: called with the name of each phase.

    Raises UserError for what the user can fix, WorkerFailed for the rest.
    """
    warm_up()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, job, multiprocessing_folder()), name="dilatant-plan")
    process.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, ChosenPlan):
                return message
            if isinstance(message, UserError):
                raise message
            if isinstance(message, _Failure):
                raise WorkerFailed(f"planning failed: {message.message}", message.details)
            progress(message)
    except EOFError:
        process.join()
        if process.exitcode == NO_GUARD_EXIT:
            raise UserError(NO_GUARD) from None
        raise WorkerFailed(f"the planning process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(connection: Connection, job: PlanningJob, shared: str | None) -> None:
    end_with_launcher(shared)
    heed_launcher()
    warnings.simplefilter("ignore", UserWarning)  # the run says them once, when it builds the model
    try:
        answer: object = _choose(job, connection.send)
    except UserError as error:
        answer = UserError(str(error))  # some kinds of UserError cannot be sent through a pipe
    except BaseException as error:
        answer = _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    with suppress(OSError):  # the launcher is gone
        connection.send(answer)
    connection.close()


def _choose(job: PlanningJob, progress: Callable[[str], None]) -> ChosenPlan:
    config, lines = for_devices_here(job.config)
    progress("opening the data")
    problem = planning_problem(config, assemble_samples(config), progress, measure_again=False)
    progress("searching")
    all_devices = bool(job.launcher)
    planned = best_plan(problem, all_devices)
    check_all_used(planned, job.launcher)
    report = plan_report(planned, job.folder.name)
    folder = write_plan_folder(planned, report)
    return ChosenPlan(
        training_plan(planned.problem, planned.result.winner, planned.chain).to_json(),
        (*lines, *_lines(planned, report), f"  all of it, as a page: {folder / 'plan.html'}"),
    )


def for_devices_here(config: Config) -> tuple[Config, list[str]]:
    """Return the config for the devices at hand, and lines to print if those of `cluster.hardware` are elsewhere."""
    cluster = config.cluster
    if cluster.groups:
        names = ", ".join(f"{group.num_devices} of {group.name}" for group in cluster.groups)
        return config, [f"ranks are taken to be those of cluster.groups, in order: {names}"]
    if plan_target(cluster, config.train).is_local:
        return config, []
    here = cluster.model_copy(update={"hardware": None, "hardware_file": None, "memory_gib": None, "reserve": None})
    return config.model_copy(update={"cluster": here}), [
        f"cluster.hardware is {cluster.hardware}, which is not here: planned for the devices that are"
    ]


def check_all_used(planned: PlannedRun, launcher: str) -> None:
    """Raise UserError if a launcher has started one process per device and a device stays idle. Devices that wait for
    the next change of members are not idle."""
    devices, used = planned.problem.target.cluster.num_devices, len(planned.result.winner.plan.ranks)
    if launcher and used != devices and planned.chain is None:
        layers = ", ".join(f"{unit.name} {len(unit.layers)}" for unit in planned.problem.model.spec.units)
        raise UserError(
            f"{launcher} started {devices} processes, and no plan uses exactly so many: with layers {layers} and a "
            f"global batch of {planned.problem.global_batch}, the next that can are {used}. Start {used}, or change "
            "train.global_batch_size"
        )


def _lines(planned: PlannedRun, report: PlanReport) -> list[str]:
    ranked, problem = planned.result.winner, planned.problem
    seconds = ranked.score.seconds
    idle = f"; {ranked.idle_devices} of the devices stay idle" if ranked.idle_devices else ""
    reasons = report.reasons[1:]  # the layout is printed already
    if len(reasons) >= REASONS:
        reasons = (*reasons[: REASONS - 1], reasons[-1])  # last: the plan's certainty
    return [
        *(f"warning: {warning}" for warning in report.warnings),
        f"planned for {report.hardware}, with costs {report.cost_source}:",
        f"  {layout_text(ranked.plan, problem.target.cluster)}; {cut_text(ranked)}, schedule {ranked.score.schedule}, "
        f"zero {ranked.zero}, samples placed by {problem.policy}{idle}",
        f"  predicted: {seconds_text(seconds)} a step, {count_text(problem.global_batch / seconds)} samples per second",
        *(f"  {reason}" for reason in (*planned.rows, *reasons)),
    ]
