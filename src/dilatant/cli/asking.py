"""Options for prompting an exported model, shared by `generate` and `chat`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from dilatant.data.sample import Media, MediaKind
    from dilatant.hf.export import ExportedModel

_COLDEST = 0.001
"""Below this temperature, scaled logits exceed the range of float16, and later that of float32."""

ExportPath = Annotated[
    Path, typer.Argument(metavar="EXPORT", help="A folder written by `dilatant export`, or by `train`.")
]
Image = Annotated[list[Path], typer.Option("--image", help="An image for the (first) question; repeatable.")]
Audio = Annotated[list[Path], typer.Option("--audio", help="A sound for it; repeatable.")]
Video = Annotated[
    list[Path], typer.Option("--video", help="A video for it, or a folder of its frames; repeatable.")
]
System = Annotated[str | None, typer.Option(help="What the model is told before the question.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The longest answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that share this probability."),
]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")]
RepetitionPenalty = Annotated[
    float, typer.Option(min=0.0, help="Above 1, tokens that were there already are less likely.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of what is drawn.")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of text generation."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float = 1.0

    def problems(self) -> list[str]:
        """Return what is wrong with the options, one line each."""
        found = []
        if not (self.temperature == 0 or _COLDEST <= self.temperature < math.inf):
            found.append(
                f"--temperature must be 0, or a number from {_COLDEST} on (given: {self.temperature:g})"
            )
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            found.append("--top-p and --top-k choose what is drawn from; give a --temperature, such as 0.7")
        if not 0 < self.repetition_penalty < math.inf:
            found.append(f"--repetition-penalty must be above 0 (given: {self.repetition_penalty:g})")
        return found

    def keywords(self) -> dict[str, Any]:
        """Return keywords for transformers' `generate`. An option that is not given means no restriction, whatever the
        model's own settings say."""
        keywords: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if self.temperature > 0:
            drawn = {"temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": self.top_k or 0}
            keywords |= {"do_sample": True, **drawn}
        return keywords


def media_of(image: Iterable[Path], audio: Iterable[Path], video: Iterable[Path]) -> list[Media]:
    """Return the media that the options name, in their order."""
    from dilatant.data.sample import Media

    kinds: tuple[tuple[MediaKind, Iterable[Path]], ...] = (
        *(("image", image), ("audio", audio), ("video", video)),
    )
    return [Media(kind, path, str(path)) for kind, paths in kinds for path in paths]


def media_problems(given: Iterable[Media]) -> list[str]:
    """Return why files named by options cannot be read."""
    found = []
    for media in given:
        path = Path(media.name)
        if not path.is_file() and not (media.kind == "video" and path.is_dir()):
            why = "is not a file" if path.exists() else "does not exist"
            found.append(f"--{media.kind} {media.name!r} {why}")
    return found


def require_encoders(exported: ExportedModel, given: Iterable[Media]) -> None:
    """Raise UserError for media that the model has no encoder for."""
    kinds = {unit.kind for unit in exported.encoding.units}
    for media in given:
        if media.kind not in kinds:
            raise UserError(f"--{media.kind} {media.name!r}: this model has no encoder for {media.kind}")


def is_text(text: str) -> bool:
    """Return whether `text` is valid: invalid UTF-8 from a terminal arrives as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
