"""State inheritance: a new trainer receives the state and the unfinished step of the last generation."""

from __future__ import annotations

from pathlib import Path

from dilatant.comm.gather import all_gather_object
from dilatant.resilience.partial_step.handover import read_exported_gradients
from dilatant.resilience.partial_step.salvage_exchange import adopt_partial_step
from dilatant.resilience.state_transfer import transfer
from dilatant.training.checkpoints.boxes import pieces_of
from dilatant.training.checkpoints.checkpoint import list_checkpoints
from dilatant.training.trainer import Trainer


def inherit_state(trainer: Trainer, old: Trainer | None, checkpoints: Path) -> int:
    """Transfer the last generation's state to the ranks that hold it in this one; returns the bytes received. Raises
    Lost on all ranks."""
    newest = list_checkpoints(checkpoints)[:1] if trainer.rank == 0 else []
    own = None if old is None else [old.values(), sorted(old.names_with_moments())]
    gathered = all_gather_object(trainer.comm, [own, newest[0].step if newest else 0, trainer.stays])
    told = [each for each, *_ in gathered if each is not None]
    values = told[0][0]
    stays = all(each for *_, each in gathered)
    copied = 0
    if not stays:
        everybody = {name for _, names in told for name in names}
        held = [] if old is None else list(pieces_of(old.state(), old.shapes))
        wanted = trainer.empty_state(everybody)
        copied = transfer(trainer.comm, held, list(pieces_of(wanted, trainer.shapes)))
    trainer.go_on_from(values, stays)
    trainer.continue_branch(gathered[0][1], newest[0].path if newest else None)
    return copied


def adopt_gradients(
    trainer: Trainer, old: Trainer | None, base: int, handed: Path
) -> tuple[tuple[int, int], int]:
    """Adopt the gradients of the unfinished step. Returns the numbers of its reused and missing (layer, sample) pairs,
    (0, 0) if nothing is reused, and the number of departed ranks of generation `base` whose exports in the folder
    `handed` are reused."""
    comm, step = trainer.comm, trainer.step
    left = read_exported_gradients(handed, base, step, comm.rank, comm.size)
    found = adopt_partial_step(comm, step, None if old is None else old.runtime, trainer.runtime, left)
    if found is None:
        return (0, 0), 0
    given = {move.source for move in found.moves if move.source >= comm.size}
    return found.pairs(trainer.runtime.trained_by_layer), len(given)
