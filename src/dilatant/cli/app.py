"""The `dilatant` command: all verbs, and the handling of errors.

Verbs import what they need when they run, so that `--help` and fast verbs start immediately.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer
from rich.text import Text

from dilatant import __version__
from dilatant.cli import data
from dilatant.cli.options import with_options
from dilatant.comm.temporary import remove_left_folders
from dilatant.config.errors import UserError
from dilatant.report.say import open_console, warnings_as_lines

USER_ERROR_EXIT = 2

app = typer.Typer(
    name="dilatant",
    help="Train multimodal LLMs on any devices: planned from your data, balanced, alive while nodes come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dilatant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options common to all verbs."""


_VERBS = (
    *("init", "plan", "simulate", "profile", "train", "resume", "export", "generate", "chat", "evaluate", "agent"),
    *("status", "doctor", "check_model", "convert_config"),
)
"""Verbs in the order of `--help`: each is the function of its name in the module of its name."""

for _name in _VERBS:
    _verb = getattr(import_module(f"dilatant.cli.{_name}"), _name)
    app.command(_name.replace("_", "-"))(with_options(_verb))
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line, then exit without freeing imported modules, which takes Python over a second and would
    delay error messages on a busy machine. SIGTERM exits like an error, so that temporary folders are removed."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    remove_left_folders()
    try:
        run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        atexit._run_exitfuncs()
        with suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run() -> None:
    """Run the verb and raise SystemExit. A user error prints one message to stderr, without a stack trace, and exits
    with code 2; a warning prints one line to stderr."""
    try:
        with warnings_as_lines(open_console(stderr=True)):
            app()
    except UserError as error:
        open_console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)
        sys.exit(USER_ERROR_EXIT)
