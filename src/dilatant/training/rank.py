"""One rank of a run: build the trainer, restore its checkpoint, train, observed on rank 0, and evaluate."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Literal

from rich.console import Console

from dilatant.comm.launch import Worker
from dilatant.config import Config, UserError
from dilatant.config.files.credentials import mask_tree
from dilatant.data.index.lint import unused_lines
from dilatant.planning.assemble import Samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.problem.describe_data import describe_data
from dilatant.planning.problem.planned_hardware import unlike_devices
from dilatant.report.gantt import measured_chart
from dilatant.report.metrics import StepMetrics, finite_or_none
from dilatant.report.pages.page import Page, write_page
from dilatant.report.pages.page_links import link_pages
from dilatant.report.pages.perfetto import write_timeline
from dilatant.report.pages.plan_page import render_step_page
from dilatant.report.pages.stats_page import render_stats_page
from dilatant.report.progress import ProgressLine
from dilatant.report.run_folder import RunFolder, last_step
from dilatant.report.say import open_console, say, show_progress, warn
from dilatant.report.step_comparison import Prediction
from dilatant.report.text.gantt_summary import by_lane
from dilatant.report.text.wording import counted
from dilatant.report.trackers import Tracker, open_trackers
from dilatant.training.callbacks import CallbackList, RunControl
from dilatant.training.checkpoints.starting_point import StartingPoint, agreed_checkpoint
from dilatant.training.evaluation.evaluation import Evaluation
from dilatant.training.prepare import PreparedRun, prepare
from dilatant.training.step_profiler import TRACES, trace_folder
from dilatant.training.stop_signal import StopSignal
from dilatant.training.trainer import Trainer

Show = Literal["nothing", "stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run. exit_code: 0, or 128 + the number of the signal that stopped the run. loss: of the last step
    here. summary: which ranks were busy and which waited in the last step. evaluation: for a run that reached its last
    step. checkpoint: the last one written by this run. began_at: steps that were done before. is_first: this process
    reports for the run (rank 0 under an outer launcher). training_began: `time.monotonic` when the first step could
    begin. best_step: step of the best evaluation by `evaluation.keep_best`. ended_early: the step at which evaluations
    had not improved for long enough."""

    folder: Path
    step: int
    total_steps: int
    seconds: float
    exit_code: int
    loss: float | None = None
    summary: str = ""
    evaluation: Evaluation | None = None
    checkpoint: Path | None = None
    began_at: int = 0
    is_first: bool = True
    training_began: float | None = None
    best_step: int | None = None
    ended_early: int | None = None

    @property
    def finished(self) -> bool:
        return self.exit_code == 0

    def _repr_html_(self) -> str:
        """Return the result and the last step's page for a notebook."""
        figures = {} if self.loss is None else {"loss": self.loss}
        figures |= {} if self.evaluation is None else {f"held-out {k}": v for k, v in self.evaluation.figures.items()}
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        text = f"step {self.step} of {self.total_steps}: {shown} ({self.folder})"
        page = self.folder / "timeline.html"
        shown_page = Page(page.read_text(encoding="utf-8"))._repr_html_() if page.is_file() else ""
        return f"<p>{escape(text)}</p>{shown_page}"


def train_rank(
    worker: Worker,
    config: Config,
    plan_json: str,
    start: StartingPoint,
    show: Show,
    prepared: PreparedRun | None = None,
) -> RunResult:
    """Run one rank; rank 0 shows the progress. prepared: given if this process has prepared the run already."""
    planned = TrainingPlan.from_json(plan_json)
    prepared = prepared or prepare(config, planned)
    folder = RunFolder(config.output_dir)
    with show_progress(console_for(show if worker.rank == 0 else "nothing"), "building the model"):
        trainer = Trainer(config, prepared.samples, prepared.model, planned, worker, folder.checkpoints)
    try:
        checkpoint = agreed_checkpoint(trainer.comm, start.checkpoint)
        begin_state(trainer, checkpoint is not None, show)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        others = unlike_devices(trainer.comm, planned.costs)
        if trainer.rank == 0:
            begin_folder(config, prepared, planned, folder, start.discards, show)
            if others is not None:
                warn(console_for(show), others)
        with StopSignal() as stop:
            return train_to_end(config, trainer, folder, show, stop)
    except BaseException as error:
        trainer.fail(error)
        raise
    finally:
        trainer.close()
        folder.close()


def begin_state(trainer: Trainer, resumes: bool, show: Show) -> None:
    """Read the moments that a new run begins with, and compute the references of pairs before the weights change, if
    there are any; show the progress on rank 0."""
    if not resumes:
        trainer.state.begin_moments()
    if trainer.references is not None:
        console = console_for(show if trainer.rank == 0 else "nothing")
        with show_progress(console, "comparing with the start model") as progress:
            trainer.find_references(resumes, progress)


def begin_folder(
    config: Config, prepared: PreparedRun, planned: TrainingPlan, folder: RunFolder, discards: bool, show: Show
) -> None:
    """Write the files that a run begins with. Call this when the config is known to be right: a mistake must not cost
    an old run. discards: delete the existing checkpoints and traces."""
    if discards:
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        shutil.rmtree(folder.path / TRACES, ignore_errors=True)
    folder.write_config(config)
    folder.write_text("plan.json", planned.to_json())
    samples, console = prepared.samples, console_for(show)
    unused = unused_lines(samples.train, samples.train_sizes, samples.encoding)
    unused += unused_lines(samples.held_out, samples.held_out_sizes, samples.held_out_encoding)
    for line in dict.fromkeys(unused):  # `data.val_size` divides a source
        say(console, line)
    _show_data(config, samples, folder, console)


def train_to_end(config: Config, trainer: Trainer, folder: RunFolder, show: Show, stop: StopSignal) -> RunResult:
    """Train, observed on rank 0, and evaluate the final model; called by all ranks."""
    first, began_at = trainer.rank == 0, trainer.step
    with Observer(config, folder, trainer, console_for(show)) if first else nullcontext() as observer:
        if observer is not None:
            observer.take_over()
        training_began = time.monotonic()
        if observer is None:
            evaluation = trainer.run(lambda metrics: None, lambda: stop.received)
        else:
            evaluation = trainer.run(observer.stepped, lambda: stop.received, observer.evaluated, observer.decide)
        seconds = time.monotonic() - training_began
        summary = _show_last_step(trainer, folder) if trainer.step else ""
        if trainer.is_finished and evaluation is None:
            evaluation = trainer.evaluator.evaluate()
            if observer is not None and evaluation is not None:
                observer.evaluated(trainer.step, evaluation)
        total_steps = trainer.state.total_steps
        result = RunResult(
            folder.path,
            trainer.step,
            total_steps,
            seconds,
            # Without a signal on this rank, another rank was asked to stop.
            0 if trainer.is_finished else stop.exit_code or 128 + signal.SIGTERM,
            observer.last_loss if observer is not None else None,
            summary,
            evaluation,
            trainer.saving.published,
            began_at,
            first,
            training_began,
            trainer.state.best.step,
            trainer.step if trainer.step < total_steps and trainer.is_finished else None,
        )
        if observer is not None:
            observer.ended(result)
    return result


def _show_data(config: Config, samples: Samples, folder: RunFolder, console: Console) -> None:
    """Write a page about the training data if their sizes are known. A page that cannot be written ends no run."""
    if samples.train_sizes is None:
        return
    title = f"{folder.path.name}: the training data"
    try:
        report = describe_data(config, samples, samples.train_sizes, title)
        write_page(folder.path / "data.html", render_stats_page(report))
        link_pages(folder.path)
    except UserError as error:
        warn(console, str(error))


def _show_last_step(trainer: Trainer, folder: RunFolder) -> str:
    """Write the last step as a page, for Perfetto and for `dilatant simulate`; return its summary. Called by all ranks;
    rank 0 writes."""
    step, waits = trainer.runtime.measured_step(), trainer.data_waits()
    if trainer.rank != 0 or step is None or not step.actions:
        return ""
    plan, step = trainer.runtime.plan, replace(step, waits=waits)
    write_timeline(folder.path / "timeline.json", step.actions, plan, trainer.runtime.arrows(), waits)
    planned = trainer.runtime.last_step
    predicted = None if planned is None else planned.prediction.timeline()
    prediction = None
    if planned is not None and predicted is not None:
        prediction = Prediction(predicted, planned.prediction.origin)
    page = render_step_page(step.actions, plan, f"{folder.path.name}: the last step", prediction, waits)
    write_page(folder.path / "timeline.html", page)
    folder.write_text("step.json", step.to_json() + "\n")
    link_pages(folder.path)
    return by_lane(measured_chart(step.actions, plan, waits), plan)


def console_for(show: Show) -> Console:
    return open_console(stderr=show == "stderr", quiet=show == "nothing")


class Observer:
    """Record and show a run on rank 0, while it trains."""

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer, console: Console) -> None:
        self.last_loss: float | None = None
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._console = console
        self._trackers: list[Tracker] = []
        self._line: ProgressLine
        self._published: Path | None = None
        self._history: list[dict[str, float]] = []

    def __enter__(self) -> Observer:
        trainer = self._trainer
        if trainer.step:
            reason = trainer.membership.reason
            why = f" with {trainer.comm.size} ranks: {reason}" if reason else ""
            self._console.print(f"going on after step {trainer.step}{why}", highlight=False, markup=False)
            self._history = self._folder.evaluations_before(trainer.step)
        if (warning := self._folder.begin_metrics(trainer.step, trainer.membership.weights_follow)) is not None:
            warn(self._console, warning)
        tree = self._config.model_dump(mode="json")
        mask_tree(tree)
        self._trackers = open_trackers(self._config.train.report_to, self._folder.path, tree, first_step=trainer.step)
        if trainer.callbacks is not None:
            control, state = trainer.callbacks.control, trainer.state
            if not control.step:  # of a new process
                control.follow(state.step, state.stopped, state.rate_factor)
            control.folder, control.total_steps = self._folder.path, state.total_steps
        self._published = trainer.saving.published
        self._line = ProgressLine(self._console, trainer.state.total_steps, trainer.step)
        self._line.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._trainer.membership.gate is not None:  # steps may be unreported
            with suppress(Exception):  # the first error counts
                self.catch_up(self._trainer.done.recent)
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
        if (traces := trace_folder(self._config, metrics.step)) is not None:
            say(self._console, f"step {metrics.step} was profiled; the trace of each rank is in {traces}")
        if metrics.warning is not None:
            warn(self._console, metrics.warning)

    def decide(self, metrics: StepMetrics | None) -> RunControl | None:
        """Call the user's callbacks for a step, unless they were called for it or its metrics are unknown; return what
        they decided so far."""
        if (callbacks := self._trainer.callbacks) is None:
            return None
        if metrics is not None:
            callbacks.control.step = metrics.step
            self._report_checkpoint(callbacks)
            callbacks.call("on_step", metrics)
        return callbacks.control

    def ended(self, result: RunResult) -> None:
        """Call the user's callbacks for the last checkpoint and for the end."""
        if (callbacks := self._trainer.callbacks) is not None:
            self._report_checkpoint(callbacks)
            callbacks.call("on_end", result)
            self._log_figures(callbacks.control)

    def _report_checkpoint(self, callbacks: CallbackList) -> None:
        published = self._trainer.saving.published
        if published is not None and published != self._published:
            self._published = published
            callbacks.call("on_checkpoint", published)
            self._log_figures(callbacks.control)

    def _log_figures(self, control: RunControl) -> None:
        """Record what callbacks logged after the record of their step, as a line of its own."""
        figures = control.take_figures()
        if figures:
            self._trainer.done.catch_up()
            self._folder.log({"step": control.step, "figures": finite_or_none(figures)})
            for tracker in self._trackers:
                tracker.log(control.step, {f"figures/{name}": own for name, own in figures.items()})

    def take_over(self) -> None:
        """Report what the previous generation has left, if its rank 0 was lost: steps, and the callbacks of the last
        one."""
        done = self._trainer.done
        self.catch_up(done.recent)
        if (control := self.decide(done.last)) is not None:
            self._log_figures(control)

    def catch_up(self, recent: Sequence[StepMetrics]) -> None:
        """Write those of the `recent` steps that metrics.jsonl lacks, whichever rank was to write them."""
        written = last_step(self._folder.path / "metrics.jsonl")
        for metrics in recent:
            if metrics.step > written:
                self.stepped(metrics)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation after `step`."""
        before = [entry for entry in self._history if entry["step"] != step]  # another generation may repeat it
        if len(before) == len(self._history):
            of_sources = {name: finite_or_none(own) for name, own in evaluation.by_source.items()}
            self._folder.log(
                {"step": step, "evaluation": finite_or_none(evaluation.figures)}
                | ({"by_data_set": of_sources} if of_sources else {})
            )
        self._history = [*before, {"step": step, **evaluation.figures}]
        record = {"step": step, **evaluation.to_record(), "history": self._history}
        self._folder.write_json("eval.json", record)
        scalars = {f"eval/{name}": value for name, value in evaluation.figures.items()}
        for source, figures in evaluation.by_source.items():
            scalars |= {f"eval/{source}/{name}": value for name, value in figures.items()}
        for tracker in self._trackers:
            tracker.log(step, scalars)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in evaluation.figures.items())
        kept = self._config.evaluation.keep_best
        best = self._trainer.state.best
        about = "" if kept is None or best.step is None else f" (best {kept} {best.value:.4g}, step {best.step})"
        judged = counted(len(evaluation.verdicts), "held-out sample")
        say(self._console, f"step {step}: {judged}: {shown}{about}")
        if (callbacks := self._trainer.callbacks) is not None:
            callbacks.control.step = step
            callbacks.call("on_evaluation", evaluation)
            self._log_figures(callbacks.control)
