"""Options for prompting an exported model, shared by `generate`, `chat` and `evaluate`, and the model that answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilatant.cli.options import say_loading
from dilatant.config.errors import UserError, list_problems

if TYPE_CHECKING:
    from dilatant.data.sample import Media, Turn
    from dilatant.data.text.encode import EncodedPrompt
    from dilatant.models.generators.diffusion import SamplingSettings

_COLDEST = 0.001
"""Below this temperature, scaled logits exceed the range of float16, and later that of float32."""

ExportPath = Annotated[
    Path, typer.Argument(metavar="EXPORT", help="A folder written by `dilatant export`, or by `train`.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The longest answer.")]
Paths = list[Path]


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Media and system text of the (first) question, and the sampling settings of text generation."""

    image: Annotated[Paths, typer.Option("--image", help="An image for the (first) question; repeatable.")] = field(
        default_factory=list
    )
    audio: Annotated[Paths, typer.Option("--audio", help="A sound for it; repeatable.")] = field(default_factory=list)
    video: Annotated[Paths, typer.Option("--video", help="A video for it, or a folder of its frames; repeatable.")] = (
        field(default_factory=list)
    )
    system: Annotated[str | None, typer.Option(help="What the model is told before the question.")] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token.")] = 0.0
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that share this probability.")
    ] = None
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")] = None
    repetition_penalty: Annotated[
        float, typer.Option(min=0.0, help="Above 1, tokens that were there already are less likely.")
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of what is drawn.")] = 0

    @property
    def media(self) -> list[Media]:
        """The media that the options name, in their order."""
        kinds = ("image", "audio", "video")
        return [media_at(kind, path) for kind in kinds for path in getattr(self, kind)]

    def system_turns(self) -> tuple[Turn, ...]:
        """Return the turns before the first question."""
        from dilatant.data.sample import Turn

        return (Turn("system", (self.system,)),) if self.system else ()

    def problems(self) -> list[str]:
        """Return what is wrong with the options, one line each."""
        found = media_problems(self.media)
        if not is_text(self.system or ""):
            found.append("--system is not UTF-8 text")
        if not (self.temperature == 0 or _COLDEST <= self.temperature < math.inf):
            found.append(f"--temperature must be 0, or a number from {_COLDEST} on (given: {self.temperature:g})")
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


@dataclass(frozen=True, slots=True)
class DrawingOptions:
    """Settings of picture generation."""

    guidance: Annotated[
        float, typer.Option(min=0.0, help="How much pictures follow the prompt; 1 is as they were learned.")
    ] = 2.0
    drawing_steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps from noise to a picture.")] = 20

    def settings(self) -> SamplingSettings:
        from dilatant.models.generators.diffusion import SamplingSettings

        return SamplingSettings(self.drawing_steps, self.guidance)


class Answerer:
    """An exported model on this machine's device, which answers as options say. Raises UserError for options with a
    mistake (`problems` has more), before anything large is loaded."""

    def __init__(
        self, folder: Path, options: PromptOptions, max_new_tokens: int, problems: list[str], what: str
    ) -> None:
        if problems := [*problems, *options.problems()]:
            raise list_problems(f"the {what} has a mistake:", problems)
        say_loading()

        import torch

        from dilatant.hf.export import load_exported
        from dilatant.runtime.precision import pick_device

        self.options = options
        self.max_new_tokens = max_new_tokens
        self.device = pick_device()
        exported = load_exported(folder)
        self.tokenizer, self.encoding = exported.tokenizer, exported.encoding
        self.stop_ids = self.encoding.chat.stop_ids
        self.require_encoders(options.media)
        self.model = exported.model.to(self.device)
        torch.manual_seed(options.seed)

    def require_encoders(self, media: Iterable[Media]) -> None:
        """Raise UserError for media that the model has no encoder for."""
        kinds = {unit.kind for unit in self.encoding.units}
        for item in media:
            if item.kind not in kinds:
                raise UserError(f"--{item.kind} {item.name!r}: this model has no encoder for {item.kind}")

    def answer(self, prompt: EncodedPrompt, **more: Any) -> str:
        """Return the answer to a prompt. more: further keywords for transformers' `generate`."""
        from dilatant.training.evaluation.image_answers import generate_answers

        (text,) = generate_answers(
            self.model, self.tokenizer, [prompt], self.device, self.max_new_tokens, self.stop_ids,
            **self.options.keywords(), **more,
        )  # fmt: skip
        return text


def media_at(kind: Any, path: Path) -> Media:
    """Return the item of this kind at a path."""
    from dilatant.data.sample import Media

    return Media(kind, path, str(path))


def media_problems(media: Iterable[Media]) -> list[str]:
    """Return why files named by options cannot be read."""
    found = []
    for item in media:
        path = Path(item.name)
        if not path.is_file() and not (item.kind == "video" and path.is_dir()):
            why = "is not a file" if path.exists() else "does not exist"
            found.append(f"--{item.kind} {item.name!r} {why}")
    return found


def is_text(text: str) -> bool:
    """Return whether `text` is valid: invalid UTF-8 from a terminal arrives as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
