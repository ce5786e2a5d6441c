"""What a rank decodes: exactly the parts of samples that its own stages use."""

from __future__ import annotations

from dilatant.data.encode import TOKENS
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import Plan
from dilatant.schedule.schedule import Assignment


class Needs:
    """The parts of samples that the stages of one rank under a plan read (see `Unit.reads`)."""

    def __init__(self, model: MultimodalModel, plan: Plan, rank: int) -> None:
        parts: dict[tuple[str, int], frozenset[str]] = {}
        for placed in plan.stages():
            if rank in placed.stage.ranks:
                read = model.units[placed.unit].reads(placed.stage.first, placed.stage.end)
                chain = placed.unit, placed.replica
                parts[chain] = parts.get(chain, frozenset()) | read
        self._parts = {chain: read for chain, read in parts.items() if read}
        self.media = frozenset().union(*self._parts.values()) - {TOKENS}
        """The units whose media this rank reads."""

    def of(self, assignment: Assignment) -> dict[int, frozenset[str]]:
        """Sample number → parts, in the order in which this rank comes to need them: by microbatch."""
        rows = [
            (position, samples, read)
            for (unit, replica), read in self._parts.items()
            for position, samples in enumerate(assignment.microbatches[unit][replica])
        ]
        needed: dict[int, frozenset[str]] = {}
        for _, samples, read in sorted(rows, key=lambda row: row[0]):
            for sample in samples:
                needed[sample] = needed.get(sample, frozenset()) | read
        return needed
