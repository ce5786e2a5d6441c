"""What is written and shown of a run: metrics.jsonl, eval.json, trackers, the live line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from dilatant.config import Config
    from dilatant.report.run_folder import RunFolder
    from dilatant.report.trackers import Tracker
    from dilatant.training.evaluate import Evaluation
    from dilatant.training.metrics import StepMetrics
    from dilatant.training.trainer import Trainer


@contextmanager
def observing(
    config: Config, folder: RunFolder, trainer: Trainer, console: Console
) -> Iterator[tuple[Callable[[StepMetrics], None], list[Tracker]]]:
    """Gives the observer of steps, and the trackers for other figures; both end with the block."""
    from dilatant.report.progress import ProgressLine
    from dilatant.report.say import warn
    from dilatant.report.trackers import open_trackers

    if (warning := folder.begin_metrics(trainer.step)) is not None:
        warn(console, warning)
    trackers = open_trackers(
        config.train.report_to, folder.path, config.model_dump(mode="json"), first_step=trainer.step
    )
    try:
        with ProgressLine(console, trainer.total_steps, trainer.step) as line:

            def observe(metrics: StepMetrics) -> None:
                folder.log(metrics.to_record())
                for tracker in trackers:
                    tracker.log(metrics.step, metrics.to_scalars())
                line.update(metrics)

            yield observe, trackers
    finally:
        for tracker in trackers:
            tracker.close()


def show_evaluation(
    folder: RunFolder, console: Console, step: int, evaluation: Evaluation, trackers: Sequence[Tracker] = ()
) -> None:
    """Write eval.json, tell the trackers, and say it."""
    folder.write_json("eval.json", {"step": step, **evaluation.to_record()})
    for tracker in trackers:
        tracker.log(step, {"eval/exact_match": evaluation.exact_match})
    console.print(
        f"step {step}: {evaluation.exact_match:.1%} of {len(evaluation.verdicts):,} held-out answers are exact",
        highlight=False,
    )
