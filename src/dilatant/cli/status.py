"""`dilatant status`: show the members and the history of a resilient run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dilatant.cli.options import AsJson, RunPath
from dilatant.config.errors import UserError
from dilatant.report.say import open_console
from dilatant.report.text.wording import counted

if TYPE_CHECKING:
    from dilatant.resilience.status import RunStatus

FOLLOW_SECONDS = 1.0


def status(
    folder: RunPath,
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing it until the run ends.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="End with 0 where the run is finished, 75 where `dilatant resume` may go on, 1 after a mistake.",
        ),
    ] = False,
) -> None:
    """Show the members, the generation and the history of a run with `resilience.enabled`."""
    from rich.live import Live

    from dilatant.resilience.status import read_status

    if follow and as_json:
        raise UserError("--follow shows a table; leave out --json, or ask again and again")
    found = read_status(folder)
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif not follow:
        open_console().print(_shown(found))
    else:
        with Live(_shown(found), console=open_console(), auto_refresh=False) as live:
            while not found.stopped:
                time.sleep(FOLLOW_SECONDS)
                found = read_status(folder)
                live.update(_shown(found), refresh=True)
    if exit_code:
        raise typer.Exit(found.exit_code)


def _shown(found: RunStatus) -> Group:
    from dilatant.resilience.status import generations

    step = "no step yet" if found.step is None else f"step {found.step}"
    headline = Text(f"generation {found.generation}, {found.stopped or found.task}, {step}")
    nodes = Table("node", "host", "", "agent", "workers", box=None, pad_edge=False, header_style="bold")
    for node in found.nodes:
        state = node.state(bool(found.stopped))
        workers = " ".join(map(str, node.workers))
        nodes.add_row(Text(node.name), Text(node.host), state, str(node.agent), workers)
    titles = "time", "generation", "step", "members", "recovered in", "why"
    history = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for one in generations(found.events):
        history.add_row(
            time.strftime("%H:%M:%S", time.localtime(one.time)),
            str(one.number),
            str(one.step),
            str(one.members),
            f"{one.seconds:.2f} s" if one.lost else "",
            Text(one.reason),
        )
    copies = ", ".join(f"{count} of {unit}" for unit, count in found.copies.items())
    then = found.shortage or f"{counted(min(found.copies.values(), default=1) - 1, 'node')} may be lost at once"
    shown = [Text(f"pipelines: {found.pipelines}"), Text(f"copies on different nodes: {copies}; {then}")]
    return Group(headline, *(shown if copies else ()), nodes, history)
