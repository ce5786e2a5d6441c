"""Attention over ranks that share a row's tokens: ours against torch's `context_parallel`, where torch has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from dilatant.attention.context_parallel import ContextParallelRow, context_parallel_attention
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.placement import place_row
from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker

HEADS, SIZE = 8, 64


def compare_context(worker: Worker, tokens: int, steps: int) -> dict[str, Any]:
    """Forward and backward of causal attention over one row of `tokens`, in turn; what rank 0 returns is the result.
    Where torch's raises, its own words are."""
    torch.set_num_threads(1)
    device = worker.device
    on_gpu = device.type == "cuda"
    comm = Comm(worker.store, worker.rank, worker.size, device=device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("theirs", worker.store),
        rank=worker.rank,
        world_size=worker.size,
    )
    mesh = init_device_mesh(device.type, (worker.size,))
    random = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    row = [torch.randn(tokens, HEADS, SIZE, generator=random).to(device, dtype) for _ in range(3)]
    mask = AttentionMask.from_tokens(np.ones(tokens, np.int64), np.arange(tokens))
    placed = place_row(mask, worker.size)
    share = ContextParallelRow(mask, placed.placement, comm.world, block=placed.block)

    def ours() -> Tensor:
        leaves = [share.take(each).requires_grad_() for each in row]
        output: Tensor = context_parallel_attention(*leaves, share)
        output.sum().backward()
        return output.detach()

    def theirs() -> Tensor:
        whole = [each.transpose(0, 1)[None].contiguous() for each in row]
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
            leaves = [each.detach().requires_grad_() for each in whole]
            # By its module: torch puts another function there meanwhile.
            output = functional.scaled_dot_product_attention(*leaves, is_causal=True)
            output.sum().backward()
        return output.detach()

    def norm(output: Tensor) -> float:
        squares = output.double().square().sum()
        comm.world.sum_(squares, "squares").wait()
        return float(squares.sqrt())

    def timed(step: Callable[[], object]) -> float:
        comm.world.barrier()
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        comm.world.barrier()
        return time.perf_counter() - began

    result: dict[str, Any] = {"ranks": worker.size, "tokens": tokens, "device": device.type}
    try:
        try:
            output = theirs()
        except Exception as error:
            result["theirs_raises"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            result["ours_seconds"] = statistics.median(timed(ours) for _ in range(steps))
            return result
        result["norms"] = [norm(ours()), norm(output)]
        pairs = [(timed(ours), timed(theirs)) for _ in range(steps)]
        result["ours_seconds"], result["theirs_seconds"] = map(statistics.median, zip(*pairs))
        result["ratio"] = statistics.median(a / b for a, b in pairs)
        return result
    finally:
        dist.destroy_process_group()
        comm.close()
