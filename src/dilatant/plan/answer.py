"""Base class of the results that planners return."""

from __future__ import annotations


class PlannerAnswer:
    """Declare the fields that all planner results share; each frozen subclass declares them in its own order.

    `seconds` is the predicted time, `lower_bound` a time in seconds that no answer to the same question can beat,
    `proven` is True if the answer is known to be optimal, and `wall_seconds` is the planner's run time. `wall_seconds`
    takes no part in comparisons, so two ranks that plan alike hold equal answers.
    """

    __slots__ = ()

    seconds: float
    lower_bound: float
    proven: bool
    wall_seconds: float

    @property
    def gap(self) -> float:
        """Largest possible excess of `seconds` over the optimum, as a fraction of the lower bound; 0 when proven."""
        if self.proven or self.seconds <= self.lower_bound:
            return 0.0
        return self.seconds / self.lower_bound - 1.0 if self.lower_bound > 0.0 else float("inf")
