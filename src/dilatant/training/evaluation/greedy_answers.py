"""Greedy answers of a model that is cut in stages: drafts are proven in whole forward passes, several tokens each.

One pass over a prompt and a drafted answer tells the likeliest token after each of its prefixes. As far as the draft
is what the model says, it is proven, and so is the first token where it is not; what the model says behind that is the
next draft (Jacobi decoding: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel
Decoding"). The first draft is the expected answer, so a right one takes one pass. A pass goes through stages as any
step does: nobody needs the whole model, and every layout writes the same.
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
class Answer:
    """Of a sample whose labels are an answer. expected: its tokens. loss: its cross entropy, summed. prompt: tokens
    before it. written: those that are proven; draft: what may follow them."""

    expected: list[int]
    loss: float
    prompt: int
    written: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    is_done: bool = False

    def prove(self, given: Sequence[int], said: Sequence[int], longest: int, ends: Collection[int]) -> None:
        """given: the tokens of a draft from the beginning; said: the likeliest in the place of each."""
        right = 0
        while right < len(given) and given[right] == said[right]:
            right += 1
        proven = list(said[: right + 1])
        stop = next((at for at, token in enumerate(proven) if token in ends), None)
        proven = proven if stop is None else proven[: stop + 1]
        self.written = proven[:longest]
        self.is_done = len(proven) >= longest or stop is not None
        self.draft = list(said[right + 1 :])


def judge_answers(
    runtime: Runtime, samples: Sequence[EncodedSample], step: PreparedStep
) -> dict[int, Answer]:
    """Sample number → its answer, in which nothing is written yet beyond what one pass proves; the same on all ranks.
    step: of these samples, with `forwards`."""
    own = {}
    for number, predicted in runtime.predict(samples, step).items():
        labels = samples[number].labels
        at = np.flatnonzero(labels != NO_LOSS)
        own[number] = [labels[at].tolist(), int(at[0]), predicted.tokens, sum(predicted.losses)]
    answers = {}
    for number, (expected, prompt, said, loss) in _everywhere(runtime, own).items():
        answer = Answer(expected, loss, prompt)
        answer.prove(expected, said, len(said), ())
        answers[number] = answer
    return answers


def write_answers(
    runtime: Runtime,
    samples: Sequence[EncodedSample],
    step: PreparedStep,
    answers: Mapping[int, Answer],
    longest: int,
    ends: Collection[int],
) -> None:
    """Write the answers that `judge_answers` gave to their end: one of `ends`, or `longest` tokens. Called by all ranks
    together."""
    for answer in answers.values():
        proven = [*answer.written, *answer.draft]
        answer.prove(answer.written, answer.written, longest, ends)
        answer.draft = proven[len(answer.written) :]
    pad = min(ends, default=0)
    turn = 0
    while not all(answer.is_done for answer in answers.values()):
        turn += 1
        drafts = {
            number: [*answer.written, *answer.draft, *[pad] * longest][:longest]
            for number, answer in answers.items()
        }
        asked = [
            _with_draft(sample, answers[number].prompt, drafts[number], turn)
            for number, sample in enumerate(samples)
        ]
        again = runtime.prepare(asked, step.assignment, step.schedule, forwards=True)
        own = {number: one.tokens for number, one in runtime.predict(asked, again).items()}
        for number, said in _everywhere(runtime, own).items():
            answers[number].prove(drafts[number], said, longest, ends)


def _with_draft(sample: EncodedSample, prompt: int, draft: Sequence[int], turn: int) -> EncodedSample:
    """The sample with another answer; without tokens where it had none."""
    ids = sample.input_ids
    if len(ids):
        ids = np.concatenate([ids[:prompt], np.asarray(draft, np.int64)])
        labels = np.where(np.arange(len(ids)) < prompt, NO_LOSS, ids)
    else:
        labels = ids
    sizes = {**sample.sizes, LANGUAGE: prompt + len(draft)}
    content = digest(f"{sample.draw} {turn}", np.asarray(draft, np.int64))
    return replace(sample, input_ids=ids, labels=labels, sizes=sizes, targets=len(draft), content=content)


def _everywhere(runtime: Runtime, own: Mapping[int, Any]) -> dict[int, Any]:
    return {
        int(number): value
        for of_rank in all_gather_object(runtime.comm, own)
        for number, value in of_rank.items()
    }
