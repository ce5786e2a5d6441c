"""`dilatant export`: write a run's newest checkpoint in the Hugging Face layout."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilatant.cli.options import AsJson, RunPath, Trust, read_run, say_loading
from dilatant.config.errors import UserError
from dilatant.config.files.own_files import require_plain
from dilatant.report.say import open_console, say, warn

if TYPE_CHECKING:
    from rich.console import Console

    from dilatant.config import Config


class ExportFormat(StrEnum):
    """Format of exported weights."""

    HF = "hf"
    DCP = "dcp"
    DCP_MOMENTS = "dcp-moments"


def export(
    folder: RunPath,
    to: Annotated[
        Path | None,
        typer.Option(help="Where to: a new folder, or an earlier export. The run's own export/ by default."),
    ] = None,
    layout: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="Weights as safetensors (hf), as a checkpoint of torch (dcp), or as one with the moments of AdamW, "
            "from which other programs continue (dcp-moments).",
        ),
    ] = ExportFormat.HF,
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence in the model card, as on the hub: apache-2.0.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload the export; a new repository is private.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's newest valid checkpoint in the Hugging Face layout; its best one with `evaluation.keep_best`."""
    console = open_console(stderr=as_json)
    require_plain(folder, is_run=True)
    config = read_run(folder, trust=trust, needs_data=False)
    target = to or folder / "export"
    lora = config.model.lora
    if layout is not ExportFormat.HF and lora is not None and not lora.merge:
        raise UserError(
            f"--format {layout} is for whole models, but model.lora.merge is false: the export is the adapter alone, "
            "in peft's format; leave --format out"
        )
    say_loading()

    from dilatant.hf.export import check_target
    from dilatant.hf.hub_upload import check_push, push

    check_target(target, folder)
    if push_to_hub is not None:
        check_push(push_to_hub)
    step = _export_newest(folder, config, target, layout, licence, console)
    say(console, f"step {step} exported to {target}")
    result = {"export": str(target), "step": step}
    if push_to_hub is not None:
        result["hub"] = push(target, push_to_hub, step)
        say(console, f"pushed to {result['hub']}")
    if as_json:
        print(json.dumps(result))


def _export_newest(
    folder: Path, config: Config, target: Path, layout: ExportFormat, licence: str | None, console: Console
) -> int:
    """Export the newest valid checkpoint, or the best one, and return its step. A run that goes on may delete it
    meanwhile; then the next one is taken. Raises UserError."""
    from dilatant.planning.assemble import assemble_encoding, assemble_model
    from dilatant.training.checkpoints.checkpoint import best_of, damage, newest_valid
    from dilatant.training.checkpoints.files import DamagedError
    from dilatant.training.export_checkpoint import export_checkpoint

    tokenizer, encoding = assemble_encoding(config)
    for _ in range(3):
        checkpoint, warnings = newest_valid(folder / "checkpoints")
        for warning in warnings:
            warn(console, warning)
        if checkpoint is None:
            raise UserError(f"{str(folder)!r} has no valid checkpoint to export")
        if config.evaluation.keep_best is not None:
            checkpoint = best_of(checkpoint)
        model = assemble_model(config, tokenizer, encoding, hollow=True)
        try:
            export_checkpoint(checkpoint.path, model, config, encoding, target, folder, layout.value, licence)
            return checkpoint.step
        except (UserError, DamagedError):
            if damage(checkpoint.path) is None:
                raise
    raise UserError(
        f"{str(folder)!r} deletes its checkpoints while they are exported; raise train.keep_checkpoints, or wait until "
        "the run has ended"
    )
