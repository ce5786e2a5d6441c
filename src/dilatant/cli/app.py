"""`dilatant`: the verbs put together, and how errors end.

Verbs import what they need when they run, so that `--help` and the light verbs start at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from dilatant import __version__
from dilatant.cli import (
    agent,
    chat,
    data,
    doctor,
    evaluate,
    export,
    generate,
    plan,
    profile,
    resume,
    simulate,
    status,
    train,
)
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
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """What holds for all verbs."""


app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("profile")(profile.profile)
app.command("train")(train.train)
app.command("resume")(resume.resume)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("evaluate")(evaluate.evaluate)
app.command("agent")(agent.agent)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point of a process, which just ends after `run`: to free all that was imported takes Python over a second,
    which is long for who waits for an error on a busy machine. SIGTERM ends it as an error would, so that temporary
    folders go."""
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
    """Raises SystemExit. A user's mistake is one message on stderr and exit code 2, without a stack trace; a warning is
    one line there."""
    try:
        with warnings_as_lines(open_console(stderr=True)):
            app()
    except UserError as error:
        open_console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)
        sys.exit(USER_ERROR_EXIT)
