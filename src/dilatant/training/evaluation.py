"""Held-out accuracy: does the model write exactly the answer? Judged through the run's own stages, in any layout.

A greedy answer is exactly the expected one if and only if, given the expected answer up to any of its tokens, the
likeliest next token is the expected one. So one forward pass of all answers tells what generation, token by token,
would, and nobody needs the whole model; of a wrong answer what is written is known up to its first wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dilatant.comm.gather import all_gather_object
from dilatant.config import Config
from dilatant.config.errors import UserError
from dilatant.data.encode import encode_prompt, encode_sample
from dilatant.data.sample import EncodedSample
from dilatant.profiling.assemble import Samples
from dilatant.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Verdict:
    """One held-out sample: what was expected, and what the model wrote ("..." where it goes on after a wrong token)."""

    sample: str
    expected: str
    written: str

    @property
    def is_right(self) -> bool:
        return self.expected.strip() == self.written.strip()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Exact match over held-out samples. `skipped`: samples that could not be read."""

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...]

    @property
    def exact_match(self) -> float:
        """Share of samples answered exactly, in [0, 1]."""
        return sum(verdict.is_right for verdict in self.verdicts) / max(1, len(self.verdicts))

    def to_record(self, examples: int = 8) -> dict[str, Any]:
        """What eval.json holds: the figure, and some wrong answers to look at."""
        wrong = [verdict for verdict in self.verdicts if not verdict.is_right]
        return {
            "exact_match": self.exact_match,
            "samples": len(self.verdicts),
            "skipped": list(self.skipped),
            "wrong_examples": [
                {"sample": verdict.sample, "expected": verdict.expected, "written": verdict.written}
                for verdict in wrong[:examples]
            ],
        }


@dataclass(frozen=True, slots=True)
class _Question:
    """A sample whose only targets are `answer`, the tokens of its last answer; and that answer as text."""

    sample: EncodedSample
    answer: list[int]
    expected: str


def evaluate(runtime: Runtime, config: Config, samples: Samples) -> Evaluation | None:
    """Exact match of the last answer of every held-out sample; None without such data. Called by all ranks together,
    which all get the same; the model is in evaluation mode meanwhile.

    Raises UserError for a sample that cannot be read, unless `data.on_error` is skip: then all ranks must decode all
    media.
    """
    if samples.held_out is None:
        return None
    total = min(len(samples.held_out), config.evaluation.limit or len(samples.held_out))
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    runtime.train(False)
    try:
        for start in range(0, total, config.evaluation.batch_size):
            indices = range(start, min(total, start + config.evaluation.batch_size))
            batch = list(_questions(samples, indices, config.data.on_error == "skip", skipped))
            if batch:
                verdicts += _judge(runtime, batch, samples.tokenizer, config.evaluation.max_new_tokens)
    finally:
        runtime.train()
    return Evaluation(tuple(verdicts), tuple(skipped))


def _judge(
    runtime: Runtime, batch: list[_Question], tokenizer: Any, max_new_tokens: int
) -> Iterator[Verdict]:
    own = runtime.predict([question.sample for question in batch])
    written = {
        number: _written(batch[number], tokens, tokenizer, max_new_tokens) for number, tokens in own.items()
    }
    by_number = {
        int(number): text
        for of_rank in all_gather_object(runtime.comm, written)
        for number, text in of_rank.items()
    }
    for number, question in enumerate(batch):
        yield Verdict(question.sample.id, question.expected, by_number[number])


def _questions(
    samples: Samples, indices: range, skip_errors: bool, skipped: list[str]
) -> Iterator[_Question]:
    assert samples.held_out is not None
    undecoded = replace(samples.encoding, decode=frozenset())
    for index in indices:
        try:
            whole = encode_sample(samples.held_out[index], samples.encoding)
            prompt = encode_prompt(samples.held_out[index], undecoded)
        except UserError as error:
            if not skip_errors:
                raise
            skipped.append(str(error))
            continue
        labels = whole.labels.copy()
        labels[: len(prompt.sample.input_ids)] = -100
        ends = np.flatnonzero(labels == samples.tokenizer.eos_token_id)
        if len(ends):  # what a template writes behind the answer is not judged
            labels[int(ends[0]) + 1 :] = -100
        answer = labels[labels != -100].tolist()
        yield _Question(replace(whole, labels=labels), answer, prompt.answer)


def _written(question: _Question, predicted: list[int], tokenizer: Any, max_new_tokens: int) -> str:
    """What the model writes: all of a right answer, or up to the first wrong token ("..." if it goes on there)."""
    for place, (token, wanted) in enumerate(zip(predicted, question.answer, strict=True)):
        if token != wanted or place == max_new_tokens:
            written = [*question.answer[:place], token][:max_new_tokens]
            ends = token == tokenizer.eos_token_id or place == max_new_tokens
            return tokenizer.decode(written, skip_special_tokens=True) + ("" if ends else "...")
    return question.expected
