"""Environment variables: all that Dilatant reads or sets are in this file. Imports no torch.

Variables of torchrun, Slurm and Kubernetes give this process's rank and machine; the others are small switches.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from dilatant.config.errors import UserError, as_user_error


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """This process's rank and address under an outer launcher.

    hosts_store: rank 0 listens at host and port itself; otherwise torchrun's agent does. attempt: torchrun's restart
    count. one_machine: all ranks are on one machine.
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
    """Return `text` with `~`, `$NAME` and `${NAME}` replaced; a `$` in the name of an existing file stays.

    base: the folder from which a relative path starts. Raises UserError for a variable that is not set.
    """
    if "\0" in text:
        raise UserError(f"{text!r} is no path: it has a character of code 0")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            raise UserError(f"path {text!r}: environment variable {name} is not set; set it, or write the path out")
        return os.environ[name]

    try:
        if "$" in text and not os.path.lexists(base / text):
            text = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
            if re.search(r"\$[{(]", text):
                raise UserError(f"path {text!r}: of what shells replace, only $NAME and ${{NAME}} are; write it out")
        return Path(text).expanduser()
    except (RuntimeError, OSError) as error:
        raise UserError(f"path {text!r} cannot be used: {error}") from None


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Inside this context, newly started Python processes import nothing from their working folder, so that a user's
    random.py there does not shadow the library's."""
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
    """Hide all GPUs from this process (if it has not used them yet) and from its children."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def place_from(environment: Mapping[str, str] = os.environ) -> LaunchPlace | None:
    """Read this process's place from the variables of torchrun (or any launcher that sets the same), mpirun, Slurm or
    a Kubernetes indexed Job. Returns None without such variables, or if they describe a single process. Raises
    UserError if they are incomplete or contradictory.

    mpirun's variables come before Slurm's: inside a job mpirun starts helpers with srun, whose variables they inherit.
    """
    get = environment.get
    if "RANK" in environment and "WORLD_SIZE" in environment:
        ranks = get("RANK"), get("WORLD_SIZE"), get("LOCAL_RANK", "0"), get("LOCAL_WORLD_SIZE", "1")
        return _place(environment, "torchrun", ranks)
    for names in _OF_MPIRUN:
        rank, size, local_rank, local_size = map(get, names)
        if rank is not None and size is not None and local_rank is not None:
            return _place(
                environment, "mpirun", (rank, size, local_rank, local_size or "1"),
                "127.0.0.1" if local_size == size else None,
                # Two mpirun jobs on one node must not use one port; all ranks of a job have this text.
                str(20000 + crc32(_shared_word(environment).encode()) % 20000),
            )  # fmt: skip
    # In a shell of salloc, which is a step of one task, SLURM_NTASKS counts the tasks of the whole job.
    tasks = get("SLURM_STEP_NUM_TASKS") or get("SLURM_NTASKS")
    if "SLURM_PROCID" in environment and tasks and "SLURM_STEP_ID" in environment:
        per_node = get("SLURM_STEP_TASKS_PER_NODE") or get("SLURM_NTASKS_PER_NODE") or "1"
        local_size = tasks_of_node(per_node, get("SLURM_NODEID", "0"))
        return _place(
            environment, "Slurm", (get("SLURM_PROCID"), tasks, get("SLURM_LOCALID", "0"), local_size),
            first_host(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST", "")),
            # Two jobs on one node must not use the same port.
            str(20000 + int(get("SLURM_JOB_ID", "0")) % 20000),
            get("SLURM_STEP_NUM_NODES") == "1",
        )  # fmt: skip
    if "JOB_COMPLETION_INDEX" in environment:
        ranks = get("JOB_COMPLETION_INDEX"), get("WORLD_SIZE"), "0", "1"
        return _place(environment, "Kubernetes", ranks)
    alone = [name for name in ("PMIX_RANK", "PMI_RANK") if name in environment]
    if alone and "SLURM_PROCID" not in environment and get("PMI_SIZE") != "1":
        raise UserError(
            f"an MPI launcher started this process ({alone[0]} is set), but does not say how many there are on which "
            "machine; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
        )
    return None


_OF_MPIRUN = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of Open MPI, of MVAPICH, and of MPICH, Intel MPI and other launchers based on Hydra."""


def _shared_word(environment: Mapping[str, str]) -> str:
    """Return a text that all processes of one mpirun share, and no others."""
    named = (environment.get(name) for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT"))
    return next((word for word in named if word), "")


def first_host(nodes: str) -> str | None:
    """Return the first host of a Slurm node list: "gpu[03-05,9],cpu1" → "gpu03", "rack[1-2]node[1-4].local" →
    "rack1node1.local"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", first[0]).strip() if first else None


def tasks_of_node(counts: str, node: str) -> str:
    """Return a node's number of tasks from Slurm's list: "2(x3),1" means three nodes with two tasks and one with one.

    node: its index in the list. A text that is no such list is returned unchanged.
    """
    written = [re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part) for part in counts.split(",")]
    each = [count[1] for count in written if count for _ in range(min(int(count[2] or 1), 1 << 20))]
    if not all(written) or not node.isdigit():
        return counts
    return each[min(int(node), len(each) - 1)] if each else counts


def _place(
    environment: Mapping[str, str],
    launcher: str,
    ranks: tuple[str | None, ...],
    host: str | None = None,
    port: str = "29500",
    one_machine: bool = False,
) -> LaunchPlace | None:
    """Return the place for (rank, size, local rank, local size). host and port: if MASTER_ADDR or MASTER_PORT is not
    set."""
    rank, size, *local = ranks
    host = environment.get("MASTER_ADDR") or host
    texts = (rank, size or "1", *local, environment.get("MASTER_PORT") or port)
    with as_user_error(f"the variables of {launcher} are not numbers", ValueError):
        number, count, local_rank, num_local, port_number = (int(str(each)) for each in texts)
    ranges = [("rank", number, count)] if size else []
    if num_local != 1:  # some launchers only set the local rank, not the number of local ranks
        ranges.append(("local rank", local_rank, num_local))
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
    return LaunchPlace(
        launcher=launcher,
        rank=number,
        size=count,
        local_rank=local_rank,
        local_size=num_local,
        host=host,
        port=port_number,
        # torchrun's agent hosts the store itself.
        hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        one_machine=one_machine or num_local >= count,
    )


def token_variables() -> tuple[str | None, str | None]:
    """Return the secret that ranks of several machines share, and the file that holds it; None if not set."""
    return os.environ.get("DILATANT_TOKEN"), os.environ.get("DILATANT_TOKEN_FILE")


def config_home() -> Path:
    """Return the folder for the user's settings of all programs."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def state_folder() -> Path:
    """Return the folder for records of the user's decisions, which are no settings and cannot be recomputed."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dilatant"


def cache_home() -> Path:
    """Return the folder for the caches of all programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder() -> Path:
    """Return Dilatant's cache folder: `DILATANT_CACHE`, or a subfolder of `cache_home`."""
    named = os.environ.get("DILATANT_CACHE")
    return Path(named) if named else cache_home() / "dilatant"


def gloo_interfaces() -> str | None:
    """Return the network interfaces that the user selected for Gloo."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def prepare_torch() -> None:
    """Set variables of torch and CUDA that the user has not set, before they are read. Each directed edge has its own
    stream, and a waiting receive must not block a send in the same hardware queue. cuBLAS repeats its sums only with
    fixed workspaces (these are torch's on Hopper). Segments that grow are not fragmented by rows of unlike length.
    Compiled code is loaded from the user's own cache, while torch's default folder in /tmp can be made by anybody."""
    default = os.path.join(tempfile.gettempdir(), "torchinductor_")  # set by an import of torch, to be read later
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default).startswith(default):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "inductor")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def prepare_nccl(one_machine: bool) -> None:
    """Set NCCL's variables before the first communicator: disable its error handling, use loopback on one machine.

    NCCL's own error handling and heartbeat monitor kill the process; `Comm` aborts, reports why and may continue.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def chooses_threads() -> bool:
    """Return True if the user set the number of compute threads of a process."""
    return "OMP_NUM_THREADS" in os.environ


def compute_in_one_thread() -> None:
    """Compute in one thread unless the user set a number; call before numerical libraries are loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def interprets_triton() -> bool:
    """Return True if Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def hub_is_offline() -> bool:
    """Return True if the user forbids Hugging Face libraries to use the network."""
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def ray_address() -> str | None:
    """Return HOST:PORT of the Ray cluster that programs on this machine use by default."""
    return os.environ.get("RAY_ADDRESS") or None


def use_ray_cluster(address: str) -> None:
    """Make this process's children use this Ray cluster by default."""
    os.environ["RAY_ADDRESS"] = address


def has_ray_token() -> bool:
    """Return True if Ray requires tokens for authentication and has one to present."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return False
    file = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or (
        Path(file).is_file() if file else (Path.home() / ".ray" / "auth_token").is_file()
    )


def show_ray_token(token: str) -> None:
    """Make Ray, in this process and its children, require and present this token."""
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
