"""Device meshes of a generation: usable by what shards by mesh, without a default group, and gone with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dilatant
from dilatant.comm.comm import Comm, CommAborted
from dilatant.comm.mesh import grid_of
from worker_pool import Worker, WorkerPool

WHOLE = torch.arange(30.0).view(6, 5)
SQUARE = {"replica": 2, "shard": 2}


def _distribute(mesh: DeviceMesh, *placements: Any, tensor: Tensor = WHOLE) -> DTensor:
    """Every rank takes its part of a tensor that all have: no communication, no default group."""
    return distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)


def _sharded(worker: Worker) -> tuple[list[list[int]], int, int, list[float]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    mesh = comm.mesh("square", SQUARE, ranks=(3, 1, 2, 0))
    assert comm.mesh("square", SQUARE, ranks=(3, 1, 2, 0)) is mesh
    tensor = _distribute(mesh, Shard(1), Shard(0))
    assert tensor.to_local().shape == (3, 3 if mesh.get_local_rank("replica") == 0 else 2)
    other = tensor.redistribute(placements=[Replicate(), Shard(1)])
    assert other.to_local().shape == (6, 3 if mesh.get_local_rank("shard") == 0 else 2)
    for whole, expected in [
        (tensor, WHOLE),
        (other, WHOLE),
        (tensor @ tensor.T, WHOLE @ WHOLE.T),
        (tensor.sum(0), WHOLE.sum(0)),
    ]:
        assert torch.equal(whole.full_tensor(), expected)
    line = mesh["shard"]
    summed = functional.all_reduce(torch.tensor([float(worker.rank)]), "sum", (line, 0))
    assert not dist.is_initialized()
    place = line.get_local_rank()
    comm.close()
    return mesh.mesh.tolist(), place, mesh.get_rank(), [*line.mesh.tolist(), summed.item()]


def test_a_tensor_sharded_over_a_mesh_is_the_whole_again(workers: WorkerPool) -> None:
    grid = [[3, 1], [2, 0]]
    assert workers.run(_sharded, 4) == [
        (grid, 1, 0, [2, 0, 2]),
        (grid, 1, 1, [3, 1, 4]),
        (grid, 0, 2, [2, 0, 2]),
        (grid, 0, 3, [3, 1, 4]),
    ]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def _gradients(worker: Worker, axes: dict[str, int], ranks: tuple[int, ...]) -> dict[str, Tensor]:
    comm = Comm(worker.store, worker.rank, worker.size)
    gradients = {}
    if worker.rank in ranks:
        mesh = comm.mesh("some", axes, ranks)
        model = _model()
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
        model(_batch(worker.rank)).square().mean().backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    comm.world.barrier()
    comm.close()
    return gradients


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [(SQUARE, (0, 1, 2, 3)), ({"shard": 3}, (3, 0, 1)), ({"replica": 1, "shard": 2}, (1, 2))],
)
def test_gradients_of_a_fully_sharded_model_are_those_of_one_process(
    workers: WorkerPool, axes: dict[str, int], ranks: tuple[int, ...]
) -> None:
    model = _model()
    model(torch.cat([_batch(rank) for rank in ranks])).square().mean().backward()
    for rank, gradients in enumerate(workers.run(_gradients, 4, axes, ranks)):
        assert bool(gradients) == (rank in ranks)
        for name, gradient in gradients.items():
            # fp32, means of means: a few roundings.
            torch.testing.assert_close(
                gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7, msg=name
            )


def _tensor_parallel(worker: Worker) -> list[dict[str, Tensor]]:
    gradients = []
    for generation in range(2):
        comm = Comm(worker.store, worker.rank, worker.size, generation)
        # Other names: the mesh that torch joins out of these two for a parameter is of its own class, and would equal
        # the one of the generation before.
        mesh = comm.mesh("square", {f"data{generation}": 2, f"tensor{generation}": 2})
        model = _model()
        with comm.default_group():
            parallelize_module(
                model, mesh[f"tensor{generation}"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
            for module in (model[0], model[2], model):
                fully_shard(module, mesh=mesh[f"data{generation}"])
        model(_batch(mesh.get_local_rank(0))).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        gradients.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})
        comm.world.barrier()
        comm.close()
    return gradients


def test_tensor_parallel_parameters_are_fully_sharded_over_another_axis(workers: WorkerPool) -> None:
    model = _model()
    model(torch.cat([_batch(0), _batch(1)])).square().mean().backward()
    for generations in workers.run(_tensor_parallel, 4):
        for gradients in generations:
            assert len(gradients) == 4
            for name, gradient in gradients.items():
                expected = model.get_parameter(name).grad
                # fp32, means of means: a few roundings.
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=name)


def _two_generations(worker: Worker) -> None:
    meshes, tensors, sums = [], [], []
    for generation, rank in enumerate((worker.rank, worker.size - 1 - worker.rank)):
        comm = Comm(worker.store, rank, worker.size, generation)
        mesh = comm.mesh("square", SQUARE)
        tensor = _distribute(mesh, Shard(0), Shard(1))
        if generation == 0:
            group = mesh.get_group("shard")
            assert dist.get_process_group_ranks(group) == mesh["shard"].mesh.tolist()
        else:
            assert mesh != meshes[0]
            assert mesh["shard"] != meshes[0]["shard"]
            with pytest.raises(RuntimeError, match="different mesh"):
                tensor + tensors[0]
        # What torch derived for the first mesh it must not reuse for the second, which looks the same.
        sums.append((tensor @ tensor.T).redistribute(placements=[Shard(1), Replicate()]).full_tensor())
        meshes.append(mesh)
        tensors.append(tensor)
        comm.world.barrier()
        comm.close()
        for use in (tensors[0].full_tensor, lambda: meshes[0].get_group("shard")):
            with pytest.raises(RuntimeError, match=r"Could not resolve .*generation0/square/shard/"):
                use()
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(group)
    assert all(torch.equal(each, WHOLE @ WHOLE.T) for each in sums)


def test_a_closed_generations_names_resolve_to_nothing_and_the_next_has_its_own(workers: WorkerPool) -> None:
    workers.run(_two_generations, 4)


def _beside_a_default_group(worker: Worker) -> None:
    store = dist.PrefixStore("own", worker.store)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.size)
    try:
        own, count = dist.group.WORLD, dist.distributed_c10d._world.group_count
        backward = Comm(worker.store, worker.size - 1 - worker.rank, worker.size, generation=0)
        with pytest.raises(ValueError, match=r"rank 1 is rank 0 .*default|rank 0 is rank 1 .*default"):
            backward.mesh("line", {"shard": 2})
        backward.world.barrier()
        backward.close()
        comm = Comm(worker.store, worker.rank, worker.size, generation=1)
        mesh = comm.mesh("line", {"shard": 2})
        # With a default group, of whatever origin, the first rank may have the data.
        data = WHOLE if worker.rank == 0 else torch.zeros_like(WHOLE)
        assert torch.equal(distribute_tensor(data, mesh, [Shard(0)]).full_tensor(), WHOLE)
        with comm.default_group():
            assert dist.group.WORLD is own
        assert dist.group.WORLD is own
        assert dist.distributed_c10d._world.group_count == count
        group = dist.new_group([0, 1])  # hangs where ranks count their groups differently
        comm.world.barrier()
        comm.close()
        for each in (own, group):
            total = torch.ones(1)
            dist.all_reduce(total, group=each)
            assert total.item() == 2
        last = Comm(worker.store, worker.rank, worker.size, generation=2)
        last.mesh("line", {"shard": 2})
    finally:
        dist.destroy_process_group()
    last.world.barrier()
    total = torch.ones(1)
    last.group("line/shard/0", (0, 1)).sum_(total).wait()
    assert total.item() == 2
    last.close()


def test_a_process_keeps_its_own_default_group(workers: WorkerPool) -> None:
    workers.run(_beside_a_default_group, 2)


def _checkpoint(worker: Worker, folder: str) -> None:
    comm = Comm(worker.store, worker.rank, worker.size)
    mesh = comm.mesh("square", SQUARE)
    saved = {"weight": _distribute(mesh, Shard(0), Shard(1)), "step": 7}
    empty = _distribute(comm.mesh("line", {"shard": 4}), Shard(1), tensor=torch.zeros_like(WHOLE))
    loaded = {"weight": empty, "step": 0}
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        distribute_tensor(WHOLE, mesh, [Replicate(), Shard(0)])
    with comm.default_group():
        dcp.save(saved, checkpoint_id=folder)
        dcp.load(loaded, checkpoint_id=folder)
        data = WHOLE if worker.rank == 0 else torch.zeros_like(WHOLE)
        scattered = distribute_tensor(data, mesh, [Replicate(), Shard(0)])
    assert not dist.is_initialized()
    assert torch.equal(loaded["weight"].full_tensor(), WHOLE)
    assert loaded["step"] == 7
    assert torch.equal(scattered.full_tensor(), WHOLE)
    comm.world.barrier()
    comm.close()


def test_a_checkpoint_of_sharded_tensors_loads_under_another_mesh(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(_checkpoint, 4, str(tmp_path / "checkpoint"))


def _aborted(worker: Worker) -> tuple[str | None, float]:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=100)
    mesh = comm.mesh("line", {"shard": 3})
    comm.world.barrier()
    begun = time.monotonic()
    if worker.rank == 2:
        time.sleep(0.3)
        comm.abort("rank 2 found sample 'x' broken")
    else:
        with pytest.raises(RuntimeError):
            _distribute(mesh, Shard(0)).full_tensor()
        with pytest.raises(CommAborted, match="sample 'x' broken"):
            comm.mesh("another", {"shard": 3})
    seconds = time.monotonic() - begun
    comm.close()
    with pytest.raises(RuntimeError, match="Could not resolve"):
        mesh.get_group()
    return comm.aborted, seconds


def test_an_abort_ends_what_is_blocked_in_a_mesh(workers: WorkerPool) -> None:
    for reason, seconds in workers.run(_aborted, 3):
        assert reason == "rank 2 found sample 'x' broken"
        assert seconds < 20  # far below the timeout of 100 s, whatever else runs here


@pytest.mark.parametrize(
    ("axes", "ranks", "wrong"),
    [
        ({"replica": 2, "shard": 2}, (0, 1, 2), "the axes have 4 places for 3 ranks"),
        ({"shard": 4}, (0, 1, 1, 3), "a rank is listed twice"),
        ({"shard": 2}, (1, 2), "rank 0, which asks for it, is no member"),
        ({"shard": 2}, (0, 4), "this generation has ranks 0 to 3"),
        ({}, (), "a mesh has at least one axis"),
        ({"shard": 0}, (), "an axis at least one rank"),
        ({"replica": 2, "shard": 2}, (1, 1, 7), "4 places for 3 .*listed twice.*ranks 0 to 3.*no member"),
    ],
)
def test_a_mesh_that_cannot_be_says_all_that_is_wrong(
    axes: dict[str, int], ranks: tuple[int, ...], wrong: str
) -> None:
    with pytest.raises(ValueError, match=rf"mesh 'm' of .* over ranks \[.*{wrong}"):
        grid_of("m", axes, ranks, rank=0, size=4)


def _alone(worker: Worker) -> None:
    comm = Comm(worker.store, worker.rank, worker.size)
    mesh = comm.mesh("alone", {"replica": 1, "shard": 1})
    assert torch.equal(_distribute(mesh, Replicate(), Shard(0)).full_tensor(), WHOLE)
    with pytest.raises(ValueError, match="called 'alone'"):
        comm.mesh("alone", {"shard": 1})
    makers: list[Callable[[], Any]] = [mesh._flatten, lambda: mesh._unflatten(0, (1, 1), ("a", "b"))]
    for make in makers:
        with pytest.raises(NotImplementedError, match=r"ask Comm\.mesh"):
            make()
    comm.close()


def test_a_mesh_of_one_rank_is_one_and_a_name_means_one_mesh(workers: WorkerPool) -> None:
    workers.run(_alone, 1)


def test_what_torch_distributed_keeps_private_is_touched_in_one_place() -> None:
    private = re.compile(
        r"torch\._C|distributed_c10d|ProcessGroup(Gloo|NCCL)|_dim_group_names"
        r"|\bdist\._|\btorch\.distributed\.(\w+\.)*_|from torch\.distributed.* import .*\b_"
    )
    package = Path(dilatant.__file__).parent
    touching = [path for path in package.rglob("*.py") if private.search(path.read_text())]
    assert {path.relative_to(package).as_posix() for path in touching} == {
        "comm/comm.py",
        "comm/mesh.py",
    }
