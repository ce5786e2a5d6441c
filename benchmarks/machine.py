"""Where and when a benchmark ran: what every result keeps."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_LIBRARIES = ("numpy", "numba", "torch", "transformers", "triton")


def machine() -> dict[str, Any]:
    """Date (UTC), processor, cores, Python and library versions; and the GPU, where torch finds one."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }
    for library in _LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            continue
    return {**facts, **_gpu()}


def _processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu() -> dict[str, str]:
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
