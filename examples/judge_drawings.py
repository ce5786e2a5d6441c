"""How many of the digits that an exported model draws are recognised?

    python examples/judge_drawings.py runs/draw/export 50
    dilatant evaluate runs/draw/export --data data/draw/held_out.jsonl --judge examples/judge_drawings.py

The judge is a classifier trained on scikit-learn's real scans; the share of real scans it was not trained on that it
recognises is printed beside. Any judge can be put in its place: a function from pictures to what they show.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
from digits_to_draw import HELD_OUT_EVERY, WORDS
from PIL.Image import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from dilatant.data.sample import Sample, Turn
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import ExportedModel, load_exported
from dilatant.models.generators.diffusion import SamplingSettings
from dilatant.models.multimodal import MultimodalModel
from dilatant.training.evaluation.image_answers import encoder_inputs, generate_pictures, rows_behind


def score(question: str, expected: list[str | Image], answered: list[str | Image]) -> float:
    """1 for an answer that says what is expected and has one picture, of the digit that was asked for, or else shown;
    else 0."""
    pictures = [part for part in answered if not isinstance(part, str)]
    said, wanted = ("".join(part for part in parts if isinstance(part, str)) for parts in (answered, expected))
    if len(pictures) != 1 or said.strip() != wanted.strip():
        return 0.0
    asked = question.split()[-1]
    if asked in WORDS:
        return float(digit_on(pictures[0]) == WORDS.index(asked))
    (shown,) = (part for part in expected if not isinstance(part, str))
    return float(digit_on(pictures[0]) == digit_on(shown))


def digit_on(picture: Image) -> int:
    """What the judge takes it for."""
    return int(judge_of_digits().predict(np.asarray(picture, np.float64).reshape(1, -1) / 255 * 16)[0])


@cache
def judge_of_digits() -> SVC:
    """Trained on the real scans that are not held out."""
    digits = load_digits()
    learned = np.arange(len(digits.target)) % HELD_OUT_EVERY != 0
    return SVC(gamma=0.001, C=10).fit(digits.data[learned], digits.target[learned])


def recognised(exported: ExportedModel, count: int, guidance: float = 2.0, steps: int = 20) -> tuple[float, float]:
    """The share of drawn digits that the judge recognises, `count` of each, and that of real ones."""
    digits = load_digits()
    held_out = np.arange(len(digits.target)) % HELD_OUT_EVERY == 0
    judge = judge_of_digits()
    real = judge.score(digits.data[held_out], digits.target[held_out])
    (target,) = exported.encoding.targets
    model = exported.model
    assert isinstance(model, MultimodalModel)
    right = []
    for label, word in enumerate(WORDS):
        asked = Sample("judge", (Turn("user", (f"draw a {word}",)),))
        prompt = encode_prompt(asked, exported.encoding)
        start = exported.tokenizer.encode(target.start, add_special_tokens=False)
        places = [target.placeholder_id] * target.tokens_per_item
        ids = torch.tensor([[*prompt.sample.input_ids.tolist(), *start, *places]])
        with torch.no_grad():  # hidden states for a picture that directly follows the prompt: [1, k, hidden]
            rows = rows_behind(model, ids, encoder_inputs([prompt], ids.device), target)
        keys = [f"{word} {number}" for number in range(count)]
        drawn = generate_pictures(
            model[target.name], rows.expand(count, -1, -1), SamplingSettings(steps, guidance), keys
        )
        pixels = (drawn.flatten(1).numpy() + 1) * 8
        right.append(float((judge.predict(pixels) == label).mean()))
    return float(np.mean(right)), real


if __name__ == "__main__":
    torch.set_num_threads(1)
    exported = load_exported(Path(sys.argv[1]))
    for guidance in (1.0, 2.0):
        share, real = recognised(exported, int(sys.argv[2]), guidance)
        print(f"guidance {guidance:g}: {share:.3f} of drawn digits recognised, {real:.3f} of real ones")
