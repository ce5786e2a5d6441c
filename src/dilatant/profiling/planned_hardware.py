"""Which devices a plan is for: those of the config, or this machine's."""

from __future__ import annotations

import itertools
import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dilatant.config import ClusterConfig, OptimizerConfig, UserError
from dilatant.cost.hardware import Hardware, load_hardware
from dilatant.cost.memory import (
    BF16,
    DEFAULT_ZERO,
    EIGHT_BIT_MOMENTS,
    FP32,
    FP32_AVERAGE,
    FP32_MOMENTS,
    ParameterBytes,
    Zero,
)
from dilatant.plan.cluster import Cluster, cluster_of
from dilatant.profiling.link_probe import MeasuredLinks
from dilatant.runtime.precision import pick_precision

USABLE = 0.93
"""The part of a GPU's memory that training may use: its context, NCCL's buffers and pieces that the allocator cannot
join take the rest. The data sheets' decimal gigabytes, which stand for GPUs that are not here, leave as much."""
_UNKNOWN_GPU = "A40"
"""Whose links an unlisted GPU is taken to have: PCIe 4.0 and one fast port, which most machines have at least."""


@dataclass(frozen=True, slots=True)
class Target:
    """The devices to plan for. Cost files must be of `requested`: the entry that the config names, or this device.

    `is_local` says that this machine has such devices, so layers can be measured; `threads` are then those of one CPU
    process. `dtype` is that of weights and activations, `rules` what a parameter takes.
    """

    hardware: Hardware
    requested: str
    cluster: Cluster
    is_local: bool
    threads: int
    dtype: str
    rules: ParameterBytes


def devices_per_node(config: ClusterConfig) -> int:
    """Those of the config, else this machine's GPUs, else one process for each core, between 2 and 4."""
    return config.gpus_per_node or torch.cuda.device_count() or min(4, max(2, _cores()))


def plan_target(
    config: ClusterConfig,
    precision: str = "auto",
    zero: Zero | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Target:
    """The devices of `cluster:` in the config, and `train.precision` and `train.zero` on them.

    Raises UserError for hardware that the file does not have, and for bf16 on a GPU here without it.
    """
    gpus = torch.cuda.device_count()
    per_node = devices_per_node(config)
    threads = max(1, _cores() // per_node)
    here = _this_device(per_node, threads)
    path = Path(config.hardware_file) if config.hardware_file else None
    if path is not None and not path.is_file():
        raise UserError(f"cluster.hardware_file: {str(path)!r} does not exist")
    listed = load_hardware(config.hardware, path) if config.hardware else here
    is_local = config.hardware is None or is_same_hardware(here.name, listed.name)
    # What was written by hand counts; only the name tells whose costs these are.
    hardware = replace(listed, name=here.name) if is_local else listed
    if config.memory_gib is not None:
        hardware = replace(hardware, memory=config.memory_gib * 2**30)
    if is_local:
        device = torch.device("cuda" if gpus else "cpu")
        dtype = str(pick_precision(precision, device)).removeprefix("torch.")
    else:
        on_gpu = not is_same_hardware("CPU", hardware.name)
        dtype = "bfloat16" if precision == "bf16" or (precision == "auto" and on_gpu) else "float32"
    return Target(
        hardware=hardware,
        requested=config.hardware or here.name,
        cluster=cluster_of(hardware, config.nodes, per_node),
        is_local=is_local,
        threads=threads,
        dtype=dtype,
        rules=replace(
            rules_of(FP32 if dtype == "float32" else BF16, optimizer or OptimizerConfig()),
            zero=zero or DEFAULT_ZERO,
            ranks_per_node=per_node,
        ),
    )


def rules_of(rules: ParameterBytes, optimizer: OptimizerConfig) -> ParameterBytes:
    """What a parameter takes under this optimizer. rules: under AdamW on the device."""
    if optimizer.offload:
        return replace(rules, optimizer=0.0)
    saved = FP32_MOMENTS - EIGHT_BIT_MOMENTS if optimizer.name == "adamw_8bit" else 0.0
    average = 0.0 if optimizer.ema is None else FP32_AVERAGE
    return replace(rules, optimizer=rules.optimizer - saved + average)


def with_links(hardware: Hardware, found: MeasuredLinks) -> Hardware:
    """The hardware with the links that were measured; the others as they are."""
    measured = {
        name: one.link
        for name, one in (("inside", found.inside), ("between", found.between))
        if one is not None
    }
    source = f"links {' and '.join(measured)} measured on {hardware.name}; the rest: {hardware.source}"
    return replace(hardware, inside=measured.get("inside", hardware.inside),
                   between=measured.get("between", hardware.between), ports=found.ports or hardware.ports,
                   source=source)  # fmt: skip


def entry_name(hardware: Hardware) -> str:
    """What an entry of a hardware file for this device is best called: the known word in its name, or all of it."""
    for word in sorted(_words(hardware.name)):
        with suppress(UserError):
            return load_hardware(word).name
    return hardware.name


def is_same_hardware(one: str, other: str) -> bool:
    """Whether a device name is the other, or an entry of the hardware file that it belongs to: "NVIDIA H100 80GB HBM3"
    is an "H100", "CPU Xeon, 1 thread" a "CPU"."""
    return one == other or other in _words(one) or one in _words(other)


def _words(name: str) -> set[str]:
    """The words of a name, alone and with the next one: "RTX 4090"."""
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
    return replace(listed, name=properties.name, memory=USABLE * properties.total_memory)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), "")
    return re.sub(r"\((R|TM)\)|\bCPU\b", "", found or platform.processor() or platform.machine()).strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
