"""Answers of an exported model to held-out samples, scored by metrics of texts or by a user's function, which may ask
another model."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilatant.config.errors import UserError, own_code
from dilatant.config.signatures import require_call
from dilatant.data.errors import SampleError
from dilatant.data.media.image_file import decode_image
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.order.blend import Blend
from dilatant.data.sample import Media, Sample
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import ExportedModel
from dilatant.models.generators.diffusion import SamplingSettings
from dilatant.models.multimodal import MultimodalModel
from dilatant.training.evaluation.answer_metrics import measure
from dilatant.training.evaluation.image_answers import answer_with_pictures, generate_answers

if TYPE_CHECKING:
    from PIL.Image import Image

    from dilatant.training.evaluation.image_answers import Drawn

ScoredAnswer = list["str | Drawn"]
Judge = Callable[[str, ScoredAnswer, ScoredAnswer], float]
"""judge(question, expected, answered) → a number; texts and pictures in their order."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out sample and the model's answer: texts and pictures in their order. text: the expected answer's text.
    source: name of the data set."""

    sample: Sample
    text: str
    answered: ScoredAnswer
    source: str

    @property
    def written(self) -> str:
        """The text of the model's answer."""
        return "".join(part for part in self.answered if isinstance(part, str))

    @property
    def record(self) -> dict[str, str]:
        return {"sample": self.sample.id, "expected": self.text, "written": self.written}


def load_judge(place: str) -> Judge:
    """Load the function FILE.py:FUNCTION (default `score`); it can import from the file's folder. Raises UserError."""
    file, _, name = place.partition(":")
    path, name = Path(file), name or "score"
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--judge {place!r}: give FILE.py or FILE.py:FUNCTION; {str(path)!r} is no Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    with own_code(f"--judge {place!r} cannot be loaded"):
        spec.loader.exec_module(module)
    judge = getattr(module, name, None)
    if not callable(judge):
        raise UserError(f"--judge {place!r}: {str(path)!r} has no function {name!r}")
    require_call(f"--judge {place!r}", judge, "question", "expected", "answered")
    return judge


def answer_samples(
    exported: ExportedModel,
    held_out: Blend,
    limit: int | None,
    device: torch.device,
    max_new_tokens: int,
    how: SamplingSettings,
    seed: int = 0,
    on_problem: Callable[[SampleError], object] | None = None,
) -> Iterator[Answered]:
    """Yield greedy answers to the first `limit` samples of each data set, in order, of marked ones to the good ones.
    on_problem: called for a sample that cannot be asked. Raises UserError for it otherwise."""
    model, tokenizer, encoding = exported.model.to(device), exported.tokenizer, exported.encoding
    for index in held_out.first(limit).tolist():
        try:
            sample = held_out[index]
            if encoding.marks and sample.desired is False:
                continue  # a bad answer is nothing to compare with
            prompt = encode_prompt(sample, encoding)
        except SampleError as error:
            if on_problem is None:
                raise
            on_problem(error)
            continue
        answered: ScoredAnswer
        if encoding.targets:
            assert isinstance(model, MultimodalModel)  # as models with generators are
            key = seed + index
            answered = answer_with_pictures(
                model, tokenizer, prompt, encoding.targets, device, max_new_tokens, how, key
            )
        else:
            ends = encoding.chat.stop_ids
            answered = [*generate_answers(model, tokenizer, [prompt], device, max_new_tokens, ends)]
        yield Answered(sample, prompt.answer, answered, held_out.source_names[held_out.source_of(index)])


def measure_answers(answers: Sequence[Answered], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of answers by name, their number, and, of several data sets, the metrics of each. Raises
    UserError for a user's metric that fails."""

    def figures(some: Sequence[Answered]) -> dict[str, float]:
        expected, written = [one.text for one in some], [one.written for one in some]
        return {name: measure(name, expected, written) for name in metrics}

    sources = dict.fromkeys(one.source for one in answers)
    each = {name: figures([one for one in answers if one.source == name]) for name in sources if len(sources) > 1}
    return {**figures(answers), "samples": len(answers), **({"by_data_set": each} if each else {})}


def judge_answer(one: Answered, judge: Judge, targets: Sequence[ImageTarget] = ()) -> float:
    """Return the judge's score of an answer. targets: what the model draws. Raises UserError for a judge that fails or
    returns no finite number."""
    channels = next((target.processor.channels for target in targets), 3)
    sample = one.sample
    expected: ScoredAnswer
    with own_code(f"the judge failed at {sample.id}"):
        asked = "".join(part for turn in sample.turns[:-1] for part in turn.content if isinstance(part, str))
        expected = [part if isinstance(part, str) else _shown(part, channels) for part in sample.turns[-1].content]
        score = float(judge(asked, expected, one.answered))
    if not math.isfinite(score):
        raise UserError(f"the judge gives {sample.id} {score}; it must give a finite number")
    return score


def _shown(media: Media, channels: int) -> Image | str:
    """Return a picture of an answer; other media are named by their kind."""
    if media.kind != "image":
        return f"<{media.kind}>"
    from PIL import Image

    pixels = decode_image(media, channels)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
