"""Live progress line of a run: step, loss, tokens per second by unit, data wait, remaining time."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dilatant.report.metrics import StepMetrics
from dilatant.report.say import say
from dilatant.report.text.wording import seconds_text

_SMOOTHING = 0.1
"""Weight of the newest step; the first steps have equal weights."""
_PLAIN_INTERVAL_SECONDS = 5.0


class ProgressLine:
    """A progress bar on a terminal; elsewhere (a log file, Slurm) a plain line every few seconds."""

    def __init__(self, console: Console, total_steps: int, completed_steps: int = 0) -> None:
        self._console = console
        self._steps = 0
        self._seconds: float | None = None
        self._last_plain = 0.0
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=completed_steps, figures="")

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, metrics: StepMetrics) -> None:
        """Show a finished step. The first step's time is ignored: it allocates memory and chooses kernels."""
        if self._steps:
            before = metrics.step_seconds if self._seconds is None else self._seconds
            weight = max(_SMOOTHING, 1 / self._steps)
            self._seconds = before + weight * (metrics.step_seconds - before)
        self._steps += 1
        figures = describe(metrics, self._seconds)
        self._progress.update(self._task, completed=metrics.step, figures=figures)
        now = time.monotonic()
        last = metrics.step == metrics.total_steps
        if not self._console.is_terminal and (last or now - self._last_plain >= _PLAIN_INTERVAL_SECONDS):
            self._last_plain = now
            say(self._console, f"step {metrics.step}/{metrics.total_steps}  {figures}")


def describe(metrics: StepMetrics, smoothed_seconds: float | None) -> str:
    """Return the text of the line, for example `loss 0.4120  tok/s vision 4.1k  data 2%  left 1:02`.

    The line adds the step's seconds beside the planned ones if the metrics have a prediction that is not rough.
    smoothed_seconds: smoothed seconds of a step, None before the second step; without them neither the remaining nor
    the planned time is shown.
    """
    seconds = max(metrics.step_seconds, 1e-9)
    units = "  ".join(f"{name} {_short(count / seconds)}" for name, count in metrics.tokens.items())
    wait = 100 * metrics.data_wait_seconds / seconds
    left, planned = "", ""
    if smoothed_seconds is not None or metrics.step == metrics.total_steps:
        left = f"  left {_clock((smoothed_seconds or 0.0) * (metrics.total_steps - metrics.step))}"
    if smoothed_seconds is not None and metrics.predicted_seconds is not None and not metrics.is_rough:
        planned = f"  step {seconds_text(metrics.step_seconds)} (planned {seconds_text(metrics.predicted_seconds)})"
    prefix, factor = ("T", 1) if metrics.teraflops >= 0.1 else ("G", 1000)
    speed = f"  {factor * metrics.teraflops:.3g} {prefix}FLOP/s" if metrics.teraflops else ""
    if metrics.mfu is not None:
        speed = f"  MFU {metrics.mfu:.0%}"
    memory = "" if metrics.peak_bytes is None else f"  mem {metrics.peak_bytes / 2**30:.1f} GiB"
    loss = f"loss {metrics.loss:.4f}"
    if metrics.rewards:
        what = "judges right" if "kl" in metrics.rewards else "prefers the chosen"
        loss += f"  {what} {metrics.rewards['accuracies']:.0%}"
    return f"{loss}  tok/s {units}{speed}{memory}  data {wait:.0f}%{planned}{left}"


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
