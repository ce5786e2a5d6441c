"""All-gather, reduce-scatter and all-to-all put every rank's part where its place in the group says."""

from __future__ import annotations

import pytest
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.tensor_group import TensorGroup
from harness.worker_pool import Worker, WorkerPool

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
GROUPS = [(0, 1, 2), (2, 0), (1,)]


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) + 100 * rank).to(dtype)  # below 256: exact in bf16, as are sums of three


def _collect(worker: Worker) -> dict[str, list[list[float]]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    results = {}
    for ranks in GROUPS:
        if worker.rank not in ranks:
            continue
        group = comm.group(str(ranks), ranks)
        for dtype in DTYPES:
            part = _values(worker.rank % 2, 6, dtype).view(2, 3)
            gathered = torch.zeros(len(ranks), 2, 3, dtype=dtype)
            whole = _values(worker.rank % 2, 4 * len(ranks), dtype)
            kept = whole.clone()
            own = torch.zeros(2, 2, dtype=dtype)
            pending = [group.all_gather(gathered, part), group.reduce_scatter(own, whole)]
            for each in pending:
                each.wait()
            assert torch.equal(whole, kept)
            results[f"{ranks} {dtype}"] = [gathered.flatten().tolist(), own.flatten().tolist()]
        group.all_gather(torch.zeros(0), torch.zeros(0)).wait()
        group.reduce_scatter(torch.zeros(0), torch.zeros(0)).wait()
        with pytest.raises(ValueError, match="is not an equal part"):
            group.all_gather(torch.zeros(3 * len(ranks)), torch.zeros(2))
        with pytest.raises(ValueError, match="is not an equal part"):
            group.reduce_scatter(torch.zeros(2, dtype=torch.int64), torch.zeros(2 * len(ranks)))
    comm.world.barrier()
    comm.close()
    return results


def test_parts_go_to_their_places_in_every_dtype(workers: WorkerPool) -> None:
    for rank, results in enumerate(workers.run(_collect, 3)):
        for ranks in GROUPS:
            if rank not in ranks:
                continue
            for dtype in DTYPES:
                gathered, own = results[f"{ranks} {dtype}"]
                assert gathered == [value + 100 * (member % 2) for member in ranks for value in range(6)]
                sums = [sum(value + 100 * (member % 2) for member in ranks) for value in range(4 * len(ranks))]
                place = ranks.index(rank)
                assert own == sums[4 * place : 4 * place + 4]


COUNTS = [[[2, 0, 3], [0, 0, 0], [1, 4, 0]], [[0, 0, 0]] * 3, [[0, 5, 0]] * 3]
"""Numbers from each rank to each: some to itself, none from one; none at all; all to one."""


def _exchange(worker: Worker) -> list[list[float]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    group = comm.group("reversed", (2, 1, 0))
    found = []
    for dtype in DTYPES:
        for counts in COUNTS:
            sent = counts[group.index]
            received = [of_rank[group.index] for of_rank in counts]
            arrived = torch.zeros(sum(received), dtype=dtype)
            group.all_to_all(arrived, _values(group.index, sum(sent), dtype), received, sent).wait()
            found.append(arrived.tolist())
    alone = comm.group(f"alone {worker.rank}", (worker.rank,))
    output = torch.zeros(2)
    alone.all_to_all(output, torch.ones(2), [2], [2]).wait()
    assert output.tolist() == [1, 1]
    with pytest.raises(ValueError, match="are no counts of a tensor of"):
        group.all_to_all(torch.zeros(2), torch.zeros(3), [1, 1, 0], [1, 1, 0])
    comm.world.barrier()
    comm.close()
    return found


def test_unequal_numbers_go_from_every_rank_to_every_rank(workers: WorkerPool) -> None:
    for rank, found in enumerate(workers.run(_exchange, 3)):
        place = 2 - rank
        for counts, arrived in zip(COUNTS * len(DTYPES), found, strict=True):
            expected = []
            for sender, sent in enumerate(counts):
                before = sum(sent[:place])
                expected += [100 * sender + number for number in range(before, before + sent[place])]
            assert arrived == expected


def _adds_its_share(worker: Worker) -> list[list[float]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    ranks = TensorGroup(comm.group("tensor", (0, 1)))
    leaf = torch.ones(3, requires_grad=True)
    hidden = leaf * 1
    gradient = torch.full((3,), 1.0 + worker.rank)
    (hidden + ranks.copy(hidden)).backward(gradient)  # addition hands one tensor to both of its terms
    comm.world.barrier()
    comm.close()
    return [leaf.grad.tolist(), gradient.tolist()]


def test_a_sum_over_ranks_changes_no_gradient_that_others_read(workers: WorkerPool) -> None:
    for rank, (leaf, gradient) in enumerate(workers.run(_adds_its_share, 2)):
        assert gradient == [1 + rank] * 3
        assert leaf == [(1 + rank) + (1 + 2)] * 3  # its own through the addition, all ranks' through the copy
