"""Time shares: how each step's time was spent, as a few numbers exchanged with the agreement that commits the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dilatant.plan.plan import Plan
from dilatant.schedule.measured import MeasuredAction


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of time, 0 to 1.

    busy: unit and stage position ("language 1", all replicas together) → share of its ranks' time spent computing it;
    the rest is bubble. waited: unit → share of all ranks' time spent waiting for its rows.
    """

    busy: Mapping[str, float] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)


class ShareCounter:
    """Computes time shares from measurements: ranks sum their `own` lists, and `shares` reads the total."""

    def __init__(self, plan: Plan) -> None:
        stages = plan.stages()
        self._label = {placed.index: f"{placed.unit} {placed.position}" for placed in stages}
        self._ranks: dict[str, int] = dict.fromkeys(self._label.values(), 0)
        self._unit_of_rank: dict[int, str] = {}
        for placed in stages:
            self._ranks[self._label[placed.index]] += len(placed.stage.ranks)
            for rank in placed.stage.ranks:
                self._unit_of_rank.setdefault(rank, placed.unit)
        self._units = [unit.name for unit in plan.units]
        self._all_ranks = len(plan.ranks)

    def own(self, actions: Sequence[MeasuredAction], seconds: float) -> list[float]:
        """Return this rank's addends: seconds computed by stage, seconds waited by unit, and the step's `seconds`."""
        busy = dict.fromkeys(self._ranks, 0.0)
        waited = dict.fromkeys(self._units, 0.0)
        for one in actions:
            busy[self._label[one.action.stage]] += one.seconds
            if one.waited_for is not None:
                waited[self._unit_of_rank[one.waited_for]] += one.waited_seconds
        return [*busy.values(), *waited.values(), seconds]

    def shares(self, summed: Sequence[float]) -> StepShares:
        """Return the shares from the sum of all ranks' `own`; the step's length is the mean over ranks."""
        total = summed[-1] or 1.0
        mean = total / self._all_ranks
        stages = len(self._ranks)
        return StepShares(
            {label: value / (mean * ranks) for (label, ranks), value in zip(self._ranks.items(), summed)},
            {unit: value / total for unit, value in zip(self._units, summed[stages:])},
        )
