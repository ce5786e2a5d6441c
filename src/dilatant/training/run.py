"""A run, from its config to the exported model: prepared and proven here, trained by a Trainer on every rank."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from dilatant.comm import fork_server
from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.launch import Worker, WorkerFailed, launch
from dilatant.config import Config, UserError
from dilatant.config.environment import hide_gpus, place_from
from dilatant.data.blend import Blend
from dilatant.data.workers import warm_up
from dilatant.models.freeze import audit
from dilatant.models.materialize import allocate
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import Plan
from dilatant.profiling.assemble import Samples, assemble_model, assemble_samples
from dilatant.report.perfetto import describe, summarize, write_timeline
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import warn
from dilatant.report.step_page import write_step_page
from dilatant.training.checkpoint import damage, identity, list_checkpoints, load, newest_valid
from dilatant.training.evaluation import Evaluation
from dilatant.training.export import export_model
from dilatant.training.layout import plan_from_config, prove_schedule, units_decoded_on
from dilatant.training.observer import Observer
from dilatant.training.stop_signal import StopSignal
from dilatant.training.trainer import Trainer, TrainResult

Show = Literal["nothing", "stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. exit_code: 0, or what the signal that stopped it asks for (128 + its number). loss: of the last
    step here. summary: who was busy and who waited in the last step. evaluation: of a run that reached its last step.
    is_first: this process speaks for the run; under an outer launcher that is rank 0's."""

    folder: Path
    step: int
    total_steps: int
    seconds: float
    exit_code: int
    loss: float | None = None
    summary: str = ""
    evaluation: Evaluation | None = None
    is_first: bool = True

    @property
    def finished(self) -> bool:
        return self.exit_code == 0


class Stopped(Exception):
    """A signal ended the run before it had trained, or after; `exit_code` as in `RunResult`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"stopped by {signal.Signals(exit_code - 128).name}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run works with, complete before any device is taken. model: layers from configs, and weights that ranks
    read for themselves, are on the meta device."""

    samples: Samples
    model: MultimodalModel
    plan: Plan


def train(config: Config, *, overwrite: bool = False, show: Show = "nothing") -> RunResult:
    """Train the model of a config, evaluate it on held-out data and export it into the run folder.

    overwrite: start anew in an output_dir that holds a run. show: where progress goes. Starts the ranks of the layout,
    or is one of them under torchrun, Slurm or Kubernetes. Raises UserError for what is wrong with config, data or
    folder, WorkerFailed when a rank fails, Stopped when a signal ends a run before it trains; a run that was asked to
    stop later is saved and returns.
    """
    if config.train.device == "cpu":
        hide_gpus()
    place = place_from()
    if config.parallel is None and place is not None:
        raise UserError(
            f"{place.launcher} started {place.size} processes, but the config has no 'parallel' section, so each would "
            "train the whole model; add one, or start a single process"
        )
    if config.parallel is not None and place is None:
        fork_server.warm_up()  # before our own imports, which take as long as the server's
    speaks = place is None or place.rank == 0
    console = _console(show if speaks else "nothing")
    folder = RunFolder(config.output_dir)
    try:
        start = _Start(None)
        if speaks:
            folder.lock()
            start = _starting_point(config, folder, overwrite, console)
        with console.status("building the model"):
            prepared = prepare(config)
        if place is not None and place.size != len(prepared.plan.ranks):
            raise UserError(
                f"the layout has {len(prepared.plan.ranks)} ranks, but {place.launcher} started {place.size} "
                "processes; start as many as it has ranks, or change 'parallel'"
            )
        with console.status("proving the schedule"):
            prove_schedule(config, prepared.plan, prepared.model)
        if speaks:
            # Nothing can be wrong with the config any more: a mistake must not cost an old run.
            if start.discards:
                shutil.rmtree(folder.checkpoints, ignore_errors=True)
            folder.write_config(config.to_yaml())
            folder.write_text("plan.json", prepared.plan.to_json())
        _describe(console, prepared)
        result = _launch(config, prepared, start.checkpoint, show)
        if result.finished and result.is_first:
            _export(config, prepared, folder)
        return result
    finally:
        folder.close()


def prepare(config: Config, plan: Plan | None = None) -> Prepared:
    """Data, model and plan of a run. Raises UserError that names the key or the sample."""
    samples = assemble_samples(config)
    model = assemble_model(config, samples, hollow=True)
    return Prepared(samples, model, plan or plan_from_config(config.parallel, model))


def train_rank(
    worker: Worker,
    config: Config,
    plan_json: str,
    checkpoint: Path | None,
    show: Show,
    prepared: Prepared | None = None,
) -> RunResult:
    """One rank's part of a run, of which rank 0 shows the progress. prepared: where this process has it already."""
    plan = Plan.from_json(plan_json)
    prepared = prepared or prepare(config, plan)
    samples = prepared.samples
    decoded = units_decoded_on(prepared.model, plan, worker.rank)
    if config.data.workers and decoded:
        warm_up()
    if config.data.on_error == "error":
        # With `skip`, every rank must find the same samples corrupt, so all of them decode all media.
        samples = replace(samples, encoding=replace(samples.encoding, decode=decoded))
    folder = RunFolder(config.output_dir)
    trainer = Trainer(config, samples, prepared.model, plan, worker, folder.checkpoints)
    try:
        checkpoint = _agreed_checkpoint(trainer.comm, checkpoint)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        first = worker.rank == 0
        with Observer(config, folder, trainer, _console(show)) if first else nullcontext() as observer:
            with StopSignal() as stop:
                result = _train(config, trainer, observer, stop)
            summary = _show_last_step(trainer, folder) if result.step else ""
            evaluation = trainer.evaluate() if result.finished else None
            if observer is not None:
                observer.evaluated(trainer.step, evaluation)
        return RunResult(
            folder.path,
            result.step,
            result.total_steps,
            result.seconds,
            # Without a signal here another rank was asked.
            0 if result.finished else stop.exit_code or 128 + signal.SIGTERM,
            observer.last_loss if observer is not None else None,
            summary,
            evaluation,
            first,
        )
    except BaseException as error:
        trainer.fail(error)
        raise
    finally:
        trainer.close()
        folder.close()


def _train(config: Config, trainer: Trainer, observer: Observer | None, stop: StopSignal) -> TrainResult:
    def after_step(step: int) -> None:
        every = config.evaluation.steps
        if every and step % every == 0 and step < trainer.total_steps:
            evaluation = trainer.evaluate()
            if observer is not None:
                observer.evaluated(step, evaluation)

    if observer is None:
        return trainer.run(lambda metrics: None, lambda: stop.received, after_step)
    return trainer.run(observer.stepped, lambda: stop.received, after_step)


def _agreed_checkpoint(comm: Comm, own: Path | None) -> Path | None:
    """The checkpoint that rank 0 found, on all ranks. Raises UserError where a rank does not see it."""
    chosen = all_gather_object(comm, None if own is None else str(own))[0]
    if chosen is None:
        return None
    try:
        seen, problem = identity(Path(chosen)), None
    except UserError as error:
        seen, problem = "", str(error)
    sights = all_gather_object(comm, [seen, problem])
    blind = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(sights) if text is not None]
    blind += [
        f"rank {rank} sees another checkpoint there"
        for rank, (other, text) in enumerate(sights)
        if text is None and other != sights[0][0]
    ]
    if blind:
        raise UserError(
            f"rank 0 goes on from {chosen!r}, which not all ranks see alike ({'; '.join(blind[:4])}); output_dir must "
            "be on storage that all machines share"
        )
    return Path(chosen)


def _launch(config: Config, prepared: Prepared, checkpoint: Path | None, show: Show) -> RunResult:
    """Train on all ranks; how rank 0 (or this rank, under an outer launcher) ended."""
    plan = prepared.plan
    here = len(plan.ranks) == 1
    with _stopping(starts_workers=not here and place_from() is None) as stop:
        try:
            result, *_ = launch(
                train_rank,
                len(plan.ranks),
                config,
                plan.to_json(),
                checkpoint,
                show,
                *((prepared,) if here else ()),
                started=stop.workers_run,
            )
        except WorkerFailed as failure:
            # A worker that does not train, yet or any more, just ends when it is asked to.
            if stop.signal.received and failure.killed_by == signal.SIGTERM:
                raise Stopped(stop.signal.exit_code) from None
            raise
        except KeyboardInterrupt:
            raise Stopped(stop.signal.exit_code or 128 + signal.SIGINT) from None
    return replace(result, exit_code=stop.signal.exit_code or result.exit_code)


class _Stop:
    """What a signal to the launcher does: it ends the launch, and once workers run they are asked to stop."""

    def __init__(self) -> None:
        self.signal = StopSignal()
        self.signal.on_signal = _interrupt

    def workers_run(self) -> None:
        self.signal.on_signal = _terminate_workers


@contextmanager
def _stopping(starts_workers: bool) -> Iterator[_Stop]:
    stop = _Stop()
    with stop.signal if starts_workers else nullcontext():
        yield stop


def _terminate_workers() -> None:
    """Those that train stop after the step in hand, the others at once."""
    for worker in multiprocessing.active_children():
        worker.terminate()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _show_last_step(trainer: Trainer, folder: RunFolder) -> str:
    """Write the last step: as a page, for Perfetto, and for `dilatant simulate`; returns its summary. Called by all
    ranks, of which the first writes."""
    step = trainer.runtime.measured_step()
    if trainer.rank != 0 or step is None or not step.actions:
        return ""
    plan = trainer.runtime.plan
    write_timeline(folder.path / "timeline.json", step.actions, plan, trainer.runtime.arrows())
    write_step_page(folder.path / "timeline.html", step.actions, plan, f"{folder.path.name}: the last step")
    folder.write_text("step.json", step.to_json() + "\n")
    return describe(summarize(step.actions, plan))


def _export(config: Config, prepared: Prepared, folder: RunFolder) -> None:
    model = prepared.model
    if len(prepared.plan.ranks) > 1:
        newest, _ = newest_valid(folder.checkpoints)
        if newest is None:
            raise UserError(f"{str(folder.checkpoints)!r} holds no complete checkpoint to export")
        load(newest.path, {"model": allocate(model.units)})
    export_model(model, prepared.samples.encoding, folder.export, folder.path)


def _console(show: Show) -> Console:
    return Console(stderr=show == "stderr", quiet=show == "nothing")


@dataclass(frozen=True, slots=True)
class _Start:
    """What a run begins with: a checkpoint, or nothing; `discards` the checkpoints of the run that was there."""

    checkpoint: Path | None
    discards: bool = False


def _starting_point(config: Config, folder: RunFolder, overwrite: bool, console: Console) -> _Start:
    """Where to begin. Raises UserError rather than lose a run."""
    resume = config.train.resume
    if resume == "auto":
        checkpoint, warnings = newest_valid(folder.checkpoints)
        for warning in warnings:
            warn(console, warning)
        if checkpoint is None and warnings:
            raise UserError(
                f"no checkpoint in {str(folder.checkpoints)!r} is undamaged; start anew with --overwrite"
            )
        return _Start(checkpoint.path if checkpoint else None)
    if resume != "never":
        problem = damage(Path(resume))
        if problem is not None:
            raise UserError(f"train.resume: {resume!r} is not a usable checkpoint: {problem}")
        return _Start(Path(resume))
    if list_checkpoints(folder.checkpoints):
        if not overwrite:
            raise UserError(
                f"{str(folder.path)!r} holds a run already; go on with `dilatant resume {folder.path}`, "
                "choose another output_dir, or start anew with --overwrite"
            )
        return _Start(None, discards=True)
    return _Start(None)


def _describe(console: Console, prepared: Prepared) -> None:
    """What trains on what, before the first step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part")
    for title in ("parameters", "trainable"):
        table.add_column(title, justify="right")
    table.add_column("")
    for part in audit(prepared.model.units):
        table.add_row(
            part.part,
            f"{part.parameters:,}",
            f"{part.trainable:,}",
            "" if part.trainable else "[cyan]frozen[/]",
        )
    console.print(table)
    samples = prepared.samples
    amount = f"{len(samples.train):,} samples" if isinstance(samples.train, Blend) else "a stream of samples"
    held_out = f", {len(samples.held_out):,} held out" if samples.held_out is not None else ""
    console.print(f"{amount} to train on{held_out}\n", highlight=False)
