"""A run, from its config to the exported model: prepared and proven here, trained by a Trainer on every rank."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilatant.comm import fork_server
from dilatant.comm.errors import WorkerFailed
from dilatant.comm.launch import Worker, launch
from dilatant.config import Config, UserError
from dilatant.config.environment import LaunchPlace, hide_gpus, place_from
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.order.blend import Blend, StreamBlend
from dilatant.hf.export import check_target
from dilatant.models.core.freeze import audit
from dilatant.planning.auto_plan import Devices, choose_plan, devices_at_hand, is_planned_here, share_plan
from dilatant.planning.layout import TrainingPlan, prove_schedule, zero_text
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import say, show_progress, warn
from dilatant.report.text.wording import counted
from dilatant.report.trackers import check_trackers
from dilatant.training.callbacks import named_callbacks
from dilatant.training.checkpoints.checkpoint import newest_valid
from dilatant.training.checkpoints.files import read_manifest
from dilatant.training.checkpoints.starting_point import StartingPoint, find_start, with_template_date
from dilatant.training.evaluation.answer_metrics import find_metric
from dilatant.training.export_checkpoint import export_checkpoint
from dilatant.training.optimizers.optimizer import check_optimizer
from dilatant.training.own_parts import find_loss, find_optimizer, find_schedule
from dilatant.training.prepare import PreparedRun, prepare
from dilatant.training.rank import RunResult, Show, console_for, train_rank
from dilatant.training.stop_signal import RunStopped, StopSignal


@dataclass(frozen=True, slots=True)
class Resilient:
    """Launcher of a run that survives the loss of ranks: `resilience.launch.launch_resiliently` or `run_leader`, above
    this package in the import order. nodes: machines to begin with, each with `resilience.ranks_per_node` ranks; None:
    this machine alone. launcher: name of what started, or asked for, this many. is_awaited: they come as the layout
    needs them; otherwise all are there, and idle without a part of it."""

    launch: Callable[..., RunResult]
    nodes: int | None = None
    launcher: str = ""
    is_awaited: bool = False


def train(
    config: Config, *, overwrite: bool = False, show: Show = "nothing", resilient: Resilient | None = None
) -> RunResult:
    """Train the model of a config, evaluate it on held-out data and export it into the run folder.

    overwrite: start anew in an output_dir that holds a run. show: the stream that progress is written to. Starts the
    ranks of the layout, or is one of them under torchrun, Slurm or Kubernetes. Raises UserError for mistakes in config,
    data or folder, WorkerFailed when a rank fails, RunStopped when a signal ends a run before it trains; a run that was
    asked to stop later is saved and returns. resilient: launcher of a run that survives the loss of ranks.
    """
    fork_server.require_main_guard()
    config = with_template_date(config)
    if config.train.device == "cpu":
        hide_gpus()
    check_optimizer(config.train.optimizer)
    check_trackers(config.train.report_to)
    for metric in config.evaluation.metrics if config.holds_out else ():
        find_metric(metric)
    for find in (find_loss, find_optimizer, find_schedule, named_callbacks):
        find(config)
    place = place_from()
    plans = is_planned_here(config, place)
    devices = devices_at_hand(config, place)
    if resilient is not None:
        place = None  # ranks are started here, or by agents
        if resilient.nodes is not None:
            devices = Devices(resilient.nodes, config.resilience.ranks_per_node, resilient.launcher)
    if not plans and place is not None and not config.parallel.is_laid_out:
        raise UserError(
            f"{place.launcher} started {place.size} processes, but parallel: single asks for one; start one, or let "
            "the run plan for them (parallel: auto)"
        )
    is_first = place is None or place.rank == 0
    console = console_for(show if is_first else "nothing")
    folder = RunFolder(config.output_dir)
    try:
        start = StartingPoint(None)
        if is_first:
            folder.lock()
            check_target(folder.export, folder.path)
            start = find_start(config, folder, overwrite, console)
        choose = partial(choose_plan, config, devices, folder, start.checkpoint is not None)
        if place is not None and (plans or config.parallel.is_cut_here):
            # The ranks connect first, because only rank 0 plans.
            result, prepared = _launch(config, _train_as_planned, place.size, config, choose, start, show)
        else:
            try:
                chosen = choose(console) if plans else None
            except KeyboardInterrupt:
                raise RunStopped(128 + signal.SIGINT, config.output_dir) from None
            prepared = _prepare(config, chosen, place, console, start)
            ranks, plan = len(prepared.planned.plan.ranks), prepared.planned.to_json()
            if resilient is not None:
                chain = prepared.planned.chain
                if plans and chain is not None and not chain.keeps_layout and not resilient.is_awaited:
                    whole = devices.count - devices.count % config.resilience.ranks_per_node
                    ranks = max(ranks, whole)  # those without a part are idle until the next change
                _check_nodes(config, resilient, ranks)
                result = _stoppable(config, partial(resilient.launch, config, ranks, plan, start, show))
            else:
                # A run with one rank trains in this process, which has prepared already.
                here = (prepared,) if ranks == 1 else ()
                result = _launch(config, train_rank, ranks, config, plan, start, show, *here)
        if result.finished and (result.is_first or resilient is not None):
            _export(config, prepared, result, folder)
        return result
    finally:
        folder.close()


def _train_as_planned(
    worker: Worker, config: Config, choose: Callable[..., TrainingPlan | None], start: StartingPoint, show: Show
) -> tuple[RunResult, PreparedRun]:
    """Run one rank of an outer launcher: rank 0 plans (or cuts stages) for all ranks, which then build and train."""
    assert worker.store is not None
    place = place_from()
    console = console_for(show if worker.rank == 0 else "nothing")
    cut: list[PreparedRun] = []

    def plan(sign: Callable[[], None]) -> TrainingPlan | None:
        if not config.parallel.is_cut_here:
            return choose(console, sign)
        cut.append(_prepare(config, None, place, console, start, sign))
        return cut[0].planned

    shared = share_plan(worker.store, worker.rank, config.parallel.timeout_seconds, plan)
    prepared = cut[0] if cut else _prepare(config, shared, place, console, start)
    return train_rank(worker, config, prepared.planned.to_json(), start, show, prepared), prepared


def _prepare(
    config: Config,
    made: TrainingPlan | None,
    place: LaunchPlace | None,
    console: Console,
    start: StartingPoint,
    sign: Callable[[], None] = lambda: None,
) -> PreparedRun:
    """Prepare, prove and show data, model and plan. sign: heartbeat for ranks that wait. Raises UserError, also if the
    data are not those of the checkpoint to start from."""
    with show_progress(console, "opening the data") as show:

        def progress(done: int, total: int) -> None:
            sign()
            show(f"measuring samples: {done:,} of {total:,}")

        prepared = prepare(config, made=made, progress=progress)
    if start.checkpoint is not None:
        data = DataIdentity(prepared.samples.train, prepared.samples.train_sizes, prepared.samples.encoding)
        data.require(read_manifest(start.checkpoint).values.get("data", ()))
    for warning in prepared.warnings:
        warn(console, warning)
    if place is not None and place.size != len(prepared.planned.plan.ranks):
        raise UserError(
            f"the layout has {len(prepared.planned.plan.ranks)} ranks, but {place.launcher} started {place.size} "
            "processes; start as many as it has ranks, or let the run plan for them (parallel: auto)"
        )
    with show_progress(console, "proving the schedule"):
        import_module("dilatant.schedule.loaded_kernels")  # the ranks' fork server loads them meanwhile
        prove_schedule(prepared.planned, prepared.model)
    _describe(console, config, prepared)
    return prepared


def _launch(config: Config, function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run `function` on all ranks and return rank 0's result (this rank's, under an outer launcher)."""

    def start(workers_run: Callable[..., None]) -> Any:
        seconds = config.parallel.timeout_seconds
        return launch(function, ranks, *args, started=workers_run, timeout_seconds=seconds)[0]

    # A worker that is not training (yet, or any more) just exits on SIGTERM.
    return _stoppable(config, start, ranks > 1 and place_from() is None, signal.SIGTERM)


def _stoppable(
    config: Config,
    start: Callable[[Callable[..., None]], Any],
    starts_workers: bool = True,
    killed_by: int | None = None,
) -> Any:
    """Return the result of `start(workers_run)`. A signal ends it or, once it has called `workers_run`, asks the
    workers to stop; then a WorkerFailed (if given, of a worker `killed_by` this signal) counts as stopped."""
    stop = StopSignal(_interrupt)

    def workers_run(ask: Callable[[], None] = _terminate_workers) -> None:
        stop.on_signal = ask

    with stop if starts_workers else nullcontext():
        try:
            result = start(workers_run)
        except WorkerFailed as failure:
            if stop.received and killed_by in (None, failure.killed_by):
                raise RunStopped(stop.exit_code, config.output_dir) from None
            raise
        except KeyboardInterrupt:
            raise RunStopped(stop.exit_code or 128 + signal.SIGINT, config.output_dir) from None
    return replace(result, exit_code=stop.exit_code) if stop.exit_code else result


def _check_nodes(config: Config, resilient: Resilient, ranks: int) -> None:
    """Raise UserError if the layout does not fill whole machines."""
    each = config.resilience.ranks_per_node
    if resilient.nodes is None:
        return
    by_launcher = not resilient.is_awaited and resilient.nodes * each != ranks
    if ranks % each or by_launcher:
        have = f"{resilient.launcher} started {resilient.nodes} machines" if by_launcher else "machines come"
        raise UserError(
            f"the layout has {ranks} ranks, but {have} with resilience.ranks_per_node {each}; lay out as many, or let "
            "the run plan for them (parallel: auto)"
        )


def _terminate_workers() -> None:
    """Send SIGTERM to all workers: those that train stop after the current step, the others at once."""
    for worker in multiprocessing.active_children():
        worker.terminate()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _export(config: Config, prepared: PreparedRun, result: RunResult, folder: RunFolder) -> None:
    checkpoint = result.checkpoint
    if checkpoint is None:  # no step was left to train
        newest, _ = newest_valid(folder.checkpoints)
        if newest is None:
            raise UserError(f"{str(folder.checkpoints)!r} holds no complete checkpoint to export")
        checkpoint = newest.path
    if config.evaluation.keep_best is not None and result.best_step is not None:
        best = folder.checkpoints / f"step-{result.best_step:08d}"
        checkpoint = best if best.is_dir() else checkpoint
    encoding = prepared.samples.encoding
    export_checkpoint(checkpoint, prepared.model, config, encoding, folder.export, folder.path)


def _shares(blend: Blend | StreamBlend) -> str:
    """Return each source's share of a step's samples, if there are several sources: their sizes do not count."""
    if not isinstance(blend, Blend) or len(blend.weights) == 1:
        return ""
    whole = sum(blend.weights)
    shares = [f"{name} {weight / whole:.0%}" for name, weight in zip(blend.source_names, blend.weights)]
    others = f" and {len(shares) - 6} others" if len(shares) > 6 else ""
    return f"; of a step's samples: {', '.join(shares[:6])}{others}"


def _describe(console: Console, config: Config, prepared: PreparedRun) -> None:
    """Print the model, the data and the plan before the first step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part")
    for title in ("parameters", "trainable"):
        table.add_column(title, justify="right")
    table.add_column("")
    for part in audit(prepared.model.units):
        table.add_row(
            part.part, f"{part.parameters:,}", f"{part.trainable:,}", "" if part.trainable else Text("frozen", "cyan")
        )
    console.print(table)
    samples = prepared.samples
    amount = counted(len(samples.train), "sample") if isinstance(samples.train, Blend) else "a stream of samples"
    held_out = f", {len(samples.held_out):,} held out" if samples.held_out is not None else ""
    say(console, f"{amount} to train on{held_out}{_shares(samples.train)}")
    language = prepared.model.language
    if language.proof is not None:
        say(console, f"{language.family}: {language.proof}")
    planned = prepared.planned
    if len(planned.plan.ranks) > 1:
        most = planned.microbatching(config).row_tokens
        # A config with shorter rows cuts other microbatches than those that the planner timed.
        seconds = planned.predicted_seconds if planned.row_tokens in (None, most) else None
        by_tokens = f" or more of up to {most:,} tokens"
        predicted = "" if seconds is None else f"; a step is planned to take {seconds:.3g} s"
        ranks, parts = len(planned.plan.ranks), counted(planned.num_microbatches, "microbatch")
        placed = f"schedule {planned.schedule}, samples placed by {planned.assignment}"
        say(console, f"{ranks} ranks, {parts}{by_tokens}, {placed}{predicted}")
        say(console, zero_text(planned, prepared.model))
    if prepared.rows:
        say(console, prepared.rows)
    if planned.costs is not None:
        say(console, f"costs: {planned.costs.origin}")
    console.print()
