"""The environment of this process: all variables that Dilatant reads or sets, and no other file does. Imports no torch.

Those of torchrun, Slurm and Kubernetes say where they put this process; the rest are small switches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

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


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Inside, a Python that is started imports nothing from the folder in which it starts: a random.py of the user's
    there is not the library's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def hide_gpus() -> None:
    """Let this process, if it has not begun to use them, and those that it starts see no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def place_from(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where the variables of torchrun (or anything that sets the same), mpirun, Slurm or a Kubernetes indexed Job put
    this process; None when there are none, or when they describe a single process. Raises UserError when they are
    incomplete or contradict each other.

    Those of mpirun come before Slurm's: inside a job mpirun starts helpers by srun, whose variables they pass on.
    """
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
    for rank, size, local_rank, local_size in _OF_MPIRUN:
        if rank in environment and size in environment and local_rank in environment:
            is_one_machine = environment.get(local_size) == environment[size]
            return _place(
                environment,
                "mpirun",
                rank=environment[rank],
                size=environment[size],
                local_rank=environment[local_rank],
                local_size=environment.get(local_size, "1"),
                host=environment.get("MASTER_ADDR") or ("127.0.0.1" if is_one_machine else None),
                # Two of them on one node must not meet at one port; their ranks share these words.
                port=environment.get("MASTER_PORT")
                or str(20000 + crc32(_shared_word(environment).encode()) % 20000),
            )
    # SLURM_NTASKS is the job's in a shell of salloc, which is a step of one task.
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")
    if "SLURM_PROCID" in environment and tasks and "SLURM_STEP_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        per_node = (
            environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE") or "1"
        )
        return _place(
            environment,
            "Slurm",
            rank=environment["SLURM_PROCID"],
            size=tasks,
            local_rank=environment.get("SLURM_LOCALID", "0"),
            local_size=tasks_of_node(per_node, environment.get("SLURM_NODEID", "0")),
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
    alone = [name for name in ("PMIX_RANK", "PMI_RANK") if name in environment]
    if alone and "SLURM_PROCID" not in environment and environment.get("PMI_SIZE") != "1":
        raise UserError(
            f"an MPI launcher started this process ({alone[0]} is set), but does not say how many there are on which "
            "machine; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
        )
    return None


_OF_MPIRUN = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI; MPICH, Intel MPI and others that start their processes by Hydra."""


def _shared_word(environment: Mapping[str, str]) -> str:
    """What all processes of one mpirun have, and no other's."""
    named = (environment.get(name) for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT"))
    return next((word for word in named if word), "")


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm node list: "gpu[03-05,9],cpu1" → "gpu03", "rack[1-2]node[1-4].local" →
    "rack1node1.local"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", first[0]).strip() if first else None


def tasks_of_node(counts: str, node: str) -> str:
    """How many tasks a node has, of a list as Slurm writes it: "2(x3),1" are three nodes of two and one of one.

    node: its number among them. Of what is no such list, the text itself.
    """
    written = [re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part) for part in counts.split(",")]
    each = [count[1] for count in written if count for _ in range(min(int(count[2] or 1), 1 << 20))]
    if not all(written) or not node.isdigit():
        return counts
    return each[min(int(node), len(each) - 1)] if each else counts


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
    try:
        numbers = [int(each) for each in (rank, size or "1", local_rank, local_size, port)]
    except ValueError as error:
        raise UserError(f"the variables of {launcher} are not numbers: {error}") from None
    number, count, local, num_local, port_number = numbers
    ranges = [("rank", number, count)] if size else []
    if num_local != 1:  # some launchers only say which one a process is on its machine
        ranges.append(("local rank", local, num_local))
    for name, index, of in ranges:
        if not 0 <= index < of:
            raise UserError(
                f"{launcher}'s variables say {name} {index} of {of} processes; ranks are 0 to {max(0, of - 1)}: "
                "correct the launch script"
            )
    if not 0 < port_number < 1 << 16:
        raise UserError(f"MASTER_PORT {port_number} is no port; give one from 1 to 65535")
    if size and count == 1:
        return None
    missing = [name for name, value in (("WORLD_SIZE", size), ("MASTER_ADDR", host)) if not value]
    if missing or host is None:
        raise UserError(
            f"this process was started by {launcher}, but {' and '.join(missing)} is not set; MASTER_ADDR is the host "
            "of rank 0 and WORLD_SIZE the number of processes"
        )
    return Place(
        launcher=launcher,
        rank=number,
        size=count,
        local_rank=local,
        local_size=num_local,
        host=host,
        port=port_number,
        # torchrun's agent keeps the store itself.
        hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        one_machine=one_machine or num_local >= count,
    )


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
