"""Which machine, when: what every stored benchmark result begins with."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    """Date, processor, usable cores and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": cores,
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "torch")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
