"""Where a run begins: anew, or at a checkpoint; never at the cost of a run that is there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config import Config, UserError
from dilatant.config.files.own_files import require_plain
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import warn
from dilatant.training.checkpoints.checkpoint import damage, identity, list_checkpoints, newest_valid
from dilatant.training.checkpoints.files import DamagedError, read_manifest


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with: a checkpoint, or nothing; `discards` the checkpoints of the run that was there."""

    checkpoint: Path | None
    discards: bool = False


def find_start(config: Config, folder: RunFolder, overwrite: bool, console: Console) -> Start:
    """Where to begin. Raises UserError rather than lose a run."""
    resume = config.train.resume
    if resume == "auto":
        checkpoint, warnings = newest_valid(folder.checkpoints)
        for warning in warnings:
            warn(console, warning)
        if checkpoint is None and warnings:
            raise UserError(
                f"no checkpoint in {str(folder.checkpoints)!r} is undamaged; start anew with --overwrite"
            )
        return Start(checkpoint.path if checkpoint else None)
    if resume != "never":
        require_plain(Path(resume))
        problem = damage(Path(resume))
        if problem is not None:
            raise UserError(f"train.resume: {resume!r} is not a usable checkpoint: {problem}")
        return Start(Path(resume))
    if list_checkpoints(folder.checkpoints):
        if not overwrite:
            command = f"dilatant resume {shlex.quote(str(folder.path))}"
            raise UserError(
                f"{str(folder.path)!r} holds a run already; go on with `{command}`, "
                "choose another output_dir, or start anew with --overwrite"
            )
        return Start(None, discards=True)
    return Start(None)


def with_template_date(config: Config) -> Config:
    """The config with the day that chat templates write: its own, that of the checkpoint from which it goes on, or
    today."""
    day = config.data.template_date
    if day is None:
        day = _day_of_start(config) or datetime.now().date().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"template_date": day})})


def _day_of_start(config: Config) -> str | None:
    resume = config.train.resume
    if resume == "auto":
        found = [each.path for each in list_checkpoints(RunFolder(config.output_dir).checkpoints)]
    else:
        found = [] if resume == "never" else [Path(resume)]
    for checkpoint in found:
        try:
            day = read_manifest(checkpoint).values.get("template_date")
        except (UserError, DamagedError):  # `find_start` says what is wrong with it
            continue
        if isinstance(day, str):
            return day
    return None


def agreed_checkpoint(comm: Comm, own: Path | None) -> Path | None:
    """The checkpoint that rank 0 found, on all ranks. Raises UserError where a rank does not see it."""
    chosen = all_gather_object(comm, None if own is None else str(own))[0]
    if chosen is None:
        return None
    try:
        seen, problem = identity(Path(chosen)), None
    except UserError as error:
        seen, problem = "", str(error)
    sights = all_gather_object(comm, [seen, problem])
    blind = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(sights) if text is not None]
    blind += [
        f"rank {rank} sees another checkpoint there"
        for rank, (other, text) in enumerate(sights)
        if text is None and other != sights[0][0]
    ]
    if blind:
        raise UserError(
            f"rank 0 goes on from {chosen!r}, which not all ranks see alike ({'; '.join(blind[:4])}); output_dir must "
            "be on storage that all machines share"
        )
    return Path(chosen)
