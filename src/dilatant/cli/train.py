"""`dilatant train`: from a YAML file to a trained model in a run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.observe import observing, show_evaluation
from dilatant.cli.options import AsJson, ConfigPath, Overrides, read_config
from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dilatant.config import Config
    from dilatant.models.multimodal import MultimodalModel
    from dilatant.profiling.assemble import Samples
    from dilatant.report.run_folder import RunFolder
    from dilatant.report.trackers import Tracker
    from dilatant.training.evaluate import Evaluation


def train(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in an output_dir that holds a run already.")
    ] = False,
    check_transport: Annotated[
        bool,
        typer.Option(
            "--check-transport",
            help="Prove with a header that both ends of every message between ranks mean the same; slower.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the model of a YAML file. Ctrl-C or SIGTERM saves and stops; `dilatant resume` goes on."""
    if check_transport:
        overrides = [*overrides, "parallel.check_transport=true"]
    raise typer.Exit(run(read_config(config, overrides), overwrite=overwrite, as_json=as_json))


def run(config: Config, *, overwrite: bool = False, as_json: bool = False) -> int:
    """Train, evaluate on held-out data, export. Returns the exit code; raises UserError."""
    from dilatant.comm.fork_server import warm_up
    from dilatant.config.environment import place_from

    place = place_from(os.environ)
    if config.parallel is None and place is not None:
        raise UserError(
            f"{place.launcher} started {place.size} processes, but the config has no 'parallel' section, so each would "
            "train the whole model; add one, or start a single process"
        )
    if config.parallel is not None and place is None:
        warm_up()  # before our own imports, which take as long as the server's

    from rich.console import Console

    from dilatant.profiling.assemble import assemble_samples
    from dilatant.report.run_folder import RunFolder

    console = Console(stderr=as_json, quiet=place is not None and place.rank > 0)
    begin = _in_one_process if config.parallel is None else _in_a_pipeline
    folder = RunFolder(config.output_dir)
    try:
        start = _starting_point(config, folder, overwrite, console)
        samples = assemble_samples(config)
        ended = begin(config, samples, folder, start, console, as_json)
    finally:
        folder.close()
    if ended.exit_code:
        console.print(
            f"stopped after step {ended.step} of {ended.total_steps}, saved; go on with\n"
            f"  dilatant resume {_shortest(folder.path)}",
            soft_wrap=True,
            highlight=False,
        )
        return ended.exit_code
    if ended.model is None:  # another rank of the same run goes on
        return 0
    _finish(config, samples, folder, ended, console, as_json)
    return 0


@dataclass(frozen=True, slots=True)
class _Start:
    """What a run begins with: a checkpoint, or nothing; `discards` the checkpoints of the run that was there."""

    checkpoint: Path | None
    discards: bool = False

    def prepare(self, folder: RunFolder) -> None:
        """Called when nothing can be wrong with the config any more: a mistake must not cost an old run."""
        if self.discards:
            shutil.rmtree(folder.checkpoints, ignore_errors=True)  # several ranks may do so at once


@dataclass(frozen=True, slots=True)
class _Ended:
    """How training ended. model: the trained model, if it falls to this process to export it."""

    step: int
    total_steps: int
    seconds: float
    exit_code: int
    model: MultimodalModel | None
    summary: str = ""
    evaluation: Evaluation | None = None


def _in_one_process(
    config: Config, samples: Samples, folder: RunFolder, start: _Start, console: Console, as_json: bool
) -> _Ended:
    from dilatant.cli.stop_signal import StopSignal
    from dilatant.profiling.assemble import assemble_model
    from dilatant.runtime.precision import pick_device, pick_precision
    from dilatant.runtime.step import OneProcess
    from dilatant.training.trainer import Trainer

    with console.status("building the model"):
        model = assemble_model(config, samples)
    start.prepare(folder)
    _describe(console, model, samples)
    device = pick_device()
    engine = OneProcess(model, device, pick_precision(config.train.precision, device))
    trainer = Trainer(config, model, samples, engine, folder.checkpoints)
    try:
        if start.checkpoint is not None:
            trainer.restore(start.checkpoint)
            console.print(f"going on after step {trainer.step} ({start.checkpoint.name})", highlight=False)
        folder.write_config(config.to_yaml())
        with StopSignal() as stop, observing(config, folder, trainer, console) as (observe, trackers):

            def look(step: int) -> None:
                every = config.evaluation.steps
                if every and step % every == 0 and step < trainer.total_steps:
                    _evaluate(config, model, samples, folder, console, step, trackers)

            result = trainer.run(observe, lambda: stop.received, look)
    finally:
        trainer.close()
    evaluation = None
    if not stop.exit_code:
        evaluation = _evaluate(config, model, samples, folder, console, result.step)
    return _Ended(
        result.step, result.total_steps, result.seconds, stop.exit_code, model, evaluation=evaluation
    )


def _in_a_pipeline(
    config: Config, samples: Samples, folder: RunFolder, start: _Start, console: Console, as_json: bool
) -> _Ended:
    from dilatant.cli.pipeline_run import run_pipeline
    from dilatant.config.environment import place_from
    from dilatant.profiling.assemble import assemble_model
    from dilatant.runtime.step import model_tensors
    from dilatant.training.checkpoint import load, newest_valid
    from dilatant.training.pipeline import plan_from_config, prove_schedule

    assert config.parallel is not None
    with console.status("building the model"):
        skeleton = assemble_model(config, samples, hollow=config.model.units)
    plan = plan_from_config(config.parallel, skeleton)
    place = place_from(os.environ)
    if place is not None and place.size != len(plan.ranks):
        raise UserError(
            f"the layout has {len(plan.ranks)} ranks, but {place.launcher} started {place.size} processes; start "
            "as many as it has ranks, or change 'parallel'"
        )
    with console.status("proving the schedule"):
        prove_schedule(config.parallel, plan, skeleton)
    start.prepare(folder)
    _describe(console, skeleton, samples)
    if start.checkpoint is not None:
        console.print(f"going on from {start.checkpoint.name}", highlight=False)
    folder.write_config(config.to_yaml())
    folder.write_text("plan.json", plan.to_json())
    outcome, exit_code = run_pipeline(config, plan, start.checkpoint, quiet=as_json)
    model = None
    if not exit_code and outcome.rank == 0:
        model = assemble_model(config, samples)
        newest, _ = newest_valid(folder.checkpoints)
        assert newest is not None
        load(newest.path, {"model": model_tensors(model)})
    return _Ended(
        outcome.step,
        outcome.total_steps,
        outcome.seconds,
        exit_code,
        model,
        outcome.summary,
        outcome.evaluation,
    )


def _finish(
    config: Config, samples: Samples, folder: RunFolder, ended: _Ended, console: Console, as_json: bool
) -> None:
    """Export the trained model, and say where to look."""
    from dilatant.training.export import export_model

    assert ended.model is not None
    evaluation = ended.evaluation
    export_model(ended.model, samples.encoding, folder.export)
    if as_json:
        summary: dict[str, Any] = {
            "run": str(folder.path),
            "steps": ended.step,
            "seconds": round(ended.seconds, 2),
        }
        if evaluation is not None:
            summary["exact_match"] = evaluation.exact_match
        print(json.dumps(summary))
    if ended.summary:
        console.print(f"\nthe last step: {ended.summary}", highlight=False)
    _say_where_to_look(console, folder, ended)


def _starting_point(config: Config, folder: RunFolder, overwrite: bool, console: Console) -> _Start:
    """Where to begin. Raises UserError rather than lose a run."""
    from dilatant.training.checkpoint import damage, list_checkpoints, newest_valid

    resume = config.train.resume
    if resume == "auto":
        checkpoint, warnings = newest_valid(folder.checkpoints)
        for warning in warnings:
            console.print(f"[yellow]warning:[/] {warning}", highlight=False)
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


def _describe(console: Console, model: MultimodalModel, samples: Samples) -> None:
    """What trains on what, before the first step."""
    from rich.table import Table

    from dilatant.data.blend import Blend
    from dilatant.models.freeze import audit

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part")
    for title in ("parameters", "trainable"):
        table.add_column(title, justify="right")
    table.add_column("")
    for part in audit(model.units):
        table.add_row(
            part.part,
            f"{part.parameters:,}",
            f"{part.trainable:,}",
            "" if part.trainable else "[cyan]frozen[/]",
        )
    console.print(table)
    amount = f"{len(samples.train):,} samples" if isinstance(samples.train, Blend) else "a stream of samples"
    held_out = f", {len(samples.held_out):,} held out" if samples.held_out is not None else ""
    console.print(f"{amount} to train on{held_out}\n", highlight=False)


def _evaluate(
    config: Config,
    model: MultimodalModel,
    samples: Samples,
    folder: RunFolder,
    console: Console,
    step: int,
    trackers: Sequence[Tracker] = (),
) -> Evaluation | None:
    """Exact match on the held-out data, stored as eval.json; None without such data."""
    from dilatant.training.evaluate import evaluate

    if samples.held_out is None:
        return None
    with console.status("answering the held-out questions"):
        evaluation = evaluate(
            model,
            samples.tokenizer,
            samples.held_out,
            samples.encoding,
            device=next(model.parameters()).device,
            batch_size=config.evaluation.batch_size,
            max_new_tokens=config.evaluation.max_new_tokens,
            limit=config.evaluation.limit,
            skip_errors=config.data.on_error == "skip",
        )
    show_evaluation(folder, console, step, evaluation, trackers)
    return evaluation


def _say_where_to_look(console: Console, folder: RunFolder, ended: _Ended) -> None:
    path = _shortest(folder.path)
    console.print(f"\n[bold]{ended.step} steps in {ended.seconds:.1f} s.[/] Where to look:", highlight=False)
    places = {
        f"{path}/metrics.jsonl": "every step's figures",
        f"tensorboard --logdir {path}": "the same as curves",
        f"{path}/export": "the model in the Hugging Face layout",
        f"dilatant generate {path}/export --help": "ask it something",
    }
    if ended.summary:
        places[f"{path}/timeline.html"] = "the last step on every rank: who computed, who waited for whom"
        places[f"{path}/timeline.json"] = "the same for ui.perfetto.dev"
        places[f"dilatant simulate {path}"] = "the same step predicted, beside the measured one"
    if ended.evaluation is not None:
        places = {f"{path}/eval.json": "held-out accuracy, and answers that were wrong", **places}
    for place, what in places.items():
        console.print(f"  {place}  [dim]{what}[/]", highlight=False, soft_wrap=True)


def _shortest(path: Path) -> Path:
    """The path as seen from the working directory, where that is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
