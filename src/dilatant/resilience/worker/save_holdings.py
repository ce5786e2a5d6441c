"""Last save: the ranks that are left write the state that they hold together, where no plan can continue with it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object, any_rank
from dilatant.plan.boxes import Box
from dilatant.resilience.state_transfer import StateLost, finder, plan_copies
from dilatant.training.checkpoints.checkpoint import BoxPiece, list_checkpoints, pieces_of
from dilatant.training.checkpoints.writer import CheckpointWriter
from dilatant.training.trainer import Trainer


def save_holdings(comm: Comm, old: Trainer | None, checkpoints: Path, keep: int) -> int:
    """Save the state of the last generation as a checkpoint; called by all ranks. Returns the step of the newest
    checkpoint afterwards. old: this rank's closed trainer of that generation; None if this rank has no state.

    Raises StateLost on all ranks if they do not hold all of the state, and UserError if it cannot be written.
    """
    session = comm.attempt[:16] or secrets.token_hex(8)
    # Rank 0 deletes leftovers of other writers here, before any rank writes.
    with closing(CheckpointWriter(checkpoints, keep, session, comm.rank, comm.size)) as writer:
        newest = list_checkpoints(checkpoints)[:1] if comm.rank == 0 else []
        pieces = [] if old is None else list(pieces_of(old.state.tensors(), old.state.shapes))
        names = [] if old is None else [f"model.{name}" for name in old.runtime.holdings]
        boxes = msgspec.json.encode([piece.box for piece in pieces]).decode()
        own: list[Any] = [None if old is None else old.state.values(), names, boxes]
        gathered = all_gather_object(comm, [*own, newest[0].step if newest else 0])
        values = next(values for values, *_ in gathered if values is not None)
        step: int = values["step"]
        if gathered[0][3] == step:
            return step
        held = [msgspec.json.decode(text, type=list[Box]) for _, _, text, _ in gathered]
        wholes = {box.name: Box.of(box.name, box.whole) for each in held for box in each}
        lost = {name for _, each, *_ in gathered for name in each} - wholes.keys()
        if lost:
            raise StateLost(", ".join(sorted(lost)[:3]))
        # To no rank in particular: every cell has one source, which writes it.
        copies = plan_copies(held, [*([()] * comm.size), [*wholes.values()]])
        cells = [copy.cell for copy in copies if copy.source == comm.rank]
        if newest:
            writer.continue_from(newest[0].path)
        shapes = {name.partition(".")[2]: box.whole for name, box in wholes.items()}
        writer.save(step, *_written(cells, pieces, values, old), shapes)
        writer.wait()
        any_rank(comm, False, "written parts of the last checkpoint")
        if comm.rank == 0:
            writer.publish()
        writer.wait()
        any_rank(comm, False, "the last checkpoint")
    return step


def _written(
    cells: list[Box], pieces: list[BoxPiece], values: Mapping[str, Any], old: Trainer | None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the tensors to write, the run's values, and the names of the frozen weights among the tensors."""
    find, tensors = finder(pieces), dict[str, Any]()
    frozen = []
    for cell in cells:
        kind, _, key = cell.key.partition(".")
        tensors.setdefault(kind, {})[key] = find(cell)
        weight = None if old is None else old.runtime.parameters.get(cell.name.partition(".")[2])
        if kind == "model" and weight is not None and not weight.requires_grad:
            frozen.append(key)
    return tensors, dict(values), frozen
