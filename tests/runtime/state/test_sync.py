"""Gradient sync: what is summed, when it starts, and what stays without a gradient."""

from __future__ import annotations

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.cost.memory import Zero
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, Holding, Holdings
from dilatant.runtime.state.shared_weights import BucketedWeights, StateLayout, bucket_weights
from harness.patience import wait_until
from harness.worker_pool import Worker, WorkerPool


def share(
    worker: Worker,
    weights: dict[str, nn.Parameter],
    *stages: int,
    bucket_bytes: int = 1 << 20,
    holdings: Holdings | None = None,
    zero: Zero = "none",
    node_of: list[int] | None = None,
) -> BucketedWeights:
    """`weights`, held by all ranks if `holdings` does not say otherwise, and used by the `stages` of this one."""
    everywhere = range(worker.size)
    held = holdings or {
        name: Holding({rank: Box.of(name, weight.shape) for rank in everywhere}) for name, weight in weights.items()
    }
    return bucket_weights(
        Comm(worker.store, worker.rank, worker.size),
        weights,
        dict.fromkeys(weights, stages or (0,)),
        held,
        dict.fromkeys(held, Format("float32", 4)),
        StateLayout(zero, node_of, bucket_bytes=bucket_bytes),
    )


def close(shared: BucketedWeights) -> None:
    shared.sync.close()
    shared.owned.comm.close()


def _unlike(worker: Worker, moments: tuple[tuple[str, ...], ...] = ()) -> str:
    parameters = {name: nn.Parameter(torch.arange(3.0)) for name in ("same", "other", "turned")}
    if worker.rank == 1 and not moments:
        parameters["other"].data[1] += 1e-6
        parameters["turned"].data[1:] = 1.5  # the sum is that of 1 and 2
    shared = share(worker, parameters)
    try:
        own = {name: torch.zeros(3) for name in moments[worker.rank]} if moments else {}
        shared.require_equal({"moments": own})
    except UserError as error:
        return str(error)
    finally:
        close(shared)
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
    parameters = {name: nn.Parameter(torch.ones(3)) for name in ("both", "one", "none")}
    shared = share(worker, parameters)
    sync = shared.sync
    sync.begin([0])
    used = parameters["both"] + (parameters["one"] if worker.rank else 0)
    sync.entering_last_backward(0)
    used.sum().backward()
    sync.left_last_backward(0)
    sync.finish()
    assert torch.equal(parameters["both"].grad, torch.full((3,), 2.0))
    assert torch.equal(parameters["one"].grad, torch.ones(3))
    close(shared)
    return [parameter.grad is None for parameter in parameters.values()]


def test_a_weight_that_no_holder_used_keeps_no_gradient(workers: WorkerPool) -> None:
    assert workers.run(_unused, 2) == [[False, False, True]] * 2


def _tied_in_two_stages(worker: Worker) -> list[float]:
    """The weight is in stages 0 and 1 of rank 0, which end one after the other, and in stage 2 of rank 1."""
    weight = nn.Parameter(torch.ones(2))
    stages = frozenset({0, 1}) if worker.rank == 0 else frozenset({2})
    shared = share(worker, {"w": weight}, *stages)
    sync = shared.sync
    sync.begin(stages)
    for stage in sorted(stages):
        sync.entering_last_backward(stage)
        (weight * (stage + 1)).sum().backward()
        sync.left_last_backward(stage)
    sync.finish()
    close(shared)
    return weight.grad.tolist()


def test_weight_in_two_stages_of_a_rank_is_summed_after_the_last(workers: WorkerPool) -> None:
    assert workers.run(_tied_in_two_stages, 2) == [[6.0, 6.0]] * 2


def _in_an_idle_stage(worker: Worker) -> list[float]:
    """The weight is in stages 0 and 1, of which only 0 runs a backward in this step."""
    weight = nn.Parameter(torch.ones(2))
    shared = share(worker, {"w": weight}, 0, 1)
    sync = shared.sync
    sync.begin([0])
    sync.entering_last_backward(0)
    (weight * 3).sum().backward()
    sync.left_last_backward(0)
    started = len(sync._started)
    sync.finish()
    close(shared)
    return [started, *weight.grad.tolist()]


def test_a_stage_without_a_backward_is_not_waited_for(workers: WorkerPool) -> None:
    assert workers.run(_in_an_idle_stage, 2) == [[1, 6.0, 6.0]] * 2


def _starts_within_the_backward(worker: Worker) -> list[int]:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("first", "last")}
    shared = share(worker, parameters, bucket_bytes=1)
    sync = shared.sync
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
    close(shared)
    return started


def test_a_sum_starts_inside_the_last_backward_and_not_before_it(workers: WorkerPool) -> None:
    assert workers.run(_starts_within_the_backward, 2) == [[0, 1]] * 2


def _crosses_within_the_backward(worker: Worker) -> tuple[bool, list[float]]:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("first", "middle", "last")}
    shared = share(worker, parameters, bucket_bytes=1, zero="node", node_of=[0, 0, 1, 1])
    sync = shared.sync
    crossed: list[int] = []

    def wait_for_the_node(_: torch.Tensor) -> None:
        wait_until(lambda: sync._started[0].pending.is_done)

    hidden = torch.ones(2) * parameters["first"]
    hidden.register_hook(lambda _: crossed.append(sync._crossed))
    between = hidden * parameters["middle"]
    between.register_hook(wait_for_the_node)
    sync.begin([0])
    sync.entering_last_backward(0)
    (between * parameters["last"]).sum().backward()
    sync.left_last_backward(0)
    sync.finish()
    close(shared)
    # The second bucket's sum of the node may be done as soon as it has started.
    return crossed[0] >= 1, [float(one.grad) for one in shared.owned.parameters.values()]


def test_node_sums_cross_nodes_during_the_backward(workers: WorkerPool) -> None:
    assert workers.run(_crosses_within_the_backward, 4) == [(True, [4.0] * 3)] * 4


def _adds_to_what_is_there(worker: Worker) -> list[float]:
    weight = nn.Parameter(torch.ones(1))
    shared = share(worker, {"w": weight})
    sync = shared.sync
    for _ in range(2):
        sync.begin([0])
        sync.entering_last_backward(0)
        (weight * 3).sum().backward()
        sync.left_last_backward(0)
        sync.finish()
    close(shared)
    return weight.grad.tolist()


def test_accumulated_gradients_are_added_to_and_not_summed_again(workers: WorkerPool) -> None:
    assert workers.run(_adds_to_what_is_there, 2) == [[12.0]] * 2


def _norms(worker: Worker) -> float:
    boxes = {rank: Box.of("a", (4,)) for rank in (0, 1)}
    held = {"a": Holding(boxes), "b": Holding({1: Box.of("b", (4,))}), "c": Holding({0: Box.of("c", (4,))})}
    parameters = {name: nn.Parameter(torch.ones(4)) for name in held if worker.rank in held[name].boxes}
    shared = share(worker, parameters, holdings=held)
    for parameter in parameters.values():
        parameter.grad = torch.full((4,), 2.0)
    norm = shared.owned.squared_norm()
    close(shared)
    return norm


def test_squared_norm_counts_a_weight_at_its_first_holder_only(workers: WorkerPool) -> None:
    assert workers.run(_norms, 2) == [32.0, 16.0]
