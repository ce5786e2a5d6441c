"""`dilatant convert-config`: a config of LLaMA-Factory or ms-swift as one of this project."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dilatant.config.errors import UserError


def convert_config(
    file: Annotated[
        Path, typer.Argument(help="A YAML file of LLaMA-Factory, or a script with a command line of either tool.")
    ],
    devices: Annotated[int, typer.Option(min=1, help="Devices of the run, for its global batch.")] = 1,
) -> None:
    """Print a LLaMA-Factory or ms-swift config as YAML, and on standard error each key that has no counterpart."""
    import yaml

    from dilatant.config.config import parse_config
    from dilatant.config.converted import convert, read_others
    from dilatant.config.files.own_files import read_text

    try:
        tree, left_out = convert(read_others(read_text(file)), devices)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}") from None
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), end="")
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    try:
        parse_config(tree, Path.cwd(), "what was written")
    except UserError as error:
        print(f"to complete: {error}", file=sys.stderr)
