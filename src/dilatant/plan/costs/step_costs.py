"""Step costs of one plan: numbers shared by planner and trainer, so that the simulated step is the executed one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.dense import DenseRows
from dilatant.cost.hardware import Link
from dilatant.cost.memory import MemoryReserve
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stage_costs import KIND_ORDER, StageCosts
from dilatant.plan.costs.sync_time import SyncSeconds
from dilatant.plan.costs.workload import MediaPairs, Workload, squares_of
from dilatant.plan.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """Costs of every stage of a plan, with the data to turn them into the seconds of a step.
    item_tokens: unit → tokens of one item (image, clip), for units whose items do not attend to each other; a sample's
    square is then its number of items times the square of one item. media_pairs: corrections of squares by media masks.
    dense: as in `Workload`. cluster: source of link speeds for messages and gradients; None: both take no time. sync:
    seconds for gradients and updated weights, from `plan.costs.sync_time`. origin: text on the source of the numbers
    ("measured on H100")."""

    stages: StageCosts
    item_tokens: Mapping[str, float] = field(default_factory=dict)
    dense: Mapping[str, DenseRows] = field(default_factory=dict)
    media_pairs: MediaPairs = field(default_factory=dict)
    cluster: Cluster | None = None
    sync: SyncSeconds = field(default_factory=SyncSeconds)
    origin: str = ""

    def workload(self, tokens: Mapping[str, NDArray[np.float64]]) -> Workload:
        """Return samples of `tokens[unit]` [samples] with the squares that these costs assume."""
        return Workload(tokens, squares_of(tokens, self.item_tokens, self.media_pairs), self.dense)

    def scaled(self, factors: NDArray[np.float64]) -> StepCosts:
        """Return the costs with `seconds` multiplied by `factors` [stages, kinds, 3]."""
        return replace(self, stages=replace(self.stages, seconds=self.stages.seconds * factors))

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_document` reads back to exactly the same numbers."""
        return {
            "origin": self.origin,
            "stages": {
                one.name: getattr(self.stages, one.name).tolist() for one in fields(StageCosts)
            },
            "item_tokens": dict(self.item_tokens),
            "media_pairs": {unit: dict(encoders) for unit, encoders in self.media_pairs.items()},
            "dense": {unit: rows.to_document() for unit, rows in self.dense.items()},
            "cluster": None if self.cluster is None else asdict(self.cluster),
            "sync": {
                name: {str(rank): seconds for rank, seconds in one.items()}
                for name, one in asdict(self.sync).items()
            },
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Mapping[str, Any], plan: Plan) -> StepCosts:
        """Read the output of `to_document` for `plan`. Raises ValueError for other content or another plan."""
        try:
            count, stages = len(plan.stages()), document["stages"]
            arrays = {one.name: np.asarray(stages[one.name], dtype=np.float64) for one in fields(StageCosts)}
            cluster = document["cluster"]
            if cluster is not None:
                cluster = Cluster.from_document(cluster)
            costs = cls(
                StageCosts(**arrays),
                {unit: float(tokens) for unit, tokens in document["item_tokens"].items()},
                {unit: DenseRows.from_document(rows) for unit, rows in document["dense"].items()},
                {
                    unit: {name: (float(a), float(b), float(c)) for name, (a, b, c) in encoders.items()}
                    for unit, encoders in document["media_pairs"].items()
                },
                cluster,
                SyncSeconds(
                    **{
                        name: {int(rank): float(seconds) for rank, seconds in one.items()}
                        for name, one in document["sync"].items()
                    }
                ),
                str(document["origin"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not the costs of a step: {type(error).__name__}: {error}") from error
        _check_numbers(costs)
        for name, values in arrays.items():
            shape = {
                "seconds": (count, len(KIND_ORDER), 3),
                "late_bytes": (count, 2, 3),
                **dict.fromkeys(
                    ("static_bytes", "gradient_bytes", "sum_bytes", "own_gradient_bytes"), (count,)
                ),
                "items_per_token": (count,),
            }.get(name, (count, 3))
            if values.shape != shape:
                raise ValueError(f"{name} has shape {list(values.shape)}, but this plan needs {list(shape)}")
            least = (
                -np.inf if name == "late_bytes" else 0.0
            )  # negative where kept activations are already freed
            if not (np.isfinite(values).all() and values.min(initial=0.0) >= least):
                raise ValueError(f"{name} must be finite and not negative")
        return costs


def _check_numbers(costs: StepCosts) -> None:
    """Raise ValueError for values that are not numbers or below 0. Links may be infinitely fast."""
    cluster = costs.cluster
    groups = () if cluster is None else (cluster, *cluster.parts)
    places = [place for one in groups for place in (one, one.inside, one.between, one.reserve)]
    values = [getattr(place, field.name) for place in places for field in fields(place)]
    numbers = [value for value in values if not isinstance(value, Link | MemoryReserve | str | tuple)]
    numbers += [*costs.item_tokens.values()]
    numbers += [*costs.sync.beside.values(), *costs.sync.after.values()]
    pairs = [number for one in costs.media_pairs.values() for three in one.values() for number in three]
    if not (
        all(isinstance(number, int | float) and number >= 0 for number in numbers)
        and np.isfinite(pairs).all()
    ):
        raise ValueError("tokens, seconds and links must be numbers and not negative")


def token_costs(plan: Plan, backward: tuple[bool, ...]) -> StepCosts:
    """Return default costs: a token takes each stage one second forward, and two backward if there is a backward.

    backward: by stage number, as `Trainability.backward`. Suitable for ratios of work, not for predictions.
    """
    count = len(plan.stages())
    seconds = np.zeros((count, len(KIND_ORDER), 3))
    seconds[:, 0, 1] = 1.0
    seconds[:, 1, 1] = np.where(backward, 2.0, 0.0)
    seconds[:, 2:, 1] = seconds[:, 1:2, 1] / 2
    nothing = np.zeros((count, 3))
    none, late = np.zeros(count), np.zeros((count, 2, 3))
    bytes_ = (nothing, nothing, nothing, nothing, none, none, none, none, late)
    stages = StageCosts(seconds, *bytes_, items_per_token=np.ones(count))
    return StepCosts(stages, origin=TOKENS)


TOKENS = "unknown, so tokens are counted"
"""The origin of `token_costs`."""
