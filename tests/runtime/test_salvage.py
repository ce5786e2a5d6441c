"""What survives a step that ranks were lost in counts once: loss and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.plan.plan import Plan
from dilatant.resilience.replan import replan
from dilatant.resilience.salvage import salvage_step
from dilatant.runtime.runtime import Runtime
from drawn_steps import cases
from engine_case import Case, build_model, build_samples
from oracles.engine_step import expected
from runtime.test_numerics import COMMON, Allowed, _assert_close, _part
from worker_pool import Worker, WorkerPool

Lost = tuple[int, int]
"""A rank, and how many actions it begins before it is lost; beyond its last one it is lost before the step counts."""


class _Ending:
    """A recorder whose rank is lost at an action."""

    def __init__(self, recorder: Any, after: int) -> None:
        self._recorder, self._left = recorder, after

    def start(self, *args: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise CommAborted("lost")
        self._recorder.start(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def _run(worker: Worker, case: Case, lost: list[Lost], zero: str) -> dict[str, Any] | None:
    samples = build_samples(case)
    rank, size, plan = worker.rank, worker.size, case.plan
    old: Runtime | None = None
    shares = []
    for generation in range(len(lost) + 1):
        comm = Comm(worker.store, rank, size, generation)
        runtime = Runtime(
            build_model(case, "meta"),
            plan,
            comm,
            seed=case.seed,
            bucket_bytes=case.bucket_bytes,
            zero=zero,  # type: ignore[arg-type]
            node_of=[rank % 2 for rank in range(size)],
            precision=case.dtype,
            keeps_gradients=True,
        )
        if generation:
            salvage = salvage_step(comm, 0, old, runtime)
            step = runtime.plan_step(samples)
            shares.append(1.0 if step.salvaged is None else len(step.salvaged.missing) / len(samples))
        else:
            step = runtime.prepare(samples, case.assignment, case.schedule)
        if generation == len(lost):
            break
        victim, after = lost[generation]
        victim %= size
        if victim == rank:
            runtime._executor._recorder = _Ending(runtime._recorder, after)  # type: ignore[assignment]
        try:
            runtime.execute(samples, step, step_number=0)
        except CommAborted:
            pass
        runtime.close()
        comm.close()
        if victim == rank:
            return None
        old = runtime
        survivors = {each: each - (each > victim) for each in range(size) if each != victim}
        plan = replan(plan, "language", survivors, (), 1, 4)
        rank, size = survivors[rank], size - 1
    result = runtime.execute(samples, step, step_number=0)
    owned = runtime.owned
    found = {
        "losses": dict(result.losses),
        "norm": result.grad_norm,
        "gradients": {key: p.grad.clone() for key, p in owned.parameters.items() if p.grad is not None},
        "owns": {key: box.name for key, box in owned.boxes.items()},
        "again": shares,
    }
    runtime.close()
    comm.close()
    return found


def check(workers: WorkerPool, case: Case, lost: list[Lost], zero: str) -> list[float]:
    losses, gradients, _ = expected(case)
    allowed = Allowed.of_case(case)
    results = [r for r in workers.run(_run, len(case.plan.ranks), case, lost, zero) if r is not None]
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
    for result in results:
        assert result["losses"] == pytest.approx(losses[0][1], rel=allowed.relative)
        assert result["norm"] == pytest.approx(norm, rel=allowed.relative)
        assert set(result["gradients"]) == {key for key, name in result["owns"].items() if name in gradients}
        for key, gradient in result["gradients"].items():
            wanted = _part(gradients, key)
            _assert_close(gradient, wanted, allowed.of(wanted, largest), f"gradient of {key}")
    again.append(results[0]["again"])
    return again[-1]


def _several(case: Case) -> bool:
    return len(case.plan.ranks) > 1


again: list[Any] = []
LOSSES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), min_size=1, max_size=2)


@settings(max_examples=6, **COMMON)
@given(case=cases().filter(_several), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]))
def test_a_step_that_lost_ranks_has_the_gradients_of_one_that_did_not(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str
) -> None:
    check(workers, case, lost[: len(case.plan.ranks) - 1], zero)


@pytest.mark.slow
@settings(max_examples=60, **COMMON)
@given(case=cases().filter(_several), lost=LOSSES, zero=st.sampled_from(["none", "node", "all"]))
def test_many_steps_that_lost_ranks_have_the_gradients_of_others(
    workers: WorkerPool, case: Case, lost: list[Lost], zero: str
) -> None:
    check(workers, case, lost[: len(case.plan.ranks) - 1], zero)


def test_zz():
    print("AGAIN", again)
