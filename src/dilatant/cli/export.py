"""`dilatant export`: the newest checkpoint of a run in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dilatant.cli.options import AsJson, RunPath, read_config
from dilatant.config.errors import UserError


def export(
    folder: RunPath,
    to: Annotated[Path | None, typer.Option(help="Where to; the run's own export/ by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest valid checkpoint of a run in the Hugging Face layout."""
    from rich.console import Console

    from dilatant.models.materialize import allocate
    from dilatant.profiling.assemble import assemble_model, assemble_samples
    from dilatant.training.checkpoint import load, newest_valid
    from dilatant.training.export import export_model

    console = Console(stderr=as_json)
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise UserError(f"{str(folder)!r} is not a run folder: it has no config.yaml")
    checkpoint, warnings = newest_valid(folder / "checkpoints")
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
    if checkpoint is None:
        raise UserError(f"{str(folder)!r} has no valid checkpoint to export")
    config = read_config(saved)
    samples = assemble_samples(config)
    model = assemble_model(config, samples, hollow=True)
    load(checkpoint.path, {"model": allocate(model.units)})
    target = to or folder / "export"
    export_model(model, samples.encoding, target)
    if as_json:
        print(json.dumps({"export": str(target), "step": checkpoint.step}))
    console.print(f"step {checkpoint.step} exported to {target}", highlight=False, soft_wrap=True)
