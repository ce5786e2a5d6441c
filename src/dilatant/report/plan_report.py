"""Plan report: every fact of the plan page as one plain value.

The page, the terminal table and `--json` show this value and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import msgspec

from dilatant.cost.published_runs import PublishedRun
from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """Description of a unit. `role` is "encoder", "language model" or "generator"; `model` is a readable name."""

    name: str
    role: str
    model: str
    layers: int
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True, slots=True)
class FewestDevices:
    """The smallest number of `devices` on which the run was found to fit, and its seconds of a step there."""

    devices: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class OtherFramework:
    """The fastest plan that another framework can run. `command` has its `flags` as one line; seconds of a step are
    None if nothing fits; sentences say its memory, what it cannot express and what that costs. models: what is to be
    said of the model there before its flags are read; "" for nothing."""

    name: str
    command: str
    flags: dict[str, str | int]
    step_seconds: float | None
    sentences: tuple[str, ...]
    models: str = ""


@dataclass(frozen=True, slots=True)
class SizeDistribution:
    """Tokens per sample in one unit: `counts[i]` samples have `edges[i] <= tokens < edges[i + 1]`.

    The last bin includes its upper edge. `samples` were counted; those without work in the unit count as 0.
    """

    unit: str
    samples: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float
    median: float
    p95: float
    largest: float


@dataclass(frozen=True, slots=True)
class WorkloadRatio:
    """Division of a step's compute among units, with its uncertainty.

    `shares[unit]` sum to 1; `low` and `high` bound each share with `confidence`. `stable_batch` is Entrain's b_min:
    batches at least this large keep leading to the same allocation of devices.
    """

    shares: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    confidence: float
    samples: int
    global_batch: int
    stable_batch: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak bytes by use on each of `ranks`, and the device's capacity."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    bytes_by_use: dict[str, int]
    capacity_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes_by_use.values())

    @property
    def fraction(self) -> float:
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """A plan that was considered.

    `idle`: fraction of device time lost by cause; `why`: one sentence. `sync_seconds`: time after the last backward
    until gradients are summed and updated weights are shared. `recomputed`: layers that recompute their forward, "" for
    none. `peak_memory`: the largest fraction of device memory that any rank needs; above 1 the plan does not fit.
    """

    name: str
    layout: str
    devices: int
    step_seconds: float
    peak_memory: float
    idle: dict[str, float]
    chosen: bool = False
    why: str = ""
    sync_seconds: float = 0.0
    recomputed: str = ""


@dataclass(frozen=True, slots=True)
class SearchedPlans:
    """Counts of the candidates with one encoder position and number of pipelines.

    `cut` candidates cannot beat the chosen plan by their bounds; `bound_seconds` is the least bound of all; `left` were
    less promising than those simulated. `step_seconds`: the fastest simulated plan that fits.
    """

    name: str
    candidates: int
    simulated: int
    overflowed: int
    cut: int
    left: int
    bound_seconds: float
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A group of equal devices in a heterogeneous cluster; its nodes and ranks follow those of the previous group."""

    name: str
    device: str
    nodes: int
    gpus_per_node: int
    ports: int


@dataclass(frozen=True, slots=True)
class WhyNotFacts:
    """A layout that a user asked about, and why it was not chosen."""

    asked: str
    answer: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All facts about a plan before (and, with `measured`, after) it runs.

    `cost_source`: origin of the times ("measured on ...", "analytic: ..."). `lower_bound_seconds`: a step time that no
    searched plan can beat; `proven`: no searched plan is faster; `searched` describes the searched plans, `groups`
    counts them. `device_groups`: empty for equal devices. `zero`: sharding of optimizer state, `shard`: unit →
    what else is sharded. `fewest`: the smallest cluster that was asked for. `framework`: the plan for another one.
    `mean_seconds`: of the simulated steps of a plan that was not compared with others. `measured`: a step of the run;
    `remodelled`: the actions of that step as predicted, where `timeline` is a typical step.
    `nearest`: published runs most like it, whose steps were modelled, too.
    `limits`: why the model cannot be cut or packed like others, a line each. `reasons` for this plan, `advice` and
    `warnings` are sentences from the planner, shown unchanged.
    """

    title: str
    hardware: str
    cost_source: str
    schedule: str
    plan: Plan
    units: tuple[UnitFacts, ...]
    timeline: GanttChart
    global_batch: int
    sizes: tuple[SizeDistribution, ...] = ()
    ratio: WorkloadRatio | None = None
    memory: tuple[MemoryUse, ...] = ()
    candidates: tuple[ComparedPlan, ...] = ()
    lower_bound_seconds: float | None = None
    proven: bool = False
    planning_seconds: float | None = None
    allocated_devices: int | None = None
    measured: GanttChart | None = None
    remodelled: GanttChart | None = None
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nearest: tuple[PublishedRun, ...] = ()
    searched: str = ""
    groups: tuple[SearchedPlans, ...] = ()
    why_not: tuple[WhyNotFacts, ...] = ()
    gpus_per_node: int | None = None
    ports_per_node: int = 1
    device_groups: tuple[DeviceGroup, ...] = ()
    zero: str = ""
    shard: dict[str, str] = field(default_factory=dict)
    fewest: FewestDevices | None = None
    limits: tuple[str, ...] = ()
    framework: OtherFramework | None = None
    mean_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step: the compared plan's mean over simulated steps, else those of the timeline."""
        marked = next((one.step_seconds for one in self.candidates if one.chosen), self.mean_seconds)
        return self.timeline.seconds if marked is None else marked

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.step_seconds if self.step_seconds > 0.0 else 0.0

    @property
    def ranked(self) -> tuple[ComparedPlan, ...]:
        """The candidates, the chosen one first, then by speed."""
        return tuple(sorted(self.candidates, key=lambda one: (not one.chosen, one.step_seconds)))

    @property
    def chosen(self) -> ComparedPlan:
        """The reported candidate; the fastest if none is marked. Raises IndexError without candidates."""
        return self.ranked[0]

    def to_json(self) -> str:
        """Return a JSON document that `from_json` reads back to an equal value."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> PlanReport:
        """Read the output of `to_json`. Raises ValueError naming the place that does not fit."""
        try:
            report = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"not a plan report: {error}") from error
        if unknown := sorted(msgspec.json.decode(text).keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"not a plan report: unknown keys {unknown}")
        return report
