"""Step costs of one plan: numbers shared by planner and trainer, so that the simulated step is the executed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.cost.dense import DenseRows
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
        """Return the costs with `seconds` multiplied by `factors` [stages, kinds, 3]. Factors other than 1 are
        measured, so that they include the host's seconds."""
        seconds = self.stages.seconds * factors
        host = np.where((factors == 1.0).all(axis=-1), self.stages.host_seconds, 0.0)
        return replace(self, stages=replace(self.stages, seconds=seconds, host_seconds=host))

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_document` reads back to exactly the same numbers."""
        document: dict[str, Any] = msgspec.to_builtins(self, str_keys=True, enc_hook=np.ndarray.tolist)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], plan: Plan) -> StepCosts:
        """Read the output of `to_document` for `plan`. Raises ValueError for other content or another plan."""
        alike = token_costs(plan, (True,) * len(plan.stages())).stages
        try:
            # Documents of older versions have no seconds of the host or of gathers, and no bytes of forwards.
            later = {name: getattr(alike, name) for name in ("host_seconds", "shard_bytes", "gather_seconds")}
            stages = {**later, "forward_bytes": document["stages"]["transient_bytes"], **document["stages"]}
            arrays = {one.name: np.asarray(stages[one.name], dtype=np.float64) for one in fields(StageCosts)}
            others = {name: msgspec.convert(document[name], kind, str_keys=True) for name, kind in _READ.items()}
            costs = cls(StageCosts(**arrays), **others)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not the costs of a step: {type(error).__name__}: {error}") from error
        positive = _numbers([document[name] for name in ("item_tokens", "cluster", "sync")])
        pairs = [*_numbers(document["media_pairs"])]
        if not (all(number >= 0 for number in positive) and np.isfinite(pairs).all()):  # links may be infinitely fast
            raise ValueError("tokens, seconds and links must be numbers and not negative")
        if arrays["seconds"].shape[:1] != (count := len(plan.stages()),):
            raise ValueError(f"they are not of the {count} stages that this plan has")
        for name, values in arrays.items():
            if values.shape != (shape := getattr(alike, name).shape):
                raise ValueError(f"{name} has shape {list(values.shape)}, but this plan needs {list(shape)}")
            # Late bytes are negative where kept activations are already freed.
            least = -np.inf if name in ("late_bytes", "shard_bytes") else 0.0
            if not (np.isfinite(values).all() and values.min(initial=0.0) >= least):
                raise ValueError(f"{name} must be finite and not negative")
        return costs


_READ: Mapping[str, Any] = {
    "item_tokens": dict[str, float],
    "dense": dict[str, DenseRows],
    "media_pairs": dict[str, dict[str, tuple[float, float, float]]],
    "cluster": Cluster | None,
    "sync": SyncSeconds,
    "origin": str,
}
"""Field of `StepCosts` → its type in a document."""


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in nested lists and mappings."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)


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
    bytes_ = (nothing, nothing, nothing, nothing, nothing, none, none, none, none, late)
    host, gathers = np.zeros((count, len(KIND_ORDER))), np.zeros((count, 2))
    stages = StageCosts(seconds, *bytes_, np.ones(count), host, np.zeros((count, 3, 3)), gathers)
    return StepCosts(stages, origin=TOKENS)


TOKENS = "unknown, so tokens are counted"
"""The origin of `token_costs`."""
