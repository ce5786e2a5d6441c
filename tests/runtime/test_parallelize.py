"""`parallelize` as a program uses it: alone, again and again, and also after an error."""

from __future__ import annotations

import pytest
import torch

from dilatant import ParallelSpec, UserError, parallelize
from dilatant.comm import launch
from dilatant.comm.errors import CommAborted
from dilatant.runtime.runtime import Runtime
from engine_case import CASE, build_model, build_samples
from worker_pool import Worker, WorkerPool

APART = {"vision": ParallelSpec(), "language": ParallelSpec(pp=2)}


def alone(**options: object) -> Runtime:
    return parallelize(
        build_model(CASE, "meta"),
        {"vision": ParallelSpec(), "language": ParallelSpec()},
        colocated={"vision": "language"},
        seed=CASE.seed,
        **options,
    )


def test_one_process_needs_no_worker_and_may_train_several_models() -> None:
    first, second = alone(), alone(num_microbatches=3)
    samples = build_samples(CASE)
    losses = [each.execute(samples).loss for each in (first, second, first)]
    # Microbatches change the order of sums.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    # The third step added to the gradients of the first.
    for name, gradient in ((n, p.grad) for n, p in second.parameters.items() if p.grad is not None):
        torch.testing.assert_close(first.parameters[name].grad, 2 * gradient, rtol=1e-4, atol=1e-6)
    first.close()
    second.close()


def test_too_few_workers_are_told_what_to_call() -> None:
    with pytest.raises(UserError, match=r"need 3 workers, but there is 1; .*launch\(function, 3\)"):
        parallelize(build_model(CASE, "meta"), APART)


def test_a_schedule_and_a_policy_are_chosen_by_name() -> None:
    samples = build_samples(CASE)
    runtimes = [alone(), alone(num_microbatches=3, schedule="gpipe", assignment="entrain")]
    losses = [runtime.execute(samples).loss for runtime in runtimes]
    # Microbatches change the order of sums.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for runtime in runtimes:
        runtime.close()
    for option, known in (("schedule", "1f1b"), ("assignment", "entrain")):
        with pytest.raises(UserError, match=rf"{option} 'best' is unknown; .*{known}"):
            alone(**{option: "best"})


def _again_and_again(pooled: Worker, times: int) -> list[float]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    samples, losses = build_samples(CASE), []
    for attempt in range(times):
        runtime = parallelize(
            build_model(CASE, "meta"), APART, worker=worker, num_microbatches=2, seed=CASE.seed
        )
        if attempt == 1:
            with pytest.raises(CommAborted):  # noqa: PT012
                runtime.comm.world.barrier()  # all have built theirs: an abort would reach them there, too
                if worker.rank == 1:
                    runtime.comm.abort("rank 1 had enough")
                runtime.execute(samples)
        else:
            losses.append(runtime.execute(samples).loss)
        runtime.close()
    return losses


def test_it_may_be_called_again_in_the_same_processes_also_after_an_error(workers: WorkerPool) -> None:
    for losses in workers.run(_again_and_again, 3, 3):
        assert losses == pytest.approx([losses[0]] * 2, rel=1e-6)
