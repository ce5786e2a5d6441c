"""`parallelize` as a program uses it: alone, again and again, and also after an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilatant import Auto, ParallelSpec, UserError, parallelize
from dilatant.comm import launch
from dilatant.comm.errors import CommAborted
from dilatant.config import ClusterConfig, PlanConfig
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.model import save_costs
from dilatant.plan.plan import Plan
from dilatant.profiling.describe_model import describe_model
from dilatant.profiling.layer_shapes import layer_shapes
from dilatant.profiling.planned_hardware import plan_target
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


def _planned(pooled: Worker, costs: Path) -> tuple[list[float], str]:
    """Two runtimes planned one after the other, by costs that only rank 0 can read."""
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    samples, losses, plans = build_samples(CASE), [], []
    for _ in range(2):
        runtime = parallelize(
            build_model(CASE, "meta"),
            Auto([samples] * 2, plan=PlanConfig(costs=None if pooled.rank else str(costs))),
            worker=worker,
            seed=CASE.seed,
        )
        losses.append(runtime.execute(samples).loss)
        plans.append(runtime.plan.to_json())
        runtime.close()
    assert plans[0] == plans[1]
    return losses, plans[0]


def test_a_layout_is_planned_from_model_and_batches_for_the_workers_at_hand(
    workers: WorkerPool, tmp_path: Path
) -> None:
    here = plan_target(ClusterConfig(gpus_per_node=2)).hardware
    shapes = layer_shapes(describe_model(build_model(CASE, "meta")))
    save_costs(
        analytic_costs(shapes, here, dtype="float32"), tmp_path / "costs.yaml"
    )  # instead of measuring for seconds
    alone = parallelize(build_model(CASE, "meta"), Auto([build_samples(CASE)]), seed=CASE.seed)
    expected = alone.execute(build_samples(CASE)).loss
    alone.close()
    found = workers.run(_planned, 2, tmp_path / "costs.yaml")
    assert len({plan for _, plan in found}) == 1
    assert Plan.from_json(found[0][1]).ranks == (0, 1)
    for losses, _ in found:  # sums in another order
        assert losses == pytest.approx([expected] * 2, rel=1e-6)


def test_what_planning_lacks_is_named() -> None:
    samples = build_samples(CASE)
    bare = replace(samples[0], sizes={})
    for auto, says in (
        ("auto", r"specs is 'auto'; give .*Auto\(batches\)"),
        (Auto(), "Auto has no batches"),
        (Auto([[]]), "Auto has no batches"),
        (Auto([samples, samples[1:]]), "global batches of one size"),
        (Auto([[bare]]), rf"sample '{bare.id}' does not say its tokens: sizes\['language'\]"),
    ):
        with pytest.raises(UserError, match=says):
            parallelize(build_model(CASE, "meta"), auto)
    with pytest.raises(UserError, match="what is colocated"):
        parallelize(build_model(CASE, "meta"), Auto([samples]), colocated={"vision": "language"})
