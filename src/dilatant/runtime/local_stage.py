"""The stages of one rank, with all that is around them while they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.models.core.stage import Boundary, Stage
from dilatant.models.dropout.keyed_dropout import KeyedDropout
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.routes import stages_before
from dilatant.runtime.state.weight_gradients import (
    Replaced,
    WeightGradients,
    replace_linears,
    restore_linears,
)


@dataclass(slots=True)
class LocalStage:
    """A stage on this rank.

    outbound: unit → boundary of the rows it takes from here. inbound: unit → boundary of the rows it gives, and whether
    they need gradients. needs_backward: something at or before this stage trains. gradients: what its linear layers
    put off. loss_weights: loss → how often it counts. dropout: goes around its forwards. speaks: of the ranks of the
    stage that make the same losses, this one tells them. leads: of all its ranks, this one tells predictions.
    together: the stage has others. replaced: what `close` gives back.
    """

    placed: PlacedStage
    module: Stage
    outbound: Mapping[str, Boundary]
    inbound: Mapping[str, tuple[Boundary, bool]]
    needs_backward: bool
    gradients: WeightGradients
    loss_weights: Mapping[str, float]
    dropout: KeyedDropout | None = None
    speaks: bool = True
    leads: bool = True
    together: bool = False
    replaced: Replaced | None = None

    def close(self) -> None:
        """Give the module back as it was: plain linear layers, no hooks. Once more changes nothing."""
        if self.dropout is not None:
            self.dropout.close()
        if self.replaced is not None:
            restore_linears(self.replaced)
            self.replaced = None


def local_stages(
    model: MultimodalModel,
    plan: Plan,
    rank: int,
    modules: Mapping[int, Stage],
    boundaries: Sequence[Mapping[str, Boundary]],
    backward: Sequence[bool],
) -> dict[int, LocalStage]:
    """The stages of `rank` by number, of these `modules`. boundaries: of every stage, by the unit that takes its rows.
    backward: whether there is something to train at or before a stage."""
    placed, before = plan.stages(), stages_before(plan)
    stages = {}
    for index, module in modules.items():
        own = placed[index]
        gradients = WeightGradients()
        inbound: dict[str, tuple[Boundary, bool]] = {}
        for source in before[index]:
            # The frozen rule looks at layers, so all replicas of a unit say the same at its end.
            inbound[placed[source].unit] = boundaries[source][own.unit], backward[source]
        stages[index] = LocalStage(
            placed=own,
            module=module,
            outbound=boundaries[index],
            inbound=inbound,
            needs_backward=backward[index],
            gradients=gradients,
            dropout=KeyedDropout(module, model.units[own.unit]),
            loss_weights={name: loss.weight for name, loss in model.graph.losses.items()},
            speaks=own.stage.ranks.index(rank) % own.stage.tp == 0,
            leads=own.stage.ranks[0] == rank,
            together=len(own.stage.ranks) > 1,
            replaced=replace_linears(module, gradients, module.undeferred),
        )
    return stages
