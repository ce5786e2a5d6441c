"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
