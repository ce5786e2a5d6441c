"""`dilatant evaluate`: score an exported model's answers with a user-defined function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dilatant.cli.asking import DrawingOptions, ExportPath
from dilatant.cli.options import AsJson, say_loading
from dilatant.config.errors import UserError, file_errors
from dilatant.report.say import open_console, show_progress


def evaluate(
    folder: ExportPath,
    data: Annotated[str, typer.Option(help="Held-out samples: a file, a folder or a pattern, as `data.eval`.")],
    judge: Annotated[
        str,
        typer.Option(
            help="FILE.py:FUNCTION of yours, called with question, expected and answered, texts and pictures in lists; "
            "gives a number."
        ),
    ],
    drawing: DrawingOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first samples.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where every sample's score goes, as JSON.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of what is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate answers to held-out samples with an exported model, and score them with your own function."""
    say_loading()

    from dilatant.config import DataSource
    from dilatant.data.order.blend import Blend, open_blend
    from dilatant.hf.export import load_exported
    from dilatant.runtime.precision import pick_device
    from dilatant.training.evaluation.scored_answers import judge_answers, load_judge

    scores = []
    function = load_judge(judge)
    blend = open_blend([DataSource(path=data)], held_out=True)
    assert isinstance(blend, Blend)  # a path is never streamed
    exported = load_exported(folder)
    total = min(len(blend), limit or len(blend))
    with show_progress(open_console(stderr=True), "judging") as show:
        for one in judge_answers(
            exported, blend, function, pick_device(), max_new_tokens, drawing.settings(), limit, seed
        ):
            scores.append(one)
            show(f"judging: {len(scores):,} of {total:,}")
    if not scores:
        raise UserError(f"--data {data!r} holds no samples")
    mean = sum(one.score for one in scores) / len(scores)
    record = {"mean": mean, "samples": len(scores), "scores": {one.sample: one.score for one in scores}}
    if out is not None:
        with file_errors(f"--out {str(out)!r} cannot be written"):
            out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record) if as_json else f"{mean:.4f} is the mean score of {len(scores):,} answers")
