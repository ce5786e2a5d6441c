"""The environment of this process: all variables that Dilatant reads or sets, and no other file does. Imports no torch.

Those of torchrun, Slurm and Kubernetes say where they put this process; the rest are small switches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dilatant.config.errors import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """Where an outer launcher put this process.

    hosts_store: rank 0 listens at host and port itself; otherwise torchrun's agent does. attempt: of torchrun.
    one_machine: all ranks are on it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    hosts_store: bool
    attempt: str = "0"
    one_machine: bool = False


def expand_path(text: str, base: Path) -> Path:
    """Return `text` with `~`, `$NAME` and `${NAME}` replaced; what is there under its own name stays as it is written.

    base: the folder that a relative path starts from. Raises UserError for a variable that is not set.
    """
    if "\0" in text:
        raise UserError(f"{text!r} is no path: it has a character of code 0")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            raise UserError(
                f"path {text!r}: environment variable {name} is not set; set it, or write the path out"
            )
        return os.environ[name]

    try:
        if "$" in text and not os.path.lexists(base / text):
            text = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
        return Path(text).expanduser()
    except (RuntimeError, OSError) as error:
        raise UserError(f"path {text!r} cannot be used: {error}") from None


def hide_gpus() -> None:
    """Let this process, if it has not begun to use them, and those that it starts see no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def place_from(environment: Mapping[str, str] = os.environ) -> Place | None:
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
            local_size=environment.get("SLURM_NTASKS_PER_NODE")
            or environment.get("SLURM_STEP_TASKS_PER_NODE", "1"),
            host=environment.get("MASTER_ADDR") or first_host(nodes),
            # Jobs of one node must not meet at one port.
            port=environment.get("MASTER_PORT") or str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000),
            one_machine=environment.get("SLURM_STEP_NUM_NODES") == "1",
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
    one_machine: bool = False,
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
        num_local = int(local_size.partition("(")[0])  # Slurm writes "4(x2)"
        return Place(
            launcher=launcher,
            rank=int(rank),
            size=int(size),
            local_rank=int(local_rank),
            local_size=num_local,
            host=host,
            port=int(port),
            # torchrun's agent keeps the store itself.
            hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            one_machine=one_machine or num_local >= int(size),
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"the variables of {launcher} are not numbers: {error}") from None


def token_variables() -> tuple[str | None, str | None]:
    """The secret that the ranks of several machines share, and the file that holds it, if they are named."""
    return os.environ.get("DILATANT_TOKEN"), os.environ.get("DILATANT_TOKEN_FILE")


def config_home() -> Path:
    """Where programs keep a user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def state_folder() -> Path:
    """Where we note what a user decided, which is no setting and cannot be made again."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dilatant"


def cache_home() -> Path:
    """Where programs keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder() -> Path:
    """Where we keep what can be made again: `DILATANT_CACHE`, or a folder of ours among those of other programs."""
    named = os.environ.get("DILATANT_CACHE")
    return Path(named) if named else cache_home() / "dilatant"


def gloo_interfaces() -> str | None:
    """The network interfaces that Gloo was told to use."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def prepare_cuda() -> None:
    """Before CUDA starts: every directed edge has a stream of its own, and a receive that waits must not hold up a send
    in the same hardware queue."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def prepare_nccl(one_machine: bool) -> None:
    """Before the first communicator: errors and deadlines are ours, and one machine listens on loopback only.

    NCCL's own error handling and heartbeat monitor kill the process; ours aborts, explains and may go on.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def chooses_threads() -> bool:
    """Whether the user set how many threads a process computes in."""
    return "OMP_NUM_THREADS" in os.environ


def compute_in_one_thread() -> None:
    """Unless the user set another number; before numerical libraries start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def interprets_triton() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def hub_is_offline() -> bool:
    """Whether the user keeps Hugging Face libraries from the network."""
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def ray_address() -> str | None:
    """HOST:PORT of the Ray cluster that programs on this machine use."""
    return os.environ.get("RAY_ADDRESS") or None


def has_ray_token() -> bool:
    """Whether Ray is told to let nobody in without a token, and has one to show itself."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return False
    file = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or (
        Path(file).is_file() if file else (Path.home() / ".ray" / "auth_token").is_file()
    )


def show_ray_token(token: str) -> None:
    """Let Ray, in this process and in those that it starts, let nobody in without this token."""
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
