"""Checkpoint saving: every rank writes its part in the background, and rank 0 publishes the parts as one checkpoint."""

from __future__ import annotations

import secrets
from functools import cached_property
from pathlib import Path

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import any_rank
from dilatant.config.errors import UserError
from dilatant.plan.boxes import Box
from dilatant.runtime.state.holders import written_cells
from dilatant.training.checkpoints.writer import PATIENCE_SECONDS, CheckpointWriter
from dilatant.training.run_state import RunState

LAST_PATIENCE_SECONDS = 20.0
"""Seconds that rank 0 waits for other ranks' parts of a checkpoint after a rank has failed."""


class Saving:
    """Checkpoints of one rank: its part is written in the background, and rank 0 publishes what all have written.

    A part is `RunState.written`. keep: how many checkpoints stay in `folder`.
    """

    def __init__(self, comm: Comm, folder: Path, keep: int, state: RunState) -> None:
        session = comm.attempt[:16] or secrets.token_hex(8)
        self._comm = comm
        self._writer = CheckpointWriter(folder, keep, session, comm.rank, comm.size)
        self._state = state
        self._unpublished = False
        self.step = 0
        """Step of the last save."""

    @cached_property
    def _written(self) -> dict[str, tuple[Box, ...]]:
        return written_cells(self._state.runtime.holdings, self._comm.rank)

    @property
    def published(self) -> Path | None:
        """The last checkpoint that this run published; known on rank 0."""
        return None if self._writer.published is None else self._writer.published.path

    def continue_from(self, step: int, checkpoint: Path | None) -> None:
        """Continue with the existing checkpoints, the newest of which is `checkpoint` (known on rank 0), of `step`."""
        self.step = step
        if checkpoint is not None:
            self._writer.continue_from(checkpoint)

    def save(self) -> None:
        """Write this rank's part in the background; it is published when all parts are there. Called by all ranks
        together. Raises UserError for non-finite weights, from which no run can continue."""
        self.complete()
        self._write()

    def publish_if_written(self) -> None:
        """Publish the last save if all parts are there already; called by all ranks together."""
        if self._unpublished and not any_rank(self._comm, not self._writer.ready(), "written parts"):
            self._publish()

    def complete(self) -> None:
        """Publish the last save after waiting for the parts of all ranks."""
        self._writer.wait()
        if self._unpublished:
            any_rank(self._comm, False, "written parts")
            self._publish()
            self._writer.wait()

    def save_alone(self, half_updated: bool) -> None:
        """Save the last finished step after ranks have lost contact. half_updated: an update was interrupted here."""
        self._writer.wait()
        if self._unpublished:
            self._publish(LAST_PATIENCE_SECONDS)
        if self.step != self._state.step and not half_updated:
            self._write()
            self._publish(LAST_PATIENCE_SECONDS)
        self._writer.wait()

    def close(self) -> None:
        """Finish writing."""
        self._writer.close()

    def _write(self) -> None:
        state = self._state
        tensors, masters = state.written(self._written), state.optimizer.masters
        finite = [torch.isfinite(weight.detach()).all() for weight in masters.values()]
        if finite and not bool(torch.stack(finite).all()):
            name = next(name for name, ok in zip(masters, finite) if not bool(ok))
            raise UserError(
                f"weight {name!r} is not finite after step {state.step}, so nothing is saved; the checkpoint before is "
                "still valid: go on from it with a lower learning rate"
            )
        frozen = [
            cell.key
            for name, parameter in self._state.runtime.parameters.items()
            if not parameter.requires_grad
            for cell in self._written[name]
        ]
        frozen += [cell.key for cells in state.runtime.fixed.primary_cells.values() for cell in cells]
        self._writer.save(state.step, tensors, state.values(), frozen, state.shapes)
        self._unpublished = True
        self.step = state.step

    def _publish(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._unpublished = False
        if self._comm.rank == 0:
            self._writer.publish(patience_seconds)
