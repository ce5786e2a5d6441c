"""Evaluation on held-out samples by the run's own stages, in any layout. It measures the loss of their answers, and
metrics of what the model writes in their place.

A greedy answer equals the expected one if and only if the likeliest token after each prefix of the expected answer is
the expected one. So one forward pass over all answers gives their loss and tells which of them token-by-token
generation would produce; a wrong answer is known up to its first wrong token. For metrics that need whole answers,
answers are generated to the end (`greedy_answers.write_answers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from dilatant.comm.gather import all_gather_object, any_rank
from dilatant.config.train import LOSS, EvaluationConfig
from dilatant.data.order.blend import Blend
from dilatant.models.language.pair_loss import REWARDS, PairLoss, with_margins
from dilatant.planning.assemble import Samples
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.evaluation.answer_metrics import Metric, measure
from dilatant.training.evaluation.greedy_answers import GreedyAnswer, verify_answers, write_answers
from dilatant.training.evaluation.image_answers import decode_answer
from dilatant.training.feeding.feed import StepInput
from dilatant.training.feeding.inputs import RankInputs
from dilatant.training.references import score_pairs
from dilatant.training.run_state import RunState


@dataclass(frozen=True, slots=True)
class Verdict:
    """Expected and written answer of a sample. loss: summed cross entropy of its `tokens` tokens. source: its data
    set's number. measures: of a pair, whose loss is that of one token, or of a marked answer; the texts then say which
    answer is expected to have the higher reward (or how the answer is marked), and what rewards say."""

    sample: str
    expected: str
    written: str
    loss: float = 0.0
    tokens: int = 0
    source: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return self.expected.strip() == self.written.strip()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result on held-out samples. figures: `loss`, per token of an answer or per pair, and metrics, by name; by_source:
    the same for each data set by name, if there are several. skipped: samples that could not be read."""

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


class Evaluator:
    """Evaluate a run while it trains, with its EMA weights if there are any; called by all ranks together. how: the
    config's section. own: metrics that the user passed, by name. Pairs of answers are judged by `pair_loss`."""

    def __init__(
        self,
        how: EvaluationConfig,
        samples: Samples,
        inputs: RankInputs,
        state: RunState,
        own: Mapping[str, Metric] = MappingProxyType({}),
        pair_loss: PairLoss | None = None,
    ) -> None:
        self._how = how
        self._pair_loss = pair_loss
        self._metrics = {} if self._pair_loss is not None else dict.fromkeys(how.metrics) | dict(own)
        self._held_out = samples.held_out
        self._tokenizer = samples.tokenizer
        self._stop_ids = samples.encoding.chat.stop_ids
        self._inputs = inputs
        self._state = state
        self._writes = any(name != "exact_match" for name in self._metrics)
        """True if a metric needs answers that are generated to the end."""

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out data, None without any: batches whose only targets are answer tokens. All ranks get
        the same result; the model is in evaluation mode meanwhile. Raises UserError, on rank 0, if a user's metric
        fails."""
        if self._held_out is None:
            return None
        runtime = self._state.runtime
        verdicts: list[Verdict] = []
        skipped: list[str] = []
        with self._state.averaged():
            runtime.train(False)
            try:
                as_questions = self._pair_loss is None
                for question in self._inputs.held_out(self._how.limit, self._how.batch_size, as_questions):
                    verdicts += self._judge(question) if as_questions else self._judge_pairs(question)
                    skipped += question.batch.problems
            finally:
                runtime.train()
        # A user's metric runs on rank 0 alone; all ranks decide by its value there.
        own = self._figures(verdicts) if runtime.comm.rank == 0 else None
        figures, by_source = all_gather_object(runtime.comm, own)[0]
        return Evaluation(tuple(verdicts), tuple(skipped), figures, by_source)

    @property
    def is_due(self) -> bool:
        """True if `judge` evaluates after the last step."""
        every, state = self._how.steps, self._state
        return every is not None and (state.step % every == 0 or state.step == state.total_steps)

    def judge(self, on_evaluation: Callable[[int, Evaluation], None]) -> Evaluation | None:
        """Evaluate after the last step if that is due, and pass the result to the callback `on_evaluation`. The
        evaluation counts once the callback of rank 0 has returned."""
        state, before = self._state, self._state.best
        evaluation = self.evaluate() if self.is_due else None
        if evaluation is not None:
            state.best = before.after(state.step, evaluation.figures, self._how)
            try:
                on_evaluation(state.step, evaluation)
                any_rank(state.runtime.comm, False, "the evaluation's record")
            except BaseException:
                state.best = before
                raise
        return evaluation

    @property
    def keeps(self) -> bool:
        """True if the weights after the last step are the best and are to be kept."""
        return self._how.keep_best is not None and self._state.best.step == self._state.step

    @property
    def ends_early(self) -> bool:
        """True if evaluations have not improved for as long as the config allows."""
        return self._state.best.ends(self._how)

    def _judge(self, question: StepInput[PreparedStep]) -> Iterator[Verdict]:
        samples, runtime = question.batch.samples, self._state.runtime
        answers = verify_answers(runtime, samples, question.step)
        verified = {number: answer.written for number, answer in answers.items()}
        if self._writes:
            longest = self._how.max_new_tokens
            write_answers(runtime, samples, question.step, answers, longest, self._stop_ids)
        for number, sample in enumerate(samples):
            answer = answers[number]
            written = self._text(answer.written) if self._writes else self._verified_text(answer, verified[number])
            expected = self._text(answer.expected)
            yield Verdict(sample.id, expected, written, answer.loss, len(answer.expected), sample.source)

    def _judge_pairs(self, step: StepInput[PreparedStep]) -> Iterator[Verdict]:
        loss, samples = self._pair_loss, step.batch.samples
        assert loss is not None
        found = score_pairs(self._state.runtime, step)
        scores = [found[number] for number in range(len(samples))]
        sums, counts = (torch.tensor(each, dtype=torch.float64) for each in zip(*scores, strict=True))
        reference = loss.reference_of(loss.complete(samples, sums))
        losses, rewards = loss.judge(sums, counts, reference)
        by_name = {name: each.tolist() for name, each in loss.measure(rewards, reference).items()}
        for number, (sample, value) in enumerate(zip(samples, losses.tolist(), strict=True)):
            own = {name: each[number] for name, each in by_name.items() if not math.isnan(each[number])}
            names = ("chosen", "rejected") if sample.desired is None else ("desired", "undesired")
            expected, other = names[::-1] if sample.desired is False else names
            written = expected if own[f"{REWARDS}accuracies"] else other
            yield Verdict(sample.id, expected, written, value, 1, sample.source, own)

    def _text(self, tokens: Sequence[int]) -> str:
        return decode_answer(self._tokenizer, tokens, self._stop_ids)

    def _verified_text(self, answer: GreedyAnswer, proven: Sequence[int]) -> str:
        """Return all of a right answer, or a wrong one up to its first wrong token ("..." if it goes on there)."""
        longest = self._how.max_new_tokens
        if list(proven) == answer.expected and len(proven) <= longest:
            return self._text(answer.expected)
        ends = len(proven) >= longest or proven[:longest][-1] in self._stop_ids
        return self._text(proven[:longest]) + ("" if ends else "...")

    def _figures(self, verdicts: Sequence[Verdict]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        names = self._held_out.source_names if isinstance(self._held_out, Blend) else ()
        by_source = {}
        for number, name in enumerate(names if len(names) > 1 else ()):
            own = [verdict for verdict in verdicts if verdict.source == number]
            if own:
                by_source[name] = _measured(own, self._metrics)
        return _measured(verdicts, self._metrics), by_source


def _measured(verdicts: Sequence[Verdict], metrics: Mapping[str, Metric | None]) -> dict[str, float]:
    expected = [verdict.expected for verdict in verdicts]
    written = [verdict.written for verdict in verdicts]
    tokens = sum(verdict.tokens for verdict in verdicts)
    loss = sum(verdict.loss for verdict in verdicts) / max(1, tokens)
    measured: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(verdict.measures.items() for verdict in verdicts):
        measured.setdefault(name, []).append(value)
    if measured:
        return {LOSS: loss, **with_margins({name: sum(each) / len(each) for name, each in measured.items()})}
    return {LOSS: loss, **{name: measure(name, expected, written, own) for name, own in metrics.items()}}
