"""Evaluator: when a run is evaluated on held-out samples, with which weights, and when it stops early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dilatant.config.train import EvaluationConfig
from dilatant.data.order.blend import Blend
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.training.evaluation.best_checkpoint import BestEvaluation
from dilatant.training.evaluation.evaluation import Evaluation, EvaluationSettings, evaluate
from dilatant.training.feeding.inputs import RankInputs
from dilatant.training.optimizers.averages import Averages
from dilatant.training.optimizers.master_weights import WithMasters


class Evaluator:
    """Evaluate a run while it trains; called by all ranks together. how: the config's section. averages: EMA weights,
    which are evaluated if there are any. best: the best evaluation so far."""

    def __init__(
        self,
        how: EvaluationConfig,
        samples: Samples,
        runtime: Runtime,
        inputs: RankInputs,
        optimizer: WithMasters,
        averages: Averages | None,
    ) -> None:
        self.best = BestEvaluation()
        self._how = how
        self._samples = samples
        self._runtime = runtime
        self._inputs = inputs
        self._optimizer = optimizer
        self._averages = averages

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out data (see `evaluation.evaluate`); None without any."""
        held_out = self._samples.held_out
        if held_out is None:
            return None
        how = self._how
        sources = held_out.source_names if isinstance(held_out, Blend) else ()
        questions = self._inputs.held_out(how.limit, how.batch_size)
        stop_ids = self._samples.encoding.chat.stop_ids
        judging = EvaluationSettings(
            self._samples.tokenizer, how.metrics, sources, how.max_new_tokens, stop_ids
        )
        with self._averaged():
            return evaluate(self._runtime, questions, judging)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return True if `judge` evaluates after `step`."""
        every = self._how.steps
        return every is not None and (step % every == 0 or step == total_steps)

    def judge(
        self, step: int, total_steps: int, judged: Callable[[int, Evaluation], None]
    ) -> Evaluation | None:
        """Evaluate after `step` if that is due, and pass the result to the callback `judged`."""
        how = self._how
        evaluation = self.evaluate() if self.is_due(step, total_steps) else None
        if evaluation is not None:
            if how.keep_best is not None:
                self.best = self.best.after(step, evaluation.figures[how.keep_best], how)
            judged(step, evaluation)
        return evaluation

    def keeps(self, step: int) -> bool:
        """Return True if the weights after `step` are the best and are to be kept."""
        return self._how.keep_best is not None and self.best.step == step

    @property
    def ends_early(self) -> bool:
        """True if evaluations have not improved for as long as the config allows."""
        return self.best.ends(self._how)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Let the model compute with the averages, if there are any, inside this context."""
        if self._averages is None:
            yield
            return
        with self._averages.in_place_of(self._optimizer.masters):
            self._optimizer.write_weights()
            self._runtime.owned.gather()
            yield
        # Not after an error: other ranks may be elsewhere, and checkpoints store masters.
        self._optimizer.write_weights()
        self._runtime.owned.gather()
