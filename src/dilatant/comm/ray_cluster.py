"""Ray cluster: connect to an existing cluster, or start one on this machine for one run's data workers.

Ray sends pickled code between its processes, so only clusters that require a token are used. Ray is an optional
dependency and is imported inside functions.
"""

from __future__ import annotations

import logging
import re
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.environment import has_ray_token, ray_address, show_ray_token
from dilatant.config.errors import UserError, one_line

INSTALL = 'pip install "dilatant[ray]"'
LOCAL = "local"
REACH_SECONDS = 5.0


def cluster_address(configured: str | None) -> str:
    """Return the address of the run's cluster: HOST:PORT, or `LOCAL`."""
    return configured or ray_address() or LOCAL


def check_cluster(address: str, key: str = "data.preprocess") -> None:
    """Raise UserError if Ray, which `key` asks for, is not installed, no token is set, or nothing listens at `address`.
    Starts nothing."""
    if find_spec("ray") is None:
        raise UserError(f"{key}: 'ray' needs Ray; {INSTALL}")
    if address == LOCAL:
        return
    if not has_ray_token():
        raise UserError(
            f"data.ray_address: {address} is used only with token authentication: start Ray with RAY_AUTH_MODE=token "
            "on every machine, and set that here with RAY_AUTH_TOKEN or ~/.ray/auth_token (`ray get-auth-token`)"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"data.ray_address: no Ray cluster answers at {address}: {reason}; give HOST:PORT of `ray start --head`, "
            "or 'local'"
        ) from None


class Connection:
    """Connection of this process to a cluster as a Ray driver, until `close`. One at a time per process.

    address: HOST:PORT, or `LOCAL` for a new cluster on this machine's loopback with `cpus` processors and `store_bytes`
    of shared memory, which ends with this object or its process; address and token are then those for the run's other
    ranks. shows_logs: print what actors print. Raises UserError if the connection fails.
    """

    def __init__(
        self, address: str, token: str = "", cpus: int = 1, store_bytes: int = 1 << 30, shows_logs: bool = False
    ) -> None:
        self._folder: TemporaryFolder | None = None
        options: dict[str, Any] = {"address": address}
        if address == LOCAL:
            token = secrets.token_hex(32)
            self._folder = TemporaryFolder("ray-", longest=24)
            options |= {
                "num_cpus": cpus,
                "num_gpus": 0,
                "object_store_memory": max(store_bytes, 80 << 20),
                "include_dashboard": False,
                "_temp_dir": self._folder.path,
                "_node_ip_address": "127.0.0.1",
            }
        if token:
            show_ray_token(token)
        import ray

        try:
            with _own_signals():
                ray.init(log_to_driver=shows_logs, logging_level=logging.ERROR, **options)
        except Exception as error:
            self.close()
            raise UserError(f"data.ray_address: no Ray cluster at {address}: {one_line(error)}") from None
        self.address, self.token = ray.get_runtime_context().gcs_address, token

    @property
    def cpus(self) -> int:
        """The cluster's processors, without those that are reserved, as for the nodes of a run."""
        import ray

        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        reserved = sum(bundle.get("CPU", 0) for group in groups for bundle in group["bundles"].values())
        return int(ray.cluster_resources().get("CPU", 1) - reserved)

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends. Idempotent."""
        import ray

        with suppress(Exception):
            ray.shutdown()
        if self._folder is not None:
            self._folder.close()


def cause_of(error: BaseException) -> str:
    """Return the line of a remote error that names the exception raised there, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return raised[-1] if raised else lines[0]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore signal handlers after Ray replaces SIGTERM's, with which a run saves and stops."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with suppress(ValueError):  # outside the main thread, where Ray changes no handler either
                signal.signal(number, handler)
