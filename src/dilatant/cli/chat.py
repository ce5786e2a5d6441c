"""`dilatant chat`: chat with an exported model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilatant.cli.asking import Answerer, ExportPath, MaxNewTokens, PromptOptions, is_text, media_at, media_problems
from dilatant.config.errors import UserError
from dilatant.config.printable import escaped, printable

if TYPE_CHECKING:
    from dilatant.data.sample import Turn

HELP = """/image PATH   show an image with the next question     /system TEXT  say what the model is told first
/audio PATH   play a sound with the next question      /reset        forget the conversation
/video PATH   show a video, or a folder of frames      /exit         leave (also Ctrl-D)
/help         this"""


def chat(folder: ExportPath, options: PromptOptions, max_new_tokens: MaxNewTokens = 512) -> None:
    """Chat with an exported model, with images, sounds and videos given by path. Each line is a question; /help lists
    the commands. Ctrl-C stops an answer."""
    answerer = Answerer(folder, options, max_new_tokens, [], "command")
    if answerer.encoding.targets:
        raise UserError(f"{str(folder)!r} draws pictures; ask it with `dilatant generate --out`")
    conversation = _Conversation(answerer)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP, file=sys.stderr)
    while True:
        if is_terminal:
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
        conversation.hear(line.strip())


class _Conversation:
    """The turns so far, and the media of the next question."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer
        self._system = answerer.options.system_turns()
        self._turns: list[Turn] = []
        self._media = answerer.options.media

    def hear(self, line: str) -> None:
        """Process a question or a command. Mistakes are reported, and the conversation continues."""
        from dilatant.data.sample import Turn

        command, _, rest = line.partition(" ")
        if not line:
            return
        if command in ("/image", "/audio", "/video"):
            media = [media_at(command[1:], Path(rest.strip()).expanduser())]
            problems = media_problems(media)
            try:
                self._answerer.require_encoders(media)
            except UserError as error:
                problems = [str(error)]
            if problems:
                print(printable(problems[0].removeprefix("--")), file=sys.stderr)
            else:
                self._media += media
        elif command == "/system":
            self._system = (Turn("system", (rest.strip(),)),) if rest.strip() else ()
        elif command == "/reset":
            self._turns, self._media = [], []
        elif command.startswith("/") and "/" not in command[1:]:
            if command != "/help":
                print(printable(f"{command} is no command"), file=sys.stderr)
            print(HELP, file=sys.stderr)
        elif not is_text(line):
            print("that is not UTF-8 text", file=sys.stderr)
        else:
            self._answer(Turn("user", (*self._media, line)))

    def _answer(self, question: Turn) -> None:
        from transformers import TextStreamer

        from dilatant.data.errors import SampleError
        from dilatant.data.sample import Sample, Turn
        from dilatant.data.text.encode import encode_prompt

        answerer = self._answerer
        try:
            prompt = encode_prompt(Sample("the prompt", (*self._system, *self._turns, question)), answerer.encoding)
        except SampleError as error:
            self._media = []
            print(printable(f"that cannot be asked: {error.problem}"), file=sys.stderr)
            return

        class Shown(TextStreamer):
            """Shows an answer without the token that ends it, and without control characters."""

            def put(self, value: Any) -> None:
                if value.numel() != 1 or value.item() not in answerer.stop_ids:
                    super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                super().on_finalized_text(escaped(text), stream_end)

        try:
            answer = answerer.answer(
                prompt, streamer=Shown(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
            )
        except KeyboardInterrupt:
            print("\n(stopped; the question is forgotten)", file=sys.stderr)
            return
        self._media = []
        self._turns += [question, Turn("assistant", (answer,))]
