"""What a user can put right when no plan exists."""

from __future__ import annotations

from dilatant.config.errors import UserError


class PlanError(UserError):
    """No plan answers the question as it was asked; the message says why and what would help."""


class DoesNotFitError(PlanError):
    """Memory is too small. `unit` is the unit that does not fit ("" for all together), `excess_bytes` by how much."""

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
    """The batch cannot be divided as asked. `nearest` holds the nearest batches that can."""

    def __init__(self, message: str, nearest: tuple[int, ...]) -> None:
        super().__init__(message)
        self.nearest = nearest
