"""Gradient sync: what is summed, when it starts, and what stays without a gradient."""

from __future__ import annotations

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.runtime.gradient_sync import Bucket, GradientSync, make_buckets, squared_norm
from worker_pool import Worker, WorkerPool


def test_buckets_hold_neighbours_of_equal_holders_and_dtype_up_to_a_size() -> None:
    holders = {"a": (0, 1), "b": (0, 1), "c": (0, 2), "d": (0, 2), "e": (0, 2), "f": (0, 2)}
    parameters = {name: torch.zeros(10, device="meta") for name in holders}
    parameters["e"] = parameters["e"].bfloat16()
    buckets = make_buckets(holders, parameters, ["a", "b", "c", "d", "e"], bucket_bytes=80)
    assert buckets == (
        Bucket(("e",), (0, 2)),
        Bucket(("d", "c"), (0, 2)),
        Bucket(("b", "a"), (0, 1)),
    )
    assert len(make_buckets(holders, parameters, list(holders), bucket_bytes=1)) == 6


def _unlike(worker: Worker, moments: tuple[tuple[str, ...], ...] = ()) -> str:
    comm = Comm(worker.store, worker.rank, worker.size)
    parameters = {name: nn.Parameter(torch.arange(3.0)) for name in ("same", "other", "turned")}
    if worker.rank == 1:
        parameters["other"].data[1] += 1e-6
        parameters["turned"].data[1:] = 1.5  # the sum is that of 1 and 2
    stages = {name: frozenset({0}) for name in parameters}
    sync = GradientSync(comm, parameters, stages, [Bucket(("same", "other", "turned"), (0, 1))])
    try:
        if moments:
            sync.require_equal({name: torch.zeros(3) for name in moments[worker.rank]}, "moments")
        sync.require_equal()
    except UserError as error:
        return str(error)
    finally:
        sync.close()
        comm.close()
    return ""


def test_holders_that_begin_with_unlike_weights_are_refused(workers: WorkerPool) -> None:
    for message in workers.run(_unlike, 2):
        assert "'other' on ranks [0, 1]" in message
        assert "'turned' on ranks [0, 1]" in message
        assert "'same'" not in message
        assert "the same seed" in message


def test_a_rank_without_the_moments_that_another_has_is_refused(workers: WorkerPool) -> None:
    for message in workers.run(_unlike, 2, (("same", "other"), ("same",))):
        assert message.startswith("moments that replicas share differ")
        assert "'other' on ranks [0, 1]" in message
        assert "'same'" not in message
        assert "'turned'" not in message


def _unused(worker: Worker) -> list[bool]:
    comm = Comm(worker.store, worker.rank, worker.size)
    parameters = {name: nn.Parameter(torch.ones(3)) for name in ("both", "one", "none")}
    bucket = Bucket(("both", "one", "none"), (0, 1))
    sync = GradientSync(comm, parameters, {name: frozenset({0}) for name in parameters}, [bucket])
    sync.begin([0])
    used = parameters["both"] + (parameters["one"] if worker.rank else 0)
    sync.entering_last_backward(0)
    used.sum().backward()
    sync.left_last_backward(0)
    sync.finish()
    assert torch.equal(parameters["both"].grad, torch.full((3,), 2.0))
    assert torch.equal(parameters["one"].grad, torch.ones(3))
    sync.close()
    comm.close()
    return [parameter.grad is None for parameter in parameters.values()]


def test_a_weight_that_no_holder_used_keeps_no_gradient(workers: WorkerPool) -> None:
    assert workers.run(_unused, 2) == [[False, False, True]] * 2


def _tied_in_two_stages(worker: Worker) -> list[float]:
    """The weight is in stages 0 and 1 of rank 0, which end one after the other, and in stage 2 of rank 1."""
    comm = Comm(worker.store, worker.rank, worker.size)
    weight = nn.Parameter(torch.ones(2))
    stages = frozenset({0, 1}) if worker.rank == 0 else frozenset({2})
    sync = GradientSync(comm, {"w": weight}, {"w": stages}, [Bucket(("w",), (0, 1))])
    sync.begin(stages)
    for stage in sorted(stages):
        sync.entering_last_backward(stage)
        (weight * (stage + 1)).sum().backward()
        sync.left_last_backward(stage)
    sync.finish()
    sync.close()
    comm.close()
    return weight.grad.tolist()


def test_a_weight_in_two_stages_of_a_rank_is_summed_after_the_last_of_them(workers: WorkerPool) -> None:
    assert workers.run(_tied_in_two_stages, 2) == [[6.0, 6.0]] * 2


def _in_an_idle_stage(worker: Worker) -> list[float]:
    """The weight is in stages 0 and 1, of which only 0 runs a backward in this step."""
    comm = Comm(worker.store, worker.rank, worker.size)
    weight = nn.Parameter(torch.ones(2))
    sync = GradientSync(comm, {"w": weight}, {"w": frozenset({0, 1})}, [Bucket(("w",), (0, 1))])
    sync.begin([0])
    sync.entering_last_backward(0)
    (weight * 3).sum().backward()
    sync.left_last_backward(0)
    started = len(sync._started)
    sync.finish()
    sync.close()
    comm.close()
    return [started, *weight.grad.tolist()]


def test_a_stage_without_a_backward_is_not_waited_for(workers: WorkerPool) -> None:
    assert workers.run(_in_an_idle_stage, 2) == [[1, 6.0, 6.0]] * 2


def _starts_within_the_backward(worker: Worker) -> list[int]:
    comm = Comm(worker.store, worker.rank, worker.size)
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("first", "last")}
    buckets = [Bucket(("last",), (0, 1)), Bucket(("first",), (0, 1))]
    sync = GradientSync(comm, parameters, {name: frozenset({0}) for name in parameters}, buckets)
    started: list[int] = []
    hidden = torch.ones(2) * parameters["first"]
    hidden.register_hook(lambda _: started.append(len(sync._started)))
    for is_last in (False, True):
        loss = (hidden * parameters["last"]).sum()
        if not is_last:
            sync.begin([0])
            loss.backward(retain_graph=True)
            continue
        sync.entering_last_backward(0)
        loss.backward()
        sync.left_last_backward(0)
    sync.finish()
    assert torch.equal(parameters["first"].grad, torch.full((2,), 4.0))
    sync.close()
    comm.close()
    return started


def test_a_sum_starts_inside_the_last_backward_and_not_before_it(workers: WorkerPool) -> None:
    assert workers.run(_starts_within_the_backward, 2) == [[0, 1]] * 2


def _adds_to_what_is_there(worker: Worker) -> list[float]:
    comm = Comm(worker.store, worker.rank, worker.size)
    weight = nn.Parameter(torch.ones(1))
    sync = GradientSync(comm, {"w": weight}, {"w": frozenset({0})}, [Bucket(("w",), (0, 1))])
    for _ in range(2):
        sync.begin([0])
        sync.entering_last_backward(0)
        (weight * 3).sum().backward()
        sync.left_last_backward(0)
        sync.finish()
    sync.close()
    comm.close()
    return weight.grad.tolist()


def test_gradients_of_an_earlier_batch_are_added_to_and_not_summed_again(workers: WorkerPool) -> None:
    assert workers.run(_adds_to_what_is_there, 2) == [[12.0]] * 2


def test_the_squared_norm_counts_a_weight_at_its_first_holder_only() -> None:
    parameters = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b", "c")}
    for parameter in parameters.values():
        parameter.grad = torch.full((4,), 2.0)
    holders = {"a": (0, 1), "b": (1,), "c": (0,)}
    assert squared_norm(parameters, holders, 0) + squared_norm(parameters, holders, 1) == 48.0
