"""`dilatant evaluate`: score a run's answers to held-out samples, by metrics or by a user-defined function."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.asking import DrawingOptions
from dilatant.cli.options import AsJson, Trust, read_run, say_loading
from dilatant.config.errors import UserError, file_errors
from dilatant.config.files.durable import write_named
from dilatant.report.say import open_console, show_progress, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dilatant.config import Config
    from dilatant.data.order.blend import Blend
    from dilatant.hf.export import ExportedModel
    from dilatant.models.generators.diffusion import SamplingSettings
    from dilatant.training.evaluation.scored_answers import Answered


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """The metrics that score answers, or the user's function in their place."""

    metric: Annotated[
        list[str],
        typer.Option(
            help="exact_match, anls, wer or module:function; repeatable. Default: the run's `evaluation.metrics`."
        ),
    ] = field(default_factory=list)
    judge: Annotated[
        str | None,
        typer.Option(
            help="Instead of metrics: FILE.py:FUNCTION of yours, called with question, expected and answered, texts "
            "and pictures in lists; gives a number.",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.metric and self.judge is not None:
            raise UserError("--metric and --judge are two ways to score; give one of them")


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN|EXPORT", help="A run folder, or an export.")],
    *,
    data: Annotated[
        str | None,
        typer.Option(
            help="Held-out samples: a file, a folder or a pattern, as `data.eval`. Default: those of the run.",
            show_default=False,
        ),
    ] = None,
    scoring: ScoringOptions,
    drawing: DrawingOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first samples of each data set.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where every answer or its score goes, as JSON.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer. Default: as in the run, else 128.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of what is drawn.")] = 0,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Generate answers to held-out samples with the export of a run, and score them."""
    say_loading()
    export, config = _run_of(folder, trust, needs_data=data is None)

    from dilatant.config.train import EvaluationConfig
    from dilatant.training.evaluation.answer_metrics import find_metric
    from dilatant.training.evaluation.scored_answers import judge_answer, load_judge, measure_answers

    how = EvaluationConfig() if config is None else config.evaluation
    names = scoring.metric or how.metrics
    function = None if scoring.judge is None else load_judge(scoring.judge)
    for name in names if function is None else ():
        find_metric(name)
    blend = _held_out(folder, data, config)
    exported = _opened(export, config, draws=function is not None)
    length = max_new_tokens or (128 if config is None else how.max_new_tokens)
    skips = config is not None and config.data.on_error == "skip"
    answers: list[Answered] = []
    scores: dict[str, float] = {}
    for one in _asked(exported, blend, limit or how.limit, length, drawing.settings(), seed, skips):
        answers.append(one)
        if function is not None:
            scores[one.sample.id] = judge_answer(one, function, exported.encoding.targets)
    if not answers:
        raise UserError(f"no sample could be asked of {data or folder}")
    if function is None:
        record: dict[str, Any] = measure_answers(answers, names)
        text = ", ".join(f"{name} {record[name]:.4f}" for name in names) + f" of {len(answers):,} answers"
        more: dict[str, Any] = {"answers": [one.record for one in answers]}
    else:
        mean = sum(scores.values()) / len(answers)
        record, more = {"mean": mean, "samples": len(answers), "scores": scores}, {}
        text = f"{mean:.4f} is the mean score of {len(answers):,} answers"
    if out is not None:
        with file_errors(f"--out {str(out)!r} cannot be written"):
            write_named(out, json.dumps(record | more, indent=2) + "\n")
    print(json.dumps(record) if as_json else text)


def _opened(export: Path, config: Config | None, draws: bool) -> ExportedModel:
    """Open an export, with the system text and the marks of its run. draws: pictures can be scored."""
    from dilatant.hf.export import load_exported

    exported = load_exported(export)
    if exported.encoding.targets and not draws:
        raise UserError(f"{str(export)!r} draws, and metrics compare texts; give --judge FILE.py:FUNCTION")
    if config is None:
        return replace(exported, encoding=replace(exported.encoding, system=None))
    marks = config.train.preferences is not None and config.train.preferences.method == "kto"
    if marks:
        warn(open_console(stderr=True), "samples with answers that are marked as bad are left out")
    return replace(exported, encoding=replace(exported.encoding, system=config.data.system, marks=marks))


def _asked(
    exported: ExportedModel,
    blend: Blend,
    limit: int | None,
    max_new_tokens: int,
    how: SamplingSettings,
    seed: int,
    skips: bool,
) -> Iterator[Answered]:
    """Yield the answers, and show the progress. skips: a sample that cannot be asked is left out with a warning."""
    from dilatant.runtime.precision import pick_device
    from dilatant.training.evaluation.scored_answers import answer_samples

    console = open_console(stderr=True)

    def leave_out(error: Exception) -> None:
        warn(console, f"left out: {error}")

    on_problem = leave_out if skips else None
    with show_progress(console, "asking") as show:
        answers = answer_samples(exported, blend, limit, pick_device(), max_new_tokens, how, seed, on_problem)
        for number, one in enumerate(answers, 1):
            yield one
            show(f"asking: {number:,} of {len(blend.first(limit)):,}")


def _run_of(folder: Path, trust: bool, needs_data: bool) -> tuple[Path, Config | None]:
    """Return the export, and the config of its run: that of the run folder, or of the one which holds the export."""
    from dilatant.config.files.trust import run_folder_of

    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is no folder; give a run folder, or the export of a run")
    is_run = run_folder_of(folder / "config.yaml") is not None
    export, run = (folder / "export", folder) if is_run else (folder, folder.resolve().parent)
    if is_run and not export.is_dir():
        raise UserError(f"{str(folder)!r} has no export yet; make one with `dilatant export {folder}`")
    if run_folder_of(run / "config.yaml") is None:
        return export, None
    return export, read_run(run, trust=trust, needs_data=needs_data)


def _held_out(folder: Path, data: str | None, config: Config | None) -> Blend:
    """Open the samples to ask. They are those at `data`, with the prompt and the names of columns that the run has for
    all of its data, or the held-out samples of the run. Raises UserError."""
    from dilatant.config import DataSource
    from dilatant.data.order.blend import Blend, open_blend
    from dilatant.planning.assemble import open_held_out

    if data is not None:
        sources = () if config is None else (*config.data.train, *config.data.eval)
        common = {
            name: getattr(sources[0], name)
            for name in ("prompt", "columns")
            if sources and all(getattr(each, name) == getattr(sources[0], name) for each in sources)
        }
        found = open_blend([DataSource(path=data, **common)], held_out=True)
    else:
        held_out = None if config is None else open_held_out(config)
        if held_out is None:
            raise UserError(f"{str(folder)!r} says nothing of held-out data; give --data FILE")
        found = held_out
    if not isinstance(found, Blend):
        raise UserError("held-out data that are streamed cannot be asked; give --data FILE")
    return found
