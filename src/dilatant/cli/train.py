"""`dilatant train`: train a model from a YAML file, with the results in a run folder."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.options import AsJson, Overrides, Trust, read_config, read_config_text, say_loading
from dilatant.config.errors import UserError
from dilatant.config.printable import printable

if TYPE_CHECKING:
    from dilatant.config import Config
    from dilatant.training.run import RunResult


_Names = list[str]


def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The YAML file of the run.", show_default=False),
    ] = None,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    model: Annotated[
        str | None,
        typer.Option(help="Instead of a file: a model to fine-tune, an id or a folder.", show_default=False),
    ] = None,
    data: Annotated[
        _Names,
        typer.Option(help="What to train it on: a file, a folder or an id; may be given several times."),
    ] = [],  # noqa: B006
    held_out: Annotated[
        _Names, typer.Option("--eval", help="What to judge it by; may be given several times.")
    ] = [],  # noqa: B006
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters, not all weights.")] = False,
    output_dir: Annotated[
        str | None, typer.Option("--output", help="The run folder.", show_default=False)
    ] = None,
    save_config: Annotated[
        Path | None,
        typer.Option(help="Write the YAML that this command stands for, and do not train."),
    ] = None,
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
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train from a YAML file, or fine-tune a model given by name on data given by name. Ctrl-C or SIGTERM saves a
    checkpoint and stops; `dilatant resume` continues."""
    if check_transport:
        overrides = [*overrides, "parallel.check_transport=true"]
    if config is not None:
        alone = {"--model": model, "--data": data, "--eval": held_out, "--lora": lora, "--output": output_dir,
                 "--save-config": save_config}  # fmt: skip
        given = [name for name, value in alone.items() if value]
        if given:
            raise UserError(f"{given[0]} is for a start without a config file; the file says it")
        raise typer.Exit(
            run(read_config(config, overrides, trust or None), overwrite=overwrite, as_json=as_json)
        )
    if not model or not data or not all((*data, *held_out)):
        raise UserError(
            "give a YAML file, or a model and data: dilatant train --model ID --data ID_OR_FOLDER [--lora]"
        )
    say_loading()
    text = _written_out(model, data, held_out, lora, output_dir, overrides, trust)
    if save_config is not None:
        if save_config.exists():
            raise UserError(f"--save-config {str(save_config)!r} is there already; name another file")
        try:
            with save_config.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"--save-config {str(save_config)!r} cannot be written: {error.strerror}"
            ) from None
        print(f"train it with\n  dilatant train {shlex.quote(str(save_config))}", file=sys.stderr)
        raise typer.Exit(0)
    print(text, file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(run(read_config_text(text), overwrite=overwrite, as_json=as_json))


def _written_out(
    model: str,
    data: list[str],
    held_out: list[str],
    lora: bool,
    output_dir: str | None,
    overrides: list[str],
    trust: bool,
) -> str:
    """Return the YAML of a run given by options. Raises UserError if the model cannot be opened."""
    import yaml

    from dilatant.config.config import apply_override
    from dilatant.config.files.exports import encoders_of_export, is_export_of_parts
    from dilatant.config.start import starting_config
    from dilatant.models.families.families import FAMILIES
    from dilatant.models.sources import load_pretrained_config

    if is_export_of_parts(model):
        encoders: tuple[str, ...] | None = tuple(encoders_of_export(model))
    else:
        family = FAMILIES.get(load_pretrained_config(model, "--model", trust).model_type)
        encoders = None if family is None else tuple(family.towers)
    tree = starting_config(model, data, held_out, encoders, lora, output_dir)
    if trust:
        tree["model"].get("language_model", tree["model"])["trust_remote_code"] = True
    for override in overrides:
        apply_override(tree, override)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def run(config: Config, *, overwrite: bool = False, as_json: bool = False) -> int:
    """Train, show the result, and return the exit code. Raises UserError."""
    from dilatant.config.environment import place_from

    began, place = time.monotonic(), place_from()
    say_loading()
    if config.resilience.enabled and place is not None and place.rank:
        from dilatant.resilience.processes.agent_run import launched_agent, run_agent

        return run_agent(launched_agent(config, place))  # skips the imports below, which only its ranks need
    if place is None and (config.parallel.is_laid_out or config.parallel.auto):
        from dilatant.comm.fork_server import warm_up

        warm_up()  # before the imports below, so that both run concurrently

    from dilatant.comm.launch import WorkerFailed
    from dilatant.resilience.run import train
    from dilatant.training.run import RunStopped

    try:
        result = train(config, overwrite=overwrite, show="stderr" if as_json else "stdout")
    except RunStopped as stopped:
        line = "stopped before the run began; nothing is lost"
        if stopped.can_resume:
            line = f"stopped; go on with\n  dilatant resume {shlex.quote(config.output_dir)}"
        print(printable(line), file=sys.stderr)
        return stopped.exit_code
    except WorkerFailed as failure:
        if failure.details:
            print(printable(failure.details), file=sys.stderr)
        print(printable(f"error: {failure}"), file=sys.stderr)
        return failure.exit_code
    if result.is_first:
        _show(result, began, as_json)
    return result.exit_code


def _show(result: RunResult, began: float, as_json: bool) -> None:
    from dilatant.report.say import open_console

    console = open_console(stderr=as_json)
    path = _shortest(result.folder)
    quoted = shlex.quote(str(path))
    if not result.finished:
        console.print(
            f"stopped after step {result.step} of {result.total_steps}, saved; go on with\n  dilatant resume {quoted}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        return
    if as_json:
        print(json.dumps(_summary(result, began)))
    if result.summary:
        console.print(f"\nthe last step: {result.summary}", highlight=False, markup=False, soft_wrap=True)
    trained = result.step - result.began_at
    what = (
        f"{trained} steps in {result.seconds:.1f} s."
        if trained
        else f"Nothing was left to train: the run is at step {result.step} of {result.total_steps}."
    )
    if result.ended_early is not None:
        what += (
            f" It ended early: no evaluation was better than that of step {result.best_step} "
            "(`--set evaluation.patience=null` goes on)."
        )
    console.print(f"\n{what} Where to look:", style="bold", highlight=False)
    places = {
        f"{path}/metrics.jsonl": "every step's figures",
        f"tensorboard --logdir {quoted}": "the same as curves",
        f"{path}/timeline.html": "the last step on every rank: who computed, who waited for whom",
        f"{path}/timeline.json": "the same for ui.perfetto.dev",
        f"dilatant simulate {quoted}": "the same step predicted, beside the measured one",
        f"{path}/export": "the model in the Hugging Face layout",
        f"dilatant generate {shlex.quote(f'{path}/export')} --help": "ask it something",
    }
    if (result.folder / "data.html").is_file():
        places = {f"{path}/data.html": "what the data are, and what balancing them is worth", **places}
    if (result.folder / "generations.html").is_file():
        places = {f"{path}/generations.html": "who was lost and who came, and what that cost", **places}
    if result.evaluation is not None:
        places = {f"{path}/eval.json": "held-out accuracy, and answers that were wrong", **places}
    if not result.summary:
        places = {
            place: what
            for place, what in places.items()
            if "timeline" not in place and "simulate" not in place
        }
    if (result.folder / "plan" / "plan.html").is_file():
        places = {f"{path}/plan/plan.html": "what was planned, and why", **places}
    for place, what in places.items():
        console.print(f"  {place}  ", end="", highlight=False, soft_wrap=True, markup=False)
        console.print(what, style="dim", highlight=False, soft_wrap=True)


def _summary(result: RunResult, began: float) -> dict[str, Any]:
    """Return what `--json` prints for a finished run. `began` is the command's start by `time.monotonic`."""
    summary: dict[str, Any] = {
        "run": str(result.folder),
        "steps": result.step,
        "steps_here": result.step - result.began_at,
        "seconds": round(result.seconds, 2),
        "whole_seconds": round(time.monotonic() - began, 2),
        "loss": result.loss if result.loss is not None and math.isfinite(result.loss) else None,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }
    if result.training_began is not None:
        summary["startup_seconds"] = round(result.training_began - began, 2)
    if result.evaluation is not None:
        # The wrong examples are only in eval.json.
        record = result.evaluation.to_record(examples=0)
        record.pop("wrong_examples")
        summary |= {**result.evaluation.figures, "loss": summary["loss"], "evaluation": record}
        if result.best_step is not None:
            summary["best_step"] = result.best_step
    return summary


def _shortest(path: Path) -> Path:
    """Return the path relative to the working directory if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
