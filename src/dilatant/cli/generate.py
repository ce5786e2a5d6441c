"""`dilatant generate`: answer one prompt, or all prompts of a file, with an exported model."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilatant.cli.asking import Answerer, DrawingOptions, ExportPath, MaxNewTokens, PromptOptions, is_text
from dilatant.cli.options import AsJson
from dilatant.config.errors import UserError, file_errors
from dilatant.config.printable import escaped

if TYPE_CHECKING:
    from dilatant.data.text.encode import EncodedPrompt


def generate(
    folder: ExportPath,
    *,
    prompt: Annotated[
        str | None,
        typer.Option(help="The question. Media go where their markers stand, else before it.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of questions, in any form of training data; answers may be missing. Each is answered on a "
            "line of JSON."
        ),
    ] = None,
    options: PromptOptions,
    max_new_tokens: MaxNewTokens = 128,
    out: Annotated[
        Path | None, typer.Option(help="Where a picture goes; more of them become NAME-2.png and so on.")
    ] = None,
    drawing: DrawingOptions,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, or a file of prompts, with an exported model; prompts may include images, sounds and videos."""
    problems = []
    if (prompt is None) == (prompts is None):
        problems.append("give a --prompt, or a file of --prompts")
    if prompts is not None:
        problems += [f"--{item.kind} is for one --prompt; a file names its own" for item in options.media[:1]]
        if out is not None:
            problems.append("--out is for one --prompt")
    if not is_text(prompt or ""):
        problems.append("--prompt is not UTF-8 text")
    if not math.isfinite(drawing.guidance):
        problems.append(f"--guidance must be a number (given: {drawing.guidance:g})")
    if out is not None:
        problems += _out_problems(out)
    answerer = Answerer(folder, options, max_new_tokens, problems, "prompt")
    if out is not None:
        _check_out(answerer, out)
    if prompts is not None:
        _answer_all(answerer, prompts)
        return

    from dilatant.data.errors import SampleError
    from dilatant.data.sample import Sample, Turn
    from dilatant.data.text.encode import encode_prompt

    turns = (*options.system_turns(), Turn("user", (prompt or "",)))
    try:
        encoded = encode_prompt(Sample("the prompt", turns, tuple(options.media)), answerer.encoding)
    except SampleError as error:
        raise UserError(f"the prompt: {error.problem}") from None  # its remedy is about data files
    if answerer.encoding.targets:
        _draw(answerer, encoded, drawing, out, as_json)
        return
    answer = answerer.answer(encoded)
    print(json.dumps({"answer": answer}) if as_json else escaped(answer))


def _draw(answerer: Answerer, prompt: EncodedPrompt, drawing: DrawingOptions, out: Path | None, as_json: bool) -> None:
    """Answer a prompt with texts and pictures, and write the pictures."""
    import numpy as np

    from dilatant.models.multimodal import MultimodalModel
    from dilatant.training.evaluation.image_answers import answer_with_pictures

    assert isinstance(answerer.model, MultimodalModel)  # every model with a generator is
    parts = answer_with_pictures(
        answerer.model,
        answerer.tokenizer,
        prompt,
        answerer.encoding.targets,
        answerer.device,
        answerer.max_new_tokens,
        drawing.settings(),
        answerer.options.seed,
        eos_token_id=list(answerer.stop_ids) or None,
        **answerer.options.keywords(),
    )
    pictures = [part for part in parts if not isinstance(part, str)]
    paths = []
    if out is not None:
        stems = [out.stem, *(f"{out.stem}-{number}" for number in range(2, len(pictures) + 1))]
        paths = [out.with_stem(stem) for stem in stems]
    with file_errors(f"--out {str(out)!r} cannot be written"):
        for path, picture in zip(paths, pictures):
            if isinstance(picture, np.ndarray):
                np.save(path, picture)
            else:
                picture.save(path)
    named = iter(paths)
    shown = "".join(part if isinstance(part, str) else f"[{next(named, 'a picture; give --out')}]" for part in parts)
    images = [str(path) for path, _ in zip(paths, pictures)]
    print(json.dumps({"answer": shown, "images": images}) if as_json else escaped(shown))
    if out is not None and not pictures:
        starts = " or ".join(repr(target.start) for target in answerer.encoding.targets)
        warnings.warn(f"nothing was drawn: the answer does not hold {starts}, which announces it", stacklevel=1)


def _answer_all(answerer: Answerer, prompts: Path) -> None:
    """Answer every prompt of a file, printing each answer as soon as it is ready. A prompt that fails prints its error
    instead of an answer, and the exit code becomes 2. Raises UserError if the file cannot be read or the model
    generates images."""
    from dataclasses import replace

    from dilatant.config.data import DataSource
    from dilatant.data.readers.reader import open_source
    from dilatant.data.readers.record_fields import FileRecord
    from dilatant.data.readers.records import parse_prompt
    from dilatant.data.text.encode import encode_prompt

    if answerer.encoding.targets:
        raise UserError("--prompts is for models that write; this one draws, so ask it for one --prompt at a time")
    records = open_source(DataSource(path=str(prompts))).records
    refused = 0
    for number in range(len(records)):
        name = records.name_of(number)
        try:
            record = records.read(number)
            assert isinstance(record, FileRecord)  # files hold nothing else
            sample = parse_prompt(record)
            if sample.turns[0].role != "system":
                sample = replace(sample, turns=(*answerer.options.system_turns(), *sample.turns))
            encoded = encode_prompt(sample, answerer.encoding)
        except UserError as error:  # includes errors of media files
            refused += 1
            print(json.dumps({"id": name, "error": str(error)}), flush=True)
            continue
        print(json.dumps({"id": name, "answer": answerer.answer(encoded)}), flush=True)
    if refused:
        print(f"{refused} of {len(records)} could not be asked; their lines say why", file=sys.stderr)
        raise typer.Exit(2)


def _check_out(answerer: Answerer, out: Path) -> None:
    """Raise UserError if the format of `out` does not fit what the model generates (images or features)."""
    from dilatant.models.multimodal import MultimodalModel

    if not answerer.encoding.targets:
        raise UserError(f"--out {str(out)!r}: this model has no generator, so it draws nothing")
    assert isinstance(answerer.model, MultimodalModel)
    units = [answerer.model[target.name] for target in answerer.encoding.targets]
    features = [unit.model.encoder.config.model_type for unit in units if unit.model.draws_features]
    if features and out.suffix != ".npy":
        raise UserError(
            f"--out {str(out)!r}: it draws features of {features[0]}, and making pictures of them takes a decoder, "
            "which is not part of this model; give a file that ends with .npy for the features"
        )
    if not features and out.suffix == ".npy":
        raise UserError(f"--out {str(out)!r}: it draws pictures; give an image format, such as .png")


def _out_problems(out: Path) -> list[str]:
    from PIL import Image

    Image.init()
    has_folder = out.absolute().parent.is_dir()
    is_image = Image.EXTENSION.get(out.suffix.lower()) in Image.SAVE
    if not is_image and not (out.suffix == ".npy" and has_folder):  # features
        return [f"--out {str(out)!r} must end with an image format, such as .png"]
    if not has_folder:
        return [f"--out {str(out)!r}: the folder does not exist"]
    return [f"--out {str(out)!r} is a folder"] if out.is_dir() else []
