"""For every valid plan, assignment and schedule, loss and gradients equal those of one process; and every rank needs no
more of the samples than `Needs` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from dilatant.comm.comm import Comm
from dilatant.data.sample import EncodedSample
from dilatant.runtime.runtime import Runtime
from dilatant.training.needs import Needs
from drawn_steps import Case, build_model, build_optimizer, build_samples, cases, expected
from worker_pool import Worker, WorkerPool

RELATIVE = 1e-5
"""The rule's own bound for fp32."""
ABSOLUTE = 1e-7
"""Of the largest gradient: what cancels exactly (a key's bias under softmax) leaves rounding noise of that size."""
STEPS = 3


def _only(sample: EncodedSample, parts: frozenset[str]) -> EncodedSample:
    """What a rank loads of a sample: the parts that its stages use; of all else only sizes are known."""
    nothing = np.zeros(0, np.int64)
    return replace(
        sample,
        input_ids=sample.input_ids if "tokens" in parts else nothing,
        labels=sample.labels if "tokens" in parts else nothing,
        media={unit: inputs for unit, inputs in sample.media.items() if unit in parts},
        targets=sample.target_tokens,
        content=sample.content_digest,
    )


def _three_steps(worker: Worker, case: Case) -> dict[str, Any]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(
        build_model(case, "meta"),
        case.plan,
        comm,
        seed=case.seed,
        bucket_bytes=case.bucket_bytes,
        look_ahead=case.look_ahead,
        check_transport=case.check,
    )
    needed = Needs(runtime.model, case.plan, comm.rank).of(case.assignment)
    samples = [
        _only(sample, needed.get(number, frozenset())) for number, sample in enumerate(build_samples(case))
    ]
    optimizer = build_optimizer(runtime.parameters)
    losses, gradients = [], {}
    for step in range(STEPS):
        result = runtime.execute(samples, runtime.prepare(samples, case.assignment, case.schedule))
        losses.append((result.loss, dict(result.losses)))
        if step == 0:
            norm = runtime.grad_norm()
            gradients = {name: p.grad.clone() for name, p in runtime.parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    held = {name: p.detach().clone() for name, p in runtime.parameters.items()}
    meta = all(
        p.is_meta == (name not in held)
        for unit in runtime.model.units.values()
        for name, p in unit.named_logical_parameters()
    )
    runtime.close()
    comm.close()
    return {"losses": losses, "gradients": gradients, "norm": norm, "parameters": held, "only own": meta}


def check_case(workers: WorkerPool, case: Case) -> None:
    losses, gradients, parameters = expected(case)
    results = workers.run(_three_steps, len(case.plan.ranks), case)
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
    seen: set[str] = set()
    for result in results:
        for (loss, parts), (expected_loss, expected_parts) in zip(result["losses"], losses, strict=True):
            assert loss == pytest.approx(expected_loss, rel=RELATIVE)
            assert parts == pytest.approx(expected_parts, rel=RELATIVE)
        assert result["norm"] == pytest.approx(norm, rel=RELATIVE)
        assert result["only own"], "a rank gave memory to a layer that it does not hold"
        assert set(result["gradients"]) == set(gradients) & set(result["parameters"])
        for name, gradient in result["gradients"].items():
            _assert_close(
                gradient, gradients[name], _allowed(gradients[name], largest), f"gradient of {name}"
            )
        for name, parameter in result["parameters"].items():
            seen.add(name)
            _assert_close(
                parameter, parameters[name], _allowed(parameters[name], 1.0), f"{name} after three steps"
            )
    assert seen == set(parameters)


def _allowed(expected: torch.Tensor, scale: float) -> float:
    return RELATIVE * expected.norm().item() + ABSOLUTE * scale * expected.numel() ** 0.5


def _assert_close(mine: torch.Tensor, theirs: torch.Tensor, allowed: float, what: str) -> None:
    error = (mine - theirs).norm().item()
    assert error <= allowed, f"{what}: {error} off {theirs.norm().item()}, {allowed} allowed"


COMMON: dict[str, Any] = {
    "deadline": None,
    # Not shrunk: that takes minutes, and a case is readable as it is.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=20, **COMMON)
@given(case=cases())
def test_any_step_gives_the_loss_and_the_gradients_of_one_process(workers: WorkerPool, case: Case) -> None:
    check_case(workers, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, **COMMON)
@given(case=cases())
def test_two_hundred_steps_give_the_loss_and_the_gradients_of_one_process(
    workers: WorkerPool, case: Case
) -> None:
    check_case(workers, case)
