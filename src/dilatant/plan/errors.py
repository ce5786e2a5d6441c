"""Errors for users when no plan exists; each message says what would help."""

from __future__ import annotations

from dilatant.config.errors import UserError


class PlanError(UserError):
    """No plan satisfies the request; the message says why and what would help."""


class DoesNotFitError(PlanError):
    """Memory is too small: `unit` does not fit ("" for all together), `excess_bytes` are missing."""

    def __init__(self, message: str, unit: str = "", excess_bytes: float = 0.0) -> None:
        super().__init__(message)
        self.unit = unit
        self.excess_bytes = excess_bytes


class TooFewDevicesError(PlanError):
    """There are fewer devices than the units need. `needed` is the smallest number that would do."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class BatchError(PlanError):
    """The batch cannot be divided as requested. `nearest` holds the nearest batch sizes that can."""

    def __init__(self, message: str, nearest: tuple[int, ...]) -> None:
        super().__init__(message)
        self.nearest = nearest
