"""Cost correction: scale the costs for planning later steps by measured action times, identically on all ranks.

Every rank sums the normal equations of its own actions: measured seconds against the quadratic, linear and fixed parts
of the predicted cost. These few sums are exchanged with the agreement that commits a step, so all ranks know the totals
and derive the same factors. New factors take effect at a later step number, which every rank derives, so ranks that
plan ahead use the same factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.plan.costs.stage_costs import KIND_ORDER
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.step.stragglers import Slowness

INTERVAL = 16
"""Number of steps that share one set of factors. The factors of an interval are fixed when the preceding interval
begins, so a step may be planned at least this many steps ahead."""
FORGETTING = 0.95
"""Decay of the sums per step: an average over about twenty steps."""
IGNORED_STEPS = 2
"""Number of steps after a start that are ignored, since buffers are allocated and kernels chosen in them."""
RIDGE = 2e-3
"""Strength of the ridge terms that pull a unit's part factors towards one common factor, and that factor towards 1."""
DRIFT = 1.5
"""Warn the user when the ratio of measured to predicted time exceeds this, or is below its inverse."""

PARTS = 3
_SUMS = 9
_TRIANGLE = np.triu_indices(PARTS)


@dataclass(frozen=True, slots=True, eq=False)
class RankWork:
    """Predicted cost of one rank's actions in a step, in order: `parts [actions, 3]` in seconds (quadratic, linear,
    fixed) and `group [actions]`, numbered by `CostCorrection.group_of`."""

    parts: NDArray[np.float64]
    group: NDArray[np.int64]


class _State(msgspec.Struct):
    origin: str
    units: list[str]
    finished: int | None
    sums: list[list[float]]
    versions: dict[int, list[list[float]]]
    slowness: dict[str, list[Any]] = {}
    slow: dict[int, list[float]] = {}


class CostCorrection:
    """The corrected costs of one run. Steps are finished in order; `costs_at` may be called from any thread.

    There is a factor for each unit and direction (forward, backward), and on mixed hardware for each device type of a
    unit.

    enabled: if False, only record measurements; `costs_at` always returns `origin`.
    """

    def __init__(self, plan: Plan, origin: StepCosts, enabled: bool = True) -> None:
        self.origin = origin
        self.drift: Mapping[str, float] = {}
        names = [_name(placed, origin) for placed in plan.stages()]
        self._units = list(dict.fromkeys(names))
        unit = np.asarray([self._units.index(name) for name in names])
        backward = np.asarray([kind != "F" for kind in KIND_ORDER], dtype=np.int64)
        self._group = 2 * unit[:, None] + backward  # [stages, kinds]
        self._enabled = enabled
        shares_items = origin.stages.items_per_token < 1
        self.slowness = Slowness(
            plan, [p.stage.ranks for p in plan.stages() if p.stage.degrees.row_parts > 1 and shares_items[p.index]]
        )
        self._slow: dict[int, NDArray[np.float64]] = {0: self.slowness.factors}
        self._sums = np.zeros((2 * len(self._units), _SUMS))
        self._versions: dict[int, NDArray[np.float64]] = {0: np.ones((2 * len(self._units), PARTS))}
        self._costs: dict[int, StepCosts] = {0: origin}
        self._finished: int | None = None
        self._settling = IGNORED_STEPS
        self._warned = False
        self._lock = Lock()

    @property
    def num_sums(self) -> int:
        """Length of the list that `own` returns."""
        return self._sums.size + self.slowness.num_sums

    def costs_at(self, step: int) -> StepCosts:
        """Return the costs with which every rank plans step `step`. Raises RuntimeError if they are not known yet."""
        with self._lock:
            interval = step // INTERVAL
            if self._finished is None:
                self._finished = step
            if self._enabled and (interval - 1) * INTERVAL > self._finished:
                raise RuntimeError(
                    f"step {step} cannot be planned before step {(interval - 1) * INTERVAL - 1} is done; plan at most "
                    f"{INTERVAL} steps ahead"
                )
            version = self._version(interval)
            if version not in self._costs:
                factors = self._versions[version][self._group]
                slow = self.slowness.by_stage(self._slow[version])
                self._costs[version] = self.origin.scaled(factors * slow[:, None, None])
            return self._costs[version]

    def is_corrected_at(self, step: int) -> bool:
        """Return True if `costs_at(step)` includes measurements."""
        with self._lock:
            return self._version(step // INTERVAL) > 0

    def _version(self, interval: int) -> int:
        return max(number for number in self._versions if number <= interval or number == 0)

    def group_of(self, stage: NDArray[np.signedinteger], kind: NDArray[np.signedinteger]) -> NDArray[np.int64]:
        """Return `RankWork.group` for actions given by stage number and index in `KIND_ORDER`."""
        return self._group[stage, kind]

    def own(self, rank: int, work: RankWork, seconds: Sequence[float]) -> list[float]:
        """Return this rank's sums for a step whose actions took `seconds`; `finish` needs the total over all ranks."""
        measured, predicted = np.asarray(seconds, dtype=np.float64), work.parts.sum(axis=1)
        sums = np.zeros(self._sums.shape)
        if len(measured) == len(predicted):
            # Errors are weighted relative to the prediction, so that long actions do not dominate the fit.
            known = predicted > 0
            weight = np.where(known, 1.0 / np.where(known, predicted, 1.0), 0.0)
            products = work.parts[:, _TRIANGLE[0]] * work.parts[:, _TRIANGLE[1]]
            np.add.at(sums, work.group, np.hstack([products, work.parts * measured[:, None]]) * weight[:, None])
        with self._lock:
            newest = self._versions[max(self._versions)]
        corrected = (work.parts * newest[work.group]).sum(axis=1)
        return [*sums.ravel().tolist(), *self.slowness.own(rank, seconds, corrected)]

    def finish(self, step: int, summed: Sequence[float]) -> str | None:
        """Record that all ranks finished step `step` and that their sums add up to `summed`. Returns a warning for the
        user, at most once per run, when a unit's times differ much from the costs."""
        everything = np.asarray(summed, dtype=np.float64)
        now = everything[: self._sums.size].reshape(self._sums.shape)
        self.drift = self._drift_of(now)
        with self._lock:
            self._finished = step + 1
            if self._settling:
                self._settling -= 1
            elif np.isfinite(now).all():
                self._sums = FORGETTING * self._sums + now
                self.slowness.add(everything[self._sums.size :])
            if (step + 1) % INTERVAL == 0:
                decided = (step + 1) // INTERVAL + 1
                self._versions[decided] = np.stack([_factors(sums) for sums in self._sums])
                self._slow[decided] = self.slowness.decide()
                for old in sorted(self._versions)[:-4]:
                    if old:
                        self._costs.pop(old, None)
                        del self._versions[old], self._slow[old]
        return self._warning() if (step + 1) % INTERVAL == 0 else None

    def to_json(self) -> str:
        """Serialize the state between two steps, for a checkpoint."""
        with self._lock:
            versions, slow = (
                {number: factors.tolist() for number, factors in by_version.items()}
                for by_version in (self._versions, self._slow)
            )
            slowness = self.slowness.to_document()
            sums = self._sums.tolist()
            state = _State(self.origin.origin, self._units, self._finished, sums, versions, slowness, slow)
        return msgspec.json.encode(state).decode()

    def from_json(self, text: str) -> None:
        """Restore the state that `to_json` wrote. A state with other units or costs of another origin is ignored, since
        its factors mean something else. Raises ValueError for malformed input."""
        try:
            state = msgspec.json.decode(text, type=_State)
            sums = np.asarray(state.sums)
            versions = {number: np.asarray(factors) for number, factors in state.versions.items()}
        except ValueError as error:
            raise ValueError(f"not the state of a run's costs: {type(error).__name__}: {error}") from error
        if (state.origin, state.units) != (self.origin.origin, self._units):
            return
        shapes = {factors.shape for factors in versions.values()}
        if sums.shape != self._sums.shape or shapes != {(len(self._sums), PARTS)} or 0 not in versions:
            raise ValueError("not the state of a run's costs: its arrays have other shapes")
        with self._lock:
            self._sums, self._versions, self._finished = sums, versions, state.finished
            self._costs = {}
            even = np.ones(len(self.slowness.factors))
            slow = {number: np.asarray(factors) for number, factors in state.slow.items()}
            if slow.keys() != versions.keys() or not self.slowness.from_document(state.slowness):
                slow = {}  # saved for other ranks
            self._slow = {number: slow.get(number, even) for number in versions}

    def _drift_of(self, sums: NDArray[np.float64]) -> dict[str, float]:
        """Return unit → measured over predicted seconds by the original costs, for units that had work."""
        drift = {}
        for index, name in enumerate(self._units):
            both = sums[2 * index] + sums[2 * index + 1]
            predicted, measured = _matrix(both).sum(), both[6:].sum()
            if predicted > 0 and np.isfinite(measured):
                drift[name] = float(measured / predicted)
        return drift

    def _warning(self) -> str | None:
        drifted = {name: drift for name, drift in self._drift_of(self._sums).items() if not 1 / DRIFT <= drift <= DRIFT}
        if self._warned or not drifted or not self.origin.origin.startswith("measured"):
            return None
        self._warned = True
        listed = ", ".join(f"{name} {drift:.2f} times" for name, drift in drifted.items())
        return (
            f"actions take other times than the costs ({self.origin.origin}) say: {listed}. Is the machine shared? "
            "Otherwise measure again with `dilatant profile`, and plan again"
        )


def _name(placed: PlacedStage, costs: StepCosts) -> str:
    """Return the name under which a stage shares factors: its unit and, on mixed hardware, its device type."""
    cluster = costs.cluster
    if cluster is None or not cluster.parts:
        return placed.unit
    return f"{placed.unit} on {cluster.at(placed.stage.ranks[0]).name}"


def _factors(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit non-negative factors [3] of the cost parts to the measurements; ones where nothing was measured."""
    matrix, right = _matrix(sums), sums[6:]
    predicted = matrix.sum()
    if predicted <= 0:
        return np.ones(PARTS)
    common = (right.sum() / predicted + RIDGE) / (1 + RIDGE)
    present = np.flatnonzero(np.diag(matrix) > 0)
    best, least = np.full(PARTS, common), np.inf
    for count in range(1, len(present) + 1):
        for chosen in combinations(present.tolist(), count):
            at = np.ix_(chosen, chosen)
            ridge = RIDGE * predicted
            found = np.full(PARTS, common)
            found[present] = 0.0
            found[list(chosen)] = np.linalg.solve(
                matrix[at] + ridge * np.eye(count), right[list(chosen)] + ridge * common
            )
            if (found < 0).any():
                continue
            cost = found @ matrix @ found - 2 * found @ right + ridge * ((found - common) ** 2).sum()
            if cost < least:
                best, least = found, cost
    return best


def _matrix(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    matrix = np.zeros((PARTS, PARTS))
    matrix[_TRIANGLE] = sums[:6]
    return np.maximum(matrix, matrix.T)
