"""Held-out accuracy of a pipeline, through its own stages: nobody needs the whole model.

A greedy answer is exactly the expected one if and only if, given the expected answer up to any of its tokens, the
likeliest next token is the expected one. So one forward pass of all answers tells what generation, token by token,
would; beside that a written answer is known up to its first wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dilatant.comm.comm import Comm
from dilatant.comm.gather import exchange
from dilatant.config.errors import UserError
from dilatant.data.encode import Encoding, encode_prompt, encode_sample
from dilatant.data.loader import Dataset
from dilatant.data.sample import EncodedSample
from dilatant.training.evaluate import Evaluation, Verdict

Predict = Callable[[Sequence[EncodedSample]], dict[int, list[int]]]
"""See `Parallel.predict`."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A sample whose only targets are `answer`, the tokens of its last answer; and that answer as text."""

    sample: EncodedSample
    answer: list[int]
    expected: str


def evaluate_pipeline(
    predict: Predict,
    comm: Comm,
    tokenizer: Any,
    samples: Dataset,
    encoding: Encoding,
    *,
    batch_size: int,
    max_new_tokens: int,
    limit: int | None = None,
    skip_errors: bool = False,
) -> Evaluation:
    """As `evaluate`, called by all ranks together, which all get the same; the model should be in evaluation mode.

    Raises UserError for a sample that cannot be read, unless `skip_errors`: then all ranks must decode all media.
    """
    total = min(len(samples), limit or len(samples))
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    for start in range(0, total, batch_size):
        indices = range(start, min(total, start + batch_size))
        batch = list(_questions(samples, encoding, tokenizer, indices, skip_errors, skipped))
        if not batch:
            continue
        own = predict([question.sample for question in batch])
        written = {
            int(number): text
            for of_rank in exchange(
                comm, {n: _written(batch[n], tokens, tokenizer, max_new_tokens) for n, tokens in own.items()}
            )
            for number, text in of_rank.items()
        }
        verdicts += [Verdict(q.sample.id, q.expected, written[n]) for n, q in enumerate(batch)]
    return Evaluation(tuple(verdicts), tuple(skipped))


def _questions(
    samples: Dataset,
    encoding: Encoding,
    tokenizer: Any,
    indices: range,
    skip_errors: bool,
    skipped: list[str],
) -> Iterator[_Question]:
    undecoded = replace(encoding, decode=frozenset())
    for index in indices:
        try:
            whole = encode_sample(samples[index], encoding)
            prompt = encode_prompt(samples[index], undecoded)
        except UserError as error:
            if not skip_errors:
                raise
            skipped.append(str(error))
            continue
        labels = whole.labels.copy()
        labels[: len(prompt.sample.input_ids)] = -100
        ends = np.flatnonzero(labels == tokenizer.eos_token_id)
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
