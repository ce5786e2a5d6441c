"""`dilatant chat`: chat with an exported model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilatant.cli import asking
from dilatant.cli.options import say_loading
from dilatant.config.errors import UserError, list_problems
from dilatant.config.printable import printable

if TYPE_CHECKING:
    import torch

    from dilatant.data.sample import Media, Turn
    from dilatant.hf.export import ExportedModel

HELP = """/image PATH   show an image with the next question     /system TEXT  say what the model is told first
/audio PATH   play a sound with the next question      /reset        forget the conversation
/video PATH   show a video, or a folder of frames      /exit         leave (also Ctrl-D)
/help         this"""

_NONE: dict[str, list[Path]] = {"image": [], "audio": [], "video": []}


def chat(
    folder: asking.ExportPath,
    image: asking.Image = [],  # noqa: B006
    audio: asking.Audio = [],  # noqa: B006
    video: asking.Video = [],  # noqa: B006
    system: asking.System = None,
    max_new_tokens: asking.MaxNewTokens = 512,
    temperature: asking.Temperature = 0.0,
    top_p: asking.TopP = None,
    top_k: asking.TopK = None,
    repetition_penalty: asking.RepetitionPenalty = 1.0,
    seed: asking.Seed = 0,
) -> None:
    """Chat with an exported model, with images, sounds and videos given by path. Each line is a question; /help lists
    the commands. Ctrl-C stops an answer."""
    sampling = asking.Sampling(temperature, top_p, top_k, repetition_penalty)
    given = asking.media_of(image, audio, video)
    problems = [*asking.media_problems(given), *sampling.problems()]
    if system is not None and not asking.is_text(system):
        problems.append("--system is not UTF-8 text")
    if problems:
        raise list_problems("the command has a mistake:", problems)

    say_loading()

    import torch

    from dilatant.hf.export import load_exported
    from dilatant.runtime.precision import pick_device

    exported = load_exported(folder)
    asking.require_encoders(exported, given)
    if exported.encoding.targets:
        raise UserError(f"{str(folder)!r} draws pictures; ask it with `dilatant generate --out`")
    torch.manual_seed(seed)
    talk = _Conversation(exported, pick_device(), sampling.keywords(), max_new_tokens, system, given)
    talks = sys.stdin.isatty()
    if talks:
        print(HELP, file=sys.stderr)
    while True:
        if talks:
            print("\n> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            break
        except UnicodeDecodeError:
            print("that is not UTF-8 text", file=sys.stderr)
            continue
        if not line or line.strip() == "/exit":
            break
        talk.hear(line.strip())


class _Conversation:
    """The turns so far, and the media of the next question."""

    def __init__(
        self,
        exported: ExportedModel,
        device: torch.device,
        sampling: dict[str, Any],
        max_new_tokens: int,
        system: str | None,
        media: Iterable[Media],
    ) -> None:
        self._exported = exported
        self._model = exported.model.to(device)
        self._device = device
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._system = system
        self._turns: list[Turn] = []
        self._media = list(media)

    def hear(self, line: str) -> None:
        """Process a question or a command. Mistakes are reported, and the conversation continues."""
        command, _, rest = line.partition(" ")
        if not line:
            return
        if command in ("/image", "/audio", "/video"):
            path = Path(rest.strip()).expanduser()
            shown = asking.media_of(**{**_NONE, command[1:]: [path]})
            problems = asking.media_problems(shown)
            try:
                asking.require_encoders(self._exported, shown)
            except UserError as error:
                problems = [str(error)]
            if problems:
                print(printable(problems[0].removeprefix("--")), file=sys.stderr)
            else:
                self._media += shown
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/reset":
            self._turns, self._media = [], []
        elif command.startswith("/") and "/" not in command[1:]:
            if command != "/help":
                print(printable(f"{command} is no command"), file=sys.stderr)
            print(HELP, file=sys.stderr)
        elif not asking.is_text(line):
            print("that is not UTF-8 text", file=sys.stderr)
        else:
            self._answer(line)

    def _answer(self, question: str) -> None:
        from transformers import TextStreamer

        from dilatant.data.errors import SampleError
        from dilatant.data.sample import Sample, Turn
        from dilatant.data.text.encode import encode_prompt
        from dilatant.training.evaluation.generation import generate_answers

        asked = Turn("user", (*self._media, question))
        first = () if self._system is None else (Turn("system", (self._system,)),)
        try:
            prompt = encode_prompt(
                Sample("the prompt", (*first, *self._turns, asked)), self._exported.encoding
            )
        except SampleError as error:
            self._media = []
            print(printable(f"that cannot be asked: {error.problem}"), file=sys.stderr)
            return
        tokenizer, stop_ids = self._exported.tokenizer, self._exported.encoding.chat.stop_ids

        class Shown(TextStreamer):
            """Shows an answer without the token that ends it, and without control characters."""

            def put(self, value: Any) -> None:
                if value.numel() != 1 or value.item() not in stop_ids:
                    super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                super().on_finalized_text(printable(text), stream_end)

        try:
            (answer,) = generate_answers(
                self._model,
                tokenizer,
                [prompt],
                self._device,
                self._max_new_tokens,
                stop_ids,
                streamer=Shown(tokenizer, skip_prompt=True, skip_special_tokens=True),
                **self._sampling,
            )
        except KeyboardInterrupt:
            print("\n(stopped; the question is forgotten)", file=sys.stderr)
            return
        self._media = []
        self._turns += [asked, Turn("assistant", (answer,))]
