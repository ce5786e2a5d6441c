"""Torch's communication backends of one group each: opened, used and ended directly, without a default group.

All that touches what torch.distributed keeps private is here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from dilatant.comm.store.store import Store
from dilatant.config.environment import gloo_interfaces, prepare_nccl

MAX_TAG = 1 << 20
"""Tags of transfers are below it."""
ABORT_SECONDS = 5.0
_EDGE_CTAS = 4
"""What a transfer of an edge may occupy of a GPU: a receive that waits holds its multiprocessors."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One communicator. store: what it made its rendezvous in, which has to live as long. rank: in the group."""

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
        """NCCL's only: Gloo's exists in some versions, and then reduces everything everywhere."""
        return self.handle._reduce_scatter_base(output, input, ReduceScatterOptions())

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int]
    ) -> Any:
        return self.handle.alltoall_base(output, input, output_counts, input_counts, AllToAllOptions())

    def shut_down(self) -> None:
        """Give an idle communicator back. Never raises."""
        if self.is_nccl:
            with contextlib.suppress(Exception):
                self.handle.shutdown()


def gloo_device(store: Store) -> Any:
    """The network that Gloo listens on: loopback on one machine, else that by which this machine reaches the store's.

    None: Gloo's own choice, where the user named interfaces, or where a name resolves to loopback on several machines.
    """
    if store.on_one_machine:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if gloo_interfaces() or store.local_address.startswith(("127.", "::1")):
        return None
    return dist.ProcessGroupGloo.create_device(hostname=store.local_address.removeprefix("::ffff:"))


def open_gloo(store: Store, rank: int, size: int, timeout: timedelta, device: Any) -> Backend:
    """A communicator for tensors on the CPU. device: from `gloo_device`. Blocks until all members open it."""
    if device is None:
        return Backend(dist.ProcessGroupGloo(store, rank, size, timeout), store, rank, size, is_nccl=False)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timeout
    options._devices = [device]
    options._threads = 2
    return Backend(dist.ProcessGroupGloo(store, rank, size, options), store, rank, size, is_nccl=False)


def open_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, for_edge: bool
) -> Backend:
    """A communicator for tensors on a GPU. Blocks until all members open it, in the current process's CUDA context.

    for_edge: its kernels go before others and occupy little of the GPU.
    """
    prepare_nccl(store.on_one_machine)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if for_edge:
        options.is_high_priority_stream = True
        options.config.max_ctas = _EDGE_CTAS
    handle = dist.ProcessGroupNCCL(store, rank, size, options)
    handle.eager_connect_single_device(device)
    return Backend(handle, store, rank, size, is_nccl=True)


def abort_all(backends: Sequence[Backend]) -> None:
    """Make everything that is blocked in these raise, or return on a GPU. Never raises, and returns in seconds."""
    threads = [
        threading.Thread(target=_abort_nccl, args=([each for each in backends if each.is_nccl],), daemon=True)
    ]
    threads += [
        threading.Thread(target=_abort_gloo, args=(each,), daemon=True)
        for each in backends
        if not each.is_nccl
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


def _abort_nccl(backends: Sequence[Backend]) -> None:
    """In one NCCL group: the abort of one communicator can wait for that of another (pytorch #119797)."""
    if not backends:
        return
    first = backends[0].handle
    with contextlib.suppress(Exception):
        first._group_start()
    for backend in backends:
        with contextlib.suppress(Exception):
            backend.handle.abort()
    with contextlib.suppress(Exception):
        first._group_end()


def _abort_gloo(backend: Backend) -> None:
    """Gloo's own abort does nothing (pytorch #130345). But an operation that times out closes all connections of its
    group, so a receive that nobody answers, with a timeout of a millisecond, is an abort. One from a rank that is gone
    fails at once and closes nothing: then another one must serve."""
    for distance in range(1, backend.size):
        peer = (backend.rank + distance) % backend.size
        try:
            backend.receive(torch.zeros(1), peer, MAX_TAG).wait(timedelta(milliseconds=1))
        except Exception as error:
            if "imed out" in str(error):
                return
