"""`dilatant resume`: continue a run from its newest valid checkpoint."""

from __future__ import annotations

import typer

from dilatant.cli.options import AsJson, Overrides, RunPath, Trust, read_run
from dilatant.cli.train import run


def resume(
    folder: RunPath,
    overrides: Overrides = [],  # noqa: B006  # typer takes the default from here; nothing changes it
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest valid checkpoint, with the config it was started with."""
    config = read_run(folder, overrides, resume=True, trust=trust)
    raise typer.Exit(run(config, as_json=as_json))
