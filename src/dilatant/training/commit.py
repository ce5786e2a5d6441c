"""Commit barrier: a step counts at once, or when one party decides that all ranks apply it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dilatant.comm.comm import Comm
from dilatant.training.feeding.decoding import PersistentPool


class CommitBarrier(Protocol):
    """Commit barrier between gradients and update. Without one, a step counts as soon as `Runtime.execute` returns,
    since all ranks have its gradients then; a run that survives the loss of ranks lets one party decide."""

    def begin(self, step: int, limit_seconds: float) -> None:
        """Report that this rank is ready to compute step number `step`, which should take at most `limit_seconds`."""

    def slow(self, times: float) -> None:
        """Report that this rank is slower than others by `times`, above the config's bound; 0: no longer slow."""

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        """Vote for step number `step` without waiting for the others; if this raises, this rank does not apply the
        step. hashes: layer → hash of the reduced gradients."""

    def await_commit(self) -> None:
        """Return when the proposed step is committed; if this raises, this rank does not apply the step."""


@dataclass(frozen=True, slots=True)
class RunMembership:
    """A rank's membership in a run that survives the loss of ranks. node_of: rank → node, in this generation.
    weights_follow: the weights arrive from elsewhere, so none are read or initialised. opened: called with the
    communicator as soon as it exists, so that it can be aborted. reason: why this generation began. keeps_gradients:
    see `Recovery`. pool: data workers, kept for the next generation."""

    generation: int = 0
    node_of: tuple[int, ...] | None = None
    weights_follow: bool = False
    gate: CommitBarrier | None = None
    opened: Callable[[Comm], None] = lambda comm: None
    reason: str = ""
    keeps_gradients: bool = False
    pool: PersistentPool | None = None


FIXED_MEMBERSHIP = RunMembership()
"""Membership in a run that ends when any rank is lost."""
