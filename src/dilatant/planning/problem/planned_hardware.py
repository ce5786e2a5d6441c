"""Target devices of a plan: those of the config, or this machine's."""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config import ClusterConfig, Config, OptimizerConfig, TrainConfig, UserError
from dilatant.config.memory_modes import Precision, Shard
from dilatant.config.plan import ReserveConfig
from dilatant.cost.analytic import FP8
from dilatant.cost.hardware import Hardware, load_hardware
from dilatant.cost.memory import (
    BF16,
    DEFAULT_ZERO,
    EIGHT_BIT_MOMENTS,
    EXACT_SUMS,
    FP32,
    FP32_AVERAGE,
    FP32_MOMENTS,
    GLOO_COPIES,
    NCCL_COPIES,
    MemoryReserve,
    ParameterBytes,
    Zero,
    bytes_text,
)
from dilatant.plan.cluster import Cluster, cluster_of, cluster_of_groups
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.planning.problem.link_probe import MeasuredLinks
from dilatant.report.text.wording import ranks_text
from dilatant.runtime.precision import pick_precision

GIB = 2**30
GPU_RESERVE = ReserveConfig(context_gib=1.0, communicators_gib=1.0, fragmentation=0.04)
"""Memory reserve of a GPU among several. Assumptions, on the safe side: contexts take 0.4 to 0.8 GiB, a communicator of
NCCL some hundred MiB, and an allocator that splits its blocks loses a few percent."""
NO_RESERVE = ReserveConfig(context_gib=0.0, communicators_gib=0.0, fragmentation=0.0)
_UNKNOWN_GPU = "A40"
"""GPU whose links an unlisted GPU is taken to have: PCIe 4.0 and one fast port, which most machines have at least."""


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to plan for. Cost files must be of `requested`: the entry that the config names, or this device.

    `is_local`: this machine has such devices, so layers can be measured; `threads` are then those of one CPU process.
    `dtype` is that of matrix products, `rules` what a parameter takes. `groups`: of unlike devices, each a
    target of its own; the fields other than `cluster` are then the first group's.
    """

    hardware: Hardware
    requested: str
    cluster: Cluster
    is_local: bool
    threads: int
    dtype: str
    rules: ParameterBytes
    groups: tuple[Target, ...] = ()

    def sharing(self, zero: Zero, shard: Mapping[str, Shard] | None = None) -> Target:
        """Return the target with optimizer state shared as `zero` says and, if given, with other `shard` by unit."""
        groups = tuple(group.sharing(zero, shard) for group in self.groups)
        words = self.rules.shard if shard is None else tuple(sorted(shard.items()))
        return replace(self, rules=replace(self.rules, zero=zero, shard=words), groups=groups)

    @property
    def activations(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        kind: torch.dtype = getattr(torch, "bfloat16" if self.dtype == FP8 else self.dtype)
        return kind

    @property
    def text(self) -> str:
        """Description of the nodes and their devices."""
        if self.groups:
            return "; ".join(f"{group.cluster.name}: {group.text}" for group in self.groups)
        nodes = "1 node" if self.cluster.nodes == 1 else f"{self.cluster.nodes:,} nodes"
        return f"{nodes} of {self.cluster.gpus_per_node} × {self.hardware.name}"


def devices_per_node(config: ClusterConfig) -> int:
    """Return the config's number, else that of this machine's GPUs, else one process for each core, between 2 and 4."""
    return config.gpus_per_node or torch.cuda.device_count() or min(4, max(2, _cores()))


def target_of_run(config: Config, cluster: ClusterConfig | None = None) -> Target:
    """Return the `plan_target` of a run's config, on its own cluster or on another."""
    keeps_gradients = config.resilience.keeps_gradients and not config.train.shards
    return plan_target(cluster or config.cluster, config.train, keeps_gradients)


def plan_target(config: ClusterConfig, train: TrainConfig | None = None, keeps_gradients: bool = False) -> Target:
    """Return the devices of `cluster:` in the config, for runs with these `train:` settings. keeps_gradients: see
    `ParameterBytes`.

    Raises UserError for hardware that the file does not have, for bf16 on a local GPU without it, and for a reserve
    that leaves nothing.
    """
    train = train or TrainConfig()
    if config.groups:
        return _target_of_groups(config, train)  # without recovery
    gpus = torch.cuda.device_count()
    per_node = devices_per_node(config)
    threads = max(1, _cores() // per_node)
    here = _this_device(per_node, threads)
    path = Path(config.hardware_file) if config.hardware_file else None
    if path is not None and not path.is_file():
        raise UserError(f"cluster.hardware_file: {str(path)!r} does not exist")
    listed = load_hardware(config.hardware, path) if config.hardware else here
    is_local = config.hardware is None or is_same_hardware(here.name, listed.name)
    # Values written by hand count; only the name is this device's, since it tells whose costs these are.
    hardware = replace(listed, name=here.name) if is_local else listed
    if config.memory_gib is not None:
        hardware = replace(hardware, memory=config.memory_gib * 2**30)
    if is_local:
        device = torch.device("cuda" if gpus else "cpu")
        dtype = str(pick_precision(train.precision, device)).removeprefix("torch.")
    else:
        dtype = _dtype_elsewhere(train.precision, hardware)
    dtype = FP8 if train.precision == "fp8" else dtype
    if not is_local and dtype not in hardware.peak_flops:
        raise UserError(
            f"train.precision: {train.precision}: {hardware.name} does not multiply in {dtype}, but in "
            f"{', '.join(sorted(hardware.peak_flops))} (peak_flops of cluster.hardware); choose another of the two"
        )
    copies = GLOO_COPIES if is_same_hardware("CPU", hardware.name) else NCCL_COPIES
    rules = _rules(dtype, train, per_node, keeps_gradients)
    return Target(
        hardware=hardware,
        requested=listed.name,
        cluster=cluster_of(hardware, config.nodes, per_node, _reserve(config, hardware, per_node)),
        is_local=is_local,
        threads=threads,
        dtype=dtype,
        rules=replace(rules, host_link=hardware.host_link, sum_copies=copies),
    )


def _dtype_elsewhere(precision: Precision, hardware: Hardware) -> str:
    """Return the dtype that `pick_precision` would choose on devices that are not here. Raises UserError like it."""
    on_gpu, speeds = not is_same_hardware("CPU", hardware.name), hardware.peak_flops
    # The speed of a dtype that GPUs lack is listed as that of fp32.
    lacks_bf16 = on_gpu and speeds.get("bfloat16", 0.0) <= speeds.get("float32", 0.0)
    if lacks_bf16 and precision == "bf16":
        raise UserError(f"train.precision is bf16, which {hardware.name} does not have; use fp32 or auto")
    if hardware.vendor != "NVIDIA" and precision == "fp8":
        raise UserError(
            f"train.precision is fp8, which trains on NVIDIA GPUs, not on {hardware.name}; use bf16 or auto"
        )
    return "bfloat16" if precision == "bf16" or (precision == "auto" and on_gpu and not lacks_bf16) else "float32"


def _target_of_groups(config: ClusterConfig, train: TrainConfig) -> Target:
    """Return the target of groups of unlike devices. None counts as local: layers are modelled for all unless a file
    has their costs. All compute in fp32 if one does. State is shared in nodes whose size divides every group's."""
    each = [plan_target(group, train) for group in config.of_groups]
    dtype = "float32" if any(target.dtype == "float32" for target in each) else each[0].dtype
    rules = _rules(dtype, train, math.gcd(*(target.cluster.gpus_per_node for target in each)))
    rules = replace(
        rules,
        host_link=min(target.hardware.host_link for target in each),
        sum_copies=max(target.rules.sum_copies for target in each),
    )
    groups = tuple(
        replace(
            target,
            cluster=replace(target.cluster, name=group.name, device=target.requested),
            is_local=False,
            dtype=dtype,
            rules=rules,
        )
        for group, target in zip(config.groups or (), each, strict=True)
    )
    if len(groups) == 1:
        return groups[0]
    together = cluster_of_groups([target.cluster for target in groups])
    return replace(groups[0], cluster=together, groups=groups)


def target_of_group(config: ClusterConfig, name: str, train: TrainConfig) -> Target:
    """Return the devices of one group, which must be this machine's, in the precision that all groups compute in.
    Raises UserError if the config has no such group, or this machine is of another kind."""
    whole = plan_target(config, train)
    named = {group.name: one for group, one in zip(config.groups or (), config.of_groups, strict=True)}
    if name not in named:
        there = f"has {', '.join(named)}" if named else "is null"
        raise UserError(f"--group {name!r}: cluster.groups {there}")
    target = plan_target(named[name], train)
    if not target.is_local:
        raise UserError(
            f"--group {name!r}: these are {target.requested}, of which this machine has none; run "
            "`dilatant profile` on one of them"
        )
    return replace(target, dtype=whole.dtype, rules=whole.rules)


def _rules(dtype: str, train: TrainConfig, ranks_per_node: int, keeps_gradients: bool = False) -> ParameterBytes:
    words = train.shard  # one word for all units, or by unit
    return replace(
        rules_of(FP32 if dtype == "float32" else BF16, train.optimizer),
        zero=train.zero or DEFAULT_ZERO,
        ranks_per_node=ranks_per_node,
        keeps_gradients=keeps_gradients,
        integers=EXACT_SUMS if train.deterministic else 0.0,
        shard=tuple(sorted(words.items())) if isinstance(words, dict) else (("", words),) if words else (),
    )


def _reserve(config: ClusterConfig, hardware: Hardware, per_node: int) -> MemoryReserve:
    """Return the config's memory reserve, with what such devices usually need where it is silent."""
    usual = GPU_RESERVE
    if config.memory_gib is not None or is_same_hardware("CPU", hardware.name):
        usual = NO_RESERVE
    elif config.nodes * per_node == 1:
        usual = usual.model_copy(update={"communicators_gib": 0.0})
    chosen = {**usual.model_dump(), **(config.reserve or ReserveConfig()).model_dump(exclude_none=True)}
    reserve = MemoryReserve(
        chosen["context_gib"] * GIB, chosen["communicators_gib"] * GIB, chosen["fragmentation"] * hardware.memory
    )
    if reserve.total >= hardware.memory:
        there, free = bytes_text(hardware.memory), bytes_text(reserve.total)
        raise UserError(f"cluster.reserve: of {hardware.name}'s {there}, {free} are to be left free; lower it")
    return reserve


def rules_of(rules: ParameterBytes, optimizer: OptimizerConfig) -> ParameterBytes:
    """Return what a parameter takes under this optimizer. rules: under AdamW on the device."""
    if optimizer.offload:
        return replace(rules, optimizer=0.0)
    saved = FP32_MOMENTS - EIGHT_BIT_MOMENTS if optimizer.name == "adamw_8bit" else 0.0
    average = 0.0 if optimizer.ema is None else FP32_AVERAGE
    return replace(rules, optimizer=rules.optimizer - saved + average)


def with_links(hardware: Hardware, found: MeasuredLinks) -> Hardware:
    """Return the hardware with the links that were measured; the others as they are."""
    measured = {
        name: one.link for name, one in (("inside", found.inside), ("between", found.between)) if one is not None
    }
    if (mesh := hardware.inside.mesh) and "inside" in measured:  # pairs send over one wire each
        wire = measured["inside"]
        measured["inside"] = replace(wire, bandwidth=wire.bandwidth * (mesh - 1), mesh=mesh)
    source = f"links {' and '.join(measured)} measured on {hardware.name}; the rest: {hardware.source}"
    return replace(hardware, inside=measured.get("inside", hardware.inside),
                   between=measured.get("between", hardware.between), ports=found.ports or hardware.ports,
                   source=source)  # fmt: skip


def entry_name(hardware: Hardware) -> str:
    """Return the best name for this device's entry in a hardware file: the known word in its name, or all of it."""
    for word in sorted(_words(hardware.name)):
        with suppress(UserError):
            return load_hardware(word).name
    return hardware.name


def is_same_hardware(one: str, other: str) -> bool:
    """Return True if a device name is the other, or an entry of the hardware file that it belongs to. "NVIDIA H100 80GB
    HBM3" is an "H100", "CPU Xeon, 1 thread" a "CPU"."""
    return one == other or other in _words(one) or one in _words(other)


def _words(name: str) -> set[str]:
    """Return the words of a name, alone and with the next one: "RTX 4090"."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    return {*words, *map(" ".join, itertools.pairwise(words))}


def _this_device(per_node: int, threads: int) -> Hardware:
    if not torch.cuda.is_available():
        listed = load_hardware("CPU")
        name = f"CPU {_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node
        return replace(listed, name=name, memory=memory)
    properties = torch.cuda.get_device_properties(0)
    listed = load_hardware(_UNKNOWN_GPU)
    for word in sorted(_words(properties.name)):
        with suppress(UserError):
            listed = load_hardware(word)
    return replace(listed, name=properties.name, memory=properties.total_memory)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), "")
    return re.sub(r"\((R|TM)\)|\bCPU\b", "", found or platform.processor() or platform.machine()).strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unlike_devices(comm: Comm, costs: StepCosts | None) -> str | None:
    """Return one line that names ranks on other devices than planned, in a plan for groups of unlike devices. None
    means that all are as planned or the plan has no groups. Called by all ranks."""
    cluster = None if costs is None else costs.cluster
    if cluster is None or not cluster.parts:
        return None
    name = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "CPU"
    others: dict[tuple[str, str, str], list[int]] = {}
    for rank, there in all_gather_object(comm, [comm.rank, name]):
        group = cluster.at(rank)
        if not is_same_hardware(there, group.device):
            others.setdefault((group.name, group.device, there), []).append(rank)
    if not others:
        return None
    listed = "; ".join(
        f"ranks {ranks_text(ranks)} as {group} ({device}), and they are {there}"
        for (group, device, there), ranks in others.items()
    )
    return (
        f"the plan has {listed}: samples are shared by its seconds until measured ones correct these "
        "(plan.correct_costs)"
    )
