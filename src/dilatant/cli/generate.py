"""`dilatant generate`: ask an exported model something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dilatant.cli.options import AsJson
from dilatant.config.errors import UserError


def generate(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder written by `dilatant export`.")],
    prompt: Annotated[
        str, typer.Option(help="The question. Media go where their markers stand, else before it.")
    ],
    image: Annotated[list[Path], typer.Option(help="An image file; may be given several times.")] = [],  # noqa: B006
    audio: Annotated[list[Path], typer.Option(help="A sound file; may be given several times.")] = [],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Ask an exported model something, with images and sounds."""
    from dilatant.data.encode import encode_prompt
    from dilatant.data.sample import Media, Sample, Turn
    from dilatant.runtime.precision import pick_device
    from dilatant.training.export import load_exported
    from dilatant.training.generation import generate_answers

    exported = load_exported(folder)
    kinds = {unit.kind for unit in exported.encoding.units}
    media = [Media("image", path, str(path)) for path in image] + [
        Media("audio", path, str(path)) for path in audio
    ]
    for item in media:
        if item.kind not in kinds:
            raise UserError(f"{item.name}: this model has no encoder for {item.kind}")
    device = pick_device()
    model = exported.model.to(device)
    sample = Sample("the prompt", (Turn("user", (prompt,)),), tuple(media))
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    (answer,) = generate_answers(
        model,
        exported.tokenizer,
        [encode_prompt(sample, exported.encoding)],
        device,
        max_new_tokens,
        **sampling,
    )
    print(json.dumps({"answer": answer}) if as_json else answer)
