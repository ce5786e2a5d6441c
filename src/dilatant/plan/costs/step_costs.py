"""What the steps of one plan cost: numbers that planner and trainer share, so that what is simulated is executed."""

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

BY_STAGE = ("gradient_bytes", "sum_bytes", "own_gradient_bytes")
"""One number each, which older files do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """Costs of every stage of a plan, and what is needed to turn them into the seconds of a step.

    item_tokens: unit → tokens of one item (image, clip), of units in which the items of a sample do not attend to each
    other; a sample's square is then that of one item, times their number. media_pairs: what media masks change of it.
    dense: as in `Workload`. cluster: whose links messages and gradients take; None counts neither. sync: of gradients
    and updated weights, by `plan.sync_time`. origin: in words, where the numbers are from ("measured on H100").
    """

    stages: StageCosts
    item_tokens: Mapping[str, float] = field(default_factory=dict)
    dense: Mapping[str, DenseRows] = field(default_factory=dict)
    media_pairs: MediaPairs = field(default_factory=dict)
    cluster: Cluster | None = None
    sync: SyncSeconds = field(default_factory=SyncSeconds)
    origin: str = ""

    def workload(self, tokens: Mapping[str, NDArray[np.float64]]) -> Workload:
        """Samples of `tokens[unit]` [samples] as these costs count them."""
        return Workload(tokens, squares_of(tokens, self.item_tokens, self.media_pairs), self.dense)

    def scaled(self, factors: NDArray[np.float64]) -> StepCosts:
        """The costs with `seconds` times `factors` [stages, kinds, 3]."""
        return replace(self, stages=replace(self.stages, seconds=self.stages.seconds * factors))

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON, which `from_document` reads back to the very same numbers."""
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
        """Read what `to_document` wrote for `plan`. Raises ValueError when it is something else, or of another plan."""
        try:
            count = len(plan.stages())
            nothing = [0.0] * count  # in older files
            older = {**dict.fromkeys(BY_STAGE, nothing), "late_bytes": [[[0.0] * 3] * 2] * count}
            older["items_per_token"] = [1.0] * count
            by_name = {**older, **document["stages"]}
            arrays = {one.name: np.asarray(by_name[one.name], dtype=np.float64) for one in fields(StageCosts)}
            cluster = document["cluster"]
            sync = (
                document["sync"] if "sync" in document else {"beside": document["sync_seconds"]}
            )  # older files
            if cluster is not None:
                cluster = Cluster.from_document(cluster)
            costs = cls(
                StageCosts(**arrays),
                {unit: float(tokens) for unit, tokens in document["item_tokens"].items()},
                {unit: DenseRows.from_document(rows) for unit, rows in document["dense"].items()},
                {
                    unit: {name: (float(a), float(b), float(c)) for name, (a, b, c) in encoders.items()}
                    for unit, encoders in document.get("media_pairs", {}).items()
                },
                cluster,
                SyncSeconds(
                    **{
                        name: {int(rank): float(seconds) for rank, seconds in one.items()}
                        for name, one in sync.items()
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
                **dict.fromkeys(("static_bytes", "items_per_token", *BY_STAGE), (count,)),
            }.get(name, (count, 3))
            if values.shape != shape:
                raise ValueError(f"{name} has shape {list(values.shape)}, but this plan needs {list(shape)}")
            least = (
                -np.inf if name == "late_bytes" else 0.0
            )  # less than what is kept, for what has gone by then
            if not (np.isfinite(values).all() and values.min(initial=0.0) >= least):
                raise ValueError(f"{name} must be finite and not negative")
        return costs


def _check_numbers(costs: StepCosts) -> None:
    """Raise ValueError for what is no number, or below 0. A link may be without bounds."""
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
    """Where nothing is known: a token costs every stage one second forward, and two backward where it has one.

    backward: by stage number, as `Trainability.backward`. Good for shares of work, not for predictions.
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
