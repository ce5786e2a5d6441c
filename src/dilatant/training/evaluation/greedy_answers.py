"""Greedy answers of a model that is split into stages: each forward pass verifies a draft of several tokens.

One pass over a prompt and a drafted answer gives the likeliest token after each of its prefixes. The draft is accepted
up to its first token that differs, where the model's token replaces it; the model's tokens after that are the next
draft (Jacobi decoding: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel
Decoding"). The first draft is the expected answer, so a right one takes one pass. A pass goes through the stages like
any step: no rank needs the whole model, and every layout writes the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dilatant.comm.gather import all_gather_object
from dilatant.config.model import LANGUAGE
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import NO_LOSS
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.agreement import digest
from dilatant.runtime.step.step_planner import PreparedStep


@dataclass(slots=True)
class GreedyAnswer:
    """Answer of a sample, as verified so far. expected: its tokens. loss: their cross entropy, summed. prompt: number
    of tokens before it. written: tokens that are accepted; draft: what may follow them."""

    expected: list[int]
    loss: float
    prompt: int
    written: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    is_done: bool = False

    def prove(self, tokens: Sequence[int], likeliest: Sequence[int], longest: int, ends: Collection[int]) -> None:
        """Accept the verified part of a draft. tokens: the draft from its beginning; likeliest: the model's
        tokens there."""
        right = 0
        while right < len(tokens) and tokens[right] == likeliest[right]:
            right += 1
        proven = list(likeliest[: right + 1])
        stop = next((at for at, token in enumerate(proven) if token in ends), None)
        proven = proven if stop is None else proven[: stop + 1]
        self.written = proven[:longest]
        self.is_done = len(proven) >= longest or stop is not None
        self.draft = list(likeliest[right + 1 :])


def verify_answers(runtime: Runtime, samples: Sequence[EncodedSample], step: PreparedStep) -> dict[int, GreedyAnswer]:
    """Return sample number → its answer, as far as one pass verifies it, on all ranks. step: of these samples, with
    `forwards`."""
    own = {}
    for number, predicted in runtime.predict(samples, step).items():
        labels = samples[number].labels
        at = np.flatnonzero(labels != NO_LOSS)
        own[number] = [labels[at].tolist(), int(at[0]), predicted.tokens, sum(predicted.losses)]
    answers = {}
    for number, (expected, prompt, likeliest, loss) in gather_by_sample(runtime, own).items():
        answer = GreedyAnswer(expected, loss, prompt)
        answer.prove(expected, likeliest, len(likeliest), ())
        answers[number] = answer
    return answers


def write_answers(
    runtime: Runtime,
    samples: Sequence[EncodedSample],
    step: PreparedStep,
    answers: Mapping[int, GreedyAnswer],
    longest: int,
    ends: Collection[int],
) -> None:
    """Extend the answers of `verify_answers` to one of `ends`, or `longest` tokens. Called by all ranks together."""
    for answer in answers.values():
        proven = [*answer.written, *answer.draft]
        answer.prove(answer.written, answer.written, longest, ends)
        answer.draft = proven[len(answer.written) :]
    pad = min(ends, default=0)
    turn = 0
    while not all(answer.is_done for answer in answers.values()):
        turn += 1
        drafts = {
            number: [*answer.written, *answer.draft, *[pad] * longest][:longest] for number, answer in answers.items()
        }
        drafted = [
            _with_draft(sample, answers[number].prompt, drafts[number], turn) for number, sample in enumerate(samples)
        ]
        again = runtime.prepare(drafted, step.assignment, step.schedule, forwards=True)
        own = {number: one.tokens for number, one in runtime.predict(drafted, again).items()}
        for number, likeliest in gather_by_sample(runtime, own).items():
            answers[number].prove(drafts[number], likeliest, longest, ends)


def _with_draft(sample: EncodedSample, prompt: int, draft: Sequence[int], turn: int) -> EncodedSample:
    """Return the sample with `draft` as its answer; without tokens if it had none here."""
    ids = sample.input_ids
    if len(ids):
        ids = np.concatenate([ids[:prompt], np.asarray(draft, np.int64)])
        labels = np.where(np.arange(len(ids)) < prompt, NO_LOSS, ids)
    else:
        labels = ids
    sizes = {**sample.sizes, LANGUAGE: prompt + len(draft)}
    content = digest(f"{sample.draw} {turn}", np.asarray(draft, np.int64))
    return replace(sample, input_ids=ids, labels=labels, sizes=sizes, targets=len(draft), content=content)


def gather_by_sample(runtime: Runtime, own: Mapping[int, Any]) -> dict[int, Any]:
    """Return sample number → value, of which each rank has some, on all ranks; called by all ranks together."""
    return {int(number): value for of_rank in all_gather_object(runtime.comm, own) for number, value in of_rank.items()}
