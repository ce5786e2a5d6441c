"""Starting point of a run: nothing or a checkpoint, chosen without losing an existing run."""

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
class StartingPoint:
    """Starting point of a run. checkpoint: None to start anew. discards: delete the checkpoints of an existing run."""

    checkpoint: Path | None
    discards: bool = False


def find_start(config: Config, folder: RunFolder, overwrite: bool, console: Console) -> StartingPoint:
    """Choose the starting point of a run. Raises UserError rather than lose an existing run."""
    start = _found_start(config, folder, overwrite, console)
    if start.checkpoint is not None:
        before, now = read_manifest(start.checkpoint).values.get("learns_from"), config.train.learns_from
        if before is not None and before != now:  # the moments of AdamW and the position are those of another loss
            raise UserError(
                f"train.preferences: {str(start.checkpoint)!r} learned from {before}, and this run would learn from "
                f"{now}; set it as it was, or begin a new run with that run's export as its model"
            )
    return start


def _found_start(config: Config, folder: RunFolder, overwrite: bool, console: Console) -> StartingPoint:
    resume = config.train.resume
    if resume == "auto":
        checkpoint, warnings = newest_valid(folder.checkpoints)
        for warning in warnings:
            warn(console, warning)
        if checkpoint is None and warnings:
            raise UserError(f"no checkpoint in {str(folder.checkpoints)!r} is undamaged; start anew with --overwrite")
        return StartingPoint(checkpoint.path if checkpoint else None)
    if resume != "never":
        require_plain(Path(resume))
        problem = damage(Path(resume))
        if problem is not None:
            raise UserError(f"train.resume: {resume!r} is not a usable checkpoint: {problem}")
        return StartingPoint(Path(resume))
    if list_checkpoints(folder.checkpoints):
        if not overwrite:
            command = f"dilatant resume {shlex.quote(str(folder.path))}"
            raise UserError(
                f"{str(folder.path)!r} holds a run already; go on with `{command}`, "
                "choose another output_dir, or start anew with --overwrite"
            )
        return StartingPoint(None, discards=True)
    return StartingPoint(None)


def with_template_date(config: Config) -> Config:
    """Return the config with the date for chat templates: its own, that of the checkpoint to resume from, or today."""
    day = config.data.template_date
    if day is None:
        day = _day_of_start(config) or datetime.now().date().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"template_date": day})})


def _day_of_start(config: Config) -> str | None:
    for checkpoint in checkpoints_before(config):
        try:
            day = read_manifest(checkpoint).values.get("template_date")
        except (UserError, DamagedError):  # `find_start` reports what is wrong with it
            continue
        if isinstance(day, str):
            return day
    return None


def checkpoints_before(config: Config) -> list[Path]:
    """Return the checkpoints from which the run may continue, best first; none for a new run."""
    resume = config.train.resume
    if resume == "auto":
        return [each.path for each in list_checkpoints(RunFolder(config.output_dir).checkpoints)]
    return [] if resume == "never" else [Path(resume)]


def agreed_checkpoint(comm: Comm, own: Path | None) -> Path | None:
    """Return rank 0's checkpoint on all ranks. Raises UserError if a rank does not see the same one."""
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
