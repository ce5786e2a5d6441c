"""Checkpoint saving: every rank writes its part in the background, and rank 0 publishes the parts as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import any_rank
from dilatant.config.errors import UserError
from dilatant.plan.boxes import Box
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import written_cells
from dilatant.training.checkpoints.run_state import written_state
from dilatant.training.checkpoints.writer import PATIENCE_SECONDS, CheckpointWriter
from dilatant.training.optimizers.averages import Averages
from dilatant.training.optimizers.master_weights import WithMasters

LAST_PATIENCE_SECONDS = 20.0
"""Seconds that rank 0 waits for other ranks' parts of a checkpoint after a rank has failed."""


class Saving:
    """Checkpoints of one rank: its part is written in the background, and rank 0 publishes what all have written.

    A part is the `written_state` of the runtime, the optimizer's masters and the averages.
    """

    def __init__(
        self,
        comm: Comm,
        writer: CheckpointWriter,
        runtime: Runtime,
        optimizer: WithMasters,
        averages: Averages | None,
    ) -> None:
        self._comm = comm
        self._writer = writer
        self._runtime = runtime
        self._optimizer = optimizer
        self._averages = averages
        self._shapes = {name: box.whole for name, box in runtime.boxes.items()}
        self._unpublished = False
        self.step = 0
        """Step of the last save."""

    @cached_property
    def _written(self) -> dict[str, tuple[Box, ...]]:
        return written_cells(self._runtime.holdings, self._comm.rank)

    @property
    def published(self) -> Path | None:
        """The last checkpoint that this run published; known on rank 0."""
        return None if self._writer.published is None else self._writer.published.path

    def continue_from(self, step: int, checkpoint: Path | None) -> None:
        """Continue with the existing checkpoints, the newest of which is `checkpoint` (known on rank 0), of `step`."""
        self.step = step
        if checkpoint is not None:
            self._writer.continue_from(checkpoint)

    def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Write this rank's part in the background; it is published when all parts are there. Called by all ranks
        together. values: the same on all ranks. Raises UserError for non-finite weights, from which no run can
        continue."""
        self.complete()
        self._write(step, values)

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

    def save_alone(self, step: int, values: Mapping[str, Any] | None) -> None:
        """Save the last finished step after ranks have lost contact. values: None if an update was interrupted here."""
        self._writer.wait()
        if self._unpublished:
            self._publish(LAST_PATIENCE_SECONDS)
        if self.step != step and values is not None:
            self._write(step, values)
            self._publish(LAST_PATIENCE_SECONDS)
        self._writer.wait()

    def close(self) -> None:
        """Finish writing."""
        self._writer.close()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        own = self._optimizer.masters
        tensors = written_state(self._runtime, own, self._optimizer, self._written, self._averages)
        finite = [torch.isfinite(weight.detach()).all() for weight in own.values()]
        if finite and not bool(torch.stack(finite).all()):
            name = next(name for name, ok in zip(own, finite) if not bool(ok))
            raise UserError(
                f"weight {name!r} is not finite after step {step}, so nothing is saved; the checkpoint before is "
                "still valid: go on from it with a lower learning rate"
            )
        frozen = [
            cell.key
            for name, parameter in self._runtime.parameters.items()
            if not parameter.requires_grad
            for cell in self._written[name]
        ]
        self._writer.save(step, tensors, dict(values), frozen, self._shapes)
        self._unpublished = True
        self.step = step

    def _publish(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._unpublished = False
        if self._comm.rank == 0:
            self._writer.publish(patience_seconds)
