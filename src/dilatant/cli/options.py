"""Arguments that several verbs share, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilatant.config.environment import hide_gpus
from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from dilatant.config import Config

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="A.B=C", help="Change one key; may be given several times.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, written by `dilatant train`.", show_default=False)
]


def output_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of an option that names a file to write: refuses one that cannot be there, before the work begins."""
    if path is not None and path.is_dir():
        raise UserError(f"{option.opts[0]} {str(path)!r} is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option.opts[0]} {str(path)!r}: folder {str(path.parent)!r} does not exist")
    return path


def read_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config`, whose libraries are imported only now, so that `--help` starts at once."""
    from dilatant.config import load_config

    config = load_config(path, overrides)
    if config.train.device == "cpu":
        # Before torch is imported, and for every process that this one starts: none of them sees a GPU.
        hide_gpus()
    return config
