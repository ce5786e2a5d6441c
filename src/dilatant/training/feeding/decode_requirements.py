"""What a rank decodes: exactly the parts of samples that its own stages use."""

from __future__ import annotations

from collections.abc import Sequence

from dilatant.data.text.encoding import TOKENS
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.schedule.schedule import ActionKind

Chain = tuple[str, int]
"""A unit's replica."""


class Needs:
    """The parts of samples that the stages of one rank under a plan read (see `Unit.reads`), and the tokens of rows
    whose owners it must know."""

    def __init__(self, model: MultimodalModel, plan: Plan, rank: int) -> None:
        parts: dict[Chain, frozenset[str]] = {}
        rows: set[Chain] = set()
        self._divided: dict[Chain, tuple[PlacedStage, int]] = {}
        """Where ranks share items: the stage that reads them, and this one's place."""
        self._units = model.units
        for placed in plan.stages():
            if rank in placed.stage.ranks:
                read = model.units[placed.unit].reads(placed.stage.first, placed.stage.end)
                chain = placed.unit, placed.replica
                parts[chain] = parts.get(chain, frozenset()) | read
                if placed.stage.cp > 1 and placed.unit in read:
                    self._divided[chain] = placed, placed.stage.ranks.index(rank) // placed.stage.tp
                rows |= _exchanged_with(model, plan, placed)
        self._parts = {chain: read for chain, read in parts.items() if read}
        self._own = tuple(parts)
        self._rows = tuple(rows)
        """Of the language model, those whose tokens ranks share, and that this rank gives to or takes from."""
        self.media = frozenset().union(*self._parts.values()) - {TOKENS}
        """The units whose media this rank reads."""

    def of(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        """Sample number → parts, in the order in which this rank comes to need them: by microbatch."""
        assignment = step.assignment
        rows = [
            (position, samples, read)
            for chain, read in self._parts.items()
            for position, samples in self._read(chain, step)
        ]
        if self._rows:
            own = {
                sample
                for unit, replica in self._own
                for samples in assignment.microbatches[unit][replica]
                for sample in samples
            }
            rows += [
                (position, samples, frozenset({TOKENS}))
                for unit, replica in self._rows
                for position, samples in enumerate(assignment.microbatches[unit][replica])
                if not own.isdisjoint(samples)
            ]
        needed: dict[int, frozenset[str]] = {}
        for _, samples, read in sorted(rows, key=lambda row: row[0]):
            for sample in samples:
                needed[sample] = needed.get(sample, frozenset()) | read
        return needed

    def _read(self, chain: Chain, step: PreparedStep) -> list[tuple[int, Sequence[int]]]:
        """Microbatches, by their position, of which this rank reads something: where ranks share items, the samples of
        which it has any. A schedule may run a microbatch in parts, whose items are shared each by itself."""
        if chain not in self._divided:
            unit, replica = chain
            return list(enumerate(step.assignment.microbatches[unit][replica]))
        placed, place = self._divided[chain]
        found: list[tuple[int, Sequence[int]]] = []
        for action in step.actions:
            if action.stage != placed.index or action.kind != ActionKind.F:
                continue
            samples = step.routes.samples[action]
            sizes = [{placed.unit: step.tokens[placed.unit][sample]} for sample in samples]
            owners = self._units[placed.unit].item_owners(sizes, placed.stage.cp)
            own = [
                sample for sample, of_items in zip(samples, owners, strict=True) if (of_items == place).any()
            ]
            found.append((action.microbatch, own))
        return found


def _exchanged_with(model: MultimodalModel, plan: Plan, own: PlacedStage) -> set[Chain]:
    """The replicas of the language model that a stage of another unit gives rows to, or takes rows from, where ranks
    share the tokens."""
    gives = own.is_last and model.graph.anchor in model.graph.feeds[own.unit]
    takes = own.is_first and own.unit in model.graph.feeds[model.graph.anchor]
    return {
        (placed.unit, placed.replica)
        for placed in plan.stages()
        if placed.unit == model.graph.anchor and placed.stage.cp > 1
        if (gives and placed.is_first) or (takes and placed.is_last)
    }
