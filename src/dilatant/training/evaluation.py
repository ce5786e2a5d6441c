"""Held-out accuracy: does the model write exactly the answer? Judged through the run's own stages, in any layout.

A greedy answer is exactly the expected one if and only if, given the expected answer up to any of its tokens, the
likeliest next token is the expected one. So one forward pass of all answers tells what generation, token by token,
would, and nobody needs the whole model; of a wrong answer what is written is known up to its first wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dilatant.comm.gather import all_gather_object
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step_planner import PreparedStep
from dilatant.training.feed import StepInput


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


def evaluate(
    runtime: Runtime, questions: Iterable[StepInput[PreparedStep]], tokenizer: Any, max_new_tokens: int
) -> Evaluation:
    """Exact match of the answers of `questions`, batches whose only targets are the tokens of an answer. Called by all
    ranks together, which all get the same; the model is in evaluation mode meanwhile."""
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    runtime.train(False)
    try:
        for question in questions:
            verdicts += _judge(runtime, question, tokenizer, max_new_tokens)
            skipped += question.batch.problems
    finally:
        runtime.train()
    return Evaluation(tuple(verdicts), tuple(skipped))


def _judge(
    runtime: Runtime, question: StepInput[PreparedStep], tokenizer: Any, max_new_tokens: int
) -> Iterator[Verdict]:
    samples = question.batch.samples
    own = {}
    for number, predicted in runtime.predict(samples, question.step).items():
        labels = samples[number].labels
        own[number] = _texts(labels[labels != -100].tolist(), predicted, tokenizer, max_new_tokens)
    texts = {
        int(number): pair
        for of_rank in all_gather_object(runtime.comm, own)
        for number, pair in of_rank.items()
    }
    for number, sample in enumerate(samples):
        yield Verdict(sample.id, *texts[number])


def _texts(answer: list[int], predicted: list[int], tokenizer: Any, max_new_tokens: int) -> tuple[str, str]:
    """What is expected and what the model writes: all of a right answer, or up to the first wrong token ("..." if it
    goes on there)."""
    expected = tokenizer.decode(answer, skip_special_tokens=True)
    for place, (token, wanted) in enumerate(zip(predicted, answer, strict=True)):
        if token != wanted or place == max_new_tokens:
            written = [*answer[:place], token][:max_new_tokens]
            ends = token == tokenizer.eos_token_id or place == max_new_tokens
            return expected, tokenizer.decode(written, skip_special_tokens=True) + ("" if ends else "...")
    return expected, expected
