"""Callbacks of the user, called on rank 0 at steps, evaluations, checkpoints and the end. What they decide reaches all
ranks with the next exchange, so that all stop after the same step and use the same learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dilatant.config import Config
from dilatant.config.errors import UserError, own_code
from dilatant.config.signatures import import_declared
from dilatant.report.metrics import StepMetrics


class Callback(Protocol):
    """Protocol of a callback, which may have any of these methods."""

    def on_step(self, run: RunControl, metrics: StepMetrics) -> None:
        """Called after each step that counts, before the next one begins."""

    def on_evaluation(self, run: RunControl, evaluation: Any) -> None:
        """Called after each evaluation with an `Evaluation`."""

    def on_checkpoint(self, run: RunControl, checkpoint: Path) -> None:
        """Called when a checkpoint is complete, at the latest before the run ends."""

    def on_end(self, run: RunControl, result: Any) -> None:
        """Called with the `RunResult` when the run has ended or was stopped, before the model is exported."""


EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


class RunControl:
    """A run as its callbacks see it. folder: the run folder. step: steps done, of `total_steps`. figures:
    logged, and not recorded yet."""

    def __init__(self) -> None:
        self.folder = Path()
        self.step = self.total_steps = 0
        self.is_stopping = False
        self._factor = 1.0
        self.figures: dict[str, float] = {}

    def stop(self) -> None:
        """End the run after this step as if it were the last one: it is saved, evaluated and exported."""
        self.is_stopping = True

    @property
    def learning_rate_factor(self) -> float:
        """Factor of all learning rates from the next step on, besides that of the schedule; checkpoints keep it."""
        return self._factor

    @learning_rate_factor.setter
    def learning_rate_factor(self, factor: float) -> None:
        if not 0 <= float(factor) < math.inf:
            raise UserError(f"learning_rate_factor is {factor!r}; give a number of at least 0")
        self._factor = float(factor)

    def log(self, figures: Mapping[str, float]) -> None:
        """Write figures to metrics.jsonl (under `figures`) and to the trackers, at the current step."""
        for name, value in figures.items():
            try:
                self.figures[str(name)] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"log: {name!r} is {value!r}; give a number") from None

    def follow(self, step: int, is_stopping: bool, factor: float) -> None:
        """Adopt what another rank decided, in case this one takes over."""
        self.step, self.is_stopping, self._factor = step, is_stopping, factor

    def take_figures(self) -> dict[str, float]:
        """Return the figures that were logged since the last call."""
        found, self.figures = self.figures, {}
        return found


class CallbackList:
    """The callbacks of a run in one process, and what they decided. It outlives changes of the ranks: what was reported
    once is not reported again when steps are repeated, and a decision that did not reach all ranks is sent again."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for callback in callbacks:
            if not any(callable(getattr(callback, event, None)) for event in EVENTS):
                raise UserError(f"callbacks: {type(callback).__name__} has none of the methods {', '.join(EVENTS)}")
        self.callbacks = tuple(callbacks)
        self.control = RunControl()
        self._reported: dict[str, int] = {}

    def reported(self, event: str, step: int) -> bool:
        """Note that all know of `event` after `step`; return True if they did before."""
        before = self._reported.get(event, -1)
        self._reported[event] = max(before, step)
        return before >= step

    def call(self, event: str, value: Any) -> None:
        """Call the callbacks that have this method, unless they were called for it. Raises UserError if one fails."""
        run = self.control
        if self.reported(event, run.step):
            return
        for callback in self.callbacks:
            method: Callable[..., None] | None = getattr(callback, event, None)
            if method is None:
                continue
            with own_code(f"{type(callback).__name__}.{event} failed after step {run.step}"):
                method(run, value)


def named_callbacks(config: Config) -> dict[str, Any]:
    """Return the classes and objects of `train.callbacks` by their names there. Raises UserError."""
    names = config.train.callbacks
    return {name: import_declared("train.callbacks", name, "callback") for name in names}


def open_callbacks(config: Config) -> CallbackList | None:
    """Return the callbacks that were passed in Python, with new ones of `train.callbacks`; None if there are none.
    Raises UserError."""
    passed, named = config.part("callbacks"), named_callbacks(config)
    if not named:
        return None if passed is None else passed.value
    made = [] if passed is None else [*passed.value.callbacks]
    for name, found in named.items():
        with own_code(f"train.callbacks: {name!r} cannot be made"):
            made.append(found() if isinstance(found, type) else found)
    return CallbackList(made)
