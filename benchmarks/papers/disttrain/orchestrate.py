"""Disaggregated orchestration (DistTrain): replicas, tensor-parallel and pipeline degree for each module separately."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dilatant.cost.memory import bytes_text
from dilatant.plan.errors import BatchError, DoesNotFitError, PlanError, TooFewDevicesError


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """A unit in DistTrain's model: equal layers.

    `seconds[tp]` is forward plus backward of the whole module for one sample (without frozen parts). Bytes are the
    whole module's: `state_bytes` of parameters and gradients, `optimizer_bytes`, which the replicas shard (ZeRO-1),
    `activation_bytes` of one sample between forward and backward.
    """

    name: str
    layers: int
    seconds: Mapping[int, float]
    state_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ModuleAllocation:
    """`replicas` chains of `pp` stages on `tp` GPUs each; a stage takes `stage_seconds` per microbatch."""

    name: str
    replicas: int
    tp: int
    pp: int
    stage_seconds: float

    @property
    def gpus(self) -> int:
        return self.replicas * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The allocation of every module, in the order encoders, language model, generators.

    A step takes `seconds`: `warm_up_seconds` for the first of `num_microbatches` microbatches (the language model's,
    per replica), then the slowest stage once for each of the others.
    """

    modules: tuple[ModuleAllocation, ...]
    seconds: float
    warm_up_seconds: float
    num_microbatches: int
    proven: bool
    lower_bound: float
    wall_seconds: float = field(default=0.0, compare=False)

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(module.gpus for module in self.modules)


def orchestrate(
    encoders: Sequence[ModuleCost],
    language_model: ModuleCost,
    generators: Sequence[ModuleCost],
    num_gpus: int,
    global_batch: int,
    microbatch_size: int = 1,
    capacity_bytes: float = math.inf,
) -> Orchestration:
    """Return the allocation with the least warm-up + (microbatches - 1) * slowest stage on at most `num_gpus`; exact.

    The search covers every number of replicas of every module that divides the microbatches of the global batch (the
    microbatches of another module are those of the language model times the ratio of their replicas, which need not be
    whole, as in the paper), every tensor degree in `seconds`, and every pipeline degree
    up to the layers. A stage holds ceil(layers / pp) layers. Microbatches of the language model have `microbatch_size`
    samples. In memory, the first stage of a module
    keeps as many microbatches as there are stages from it to the end of the longest path through the modules.

    Source: DistTrain 5.1-5.2. Rounding its convex relaxation loses 0.8 to 10 %; here dominated options are dropped and
    the others are combined by branch and bound. Raises BatchError when the global batch is no multiple of the
    microbatch size, DoesNotFitError or TooFewDevicesError when nothing fits.
    """
    started = time.perf_counter()
    from benchmarks.papers.disttrain.orchestrate_kernel import ANY_DEPTH, join

    modules = [*encoders, language_model, *generators]
    _check(modules, num_gpus, global_batch, microbatch_size)
    tables = [_LayoutTable.of(module, num_gpus) for module in modules]
    table = tables[len(encoders)]  # the language model's
    best, found = math.inf, None
    replicated = global_batch // microbatch_size
    for replicas in [d for d in range(1, min(num_gpus, replicated) + 1) if replicated % d == 0]:
        count = replicated // replicas
        limits = (replicas, microbatch_size, capacity_bytes, count)
        middle = table.options(*limits, exact=True)
        if not len(middle[0]) or float((middle[1][:, 2] + (count - 1) * middle[1][:, 1]).min()) >= best:
            continue
        before = _fold([one.options(*limits) for one in tables[: len(encoders)]], num_gpus, ANY_DEPTH)
        behind = tables[len(encoders) + 1 :]
        after = _fold([one.options(*limits, after=True) for one in behind], num_gpus, 0)
        stages = table.pp[middle[0]]
        if not len(before[1]) or not len(after[1]):
            continue
        seconds, b, m, a = join(before[1], middle[1], stages, after[1], num_gpus, count, best)
        if seconds < best:
            best, found = seconds, (replicas, [*before[0][b], int(middle[0][m]), *after[0][a]])
    if found is None:
        raise _nothing_fits(modules, num_gpus, replicated, microbatch_size, capacity_bytes)
    replicas, rows = found
    allocations = tuple(one.allocation(row, replicas, microbatch_size) for one, row in zip(tables, rows, strict=True))
    slowest = max(one.stage_seconds for one in allocations)
    return Orchestration(
        modules=allocations,
        seconds=best,
        warm_up_seconds=best - (replicated // replicas - 1) * slowest,
        num_microbatches=replicated // replicas,
        proven=True,
        lower_bound=best,
        wall_seconds=time.perf_counter() - started,
    )


Options = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _LayoutTable:
    """All (replicas, tp, pp) of one module on at most the allowed GPUs, by ascending GPUs."""

    module: ModuleCost
    gpus: np.ndarray
    replicas: np.ndarray
    tp: np.ndarray
    pp: np.ndarray
    seconds: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, module: ModuleCost, num_gpus: int) -> _LayoutTable:
        # Among pipeline degrees with equally large stages only the smallest can be best.
        degrees = sorted({-(-module.layers // -(-module.layers // pp)) for pp in range(1, module.layers + 1)})
        tp, pp, replicas = (
            grid.ravel()
            for grid in np.meshgrid(sorted(module.seconds), degrees, np.arange(1, num_gpus + 1), indexing="ij")
        )
        gpus = tp * pp * replicas
        allowed = np.flatnonzero(gpus <= num_gpus)
        rows = allowed[np.argsort(gpus[allowed], kind="stable")]
        times = np.zeros(max(module.seconds) + 1)
        times[list(module.seconds)] = list(module.seconds.values())
        share = -(-module.layers // pp[rows]) / module.layers
        return cls(module, gpus[rows], replicas[rows], tp[rows], pp[rows], times[tp[rows]], share)

    def options(
        self, replicas: int, samples: int, capacity: float, count: int, *, exact: bool = False, after: bool = False
    ) -> Options:
        """Return (row numbers, options) whose number of replicas divides `replicas` times `count` (or, if `exact`,
        equals `replicas`)."""
        from benchmarks.papers.disttrain.orchestrate_kernel import ModuleBytes, ModuleLayouts, frontier

        rows = np.flatnonzero(self.replicas == replicas if exact else replicas * count % self.replicas == 0)
        columns = self.gpus, self.replicas, self.tp, self.pp, self.seconds, self.share
        ways, module = ModuleLayouts(*(column[rows] for column in columns)), self.module
        held = ModuleBytes(float(module.state_bytes), float(module.optimizer_bytes), float(module.activation_bytes))
        kept, options = frontier(ways, held, float(capacity), replicas, samples, after, count, exact)
        return rows[kept], options

    def allocation(self, row: int, replicas: int, samples: int) -> ModuleAllocation:
        own = int(self.replicas[row])
        seconds = float(self.seconds[row]) * samples * (replicas / own) * float(self.share[row])
        return ModuleAllocation(self.module.name, own, int(self.tp[row]), int(self.pp[row]), seconds)


def _fold(tables: Iterable[Options], num_gpus: int, depth: int) -> tuple[list[list[int]], np.ndarray]:
    """Return the joint options of several modules: (row numbers of each, options); without modules, no GPUs."""
    from benchmarks.papers.disttrain.orchestrate_kernel import combine

    rows: list[list[int]] | None = None
    joint = np.array([[0.0, 0.0, 0.0, depth]])
    for own, options in tables:
        if rows is None:
            rows, joint = [[row] for row in own.tolist()], options
        else:
            one, other, joint = combine(joint, options, num_gpus)
            rows = [[*rows[i], int(own[j])] for i, j in zip(one.tolist(), other.tolist())]
    return [[]] if rows is None else rows, joint


def _check(modules: Sequence[ModuleCost], num_gpus: int, global_batch: int, microbatch_size: int) -> None:
    for module in modules:
        if module.layers < 1 or not module.seconds or min(module.seconds) < 1:
            raise PlanError(f"unit {module.name!r} needs layers and seconds for at least one tensor degree")
    if microbatch_size < 1 or global_batch < 1 or global_batch % microbatch_size:
        low = global_batch // max(microbatch_size, 1) * microbatch_size
        nearest = tuple(n for n in (low, low + microbatch_size) if n > 0)
        raise BatchError(
            f"a global batch of {global_batch} does not divide into microbatches of {microbatch_size}; "
            f"the nearest batches that do are {' and '.join(map(str, nearest))}",
            nearest,
        )
    needed = sum(min(module.seconds) for module in modules)
    if num_gpus < needed:
        raise TooFewDevicesError(
            f"{len(modules)} units on devices of their own need at least {needed} devices, there are {num_gpus}"
        )


def _nothing_fits(
    modules: Sequence[ModuleCost], num_gpus: int, replicated: int, microbatch_size: int, capacity: float
) -> PlanError:
    """Build the error: the module that is too large even alone on all GPUs and its excess, or all modules together."""
    problems = []
    for module in modules:
        table = _LayoutTable.of(module, num_gpus)
        if not any(
            len(table.options(replicas, microbatch_size, capacity, replicated // replicas, exact=True)[0])
            for replicas in range(1, min(num_gpus, replicated) + 1)
            if replicated % replicas == 0
        ):
            tp, pp = table.tp, table.pp
            held = module.activation_bytes * microbatch_size * np.minimum(pp, replicated // table.replicas)
            static = module.state_bytes + module.optimizer_bytes / table.replicas
            least = float(((static + held) * table.share / tp).min())
            problems.append((least - capacity, module.name))
    if problems:
        excess, name = max(problems)
        return DoesNotFitError(
            f"unit {name!r} does not fit devices of {bytes_text(capacity)}: laid out as thinly as {num_gpus} "
            f"devices allow it needs {bytes_text(excess)} more on each"
        )
    return DoesNotFitError(
        f"each unit fits {num_gpus} devices of {bytes_text(capacity)}, but not all of them together; "
        "add devices or use smaller microbatches"
    )
