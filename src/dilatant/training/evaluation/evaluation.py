"""Evaluation on held-out samples: the loss of their answers, and metrics of what the model writes in their place, by
the run's own stages in any layout.

A greedy answer equals the expected one if and only if the likeliest token after each prefix of the expected answer is
the expected one. So one forward pass over all answers gives their loss and tells which of them token-by-token
generation would produce; a wrong answer is known up to its first wrong token. For metrics that need whole answers,
answers are generated to the end (`greedy_answers.write_answers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilatant.comm.gather import all_gather_object
from dilatant.config.train import LOSS
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.evaluation.answer_metrics import measure
from dilatant.training.evaluation.generation import decode_answer
from dilatant.training.evaluation.greedy_answers import GreedyAnswer, verify_answers, write_answers
from dilatant.training.feeding.feed import StepInput


@dataclass(frozen=True, slots=True)
class Verdict:
    """Expected and written answer of a sample. loss: summed cross entropy of its `tokens` tokens. source: its data
    set's number."""

    sample: str
    expected: str
    written: str
    loss: float = 0.0
    tokens: int = 0
    source: int = 0

    @property
    def is_right(self) -> bool:
        return self.expected.strip() == self.written.strip()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result on held-out samples. figures: `loss`, per token of an answer, and metrics, by name; by_source: the same
    for each data set by name, if there are several. skipped: samples that could not be read."""

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...]
    figures: Mapping[str, float]
    by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_record(self, examples: int = 8) -> dict[str, Any]:
        """Return the content of eval.json: the figures, and some wrong answers to look at."""
        wrong = [verdict for verdict in self.verdicts if not verdict.is_right]
        return {
            **self.figures,
            "samples": len(self.verdicts),
            **({"by_data_set": {name: {**figures} for name, figures in self.by_source.items()}}
               if self.by_source else {}),
            "skipped": list(self.skipped),
            "wrong_examples": [
                {"sample": verdict.sample, "expected": verdict.expected, "written": verdict.written}
                for verdict in wrong[:examples]
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Settings of an evaluation. metrics: their names. sources: names of the data sets. max_new_tokens: of a generated
    answer. stop_ids: the tokens that end one."""

    tokenizer: Any
    metrics: tuple[str, ...]
    sources: tuple[str, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]

    @property
    def writes(self) -> bool:
        """True if a metric needs answers that are generated to the end."""
        return any(name != "exact_match" for name in self.metrics)


def evaluate(
    runtime: Runtime, questions: Iterable[StepInput[PreparedStep]], how: EvaluationSettings
) -> Evaluation:
    """Evaluate the answers of `questions`, batches whose only targets are answer tokens. Called by all ranks together,
    which get the same result; the model is in evaluation mode meanwhile. Raises UserError, on rank 0, if a user's
    metric fails."""
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    runtime.train(False)
    try:
        for question in questions:
            verdicts += _judge(runtime, question, how)
            skipped += question.batch.problems
    finally:
        runtime.train()
    # A user's metric runs on rank 0 alone; all ranks decide by its value there.
    own = _figures(verdicts, how) if runtime.comm.rank == 0 else None
    figures, by_source = all_gather_object(runtime.comm, own)[0]
    return Evaluation(tuple(verdicts), tuple(skipped), figures, by_source)


def _figures(
    verdicts: Sequence[Verdict], how: EvaluationSettings
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    by_source = {}
    if len(how.sources) > 1:
        for number, name in enumerate(how.sources):
            own = [verdict for verdict in verdicts if verdict.source == number]
            if own:
                by_source[name] = _of(own, how.metrics)
    return _of(verdicts, how.metrics), by_source


def _of(verdicts: Sequence[Verdict], metrics: Sequence[str]) -> dict[str, float]:
    expected = [verdict.expected for verdict in verdicts]
    written = [verdict.written for verdict in verdicts]
    tokens = sum(verdict.tokens for verdict in verdicts)
    loss = sum(verdict.loss for verdict in verdicts) / max(1, tokens)
    return {LOSS: loss, **{name: measure(name, expected, written) for name in metrics}}


def _judge(runtime: Runtime, question: StepInput[PreparedStep], how: EvaluationSettings) -> Iterator[Verdict]:
    samples = question.batch.samples
    answers = verify_answers(runtime, samples, question.step)
    whole = {number: answer.written for number, answer in answers.items()}
    if how.writes:
        write_answers(runtime, samples, question.step, answers, how.max_new_tokens, how.stop_ids)
    for number, sample in enumerate(samples):
        answer = answers[number]
        expected = decode_answer(how.tokenizer, answer.expected, how.stop_ids)
        written = (
            decode_answer(how.tokenizer, answer.written, how.stop_ids)
            if how.writes
            else _verified_text(answer, whole[number], how)
        )
        yield Verdict(sample.id, expected, written, answer.loss, len(answer.expected), sample.source)


def _verified_text(answer: GreedyAnswer, proven: Sequence[int], how: EvaluationSettings) -> str:
    """Return all of a right answer, or a wrong one up to its first wrong token ("..." if it goes on there)."""
    longest = how.max_new_tokens
    if list(proven) == answer.expected and len(proven) <= longest:
        return decode_answer(how.tokenizer, answer.expected, how.stop_ids)
    written = list(proven[:longest])
    ends = len(proven) >= longest or written[-1] in how.stop_ids
    return decode_answer(how.tokenizer, written, how.stop_ids) + ("" if ends else "...")
