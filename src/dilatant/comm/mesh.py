"""Device meshes over groups of one generation, for what shards by mesh: DTensor, FSDP2, functional collectives.

These find a group by its name in a registry of the process. `register` writes one there, under a name that no other
generation has (comm.py gives it), and `forget` takes it out again. With comm.py this is all that touches what
torch.distributed keeps private.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _world


def register(name: str, ranks: Sequence[int], rank: int, backend: Any, device_type: str) -> dist.ProcessGroup:
    """`backend`, which the generation's `ranks` share, as a process group that torch finds by `name`.

    It stays out of `_world.pg_names`, by which torch counts a process's groups and destroys them with the default one.
    """
    store = dist.HashStore()  # what torch keeps beside a group; the backend speaks to the generation's own
    group = dist.ProcessGroup(store, ranks.index(rank), len(ranks))
    kind = getattr(dist.ProcessGroup.BackendType, backend.name().upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    group._set_group_name(GroupName(name))
    group._set_group_desc(name)
    _register_process_group(GroupName(name), group)
    _world.pg_map[group] = (backend.name(), store)
    _world.pg_backend_config[group] = f"{device_type}:{backend.name()}"
    _world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    return group


def forget(group: dist.ProcessGroup) -> None:
    """Take out of torch's registry what `register` wrote there; its name resolves to nothing any more."""
    with contextlib.suppress(RuntimeError):  # the process's own destroy_process_group() forgets all names
        _unregister_process_group(group.group_name)
    for table in (
        _world.pg_map,
        _world.pg_backend_config,
        _world.pg_group_ranks,
        _world.pg_coalesce_state,
    ):
        table.pop(group, None)


class GenerationMesh(DeviceMesh):
    """A mesh that knows its own rank, where a DeviceMesh asks the default group for it.

    It equals only meshes over the same groups: torch keeps what it once derived for equal meshes, and would go on with
    those of an earlier generation.
    """

    def __init__(self, device_type: str, rank: int, group_names: list[Any], **parts: Any) -> None:
        self._rank = rank  # the base class reads `mesh` before it sets this
        super().__init__(device_type, _init_backend=False, _rank=rank, **parts)
        self._dim_group_names = group_names

    @classmethod
    def over(
        cls,
        groups: Sequence[dist.ProcessGroup],
        grid: Tensor,
        axes: tuple[str, ...],
        rank: int,
        device_type: str,
    ) -> GenerationMesh:
        """`grid` as a mesh of named axes. groups: of `rank`, along each of them."""
        by_name: dict[str, dist.ProcessGroup] = {group.group_name: group for group in groups}
        mesh = cls(device_type, rank, list(by_name), mesh=grid, mesh_dim_names=axes)
        mesh._pg_registry.update(by_name)
        return mesh

    @property
    def mesh(self) -> Tensor:
        return self._get_mesh_tensor_from_full_mesh(self._layout.remap_to_tensor(self._rank_map), self._rank)

    def get_rank(self) -> int:
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self.get_group(mesh_dim).rank()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self._dim_group_names == getattr(other, "_dim_group_names", None)

    __hash__ = DeviceMesh.__hash__

    def _create_sub_mesh(self, layout: Any, submesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        """What slicing by names makes."""
        names = dict(zip(self.mesh_dim_names or (), self._dim_group_names))
        root = self._get_root_mesh()
        return GenerationMesh(
            self.device_type,
            self._rank,
            [names[axis] for axis in submesh_dim_names],
            mesh_dim_names=submesh_dim_names,
            _layout=layout,
            _rank_map=root._rank_map,
            _root_mesh=root,
        )

    def _flatten(self, *arguments: Any, **options: Any) -> DeviceMesh:
        raise NotImplementedError(
            f"{self} makes no groups: ask Comm.mesh for a mesh that has the flattened axis"
        )

    def _unflatten(self, *arguments: Any, **options: Any) -> DeviceMesh:
        raise NotImplementedError(f"{self} makes no groups: ask Comm.mesh for a mesh that has the finer axes")


def grid_of(name: str, axes: Mapping[str, int], ranks: Sequence[int], rank: int, size: int) -> Tensor:
    """`ranks` in row-major order over named axes and their lengths, for `rank` of `size` that asks for this mesh.

    Raises ValueError that lists what is wrong.
    """
    wrong = []
    places = math.prod(axes.values())
    if not axes or places < 1:
        wrong.append("a mesh has at least one axis, and an axis at least one rank")
    elif places != len(ranks):
        wrong.append(f"the axes have {places} places for {len(ranks)} ranks")
    if len(set(ranks)) != len(ranks):
        wrong.append("a rank is listed twice")
    if not set(ranks) <= set(range(size)):
        wrong.append(f"this generation has ranks 0 to {size - 1}")
    if rank not in ranks:
        wrong.append(f"rank {rank}, which asks for it, is no member")
    if dist.is_initialized() and dist.get_rank() != rank:
        wrong.append(
            f"rank {rank} is rank {dist.get_rank()} of its process's default group, by which torch counts the ranks of "
            "a mesh: give it the same one in both, or destroy that group"
        )
    if wrong:
        raise ValueError(f"mesh {name!r} of {dict(axes)} over ranks {list(ranks)}: {'; '.join(wrong)}")
    return torch.tensor(ranks, dtype=torch.int).view(*axes.values())


def line_through(grid: Tensor, axis: int, rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` in nothing but their place on one axis of the grid, in that order."""
    place: list[Any] = (grid == rank).nonzero()[0].tolist()
    place[axis] = slice(None)
    return tuple(grid[tuple(place)].tolist())
