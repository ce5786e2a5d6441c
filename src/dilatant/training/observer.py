"""Observer of a run: rank 0 writes metrics.jsonl and eval.json, feeds trackers and draws the live line."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console

from dilatant.config import Config
from dilatant.report.metrics import StepMetrics
from dilatant.report.progress import ProgressLine
from dilatant.report.run_folder import RunFolder, last_step
from dilatant.report.say import open_console, warn
from dilatant.report.trackers import Tracker, open_trackers
from dilatant.training.evaluation.evaluation import Evaluation
from dilatant.training.trainer import Trainer


class Observer:
    """Record and show a run on rank 0, while it trains. console: None shows nothing."""

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer, console: Console | None) -> None:
        self.last_loss: float | None = None
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._console = console or open_console(quiet=True)
        self._trackers: list[Tracker] = []
        self._line: ProgressLine
        self._history: list[dict[str, float]] = []

    def __enter__(self) -> Observer:
        trainer = self._trainer
        if trainer.step:
            reason = trainer.membership.reason
            why = f" with {trainer.comm.size} ranks: {reason}" if reason else ""
            self._console.print(f"going on after step {trainer.step}{why}", highlight=False, markup=False)
            self._history = self._folder.evaluations_before(trainer.step)
        if (
            warning := self._folder.begin_metrics(trainer.step, trainer.membership.weights_follow)
        ) is not None:
            warn(self._console, warning)
        self._trackers = open_trackers(
            self._config.train.report_to,
            self._folder.path,
            self._config.model_dump(mode="json"),
            first_step=trainer.step,
        )
        self._line = ProgressLine(self._console, trainer.total_steps, trainer.step)
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, trace)
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def stepped(self, metrics: StepMetrics) -> None:
        """Record a finished step."""
        self.last_loss = metrics.loss
        self._folder.log(metrics.to_record())
        for tracker in self._trackers:
            tracker.log(metrics.step, metrics.to_scalars())
        self._line.update(metrics)
        if metrics.warning is not None:
            warn(self._console, metrics.warning)

    def catch_up(self, recent: Sequence[StepMetrics]) -> None:
        """Write those of the `recent` steps that metrics.jsonl lacks, whichever rank was to write them."""
        written = last_step(self._folder.path / "metrics.jsonl")
        for metrics in recent:
            if metrics.step > written:
                self.stepped(metrics)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation after `step`."""
        self._history = [*self._history, {"step": step, **evaluation.figures}]
        record = {"step": step, **evaluation.to_record(), "history": self._history}
        self._folder.write_json("eval.json", record)
        scalars = {f"eval/{name}": value for name, value in evaluation.figures.items()}
        for source, figures in evaluation.by_source.items():
            scalars |= {f"eval/{source}/{name}": value for name, value in figures.items()}
        for tracker in self._trackers:
            tracker.log(step, scalars)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in evaluation.figures.items())
        kept = self._config.evaluation.keep_best
        best = self._trainer.evaluator.best
        about = (
            "" if kept is None or best.step is None else f" (best {kept} {best.value:.4g}, step {best.step})"
        )
        self._console.print(
            f"step {step}: {len(evaluation.verdicts):,} held-out samples: {shown}{about}", highlight=False
        )
