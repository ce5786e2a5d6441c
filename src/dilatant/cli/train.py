"""`dilatant train`: train a model from a YAML file, with the results in a run folder."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.options import (
    AsJson,
    Overrides,
    Trust,
    read_config,
    read_config_text,
    say_loading,
    seen_from_here,
    show_places,
    write_new,
)
from dilatant.config.errors import UserError
from dilatant.config.printable import printable
from dilatant.report.say import open_console, print_line

if TYPE_CHECKING:
    from dilatant.config import Config
    from dilatant.training.run import RunResult


_Names = list[str]


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options for a start without a config file."""

    model: Annotated[
        str | None, typer.Option(help="Instead of a file: a model to fine-tune, an id or a folder.", show_default=False)
    ] = None
    data: Annotated[
        _Names, typer.Option(help="What to train it on: a file, a folder or an id; may be given several times.")
    ] = field(default_factory=list)
    held_out: Annotated[_Names, typer.Option("--eval", help="What to judge it by; may be given several times.")] = (
        field(default_factory=list)
    )
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters, not all weights.")] = False
    output_dir: Annotated[str | None, typer.Option("--output", help="The run folder.", show_default=False)] = None
    save_config: Annotated[
        Path | None, typer.Option(help="Write the YAML that this command stands for, and do not train.")
    ] = None

    def to_yaml(self, overrides: list[str], trust: bool) -> str:
        """Return the YAML of the run. Raises UserError if the model cannot be opened."""
        import yaml

        from dilatant.config.config import apply_override
        from dilatant.config.files.exports import encoders_of_export, is_export_of_parts
        from dilatant.config.start import starting_config
        from dilatant.models.families.generic import opens_whole
        from dilatant.models.families.pretrained import PretrainedModel
        from dilatant.models.sources import load_pretrained_config

        model = self.model or ""
        if is_export_of_parts(model):
            encoders: tuple[str, ...] | None = tuple(encoders_of_export(model))
        else:
            config = load_pretrained_config(model, "--model", trust)
            encoders = tuple(PretrainedModel.of(config, "--model").family.towers) if opens_whole(config) else None
        folder = None if self.save_config is None else self.save_config.parent
        names = (model, self.data, self.held_out, encoders, self.lora, self.output_dir)
        tree = starting_config(*names, folder or Path())
        if trust:
            tree["model"].get("language_model", tree["model"])["trust_remote_code"] = True
        for override in overrides:
            apply_override(tree, override, folder)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)
    ] = None,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    *,
    start: StartOptions,
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
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Train on the nodes of a Ray cluster (`launcher`).", show_default=False),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train from a YAML file, or fine-tune a model given by name on data given by name. Ctrl-C or SIGTERM saves a
    checkpoint and stops; `dilatant resume` continues."""
    if check_transport:
        overrides = [*overrides, "parallel.check_transport=true"]
    if on is not None:
        overrides = [*overrides, f"launcher={on}"]
    if config is not None:
        names = ("--model", "--data", "--eval", "--lora", "--output", "--save-config")
        used = [name for name, one in zip(names, fields(start)) if getattr(start, one.name)]
        if used:
            raise UserError(f"{used[0]} is for a start without a config file; the file says it")
        raise typer.Exit(run(read_config(config, overrides, trust or None), overwrite=overwrite, as_json=as_json))
    if not start.model or not start.data or not all((*start.data, *start.held_out)):
        raise UserError("give a YAML file, or a model and data: dilatant train --model ID --data ID_OR_FOLDER [--lora]")
    say_loading()
    text = start.to_yaml(overrides, trust)
    if start.save_config is not None:
        write_new(start.save_config, text, "--save-config")
        print(f"train it with\n  dilatant train {shlex.quote(str(start.save_config))}", file=sys.stderr)
        raise typer.Exit(0)
    print(printable(text), file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(run(read_config_text(text), overwrite=overwrite, as_json=as_json))


def run(config: Config, *, overwrite: bool = False, as_json: bool = False) -> int:
    """Train, show the result, and return the exit code. Raises UserError."""
    from dilatant.config.environment import place_from

    began, place = time.monotonic(), place_from()
    say_loading()
    if config.resilience.enabled and place is not None and place.rank and config.launcher is None:
        from dilatant.resilience.processes.agent_run import launched_agent, run_agent

        return run_agent(launched_agent(config, place))  # skips the imports below, which only its ranks need
    from dilatant.comm.errors import WorkerFailed
    from dilatant.resilience.train import train
    from dilatant.training.stop_signal import RunStopped

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

    console = open_console(stderr=as_json)
    path = seen_from_here(result.folder)
    quoted = shlex.quote(str(path))
    if not result.finished:
        line = f"stopped after step {result.step} of {result.total_steps}, saved; go on with"
        print_line(console, f"{line}\n  dilatant resume {quoted}", wrap=False)
        return
    if as_json:
        print(json.dumps(_summary(result, began)))
    if result.summary:
        print_line(console, f"\nthe last step: {result.summary}", wrap=False)
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
    print_line(console, (f"\n{what} Where to look:", "bold"))

    def holds(name: str) -> bool:
        return (result.folder / name).exists()

    measured = bool(result.summary)
    places = (
        (holds("plan/plan.html"), f"{path}/plan/plan.html", "what was planned, and why"),
        (result.evaluation is not None, f"{path}/eval.json", "held-out accuracy, and answers that were wrong"),
        (holds("generations.html"), f"{path}/generations.html", "who was lost and who came, and what that cost"),
        (holds("data.html"), f"{path}/data.html", "what the data are, and what balancing them is worth"),
        (True, f"{path}/metrics.jsonl", "every step's figures"),
        (True, f"tensorboard --logdir {quoted}", "the same as curves"),
        (measured, f"{path}/timeline.html", "the last step on every rank: who computed, who waited for whom"),
        (measured, f"{path}/timeline.json", "the same for ui.perfetto.dev"),
        (holds("traces"), f"{path}/traces", "profiled steps on every rank, also for ui.perfetto.dev"),
        (measured, f"dilatant simulate {quoted}", "the same step predicted, beside the measured one"),
        (True, f"{path}/export", "the model in the Hugging Face layout"),
        (True, f"dilatant generate {shlex.quote(f'{path}/export')} --prompt TEXT", "ask it something"),
    )
    show_places(console, {place: what for is_there, place, what in places if is_there})


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
