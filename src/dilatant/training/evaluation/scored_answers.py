"""Scores of held-out answers, texts and pictures alike, by a user's function: a metric, or another model."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dilatant.config.errors import UserError
from dilatant.config.signatures import require_call
from dilatant.data.media.image_file import decode_image
from dilatant.data.sample import Dataset, Media
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import ExportedModel
from dilatant.models.generators.diffusion import SamplingSettings
from dilatant.models.multimodal import MultimodalModel
from dilatant.training.evaluation.image_answers import answer_with_pictures, generate_answers

if TYPE_CHECKING:
    from PIL.Image import Image

    from dilatant.training.evaluation.image_answers import Drawn

ScoredAnswer = list["str | Drawn"]
Judge = Callable[[str, ScoredAnswer, ScoredAnswer], float]
"""judge(question, expected, answered) → a number; texts and pictures in their order."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score that the judge gave a held-out sample."""

    sample: str
    score: float


def load_judge(place: str) -> Judge:
    """Load the function FILE.py:FUNCTION (default `score`); it can import from the file's folder. Raises UserError."""
    file, _, name = place.partition(":")
    path, name = Path(file), name or "score"
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--judge {place!r}: give FILE.py or FILE.py:FUNCTION; {str(path)!r} is no Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--judge {place!r} cannot be loaded: {type(error).__name__}: {error}") from None
    judge = getattr(module, name, None)
    if not callable(judge):
        raise UserError(f"--judge {place!r}: {str(path)!r} has no function {name!r}")
    require_call(f"--judge {place!r}", judge, "question", "expected", "answered")
    return judge


def judge_answers(
    exported: ExportedModel,
    held_out: Dataset,
    judge: Judge,
    device: torch.device,
    max_new_tokens: int,
    how: SamplingSettings,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Score]:
    """Yield the scores of greedy answers to held-out samples, in order. Raises UserError for a sample that cannot be
    asked, and for a judge that fails or returns no finite number."""
    model, tokenizer, targets = exported.model.to(device), exported.tokenizer, exported.encoding.targets
    channels = next((target.processor.channels for target in targets), 3)
    for index in range(min(len(held_out), limit or len(held_out))):
        sample = held_out[index]
        prompt = encode_prompt(sample, exported.encoding)
        expected: ScoredAnswer
        answered: ScoredAnswer
        if targets:
            assert isinstance(model, MultimodalModel)  # as models with generators are
            key = seed + index
            answered = answer_with_pictures(model, tokenizer, prompt, targets, device, max_new_tokens, how, key)
        else:
            answered = [*generate_answers(model, tokenizer, [prompt], device, max_new_tokens)]
        try:
            asked = "".join(part for turn in sample.turns[:-1] for part in turn.content if isinstance(part, str))
            expected = [part if isinstance(part, str) else _shown(part, channels) for part in sample.turns[-1].content]
            score = float(judge(asked, expected, answered))
        except Exception as error:
            raise UserError(f"the judge failed at {sample.id}: {type(error).__name__}: {error}") from error
        if not math.isfinite(score):
            raise UserError(f"the judge gives {sample.id} {score}; it must give a finite number")
        yield Score(sample.id, score)


def _shown(media: Media, channels: int) -> Image | str:
    """Return a picture of an answer; other media are named by their kind."""
    if media.kind != "image":
        return f"<{media.kind}>"
    from PIL import Image

    pixels = decode_image(media, channels)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
