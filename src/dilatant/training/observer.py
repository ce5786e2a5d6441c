"""What is written and shown of a run: metrics.jsonl, eval.json, trackers, the live line."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console

from dilatant.config import Config
from dilatant.report.metrics import StepMetrics
from dilatant.report.progress import ProgressLine
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import warn
from dilatant.report.trackers import Tracker, open_trackers
from dilatant.training.evaluation import Evaluation
from dilatant.training.trainer import Trainer


class Observer:
    """Rank 0's view of a run; open while it trains. console: None shows nothing."""

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer, console: Console | None) -> None:
        self.last_loss: float | None = None
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._console = console or Console(quiet=True)
        self._trackers: list[Tracker] = []
        self._line: ProgressLine

    def __enter__(self) -> Observer:
        trainer = self._trainer
        if trainer.step:
            reason = trainer.membership.reason
            why = f" with {trainer.comm.size} ranks: {reason}" if reason else ""
            self._console.print(f"going on after step {trainer.step}{why}", highlight=False, markup=False)
        if (warning := self._folder.begin_metrics(trainer.step)) is not None:
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
        """A step is done."""
        self.last_loss = metrics.loss
        self._folder.log(metrics.to_record())
        for tracker in self._trackers:
            tracker.log(metrics.step, metrics.to_scalars())
        self._line.update(metrics)
        if metrics.warning is not None:
            warn(self._console, metrics.warning)

    def evaluated(self, step: int, evaluation: Evaluation | None) -> None:
        """Held-out samples were judged; None where there are none."""
        if evaluation is None:
            return
        self._folder.write_json("eval.json", {"step": step, **evaluation.to_record()})
        for tracker in self._trackers:
            tracker.log(step, {"eval/exact_match": evaluation.exact_match})
        self._console.print(
            f"step {step}: {evaluation.exact_match:.1%} of {len(evaluation.verdicts):,} held-out answers are exact",
            highlight=False,
        )
