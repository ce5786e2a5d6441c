"""For every valid plan, assignment and schedule, loss and gradients equal those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from dilatant.comm.comm import Comm
from dilatant.runtime.runtime import Runtime
from dilatant.training.master_weights import make_masters
from drawn_steps import Case, build_model, build_optimizer, build_samples, cases, expected
from worker_pool import Worker, WorkerPool

RELATIVE = 1e-5
"""The rule's own bound for fp32."""
ABSOLUTE = 1e-7
"""Of the largest gradient: what cancels exactly (a key's bias under softmax) leaves rounding noise of that size."""
STEPS = 3
STEP_SIZE = 0.1
"""lr / eps of the drawn steps' AdamW: how much a gradient's error moves a weight at most."""
BF16 = 2**-9
"""Rounding to bf16 is off by this share at most."""


@dataclass(frozen=True)
class Allowed:
    """relative: of the norm of a gradient. absolute: of the largest gradient, for every number. loss: of the
    language model's loss."""

    relative: float
    absolute: float
    loss: float

    @classmethod
    def of_case(cls, case: Case) -> Allowed:
        """In bf16 both runs round what every operation makes, in other shapes and so at other places. A gradient has
        passed about 15 roundings a block forward and as many backward, and as many more before and behind the blocks;
        errors that are independent and uniform up to BF16 add to sqrt(roundings / 3) * BF16, of two runs sqrt(2) times
        that, and twice that is hardly ever met. What cancels has the errors of what it cancels, a bf16 rounding of
        numbers as large as the largest gradient. So does a generator's loss, a square of a difference; the language
        model's is a mean over targets of fp32 numbers, of logits that were rounded."""
        if case.dtype == torch.float32:
            return cls(RELATIVE, ABSOLUTE, RELATIVE)
        blocks = case.language_layers + max((layers for _, _, layers, _, _ in case.encoders), default=0)
        roundings = 30 * (blocks + 2)
        return cls(2 * (2 * roundings / 3) ** 0.5 * BF16, BF16, BF16)

    def of(self, expected: torch.Tensor, largest: float) -> float:
        return self.relative * expected.norm().item() + self.absolute * largest * expected.numel() ** 0.5


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
        precision=case.dtype,
    )
    samples = build_samples(case)
    masters = {name: p for name, p in runtime.parameters.items() if not p.requires_grad} | make_masters(
        runtime.parameters
    )
    optimizer = build_optimizer(masters)
    losses, gradients = [], {}
    for step in range(STEPS):
        result = runtime.execute(samples, case.assignment, case.schedule)
        losses.append((result.loss, dict(result.losses)))
        if step == 0:
            norm = runtime.grad_norm()
            gradients = {name: p.grad.clone() for name, p in runtime.parameters.items() if p.grad is not None}
        for name, parameter in runtime.parameters.items():
            masters[name].grad = parameter.grad
        optimizer.step()
        for name, parameter in runtime.parameters.items():
            parameter.grad = masters[name].grad = None
            parameter.data.copy_(masters[name])
    held = {name: p.detach().float().clone() for name, p in masters.items()}
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
    allowed = Allowed.of_case(case)
    results = workers.run(_three_steps, len(case.plan.ranks), case)
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
    seen: set[str] = set()
    for result in results:
        for (loss, parts), (expected_loss, expected_parts) in zip(result["losses"], losses, strict=True):
            assert loss == pytest.approx(expected_loss, rel=allowed.relative)
            assert parts == pytest.approx(expected_parts, rel=allowed.relative)
            assert parts["language"] == pytest.approx(expected_parts["language"], rel=allowed.loss)
        assert result["norm"] == pytest.approx(norm, rel=allowed.relative)
        assert result["only own"], "a rank gave memory to a layer that it does not hold"
        assert set(result["gradients"]) == set(gradients) & set(result["parameters"])
        for name, gradient in result["gradients"].items():
            _assert_close(
                gradient, gradients[name], allowed.of(gradients[name], largest), f"gradient of {name}"
            )
        for name, parameter in result["parameters"].items():
            seen.add(name)
            limit = allowed.of(parameters[name], 1.0)
            if case.dtype == torch.bfloat16:  # masters begin alike, and differ by what gradients do
                moved = gradients.get(name, torch.zeros_like(parameter))
                limit = 2 * STEPS * STEP_SIZE * allowed.of(moved, largest)
            _assert_close(parameter, parameters[name], limit, f"{name} after three steps")
    assert seen == set(parameters)


def _assert_close(mine: torch.Tensor, theirs: torch.Tensor, allowed: float, what: str) -> None:
    error = (mine - theirs).norm().item()
    assert error <= allowed, f"{what}: {error} off {theirs.norm().item()}, {allowed} allowed"


COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=10, **COMMON)
@given(case=cases(dtype=torch.bfloat16))
def test_any_step_in_bf16_gives_what_one_process_gives_in_bf16(workers: WorkerPool, case: Case) -> None:
    check_case(workers, case)


@settings(max_examples=30, **COMMON)
@given(case=cases())
def test_any_step_gives_the_loss_and_the_gradients_of_one_process(workers: WorkerPool, case: Case) -> None:
    check_case(workers, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, **COMMON)
@given(case=cases(dtype=torch.bfloat16))
def test_two_hundred_steps_in_bf16_give_what_one_process_gives_in_bf16(
    workers: WorkerPool, case: Case
) -> None:
    check_case(workers, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, **COMMON)
@given(case=cases())
def test_two_hundred_steps_give_the_loss_and_the_gradients_of_one_process(
    workers: WorkerPool, case: Case
) -> None:
    check_case(workers, case)
