"""`dilatant doctor`: describe this machine, and what a run on it would use."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from typing import Any

from dilatant.cli.options import AsJson, say_loading
from dilatant.report.say import open_console, print_facts

_PACKAGES = ("torch", "transformers", "numpy", "numba", "datasets", "triton", "peft", "diffusers", "ray", "wandb")


def doctor(as_json: AsJson = False) -> None:
    """Describe this machine, and the device, precision and attention backends that a run on it would use."""
    say_loading()
    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = open_console()
    for title, entries in facts.items():
        print_facts(console, title, entries)
        console.print()


def examine() -> dict[str, dict[str, Any]]:
    """Return the facts by heading."""
    import torch

    from dilatant.attention.kernels.backends import explain_here
    from dilatant.config.environment import hub_is_offline, place_from
    from dilatant.runtime.precision import pick_device, pick_precision

    device = pick_device()
    precision = pick_precision("auto", device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    place = place_from()
    launcher = "none: one machine" if place is None else f"{place.launcher}: rank {place.rank} of {place.size}"
    return {
        "Machine": {
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "cpu cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": f"{memory / 2**30:.0f} GiB",
            "free disk here": f"{shutil.disk_usage('.').free / 2**30:.0f} GiB",
            **(gpus or {"gpu": "none"}),
        },
        "Packages": {name: _version(name) for name in _PACKAGES},
        "A run here uses": {
            "device": str(device),
            "precision": str(precision).removeprefix("torch."),
            "torch threads": _threads(),
            "launcher": launcher,
            "hub": "offline (HF_HUB_OFFLINE is set)" if hub_is_offline() else "online if reachable",
        },
        "Attention over packed rows": explain_here(device, precision),
    }


def _threads() -> str:
    """Return torch's number of threads and where it comes from."""
    import torch

    from dilatant.config.environment import chooses_threads

    shared = "processes that train on a CPU here divide its cores; OMP_NUM_THREADS sets another number"
    return f"{torch.get_num_threads()} ({'as OMP_NUM_THREADS says' if chooses_threads() else shared})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
