"""Replay of a run against a node trace: the remaining throughput, and the lost time by cause.

Whole steps are simulated. A step commits or did not happen; a change of membership stops training for a while, and a
*reaction* decides how to continue: a function from the running pipelines to the next ones (`planning.failures`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan
from dilatant.plan.replay.node_trace import NodeEvent, NodeTrace

RECONFIGURING, COPYING, RESTARTING = "reconfiguring", "copying state", "restarting"
UNFINISHED, ROLLED_BACK = "unfinished steps", "work since the last checkpoint"
SAVING, TOO_FEW = "saving checkpoints", "too few nodes"
_WHOLE = 1e-9  # tolerance, as a fraction of a step, for rounding in sums of doubles


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """Costs of changes of membership.

    `reconfigure_seconds`: to agree on the new membership and rebuild the pipelines, without copying.
    `copy_bytes_per_second`: rate at which one node sends or receives. `restart_seconds`: to restart all processes and
    load a checkpoint. A checkpoint is saved every `checkpoint_steps` steps and stops training for `checkpoint_seconds`.
    `salvaged`: fraction of an interrupted step's work that is reused; with `keeps_pipelines`, the reused work is
    instead that of the pipelines without a lost node, except their microbatches in flight, since a sample that lacks a
    layer runs through all layers again.
    """

    reconfigure_seconds: float = 5.0
    copy_bytes_per_second: float = 3e9
    restart_seconds: float = 60.0
    checkpoint_steps: int = 10
    checkpoint_seconds: float = 10.0
    salvaged: float = 0.0
    keeps_pipelines: bool = False


@dataclass(frozen=True, slots=True)
class RunningPipelines:
    """The running pipelines of a cluster, each as its node ids.

    `step_seconds` is infinite while the cluster cannot train. `moved_bytes` is the most that any node sent or received
    for this change; `kept`: the training state survived on the nodes; `restarted`: all processes restart. When a step
    is interrupted, its last `in_flight_seconds` went into microbatches whose backward has not ended. plan: the plan, if
    the reaction makes plans; `members` are its nodes in rank order.
    """

    pipelines: tuple[tuple[int, ...], ...]
    step_seconds: float
    moved_bytes: int = 0
    kept: bool = True
    restarted: bool = False
    in_flight_seconds: float = 0.0
    plan: Plan | None = None
    members: tuple[int, ...] = ()


Reaction = Callable[[RunningPipelines | None, frozenset[int]], RunningPipelines]
"""(previous pipelines or None, nodes alive now) → next pipelines."""


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """`seconds` from `start` in which `nodes` nodes in `replicas` pipelines trained on `samples` samples."""

    start: float
    seconds: float
    nodes: int
    replicas: int
    samples: float


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay: `samples` trained on and kept, and seconds `lost` by cause.

    There were `changes` of membership, of which `rollbacks` cost work since the last checkpoint. For `exposed_seconds`
    there were fewer replicas than wanted, or none. Samples in `segments` include those that were rolled back later.
    """

    name: str
    trace: str
    seconds: float
    samples: float
    lost: dict[str, float]
    changes: int
    rollbacks: int
    exposed_seconds: float
    segments: tuple[ReplaySegment, ...] = field(repr=False)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


def replay(
    name: str,
    trace: NodeTrace,
    reaction: Reaction,
    samples_per_step: float,
    costs: RecoveryCosts,
    replicas_wanted: int = 1,
) -> Replay:
    """Replay `trace` from its first event to its end.

    Joining nodes wait until the running step ends, lost nodes interrupt it. A change during recovery restarts the
    recovery. Raises PlanError for a trace without events.
    """
    if not trace.events:
        raise PlanError(f"node trace {trace.name!r} has no events to replay")
    run = _Run(trace.events[0].seconds, samples_per_step, costs)
    alive: frozenset[int] = frozenset()
    for event, following in zip(trace.events, [*trace.events[1:], None]):
        end = following.seconds if following else trace.seconds
        run.train(event.seconds if event.lost else min(run.step_end(event.seconds), end), run.kept_share(event.lost))
        alive = (alive - set(event.lost)) | set(event.joined)
        run.change(reaction(run.current, alive), event, len(alive))
    run.train(trace.seconds, run.kept_share(()))
    return Replay(
        name=name,
        trace=trace.name,
        seconds=trace.seconds - trace.events[0].seconds,
        samples=run.samples,
        lost={
            cause: run.lost[cause] for cause in sorted(run.lost, key=lambda c: -run.lost[c]) if run.lost[cause] > 0.0
        },
        changes=run.changes,
        rollbacks=run.rollbacks,
        exposed_seconds=sum(part.seconds for part in run.segments if part.replicas < replicas_wanted),
        segments=tuple(run.segments),
    )


class _Run:
    """State of a replay: the clock, the committed work, and how much of it a checkpoint holds."""

    def __init__(self, start: float, samples_per_step: float, costs: RecoveryCosts) -> None:
        self.current: RunningPipelines | None = None
        self.samples = 0.0
        self.lost: defaultdict[str, float] = defaultdict(float)
        self.changes = self.rollbacks = 0
        self.segments: list[ReplaySegment] = []
        self._now = start  # time up to here is accounted for
        self._nodes = 0
        self._recovery: list[tuple[str, float]] = []  # (cause, seconds) to spend before training
        self._samples_per_step = samples_per_step
        self._costs = costs
        self._unsaved = _Unsaved(0, 0.0)
        self._credit = 0.0  # fraction of the next step reused from an interrupted one

    def step_end(self, moment: float) -> float:
        """Return the end of the step that runs at `moment`; `moment` itself while nothing trains."""
        available = moment - self._now - sum(seconds for _, seconds in self._recovery)
        if self.current is None or math.isinf(self.current.step_seconds) or available <= 0.0:
            return moment
        rest = self._progress(available).rest
        return moment + (self.current.step_seconds - rest if rest > 0.0 else 0.0)

    def kept_share(self, lost: Collection[int]) -> float:
        """Return the fraction of the interrupted step's work that is reused when these nodes are lost."""
        if not self._costs.keeps_pipelines or self.current is None or not self.current.pipelines:
            return self._costs.salvaged
        whole = sum(not set(pipeline) & set(lost) for pipeline in self.current.pipelines)
        return whole / len(self.current.pipelines)

    def train(self, end: float, salvaged: float) -> None:
        """Recover, then train until `end`; the fraction `salvaged` of an unfinished step's work is reused."""
        begin, samples = self._now, 0.0
        for cause, seconds in self._recovery:
            spent = min(seconds, end - self._now)
            self.lost[cause] += spent
            self._now += spent
        self._recovery = []
        if self.current is not None and self._now < end:
            if math.isinf(self.current.step_seconds):
                self.lost[TOO_FEW] += end - self._now
            else:
                samples = self._steps(end - self._now, self.current.step_seconds, salvaged)
        elif self._costs.keeps_pipelines and self.current is not None and self._credit:
            # A loss during recovery also loses reused work that had moved to the nodes lost now.
            self.lost[UNFINISHED] += self._credit * self.current.step_seconds * (1.0 - salvaged)
            self._credit *= salvaged
        if end > begin:
            replicas = len(self.current.pipelines) if self.current else 0
            self.segments.append(ReplaySegment(begin, end - begin, self._nodes, replicas, samples))
            self._now = end

    def change(self, after: RunningPipelines, event: NodeEvent, nodes: int) -> None:
        """Continue with `after` from `event` on; the first pipelines of a run, and empty ones, need no recovery."""
        costs, self._nodes = self._costs, nodes
        self.changes += self.current is not None
        if self.current is not None and math.isfinite(after.step_seconds):
            if after.restarted and not event.lost and self._unsaved.steps:
                self._recovery.append((SAVING, costs.checkpoint_seconds))
                self._unsaved = _Unsaved(0, 0.0)
            elif after.restarted or not after.kept:
                self._roll_back()
            if after.restarted or not after.kept:
                self._credit = 0.0
                self._recovery.append((RESTARTING, costs.restart_seconds))
            else:
                self._recovery.append((RECONFIGURING, costs.reconfigure_seconds))
                self._recovery.append((COPYING, after.moved_bytes / costs.copy_bytes_per_second))
        self.current = after

    def _roll_back(self) -> None:
        self.rollbacks += self._unsaved.steps > 0
        self.samples -= self._unsaved.steps * self._samples_per_step
        self.lost[ROLLED_BACK] += self._unsaved.seconds
        self._unsaved = _Unsaved(0, 0.0)

    def _steps(self, available: float, step: float, salvaged: float) -> float:
        """Train for `available` seconds; return the samples of the committed steps."""
        done = self._progress(available)
        begun_before = self._credit * step if done.steps == 0 and not self._costs.keeps_pipelines else 0.0
        self.lost[SAVING] += done.saving
        begun = max(done.rest - begun_before, 0.0)
        assert self.current is not None
        # Work reused from an earlier interruption is not in flight.
        in_flight = min(self.current.in_flight_seconds, begun, available) if self._costs.keeps_pipelines else 0.0
        kept = (begun - in_flight) * salvaged
        self.lost[UNFINISHED] += begun - kept
        self._credit = (begun_before + kept) / step
        if done.saved:
            self._unsaved = _Unsaved(done.unsaved, done.unsaved * step)
        else:
            self._unsaved = _Unsaved(done.unsaved, self._unsaved.seconds + done.steps * step)
        self.samples += done.steps * self._samples_per_step
        return done.steps * self._samples_per_step

    def _progress(self, available: float) -> _Progress:
        """Return the steps that fit into `available` seconds with a checkpoint after every `checkpoint_steps`."""
        assert self.current is not None
        step, every, saving = (self.current.step_seconds, self._costs.checkpoint_steps, self._costs.checkpoint_seconds)
        time = available + self._credit * step + _WHOLE * step
        before = every - self._unsaved.steps
        if time < before * step:
            steps = math.floor(time / step)
            return _Progress(steps, 0.0, _unfinished(time, steps, step), False, self._unsaved.steps + steps)
        cycles, time = divmod(time - before * step, saving + every * step)
        steps = before + int(cycles) * every
        if time < saving:
            return _Progress(steps, cycles * saving + time, 0.0, cycles > 0, every)
        more = math.floor((time - saving) / step)
        rest = _unfinished(time - saving, more, step)
        return _Progress(steps + more, (cycles + 1) * saving, rest, True, more)


def _unfinished(time: float, steps: int, step: float) -> float:
    """Return the seconds of the unfinished step; `time` includes the rounding tolerance."""
    rest = time - (steps + _WHOLE) * step
    return rest if rest > _WHOLE * step else 0.0


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """Steps since the last checkpoint and their seconds."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Progress:
    """Result of training for some seconds: committed `steps`, seconds of `saving`, and the `rest` in an unfinished
    step. saved: a checkpoint was completed; unsaved: steps that no checkpoint holds."""

    steps: int
    saving: float
    rest: float
    saved: bool
    unsaved: int
