"""The `cluster:` and `plan:` sections of the YAML file: the devices to plan for, and the search for a plan."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import AnyPath, Section

MOST_DEVICES = 131_072
"""Maximum number of devices of a plan; the minutes and GiB of a search grow with their number."""


class ReserveConfig(Section):
    """Memory of each device that plans leave free. Defaults are 0 on a CPU; for GPUs see each key."""

    context_gib: float | None = Field(None, ge=0)
    """Memory of the context of driver and libraries. Default on GPUs: 1."""
    communicators_gib: float | None = Field(None, ge=0)
    """Buffers of all communicators of a device. Default on GPUs: 1 if there are several."""
    fragmentation: float | None = Field(None, ge=0, lt=1)
    """Memory lost to allocator fragmentation, as a share of the device's memory. Default on GPUs: 0.04."""


class GroupConfig(Section):
    """A group of equal devices in a heterogeneous cluster."""

    name: str = Field(min_length=1)
    """Name of the group in plans."""
    hardware: str
    """See `cluster.hardware`."""
    gpus_per_node: int = Field(gt=0)
    """See `cluster.gpus_per_node`."""
    nodes: int = Field(1, gt=0)
    """Number of machines."""
    memory_gib: float | None = Field(None, gt=0)
    """See `cluster.memory_gib`."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node


class ClusterConfig(Section):
    """The devices to plan for. Default: this machine."""

    nodes: int = Field(1, gt=0)
    """Number of machines."""
    gpus_per_node: int | None = Field(None, gt=0)
    """GPUs per node; on a machine without GPUs, training processes per node. Default: this machine's GPUs, else one
    process per core, between 2 and 4."""
    hardware: str | None = None
    """An entry of the hardware file: `A40`, `A100`, `H100`, `H200`, `CPU` or your own. Default: this machine's."""
    hardware_file: AnyPath | None = None
    """Your hardware file, in the format of the one that ships with Dilatant."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory per device that training may use; nothing of it is reserved unless `reserve` is set too. Default: all
    memory of a GPU of this machine, otherwise that of the hardware file, minus `reserve`."""
    reserve: ReserveConfig | None = None
    """Memory of each device that plans leave free."""
    groups: tuple[GroupConfig, ...] | None = Field(None, min_length=1)
    """Groups of different devices, instead of `nodes`, `gpus_per_node`, `hardware` and `memory_gib`; the first group
    has the first ranks. Units, and whole pipelines, are planned for the group where they run best."""

    @model_validator(mode="after")
    def _entry_named(self) -> Self:
        if self.hardware_file is not None and self.hardware is None and not self.groups:
            raise ValueError("'hardware_file' needs 'hardware', the name of the entry to take from it")
        return self

    @model_validator(mode="after")
    def _groups_or_one_kind(self) -> Self:
        if self.groups is None:
            return self
        flat = {"nodes": 1, "gpus_per_node": None, "hardware": None, "memory_gib": None}
        if both := [name for name, default in flat.items() if getattr(self, name) != default]:
            raise ValueError(f"'groups' and {', '.join(map(repr, both))} are both given; say it of each group instead")
        names = [group.name for group in self.groups]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"'groups' has {', '.join(map(repr, twice))} more than once; give each group its own name")
        return self

    @model_validator(mode="after")
    def _within_reach(self) -> Self:
        devices = self.num_devices or self.nodes * (self.gpus_per_node or 1)
        if devices > MOST_DEVICES:
            raise ValueError(f"plans are made for at most {MOST_DEVICES:,} devices, and these are {devices:,}")
        return self

    @property
    def of_groups(self) -> tuple[ClusterConfig, ...]:
        """Return each group as a separate cluster."""
        return tuple(
            self.model_copy(update={"groups": None, **group.model_dump(exclude={"name"})})
            for group in self.groups or ()
        )

    @property
    def num_devices(self) -> int | None:
        """Return the number of devices of all groups; None without groups."""
        return None if self.groups is None else sum(group.num_devices for group in self.groups)


class PlanConfig(Section):
    """Settings of the search for a plan (`dilatant plan`)."""

    costs: AnyPath | None = None
    """A file of layer costs, written by `dilatant profile`. Default: measured, or modelled for other hardware."""
    measure_seconds: float = Field(20.0, ge=0)
    """Time limit for measuring layers, if the plan is for devices of this machine; the layers that take most of a step
    come first. All measurements are kept, even rough ones; the other layers are modelled, and measured by the next
    plan. 0: measure nothing. `dilatant profile` measures everything."""
    microbatch_sizes: tuple[int, ...] = Field((1, 2, 4, 8), min_length=1)
    """Samples per microbatch to try; only divisors of the global batch are used."""
    microbatch_tokens: tuple[int, ...] | None = None
    """Microbatches limited by tokens to try as well: the maximum language-model tokens of each. The number of
    microbatches then follows from the samples of a step, and any number of pipelines can divide the batch. Default:
    `train.row_tokens`; an empty list: none. Tried without `parallel.microbatches`."""
    tensor_parallel: tuple[int, ...] | None = None
    """Tensor-parallel degrees to measure or model, and to plan with. A cost file has its own. Default: on GPUs the
    powers of two up to the devices of a node that all units support; on a CPU 1."""
    context_parallel: tuple[int, ...] | None = None
    """Context-parallel degrees to model, and to plan with. A cost file has its own. Default: the same as
    `tensor_parallel`, if the product of both fits a node."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Stages per group of ranks to try for the language model (interleaved pipelines), unless `parallel.schedule` names
    a schedule other than `interleaved`."""
    assignment: Literal["random", "entrain", "balanced", "searched"] | None = None
    """The policy that groups samples into microbatches, in plans and in training with several processes. Default: in
    training the policy of `parallel.plan`, else `balanced`."""
    correct_costs: bool = True
    """Correct the costs with which later steps are planned by the measured seconds of actions, equally on all ranks.
    `false`: samples are assigned identically in every run of a config."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        lists = "microbatch_sizes", "microbatch_tokens", "tensor_parallel", "context_parallel", "chunks"
        for name in lists:
            values = getattr(self, name)
            if values is None or (not values and name == "microbatch_tokens"):
                continue
            if not values or min(values) < 1:
                raise ValueError(f"'{name}' must list numbers from 1 on")
        return self
