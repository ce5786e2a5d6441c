"""`dilatant generate`: answer one prompt, or all prompts of a file, with an exported model."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli import asking
from dilatant.cli.options import AsJson, say_loading
from dilatant.config.errors import UserError, list_problems
from dilatant.config.printable import printable

if TYPE_CHECKING:
    import torch

    from dilatant.hf.export import ExportedModel


def generate(
    folder: asking.ExportPath,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="The question. Media go where their markers stand, else before it.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of questions, in any form of training data; answers may be missing. Each is answered on a "
            "line of JSON."
        ),
    ] = None,
    image: asking.Image = [],  # noqa: B006
    audio: asking.Audio = [],  # noqa: B006
    video: asking.Video = [],  # noqa: B006
    system: asking.System = None,
    max_new_tokens: asking.MaxNewTokens = 128,
    temperature: asking.Temperature = 0.0,
    top_p: asking.TopP = None,
    top_k: asking.TopK = None,
    repetition_penalty: asking.RepetitionPenalty = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Where a picture goes; more of them become NAME-2.png and so on.")
    ] = None,
    guidance: Annotated[
        float, typer.Option(min=0.0, help="How much pictures follow the prompt; 1 is as they were learned.")
    ] = 2.0,
    drawing_steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps from noise to a picture.")] = 20,
    seed: asking.Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, or a file of prompts, with an exported model; prompts may include images, sounds and videos."""
    given = asking.media_of(image, audio, video)
    chosen = asking.Sampling(temperature, top_p, top_k, repetition_penalty)
    problems = asking.media_problems(given)
    if (prompt is None) == (prompts is None):
        problems.append("give a --prompt, or a file of --prompts")
    if prompts is not None:
        problems += [f"--{one.kind} is for one --prompt; a file names its own" for one in given[:1]]
        if out is not None:
            problems.append("--out is for one --prompt")
    texts = {"--prompt": prompt or "", "--system": system or ""}
    problems += [f"{option} is not UTF-8 text" for option, text in texts.items() if not asking.is_text(text)]
    problems += chosen.problems()
    if not math.isfinite(guidance):
        problems.append(f"--guidance must be a number (given: {guidance:g})")
    if out is not None:
        problems += _about_out(out)
    if problems:
        raise list_problems("the prompt has a mistake:", problems)

    say_loading()

    import numpy as np
    import torch

    from dilatant.data.errors import SampleError
    from dilatant.data.sample import Sample, Turn
    from dilatant.data.text.encode import encode_prompt
    from dilatant.hf.export import load_exported
    from dilatant.models.generators.sampling import SamplingSettings
    from dilatant.models.multimodal import MultimodalModel
    from dilatant.runtime.precision import pick_device
    from dilatant.training.evaluation.generation import generate_answers
    from dilatant.training.evaluation.image_answers import answer_with_pictures

    exported = load_exported(folder)
    if out is not None and not exported.encoding.targets:
        raise UserError(f"--out {str(out)!r}: this model has no generator, so it draws nothing")
    if out is not None:
        _check_out(exported, out)
    asking.require_encoders(exported, given)
    sampling = chosen.keywords()
    device = pick_device()
    torch.manual_seed(seed)
    if prompts is not None:
        _answer_all(exported, prompts, system, device, max_new_tokens, sampling)
        return
    assert prompt is not None
    turns = [Turn("system", (system,))] if system else []
    sample = Sample("the prompt", (*turns, Turn("user", (prompt,))), tuple(given))
    try:
        encoded = encode_prompt(sample, exported.encoding)
    except SampleError as error:
        raise UserError(f"the prompt: {error.problem}") from None  # its remedy is about data files
    model, stop_ids = exported.model.to(device), exported.encoding.chat.stop_ids
    if not exported.encoding.targets:
        (answer,) = generate_answers(
            model, exported.tokenizer, [encoded], device, max_new_tokens, stop_ids, **sampling
        )
        print(json.dumps({"answer": answer}) if as_json else printable(answer))
        return
    assert isinstance(model, MultimodalModel)  # every model with a generator is
    parts = answer_with_pictures(
        model,
        exported.tokenizer,
        encoded,
        exported.encoding.targets,
        device,
        max_new_tokens,
        SamplingSettings(drawing_steps, guidance),
        seed,
        eos_token_id=list(stop_ids) or None,
        **sampling,
    )
    pictures = [part for part in parts if not isinstance(part, str)]
    paths = [] if out is None else _numbered(out, len(pictures))
    try:
        for path, picture in zip(paths, pictures):
            if isinstance(picture, np.ndarray):
                np.save(path, picture)
            else:
                picture.save(path)
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror or error}") from None
    named = iter(paths)
    shown = "".join(
        part if isinstance(part, str) else f"[{next(named, 'a picture; give --out')}]" for part in parts
    )
    print(json.dumps({"answer": shown, "images": [*map(str, paths)]}) if as_json else printable(shown))
    if out is not None and not pictures:
        starts = " or ".join(repr(target.start) for target in exported.encoding.targets)
        warnings.warn(
            f"nothing was drawn: the answer does not hold {starts}, which announces it", stacklevel=1
        )


def _answer_all(
    exported: ExportedModel,
    prompts: Path,
    system: str | None,
    device: torch.device,
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> None:
    """Answer every prompt of a file, printing each answer as soon as it is ready. A prompt that fails prints its error
    instead of an answer, and the exit code becomes 2. Raises UserError if the file cannot be read or the model
    generates images."""
    from dataclasses import replace

    from dilatant.config.data import DataSource
    from dilatant.data.readers.reader import open_source
    from dilatant.data.readers.records import parse_prompt
    from dilatant.data.sample import Turn
    from dilatant.data.text.encode import encode_prompt
    from dilatant.training.evaluation.generation import generate_answers

    if exported.encoding.targets:
        raise UserError(
            "--prompts is for models that write; this one draws, so ask it for one --prompt at a time"
        )
    records = open_source(DataSource(path=str(prompts))).records
    model, stop_ids = exported.model.to(device), exported.encoding.chat.stop_ids
    refused = 0
    for number in range(len(records)):
        name = records.name_of(number)
        try:
            sample = parse_prompt(records.read(number))
            if system is not None and sample.turns[0].role != "system":
                sample = replace(sample, turns=(Turn("system", (system,)), *sample.turns))
            asked = encode_prompt(sample, exported.encoding)
        except UserError as error:  # includes errors of media files
            refused += 1
            print(json.dumps({"id": name, "error": str(error)}), flush=True)
            continue
        (answer,) = generate_answers(
            model, exported.tokenizer, [asked], device, max_new_tokens, stop_ids, **sampling
        )
        print(json.dumps({"id": name, "answer": answer}), flush=True)
    if refused:
        print(f"{refused} of {len(records)} could not be asked; their lines say why", file=sys.stderr)
        raise typer.Exit(2)


def _check_out(exported: ExportedModel, out: Path) -> None:
    """Raise UserError if the format of `out` does not fit what the model generates (images or features)."""
    from dilatant.models.multimodal import MultimodalModel

    assert isinstance(exported.model, MultimodalModel)
    units = [exported.model[target.name] for target in exported.encoding.targets]
    seen = [unit.model.encoder.config.model_type for unit in units if unit.model.draws_features]
    if seen and out.suffix != ".npy":
        raise UserError(
            f"--out {str(out)!r}: it draws features of {seen[0]}, and making pictures of them takes a decoder, which "
            "is not part of this model; give a file that ends with .npy for the features"
        )
    if not seen and out.suffix == ".npy":
        raise UserError(f"--out {str(out)!r}: it draws pictures; give an image format, such as .png")


def _about_out(out: Path) -> list[str]:
    from PIL import Image

    Image.init()
    if out.suffix == ".npy" and out.absolute().parent.is_dir():  # features
        return [f"--out {str(out)!r} is a folder"] if out.is_dir() else []
    if out.suffix.lower() not in Image.EXTENSION or Image.EXTENSION[out.suffix.lower()] not in Image.SAVE:
        return [f"--out {str(out)!r} must end with an image format, such as .png"]
    if not out.absolute().parent.is_dir():
        return [f"--out {str(out)!r}: the folder does not exist"]
    return [f"--out {str(out)!r} is a folder"] if out.is_dir() else []


def _numbered(out: Path, count: int) -> list[Path]:
    return [out if not number else out.with_stem(f"{out.stem}-{number + 1}") for number in range(count)]
