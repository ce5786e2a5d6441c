"""Local stages: the stages of one rank with their training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.models.core.stage import Boundary, Stage
from dilatant.models.dropout.keyed_dropout import StageDropout
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.routes import stages_before
from dilatant.runtime.state.weight_gradients import (
    ReplacedLayers,
    WeightGradients,
    replace_linears,
    restore_linears,
)


@dataclass(slots=True)
class LocalStage:
    """A stage on this rank.

    outbound: consumer unit → boundary of the rows sent to it. inbound: producer unit → (boundary of its rows, True if
    they need gradients). needs_backward: this stage or an earlier one trains. gradients: the delayed weight gradients
    of the linear layers. loss_weights: loss → its weight. dropout: wraps the stage's forwards. speaks: among the
    tensor-parallel ranks, which compute the same losses, this one reports them. leads: this rank reports the
    predictions of the whole stage. together: the stage has several ranks. replaced: the layers that `close` restores.
    """

    placed: PlacedStage
    module: Stage
    outbound: Mapping[str, Boundary]
    inbound: Mapping[str, tuple[Boundary, bool]]
    needs_backward: bool
    gradients: WeightGradients
    loss_weights: Mapping[str, float]
    dropout: StageDropout | None = None
    speaks: bool = True
    leads: bool = True
    together: bool = False
    replaced: ReplacedLayers | None = None

    def close(self) -> None:
        """Restore the module's plain linear layers and remove hooks. May be called twice."""
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
    """Wrap `modules`, the stages of `rank` by number. boundaries: for every stage, by consumer unit. backward: for
    every stage, True if it or an earlier stage trains."""
    placed, before = plan.stages(), stages_before(plan)
    stages = {}
    for index, module in modules.items():
        own = placed[index]
        gradients = WeightGradients()
        inbound: dict[str, tuple[Boundary, bool]] = {}
        for source in before[index]:
            # The frozen rule depends only on layers, so the value is equal in all replicas of a unit.
            inbound[placed[source].unit] = boundaries[source][own.unit], backward[source]
        stages[index] = LocalStage(
            placed=own,
            module=module,
            outbound=boundaries[index],
            inbound=inbound,
            needs_backward=backward[index],
            gradients=gradients,
            dropout=StageDropout(module, model.units[own.unit]),
            loss_weights={name: loss.weight for name, loss in model.graph.losses.items()},
            speaks=own.stage.ranks.index(rank) % own.stage.tp == 0,
            leads=own.stage.ranks[0] == rank,
            together=len(own.stage.ranks) > 1,
            replaced=replace_linears(module, gradients, module.undeferred),
        )
    return stages
