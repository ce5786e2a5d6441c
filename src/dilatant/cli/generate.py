"""`dilatant generate`: ask an exported model something."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dilatant.cli.options import AsJson
from dilatant.config.errors import UserError, list_problems

_COLDEST = 0.001
"""Below it, logits divided by the temperature leave the range of float16, and later that of float32."""


def generate(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder written by `dilatant export`.")],
    prompt: Annotated[
        str, typer.Option(help="The question. Media go where their markers stand, else before it.")
    ],
    image: Annotated[list[Path], typer.Option(help="An image file; may be given several times.")] = [],  # noqa: B006
    audio: Annotated[list[Path], typer.Option(help="A sound file; may be given several times.")] = [],  # noqa: B006
    video: Annotated[
        list[Path], typer.Option(help="A video, or a folder of its frames; may be given several times.")
    ] = [],  # noqa: B006
    system: Annotated[str | None, typer.Option(help="What the model is told before the question.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token.")] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that share this probability."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where a picture goes; more of them become NAME-2.png and so on.")
    ] = None,
    guidance: Annotated[
        float, typer.Option(min=0.0, help="How much pictures follow the prompt; 1 is as they were learned.")
    ] = 2.0,
    drawing_steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps from noise to a picture.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of what is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Ask an exported model something, with images and sounds."""
    given = [
        (kind, path)
        for kind, paths in (("image", image), ("audio", audio), ("video", video))
        for path in paths
    ]
    problems = [
        f"--{kind} {str(path)!r} {'is not a file' if path.exists() else 'does not exist'}"
        for kind, path in given
        if not path.is_file() and not (kind == "video" and path.is_dir())
    ]
    texts = {"--prompt": prompt, "--system": system or ""}
    problems += [f"{option} is not UTF-8 text" for option, text in texts.items() if not _is_text(text)]
    if not (temperature == 0 or _COLDEST <= temperature < math.inf):
        problems.append(f"--temperature must be 0, or a number from {_COLDEST} on (given: {temperature:g})")
    if temperature == 0 and (top_p is not None or top_k is not None):
        problems.append("--top-p and --top-k choose what is drawn from; give a --temperature, such as 0.7")
    if not math.isfinite(guidance):
        problems.append(f"--guidance must be a number (given: {guidance:g})")
    if out is not None:
        problems += _about_out(out)
    if problems:
        raise list_problems("the prompt has a mistake:", problems)

    import torch

    from dilatant.data.encode import encode_prompt
    from dilatant.data.errors import SampleError
    from dilatant.data.sample import Media, Sample, Turn
    from dilatant.models.multimodal import MultimodalModel
    from dilatant.models.sampling import Drawing
    from dilatant.runtime.precision import pick_device
    from dilatant.training.drawing import answer_with_pictures
    from dilatant.training.export import load_exported
    from dilatant.training.generation import generate_answers

    exported = load_exported(folder)
    if out is not None and not exported.encoding.targets:
        raise UserError(f"--out {str(out)!r}: this model has no generator, so it draws nothing")
    kinds = {unit.kind for unit in exported.encoding.units}
    for kind, path in given:
        if kind not in kinds:
            raise UserError(f"--{kind} {str(path)!r}: this model has no encoder for {kind}")
    media: list[Media] = [Media(kind, path, str(path)) for kind, path in given]  # type: ignore[arg-type]
    turns = [Turn("system", (system,))] if system else []
    sample = Sample("the prompt", (*turns, Turn("user", (prompt,))), tuple(media))
    try:
        encoded = encode_prompt(sample, exported.encoding)
    except SampleError as error:
        raise UserError(f"the prompt: {error.problem}") from None  # its remedy is about data files
    sampling: dict[str, Any] = {}
    if temperature > 0:
        # Not given is all there is, whatever the model's own generation settings say.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}
    device = pick_device()
    torch.manual_seed(seed)
    model = exported.model.to(device)
    if not exported.encoding.targets:
        (answer,) = generate_answers(model, exported.tokenizer, [encoded], device, max_new_tokens, **sampling)
        print(json.dumps({"answer": answer}) if as_json else answer)
        return
    assert isinstance(model, MultimodalModel)  # whole models draw nothing
    parts = answer_with_pictures(
        model,
        exported.tokenizer,
        encoded,
        exported.encoding.targets,
        device,
        max_new_tokens,
        Drawing(drawing_steps, guidance),
        seed,
        **sampling,
    )
    pictures = [part for part in parts if not isinstance(part, str)]
    paths = [] if out is None else _numbered(out, len(pictures))
    try:
        for path, picture in zip(paths, pictures):
            picture.save(path)
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror or error}") from None
    named = iter(paths)
    shown = "".join(
        part if isinstance(part, str) else f"[{next(named, 'a picture; give --out')}]" for part in parts
    )
    print(json.dumps({"answer": shown, "images": [*map(str, paths)]}) if as_json else shown)


def _about_out(out: Path) -> list[str]:
    from PIL import Image

    Image.init()
    if out.suffix.lower() not in Image.EXTENSION or Image.EXTENSION[out.suffix.lower()] not in Image.SAVE:
        return [f"--out {str(out)!r} must end with an image format, such as .png"]
    if not out.absolute().parent.is_dir():
        return [f"--out {str(out)!r}: the folder does not exist"]
    return [f"--out {str(out)!r} is a folder"] if out.is_dir() else []


def _numbered(out: Path, count: int) -> list[Path]:
    return [out if not number else out.with_stem(f"{out.stem}-{number + 1}") for number in range(count)]


def _is_text(text: str) -> bool:
    """What a terminal sends that is no UTF-8 arrives as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
