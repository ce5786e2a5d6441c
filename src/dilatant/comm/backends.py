"""NCCL and Gloo communicators, each of one group: opened, used and closed directly, without a default process group.

All uses of torch.distributed's private names are in this file.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ErrorType, ReduceScatterOptions

from dilatant.comm.store.store import Store
from dilatant.config.environment import gloo_interfaces, prepare_nccl

MAX_TAG = 1 << 20
"""Upper bound (exclusive) of the tags of transfers."""
ABORT_SECONDS = 5.0
EDGE_CTAS = 4
"""Maximum CTAs of a transfer on an edge, since a waiting receive occupies GPU multiprocessors."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One communicator. store: of its rendezvous, must live as long as it. rank: this rank's index in the group."""

    handle: Any
    store: Store
    rank: int
    size: int
    is_nccl: bool

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return self.handle.send([tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self.handle.recv([tensor], source, tag)

    def all_reduce(self, tensor: Tensor, operation: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        return self.handle.allreduce([tensor], options)

    def all_gather(self, output: Tensor, input: Tensor) -> Any:
        return self.handle._allgather_base(output, input, AllgatherOptions())

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        """Reduce and scatter; only for NCCL, since Gloo lacks it in some versions and reduces everything in others."""
        return self.handle._reduce_scatter_base(output, input, ReduceScatterOptions())

    def all_to_all(self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int]) -> Any:
        return self.handle.alltoall_base(output, input, output_counts, input_counts, AllToAllOptions())

    def error(self) -> str:
        """Return the error that NCCL found in an operation, which then counts as completed; empty without one."""
        error = self.handle.get_error() if self.is_nccl else ErrorType.SUCCESS
        return "" if error == ErrorType.SUCCESS else f"NCCL reports {error.name}"

    def shut_down(self) -> None:
        """Shut down an idle communicator. Never raises."""
        if self.is_nccl:
            with contextlib.suppress(Exception):
                self.handle.shutdown()


def gloo_device(store: Store) -> Any:
    """Return Gloo's network device: loopback on one machine, else the address by which this machine reaches the store.

    None selects Gloo's default: if the user named interfaces, or if that address is loopback on several machines.
    """
    if store.on_one_machine:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if gloo_interfaces() or store.local_address.startswith(("127.", "::1")):
        return None
    return dist.ProcessGroupGloo.create_device(hostname=store.local_address.removeprefix("::ffff:"))


def open_gloo(store: Store, rank: int, size: int, timeout: timedelta, device: Any) -> Backend:
    """Open a communicator for CPU tensors. device: from `gloo_device`. Blocks until all members open it."""
    if device is None:
        return Backend(dist.ProcessGroupGloo(store, rank, size, timeout), store, rank, size, is_nccl=False)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timeout
    options._devices = [device]
    options._threads = 2
    return Backend(dist.ProcessGroupGloo(store, rank, size, options), store, rank, size, is_nccl=False)


def open_nccl(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, for_edge: bool) -> Backend:
    """Open a communicator for GPU tensors in the current CUDA context. Blocks until all members open it.

    for_edge: its kernels run on a high-priority stream and occupy few multiprocessors.
    """
    prepare_nccl(store.on_one_machine)
    torch.cuda.set_device(device)  # of the current thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # `Comm`'s deadlines, which count from the last progress, come first
    if for_edge:
        options.is_high_priority_stream = True
        options.config.max_ctas = EDGE_CTAS
    handle = dist.ProcessGroupNCCL(store, rank, size, options)
    handle.eager_connect_single_device(device)
    return Backend(handle, store, rank, size, is_nccl=True)


def abort_all(backends: Sequence[Backend]) -> None:
    """Abort: operations blocked in these communicators raise (on a GPU, return). Never raises; takes seconds."""
    # Each in its own thread: an abort waits for its kernels, which may wait for those of another communicator.
    threads = [
        threading.Thread(target=_abort_nccl if each.is_nccl else _abort_gloo, args=(each,), daemon=True)
        for each in backends
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _abort_nccl(backend: Backend) -> None:
    with contextlib.suppress(Exception):
        backend.handle.abort()


def _abort_gloo(backend: Backend) -> None:
    """Abort a Gloo communicator. Gloo's own abort does nothing (pytorch #130345), but an operation that times out
    closes all connections of its group: so wait one millisecond for a message that no rank sends. A receive from a dead
    peer fails at once and closes nothing; then try the next peer."""
    for distance in range(1, backend.size):
        peer = (backend.rank + distance) % backend.size
        try:
            backend.receive(torch.zeros(1), peer, MAX_TAG).wait(timedelta(milliseconds=1))
        except Exception as error:
            if "imed out" in str(error):
                return
