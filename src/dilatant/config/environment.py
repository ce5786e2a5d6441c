"""Where an outer launcher put this process: the variables of torchrun, Slurm and Kubernetes. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dilatant.config.errors import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """Where an outer launcher put this process. `hosts_store`: rank 0 must open the store itself."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    hosts_store: bool
    attempt: str = "0"


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Where the variables of torchrun (or anything that sets the same), Slurm or a Kubernetes indexed Job put this
    process; None when there are none, or when they describe a single process. Raises UserError when they are
    incomplete."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _place(
            environment,
            "torchrun",
            rank=environment["RANK"],
            size=environment["WORLD_SIZE"],
            local_rank=environment.get("LOCAL_RANK", "0"),
            local_size=environment.get("LOCAL_WORLD_SIZE", "1"),
            host=environment.get("MASTER_ADDR"),
        )
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and "SLURM_STEP_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        return _place(
            environment,
            "Slurm",
            rank=environment["SLURM_PROCID"],
            size=environment["SLURM_NTASKS"],
            local_rank=environment.get("SLURM_LOCALID", "0"),
            local_size=environment.get("SLURM_NTASKS_PER_NODE", "1"),
            host=environment.get("MASTER_ADDR") or first_host(nodes),
            # Jobs of one node must not meet at one port.
            port=environment.get("MASTER_PORT") or str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000),
        )  # fmt: skip
    if "JOB_COMPLETION_INDEX" in environment:
        return _place(
            environment,
            "Kubernetes",
            rank=environment["JOB_COMPLETION_INDEX"],
            size=environment.get("WORLD_SIZE"),
            local_rank="0",
            local_size="1",
            host=environment.get("MASTER_ADDR"),
        )
    return None


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm node list: "gpu[03-05,9],cpu1" → "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else None


def _place(
    environment: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str | None,
    local_rank: str,
    local_size: str,
    host: str | None,
    port: str | None = None,
) -> Place | None:
    port = port or environment.get("MASTER_PORT", "29500")
    missing = [name for name, value in (("WORLD_SIZE", size), ("MASTER_ADDR", host)) if not value]
    if size == "1":
        return None
    if missing or size is None or host is None:
        raise UserError(
            f"this process was started by {launcher}, but {' and '.join(missing)} is not set; MASTER_ADDR is the host "
            "of rank 0 and WORLD_SIZE the number of processes"
        )
    try:
        return Place(
            launcher=launcher,
            rank=int(rank),
            size=int(size),
            local_rank=int(local_rank),
            local_size=int(re.match(r"\d+", local_size)[0]),  # type: ignore[index]  # Slurm writes "4(x2)"
            host=host,
            port=int(port),
            # torchrun's agent keeps the store itself.
            hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"the variables of {launcher} are not numbers: {error}") from None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where files are kept that can be made again: `DILATANT_CACHE`, or a folder in the user's cache."""
    named = environment.get("DILATANT_CACHE")
    return (
        Path(named)
        if named
        else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dilatant"
    )
