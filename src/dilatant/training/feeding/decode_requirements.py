"""Decode requirements: exactly the parts of samples that a rank's own stages use."""

from __future__ import annotations

from collections.abc import Sequence

from dilatant.data.text.encoding import TOKENS
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.schedule.schedule import ActionKind

StageChain = tuple[str, int]
"""Unit and number of its replica."""


class DecodeRequirements:
    """Decode requirements of one rank under a plan: the parts of samples that its stages read (see `Unit.reads`), and
    the tokens of rows whose owners it must know."""

    def __init__(self, model: MultimodalModel, plan: Plan, rank: int) -> None:
        parts: dict[StageChain, frozenset[str]] = {}
        rows: set[StageChain] = set()
        self._divided: dict[StageChain, tuple[PlacedStage, int]] = {}
        """Replica → the stage that reads its items, and this rank's index, if context-parallel ranks divide items."""
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
        """Replicas of the language model with divided tokens that this rank sends rows to or receives rows from."""
        self.media = frozenset().union(*self._parts.values()) - {TOKENS}
        """Units whose media this rank reads."""

    def of(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        """Return sample number → parts, in the order in which this rank needs them: by microbatch."""
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

    def _read(self, chain: StageChain, step: PreparedStep) -> list[tuple[int, Sequence[int]]]:
        """Return the position and samples of each microbatch that this rank reads: all, or those with items of this
        rank if context-parallel ranks divide items. A schedule may run a microbatch in parts, each of which is divided
        by itself."""
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


def _exchanged_with(model: MultimodalModel, plan: Plan, own: PlacedStage) -> set[StageChain]:
    """Return the replicas of the language model with divided tokens that another unit's stage exchanges rows with."""
    gives = own.is_last and model.graph.anchor in model.graph.feeds[own.unit]
    takes = own.is_first and own.unit in model.graph.feeds[model.graph.anchor]
    return {
        (placed.unit, placed.replica)
        for placed in plan.stages()
        if placed.unit == model.graph.anchor and placed.stage.cp > 1
        if (gives and placed.is_first) or (takes and placed.is_last)
    }
