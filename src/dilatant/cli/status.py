"""`dilatant status`: who is in a run that goes on, and what has happened to it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from dilatant.cli.options import AsJson, RunPath


def status(folder: RunPath, as_json: AsJson = False) -> None:
    """Show members, generation and history of a run with `resilience.enabled`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dilatant.resilience.status import read_status

    found = read_status(folder)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    console = Console()
    step = "no step yet" if found.step is None else f"step {found.step}"
    console.print(
        f"generation {found.generation}, {found.stopped or found.task}, {step}", highlight=False, markup=False
    )
    nodes = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "host", "", "agent", "workers"):
        nodes.add_column(title)
    for node in found.nodes:
        state = ("member" if node.is_member else "left") + ("" if node.is_alive else ", gone")
        workers = " ".join(map(str, node.workers))
        nodes.add_row(Text(node.name), Text(node.host), state, str(node.agent), workers)
    console.print(nodes)
    history = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("time", "generation", "", "step", "members", "why"):
        history.add_column(title)
    for event in found.events:
        history.add_row(
            time.strftime("%H:%M:%S", time.localtime(event["time"])),
            str(event["generation"]),
            Text(event["task"]),
            str(event["step"]),
            str(len(event["members"])),
            Text(event["reason"]),
        )
    console.print(history)
