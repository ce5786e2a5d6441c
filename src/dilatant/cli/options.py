"""Arguments that several verbs share, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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


def read_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config`, whose libraries are imported only now, so that `--help` starts at once."""
    from dilatant.config import load_config

    config = load_config(path, overrides)
    if config.train.device == "cpu":
        # Before torch is imported, and for every process that this one starts: none of them sees a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return config
