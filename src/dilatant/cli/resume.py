"""`dilatant resume`: go on with a run from its newest valid checkpoint."""

from __future__ import annotations

import typer

from dilatant.cli.options import AsJson, Overrides, RunPath, Trust, read_config
from dilatant.cli.train import run
from dilatant.config.errors import UserError


def resume(
    folder: RunPath,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest valid checkpoint, with the config it was started with."""
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise UserError(f"{str(folder)!r} is not a run folder: it has no config.yaml")
    config = read_config(saved, [*overrides, f"output_dir={folder.resolve()}", "train.resume=auto"], trust)
    raise typer.Exit(run(config, as_json=as_json))
