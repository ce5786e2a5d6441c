"""Training over several processes: what each of them does, and how they start and stop together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dilatant.cli.observe import observing, show_evaluation
from dilatant.cli.stop_signal import StopSignal

if TYPE_CHECKING:
    from rich.console import Console

    from dilatant.comm.launch import Worker
    from dilatant.config import Config
    from dilatant.plan.plan import Plan
    from dilatant.profiling.assemble import Samples
    from dilatant.report.run_folder import RunFolder
    from dilatant.report.trackers import Tracker
    from dilatant.training.evaluate import Evaluation
    from dilatant.training.pipeline import Pipeline
    from dilatant.training.trainer import Trainer, TrainResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended. `summary` says who was busy and who waited in the last step (rank 0 only). exit_code: what the
    signal that stopped the run asks for. evaluation: of a run that reached its last step."""

    rank: int
    step: int
    total_steps: int
    seconds: float
    exit_code: int
    summary: str = ""
    evaluation: Evaluation | None = None


def run_pipeline(config: Config, plan: Plan, checkpoint: Path | None, quiet: bool) -> tuple[Outcome, int]:
    """Train on all ranks of `plan`; returns how rank 0 (or this rank, under an outer launcher) ended, and the exit
    code that a signal asks for. Raises UserError; any other failure of a rank is shown and ends with code 1."""
    from dilatant.comm.launch import WorkerFailed, launch

    stop = StopSignal()
    stop.on_signal = _interrupt  # until all workers run
    with stop if _starts_workers(plan) else nullcontext():
        try:
            outcome, *_ = launch(
                _train_rank,
                len(plan.ranks),
                config,
                plan.to_json(),
                checkpoint,
                quiet,
                started=lambda: setattr(stop, "on_signal", _terminate_workers),
            )
        except (WorkerFailed, KeyboardInterrupt) as failure:
            # A worker that does not train, yet or any more, just ends when it is asked to.
            if isinstance(failure, KeyboardInterrupt) or (
                stop.received and failure.killed_by == signal.SIGTERM
            ):
                print(f"stopped; go on with\n  dilatant resume {config.output_dir}", file=sys.stderr)
                raise typer.Exit(stop.exit_code or 128 + signal.SIGINT) from None
            if failure.details:
                print(failure.details, file=sys.stderr)
            print(f"error: {failure}", file=sys.stderr)
            raise typer.Exit(1) from None
    return outcome, stop.exit_code or outcome.exit_code


def _starts_workers(plan: Plan) -> bool:
    from dilatant.config.environment import place_from

    return place_from(os.environ) is None and len(plan.ranks) > 1


def _terminate_workers() -> None:
    """Those that train stop after the step in hand, the others at once."""
    for worker in multiprocessing.active_children():
        worker.terminate()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _train_rank(
    worker: Worker, config: Config, plan_json: str, checkpoint: Path | None, quiet: bool
) -> Outcome:
    """One rank's part of a run."""
    from rich.console import Console

    from dilatant.data.workers import warm_up
    from dilatant.plan.plan import Plan
    from dilatant.profiling.assemble import assemble_model, assemble_samples
    from dilatant.report.run_folder import RunFolder
    from dilatant.runtime.precision import pick_precision
    from dilatant.training.pipeline import Pipeline, units_decoded_on
    from dilatant.training.trainer import Trainer

    plan = Plan.from_json(plan_json)
    samples = assemble_samples(config)
    model = assemble_model(config, samples, hollow={unit.name for unit in plan.units})
    decoded = units_decoded_on(model, plan, worker.rank)
    if config.data.workers and decoded:
        warm_up()
    if config.data.on_error == "error":
        # With `skip`, every rank must find the same samples corrupt, so all of them decode all media.
        samples = replace(samples, encoding=replace(samples.encoding, decode=decoded))
    precision = pick_precision(config.train.precision, worker.device)
    engine = Pipeline(model, plan, config, worker, precision)
    folder = RunFolder(config.output_dir)
    trainer = Trainer(config, model, samples, engine, folder.checkpoints)
    try:
        if checkpoint is not None:
            trainer.restore(checkpoint)
        console = Console(stderr=quiet, quiet=worker.rank != 0)
        with StopSignal() as stop:
            result = _train(config, folder, trainer, engine, samples, console, stop)
        summary = _last_step(engine, plan, folder) if trainer.step else ""
        evaluation = None
        if result.finished:
            evaluation = engine.evaluate(config, samples)
            if evaluation is not None and worker.rank == 0:
                show_evaluation(folder, console, trainer.step, evaluation)
        exit_code = 0 if result.finished else stop.exit_code or 128 + signal.SIGTERM  # another rank was asked
        return Outcome(
            worker.rank, result.step, result.total_steps, result.seconds, exit_code, summary, evaluation
        )
    except BaseException as error:
        engine.fail(error)
        raise
    finally:
        trainer.close()
        folder.close()


def _train(
    config: Config,
    folder: RunFolder,
    trainer: Trainer,
    engine: Pipeline,
    samples: Samples,
    console: Console,
    stop: StopSignal,
) -> TrainResult:
    trackers: list[Tracker] = []

    def look(step: int) -> None:
        every = config.evaluation.steps
        if every and step % every == 0 and step < trainer.total_steps:
            evaluation = engine.evaluate(config, samples)
            if evaluation is not None and engine.rank == 0:
                show_evaluation(folder, console, step, evaluation, trackers)

    if engine.rank != 0:
        return trainer.run(lambda metrics: None, lambda: stop.received, look)
    with observing(config, folder, trainer, console) as (observe, opened):
        trackers += opened
        return trainer.run(observe, lambda: stop.received, look)


def _last_step(engine: Pipeline, plan: Plan, folder: RunFolder) -> str:
    """Write the last step: as a page, for Perfetto, and for `dilatant simulate`; returns its summary. Called by all
    ranks, of which the first writes."""
    from dilatant.report.perfetto import describe, summarize, write_timeline
    from dilatant.report.step_page import write_step_page

    step = engine.parallel.measured()
    if engine.rank != 0 or step is None or not step.actions:
        return ""
    write_timeline(folder.path / "timeline.json", step.actions, plan, engine.parallel.arrows())
    write_step_page(folder.path / "timeline.html", step.actions, plan, f"{folder.path.name}: the last step")
    folder.write_text("step.json", step.to_json() + "\n")
    return describe(summarize(step.actions, plan))
