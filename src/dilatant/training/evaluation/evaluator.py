"""A run judged by held-out samples while it trains: when, by which weights, and when it has not become better."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dilatant.config.train import EvaluationConfig
from dilatant.data.order.blend import Blend
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.training.evaluation.best_checkpoint import Best
from dilatant.training.evaluation.evaluation import Evaluation, Judging, evaluate
from dilatant.training.feeding.inputs import Inputs
from dilatant.training.optimizers.averages import Averages
from dilatant.training.optimizers.master_weights import WithMasters


class Evaluator:
    """Called by all ranks together. how: what the config says of it. averages: of the weights, which are judged where
    there are any. best: the best evaluation so far."""

    def __init__(
        self,
        how: EvaluationConfig,
        samples: Samples,
        runtime: Runtime,
        inputs: Inputs,
        optimizer: WithMasters,
        averages: Averages | None,
    ) -> None:
        self.best = Best()
        self._how = how
        self._samples = samples
        self._runtime = runtime
        self._inputs = inputs
        self._optimizer = optimizer
        self._averages = averages

    def evaluate(self) -> Evaluation | None:
        """See `evaluation.evaluate`; None without held-out data."""
        held_out = self._samples.held_out
        if held_out is None:
            return None
        how = self._how
        sources = held_out.source_names if isinstance(held_out, Blend) else ()
        questions = self._inputs.held_out(how.limit, how.batch_size)
        stop_ids = self._samples.encoding.chat.stop_ids
        judging = Judging(self._samples.tokenizer, how.metrics, sources, how.max_new_tokens, stop_ids)
        with self._averaged():
            return evaluate(self._runtime, questions, judging)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether `judge` evaluates after `step`."""
        every = self._how.steps
        return every is not None and (step % every == 0 or step == total_steps)

    def judge(
        self, step: int, total_steps: int, judged: Callable[[int, Evaluation], None]
    ) -> Evaluation | None:
        """The evaluation after `step`, where one is due on the way, of which `judged` is told."""
        how = self._how
        evaluation = self.evaluate() if self.is_due(step, total_steps) else None
        if evaluation is not None:
            if how.keep_best is not None:
                self.best = self.best.after(step, evaluation.figures[how.keep_best], how)
            judged(step, evaluation)
        return evaluation

    def keeps(self, step: int) -> bool:
        """Whether the weights after `step` are those to be kept."""
        return self._how.keep_best is not None and self.best.step == step

    @property
    def ends_early(self) -> bool:
        """Whether evaluations have not become better for as long as the config waits."""
        return self.best.ends(self._how)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The model computes with the averages meanwhile, where there are any."""
        if self._averages is None:
            yield
            return
        with self._averages.in_place_of(self._optimizer.masters):
            self._optimizer.write_weights()
            self._runtime.owned.gather()
            yield
        # Not after an error: others may be elsewhere, and what is saved are masters.
        self._optimizer.write_weights()
        self._runtime.owned.gather()
