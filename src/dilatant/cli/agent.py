"""`dilatant agent`: join this machine to a run whose nodes may come and go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dilatant.config.errors import UserError
from dilatant.config.printable import printable


def agent(
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where `dilatant train` leads the run.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="What people should call this machine; its host name by default.")] = "",
    wait_seconds: Annotated[float, typer.Option(min=0.0, help="For a run that has not begun.")] = 600.0,
    notice_file: Annotated[
        Path | None,
        typer.Option(help="Leave the run when this file is there: the cloud takes the machine.", show_default=False),
    ] = None,
    notice_url: Annotated[
        str | None, typer.Option(help="Leave the run when this address answers with 200.", show_default=False)
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="This machine is `resilience.standby`: it leads when the leader is gone.")
    ] = False,
) -> None:
    """Join this machine's ranks to a run with `resilience.enabled`, at its start or later.

    Requires the run's secret (in DILATANT_TOKEN or DILATANT_TOKEN_FILE, else in a shared home directory), and the run
    folder and the data at the same paths as on the other machines. SIGTERM and Ctrl-C leave the run at the end of the
    step.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {coordinator!r} is no HOST:PORT")
    if notice_url is not None and not notice_url.startswith(("http://", "https://")):
        raise UserError(f"--notice-url {notice_url!r} is no http address")
    print(printable(f"waiting for the run that {coordinator} leads"), file=sys.stderr, flush=True)

    from dilatant.resilience.processes.agent_run import AgentOptions, run_agent

    options = AgentOptions(host.strip("[]"), int(port), name, wait_seconds, notice_file, notice_url, standby)
    raise typer.Exit(run_agent(options))
