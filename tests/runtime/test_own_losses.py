"""A user's loss gives the same value and gradients under every kind of layout as in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.engine_case import CASE, OWN_LOSSES, build_model, build_samples
from dilatant import ParallelSpec, parallelize
from dilatant.comm import launch
from dilatant.config.errors import UserError
from dilatant.models.language.token_loss import TokenLoss
from harness.checked_steps import Allowed, assert_close, part_of
from harness.worker_pool import Worker, WorkerPool
from oracles.engine_step import expected

LAYOUTS = {
    "one process": ParallelSpec(),
    "pipeline": ParallelSpec(pp=2),
    "replicas": ParallelSpec(replicas=2),
    "tensor": ParallelSpec(tp=2),
    "context": ParallelSpec(cp=2),
}
OFTEN = (
    ("pipeline", "focal"),
    ("replicas", "mean of samples"),
    ("tensor", "focal"),
    ("context", "distilled"),
    ("tensor", "pulled"),
)


def _step(pooled: Worker, case: Any, language: ParallelSpec) -> tuple[float, dict[str, Any], dict[str, str]]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    runtime = parallelize(
        build_model(case, "meta"),
        {"language": language, "vision": ParallelSpec()},
        colocated={"vision": "language"} if language == ParallelSpec() else None,
        worker=worker,
        num_microbatches=2,
        seed=case.seed,
    )
    loss = runtime.execute(build_samples(case)).loss
    found = {key: p.grad.clone() for key, p in runtime.owned.parameters.items() if p.grad is not None}
    runtime.close()
    return loss, found, {key: box.name for key, box in runtime.owned.boxes.items()}


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        pytest.param(layout, loss, marks=() if (layout, loss) in OFTEN else pytest.mark.slow)
        for layout in LAYOUTS
        for loss in OWN_LOSSES
    ],
)
def test_a_loss_is_the_same_under_every_layout(workers: WorkerPool, layout: str, loss: str) -> None:
    texts = ((6, (1,)), (9, (0,)), (4, (1,)), (12, (1,)))
    case = replace(CASE, loss=loss, loss_chunk=3, attention="causal", texts=texts)
    ((wanted, _),), gradients, _ = expected(case, steps=1)
    allowed = Allowed.of_case(case)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    ranks = 1 if layout == "one process" else 3
    for found, own, _ in workers.run(_step, ranks, case, LAYOUTS[layout]):
        assert found == pytest.approx(wanted, rel=allowed.loss)
        for key, gradient in own.items():
            theirs = part_of(gradients, key)
            assert_close(gradient, theirs, allowed.of(theirs, largest), f"gradient of {key}")


def _count(sample: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda logits, targets: logits.mean(), "is .* on 7 positions, and .* as the sum of 3 and 4"),
        (lambda logits, targets: logits, r"returned \[7, 30\] for 7 positions"),
        (lambda logits, targets: 1.0, "returned a float for 7 positions"),
        (lambda logits, targets: targets.float(), "does not depend on the logits"),
        (lambda logits, targets: 1 / 0, "failed on random logits: ZeroDivisionError"),
        (lambda logits, targets: sys.exit(4), "ended the run: SystemExit: 4"),
        (lambda logits, targets: torch.rand(len(targets)) * logits.sum(-1), "without a mean or randomness"),
    ],
)
def test_a_loss_that_depends_on_the_layout_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(UserError, match=f"mine .*{problem}|mine {problem}"):
        TokenLoss(function, "mine", _count).check(30)


def test_a_loss_tells_whether_it_is_per_position() -> None:
    assert OWN_LOSSES["focal"].check(30)
    assert OWN_LOSSES["pulled"].check(30)
    assert not OWN_LOSSES["mean of samples"].check(30)
    assert not OWN_LOSSES["distilled"].check(30), "it is not tried, since it needs the samples of the run"
