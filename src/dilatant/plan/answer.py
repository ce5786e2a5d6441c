"""What every planner says about its own answer."""

from __future__ import annotations


class Answer:
    """Fields shared by the frozen values that planners return; each declares them in its own order.

    `seconds` is the predicted time, `lower_bound` a time in seconds that no answer to the same question can
    beat, `proven` whether the answer is known to be optimal, `wall_seconds` how long the planner took. The
    latter takes no part in comparisons: two ranks that plan alike hold equal answers.
    """

    __slots__ = ()

    seconds: float
    lower_bound: float
    proven: bool
    wall_seconds: float

    @property
    def gap(self) -> float:
        """How far `seconds` may be above the optimum, as a fraction of the lower bound; 0 when proven."""
        if self.proven or self.seconds <= self.lower_bound:
            return 0.0
        return self.seconds / self.lower_bound - 1.0 if self.lower_bound > 0.0 else float("inf")
