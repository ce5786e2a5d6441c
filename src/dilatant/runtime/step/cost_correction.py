"""Costs that follow measurements: what actions took corrects what the next steps are planned by, alike on all ranks.

Every rank adds up the normal equations of its own actions: measured seconds over the square, linear and fixed parts
that the costs gave them. These few sums travel with the agreement that a step commits, so all ranks know the same
totals and derive the same factors. Factors count from a later step on, which every rank knows by its number: whoever
plans ahead plans with the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.costs.stage_costs import KIND_ORDER
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.runtime.step.stragglers import Slowness

INTERVAL = 16
"""Steps for which the factors stay. Those of an interval are decided when the one before it begins, so a step may be
planned at least this many steps ahead."""
FORGETTING = 0.95
"""What a step's sums weigh after each further step: about the last twenty count."""
UNSETTLED = 2
"""First steps after a start, which are not counted: buffers are allocated and kernels chosen in them."""
RIDGE = 2e-3
"""How strongly the parts of a unit are held to one common factor, and that to 1, against what was measured."""
DRIFT = 1.5
"""Times more or less than the costs say from which on the user is told."""

PARTS = 3
_SUMS = 9
_TRIANGLE = np.triu_indices(PARTS)


@dataclass(frozen=True, slots=True, eq=False)
class OwnWork:
    """What the costs say of one rank's actions of a step, in their order: `parts [actions, 3]` seconds, square, linear
    and fixed; `group [actions]`, as `CostCorrection.group_of` numbers them."""

    parts: NDArray[np.float64]
    group: NDArray[np.int64]


class CostCorrection:
    """The costs of one run as they are corrected. Steps are finished one after another; `costs_at` may be called from
    any thread.

    Factors are of a unit, of unlike devices of a unit on one group of them; and for each direction.

    enabled: False only observes, and `costs_at` stays at `origin`.
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
            plan, [one.stage.ranks for one in plan.stages() if one.stage.cp > 1 and shares_items[one.index]]
        )
        self._slow: dict[int, NDArray[np.float64]] = {0: self.slowness.factors}
        self._sums = np.zeros((2 * len(self._units), _SUMS))
        self._versions: dict[int, NDArray[np.float64]] = {0: np.ones((2 * len(self._units), PARTS))}
        self._costs: dict[int, StepCosts] = {0: origin}
        self._finished: int | None = None
        self._settling = UNSETTLED
        self._warned = False
        self._lock = Lock()

    @property
    def num_sums(self) -> int:
        """Numbers of `own`."""
        return self._sums.size + self.slowness.num_sums

    def costs_at(self, step: int) -> StepCosts:
        """The costs that step `step` is planned by, on every rank. Raises RuntimeError for a step so far ahead that
        they are not known."""
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
        """Return whether measurements are in `costs_at(step)`."""
        with self._lock:
            return self._version(step // INTERVAL) > 0

    def _version(self, interval: int) -> int:
        return max(number for number in self._versions if number <= interval or number == 0)

    def group_of(
        self, stage: NDArray[np.signedinteger], kind: NDArray[np.signedinteger]
    ) -> NDArray[np.int64]:
        """`OwnWork.group` of actions, by stage number and place in `KIND_ORDER`."""
        return self._group[stage, kind]

    def own(self, rank: int, work: OwnWork, seconds: Sequence[float]) -> list[float]:
        """The sums of a step of `rank`, its actions having taken `seconds`: all ranks' are added up for `finish`."""
        measured, predicted = np.asarray(seconds, dtype=np.float64), work.parts.sum(axis=1)
        sums = np.zeros(self._sums.shape)
        if len(measured) == len(predicted):
            # Errors count relative to what was predicted, so that long actions do not decide alone.
            known = predicted > 0
            weight = np.where(known, 1.0 / np.where(known, predicted, 1.0), 0.0)
            products = work.parts[:, _TRIANGLE[0]] * work.parts[:, _TRIANGLE[1]]
            np.add.at(
                sums, work.group, np.hstack([products, work.parts * measured[:, None]]) * weight[:, None]
            )
        with self._lock:
            newest = self._versions[max(self._versions)]
        corrected = (work.parts * newest[work.group]).sum(axis=1)
        return [*sums.ravel().tolist(), *self.slowness.own(rank, seconds, corrected)]

    def finish(self, step: int, summed: Sequence[float]) -> str | None:
        """Step `step` is done on all ranks, whose sums add up to `summed`. Returns what to tell the user, once: that a
        unit takes much more or less than the costs say."""
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
        """The state between two steps, for a checkpoint."""
        with self._lock:
            return json.dumps(
                {
                    "origin": self.origin.origin,
                    "units": self._units,
                    "finished": self._finished,
                    "sums": self._sums.tolist(),
                    "versions": {str(number): factors.tolist() for number, factors in self._versions.items()},
                    "slowness": self.slowness.to_document(),
                    "slow": {str(number): factors.tolist() for number, factors in self._slow.items()},
                }
            )

    def from_json(self, text: str) -> None:
        """Go on from what `to_json` wrote. A state of other units or of costs from elsewhere is left aside: its factors
        mean something else. Raises ValueError when it is no such state."""
        try:
            state = json.loads(text)
            same = state["origin"] == self.origin.origin and state["units"] == self._units
            sums = np.asarray(state["sums"], dtype=np.float64)
            versions = {int(n): np.asarray(f, dtype=np.float64) for n, f in state["versions"].items()}
            finished = None if state["finished"] is None else int(state["finished"])
            slow = {int(n): np.asarray(f, dtype=np.float64) for n, f in state.get("slow", {}).items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the state of a run's costs: {type(error).__name__}: {error}") from error
        if not same:
            return
        shapes = {factors.shape for factors in versions.values()}
        if sums.shape != self._sums.shape or shapes != {(len(self._sums), PARTS)} or 0 not in versions:
            raise ValueError("not the state of a run's costs: its arrays have other shapes")
        with self._lock:
            self._sums, self._versions, self._finished = sums, versions, finished
            self._costs = {}
            nobody = np.ones(len(self.slowness.factors))
            if slow.keys() != versions.keys() or not self.slowness.from_document(state["slowness"]):
                slow = {}  # other ranks
            self._slow = {number: slow.get(number, nobody) for number in versions}

    def _drift_of(self, sums: NDArray[np.float64]) -> dict[str, float]:
        """Unit → measured over predicted seconds, of the origin's costs; only of units that had work."""
        drift = {}
        for index, name in enumerate(self._units):
            both = sums[2 * index] + sums[2 * index + 1]
            predicted, measured = _matrix(both).sum(), both[6:].sum()
            if predicted > 0 and np.isfinite(measured):
                drift[name] = float(measured / predicted)
        return drift

    def _warning(self) -> str | None:
        far = {
            name: drift
            for name, drift in self._drift_of(self._sums).items()
            if not 1 / DRIFT <= drift <= DRIFT
        }
        if self._warned or not far or not self.origin.origin.startswith("measured"):
            return None
        self._warned = True
        listed = ", ".join(f"{name} {drift:.2f} times" for name, drift in far.items())
        return (
            f"actions take other times than the costs ({self.origin.origin}) say: {listed}. Is the machine shared? "
            "Otherwise measure again with `dilatant profile`, and plan again"
        )


def _name(placed: PlacedStage, costs: StepCosts) -> str:
    """What has factors of its own: a unit, of unlike devices on each group of them."""
    cluster = costs.cluster
    if cluster is None or not cluster.parts:
        return placed.unit
    return f"{placed.unit} on {cluster.at(placed.stage.ranks[0]).name}"


def _factors(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors [3] of the parts that predict best what was measured, none negative; ones where nothing was."""
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
