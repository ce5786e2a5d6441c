"""The runtime on GPUs: one rank, and two ranks over NCCL, give the gradients of one process on a CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from cases.engine_case import Case, build_model, build_samples
from dilatant.comm import backends
from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.comm.launch import Worker, launch_local
from dilatant.data.media.pixels import Pixels
from dilatant.models.core.stage import on_device
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.executor import ActionFailed
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import trainability_of
from oracles.engine_step import expected as oracle

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4
"""Between kernels of a CPU and a GPU, which add hundreds of float32 products in other orders; TF32 is off."""


def _needs_gpus(count: int, what: str) -> Any:
    there = torch.cuda.device_count()
    return pytest.mark.skipif(there < count, reason=f"{there} of {count} GPUs: {what} was not checked")


Batches = tuple[tuple[tuple[int, ...], ...], ...]


def _case(vision: tuple[Replica, ...], vision_batches: Batches, language: tuple[Stage, ...]) -> Case:
    """vision: embedding, 2 blocks, norm, projector; language: embedding, 2 blocks, head."""
    plan = Plan((UnitPlan("vision", vision, ("language",)), UnitPlan("language", (Replica(language),))))
    assignment = Assignment({"vision": vision_batches, "language": (PAIRS,)})
    case = Case(
        language="llama",
        language_layers=2,
        tied=False,
        encoders=(("vision", "siglip_vision_model", 2, "linear", "all"),),
        frozen=(),
        recompute="none",
        attention=None,
        texts=((6, (1,)), (9, ()), (4, (1,)), (7, (2,)), (5, (1,)), (8, (1,))),
        plan=plan,
        assignment=assignment,
        schedule=Schedule({}),
        bucket_bytes=1 << 20,
        look_ahead=1,
        check=True,
        seed=5,
    )
    trainability = trainability_of(plan, trainable_layers(build_model(case, "meta").units))
    return replace(case, schedule=one_f_one_b(plan, assignment, trainability))


PAIRS = ((0, 1), (2, 3), (4, 5))
ALONE = _case((Replica((Stage(0, 5, (0,)),)),), (PAIRS,), (Stage(0, 2, (0,)), Stage(2, 4, (0,))))
TWO = _case(
    (Replica((Stage(0, 5, (0,)),)), Replica((Stage(0, 5, (1,)),))),
    (((0,), (1, 2)), ((3,), (4, 5))),
    (Stage(0, 2, (0,)), Stage(2, 4, (1,))),
)


def _runtime(worker: Worker, case: Case) -> tuple[Runtime, Comm]:
    torch.backends.cudnn.allow_tf32 = False
    comm = Comm(worker.store, worker.rank, worker.size, device=worker.device, timeout_seconds=60)
    model = build_model(case, "meta")
    return Runtime(model, case.plan, comm, seed=case.seed, execution=Execution(check_transport=case.check)), comm


def _step(worker: Worker, case: Case) -> tuple[str, float, dict[str, torch.Tensor], list[float]]:
    """Run two steps and return the results of the second, which the first must not affect."""
    runtime, comm = _runtime(worker, case)
    samples = build_samples(case)
    for _ in range(2):
        for parameter in runtime.parameters.values():
            parameter.grad = None
        loss = runtime.execute(samples, runtime.prepare(samples, case.assignment, case.schedule)).loss
    seconds = [action.seconds for action in runtime.measured()]
    gradients = {name: p.grad.cpu() for name, p in runtime.parameters.items() if p.grad is not None}
    device = next(iter(runtime.parameters.values())).device.type
    runtime.close()
    comm.close()
    return device, loss, gradients, seconds


def check_case(case: Case, device: str) -> None:
    losses, gradients, _ = oracle(case, steps=1)
    results = launch_local(_step, len(case.plan.ranks), case)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for of_device, loss, found, seconds in results:
        assert of_device == device
        assert loss == pytest.approx(losses[0][0], rel=TOLERANCE)
        assert seconds
        assert min(seconds) >= 0
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=TOLERANCE, atol=TOLERANCE * largest.item())
    assert {name for _, _, found, _ in results for name in found} == gradients.keys()


@_needs_gpus(1, "a step of one rank on a GPU")
def test_one_rank_on_a_gpu_gives_the_gradients_of_a_cpu() -> None:
    check_case(ALONE, "cuda")


@_needs_gpus(2, "a step over NCCL")
def test_two_ranks_over_nccl_give_the_gradients_of_a_cpu() -> None:
    check_case(TWO, "cuda")


def _one_sample_is_broken(worker: Worker) -> str:
    runtime, comm = _runtime(worker, TWO)
    samples = build_samples(TWO)
    if worker.rank == 1:
        samples[4] = replace(samples[4], media={"vision": {"pixel_values": torch.zeros(1, 5, 8, 8).numpy()}})
    with pytest.raises((ActionFailed, CommAborted)) as raised:
        runtime.execute(samples, runtime.prepare(samples, TWO.assignment, TWO.schedule))
    comm.close()
    return str(raised.value)


@_needs_gpus(2, "that an abort ends what is blocked in NCCL")
def test_a_failing_action_ends_who_waits_in_nccl() -> None:
    for message in launch_local(_one_sample_is_broken, 2):
        assert "sample-4" in message


class _StoreOfOneMachine(torch.distributed.HashStore):
    on_one_machine = True


@_needs_gpus(1, "NCCL's answers to the deadlines")
def test_a_communicator_of_one_rank_answers_and_is_aborted_in_time() -> None:
    store: Any = _StoreOfOneMachine()
    device = torch.device("cuda", 0)
    backend = backends.open_nccl(store, 0, 1, timedelta(seconds=30), device, for_edge=True)
    work = backend.all_reduce(torch.ones(4, device=device), torch.distributed.ReduceOp.SUM)
    work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()
    assert backend.error() == ""
    began = time.monotonic()
    backends.abort_all([backend])
    assert time.monotonic() - began < backends.ABORT_SECONDS


@_needs_gpus(1, "that media are copied without a wait")
def test_media_are_copied_without_a_device_wait() -> None:
    pixels = Pixels(np.full((2, 3, 4, 4), 255, np.uint8), 1 / 255, (0.5, 0.4, 0.3), (0.5, 0.5, 0.5))
    device = torch.device("cuda", 0)
    on_device([pixels], device)  # starts CUDA
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = on_device([pixels], device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(copied.cpu().numpy(), pixels.normalized())
