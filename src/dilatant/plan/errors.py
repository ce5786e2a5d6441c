"""Errors for users when no plan exists; each message says what would help."""

from __future__ import annotations

from dilatant.config.errors import UserError


class PlanError(UserError):
    """No plan satisfies the request; the message says why and what would help."""


class DoesNotFitError(PlanError):
    """Memory is too small for a unit, or for all together."""


class TooFewDevicesError(PlanError):
    """There are fewer devices than the units need."""


class BatchError(PlanError):
    """The batch cannot be divided as requested. `nearest` holds the nearest batch sizes that can."""

    def __init__(self, message: str, nearest: tuple[int, ...]) -> None:
        super().__init__(message)
        self.nearest = nearest
