"""Worker process: one rank of a run over several machines, started by its machine's agent."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from dilatant.config.config import parse_config
from dilatant.config.environment import hide_gpus
from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_durably
from dilatant.config.files.yaml_text import read_yaml
from dilatant.config.printable import printable
from dilatant.resilience.processes.messages import WorkerStart
from dilatant.resilience.processes.process import end_with_parent

if TYPE_CHECKING:
    from dilatant.training.rank import Show
RESULT = "result.json"
"""File in the folder of the coordinator's record: the result of the final first rank, which the leader reads."""


def main() -> None:
    """Train until the run is over, or continues without this node."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm signals all; the agent decides what follows
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    end_with_parent()
    code = 0
    try:
        train(start)
    except UserError as error:
        print(printable(f"error: {start.seat.node}: {error}"), file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    # Threads that wait in torch for unreachable ranks would crash in the interpreter's normal shutdown.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def train(start: WorkerStart) -> None:
    """Train in one worker. Raises UserError for a mistake on this machine or in the run's configuration."""
    job, begin, seat = start.job, start.job.training, start.seat
    config = parse_config(read_yaml(begin.config), base=Path("/"))
    if config.train.device == "cpu":
        hide_gpus()
    from dilatant.comm.launch import worker_here
    from dilatant.resilience.worker.rank import ResilientRank
    from dilatant.resilience.worker.worker_link import RunEnded
    from dilatant.training.checkpoints.starting_point import StartingPoint

    worker = worker_here(seat.index, job.workers, seat.index, job.workers, None)
    point = StartingPoint(Path(begin.checkpoint) if begin.checkpoint else None, begin.discards)
    try:
        result = ResilientRank(worker, config, begin.plan, point, cast("Show", begin.show), seat).run()
    except RunEnded:
        return  # the coordinator says why
    if result is not None and result.is_first:
        text = msgspec.json.encode(asdict(result), enc_hook=str).decode()
        write_durably(Path(job.folder) / RESULT, text + "\n")


if __name__ == "__main__":
    main()
