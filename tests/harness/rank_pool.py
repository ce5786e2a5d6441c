"""Ranks for tests: processes that stay up and run functions with a gloo group among them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from harness.fork_server import start_fork_server

SIZES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Among:
    """The ranks of torch's process group, as a row is shared among them."""

    group: dist.ProcessGroup

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.group.size()))

    @property
    def index(self) -> int:
        return self.group.rank()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str = "") -> Any:
        return dist.all_gather_into_tensor(output, input, group=self.group, async_op=True)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, what: str = "") -> Any:
        return dist.reduce_scatter_tensor(output, input, group=self.group, async_op=True)


def _serve(rank: int, ranks: int, store_path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, ranks), rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES if size <= ranks}
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, size, arguments = task
        try:
            pipe.send((True, function(Among(groups[size]), *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """`ranks` processes from a fork server that has imported torch once."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        pairs = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(ranks, *arguments)` on the first `size` ranks at once; their results in rank order."""
        for pipe in self._pipes[:size]:
            pipe.send((function, size, arguments))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for rank, (fine, result) in enumerate(answers):
            assert fine, f"rank {rank} failed:\n{result}"
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=30)
        self._folder.cleanup()
