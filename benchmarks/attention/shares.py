"""Context parallelism on one device: every rank's true share run in turn, under every placement; and what it tells of
the costs of blocks.

The time of a step is that of the slowest rank. Communication is not measured but modelled: bytes over bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.attention.clock import median_seconds
from benchmarks.attention.kernels import Shape, make_problem
from dilatant.attention.context_parallel import ContextParallelRow
from dilatant.attention.kernels.backends import choose_kernel, installed, request_of
from dilatant.attention.kernels.packed_attention import load_kernel
from dilatant.attention.kernels.scores import Kernel, Scores
from dilatant.attention.masks.blocks import block_workloads
from dilatant.attention.masks.placement import place_blocks

POLICIES = ("lpt", "zigzag", "contiguous")
BANDWIDTHS = {"inside a node, 350 GB/s": 350e9, "between nodes, 45 GB/s": 45e9}


@dataclass(frozen=True)
class Rank:
    """Stands for a group of ranks: a share is made by its place among them alone."""

    index: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))


def measure_shares(
    kinds: Sequence[str],
    tokens: int,
    degrees: Sequence[int],
    shape: Shape,
    device: torch.device,
    repeats: int,
    block: int = 128,
) -> tuple[list[dict[str, Any]], list[tuple[int, int, int, float]]]:
    """For every kind, degree and policy: the slowest and the mean rank, forward and backward together.

    Also every share as an observation (full blocks, partial blocks, rows of blocks, seconds) to fit costs to.
    """
    results, observations = [], []
    for kind in kinds:
        problem = make_problem(kind, tokens, shape, device)
        work = block_workloads(problem.mask, block)
        for ranks in degrees:
            slowest, of_policies = {}, []
            for policy in POLICIES:
                placement = place_blocks(work, ranks, policy)
                seconds = []
                for number in range(ranks):
                    share = ContextParallelRow(problem.mask, placement, Rank(number, ranks), block=block)  # type: ignore[arg-type]
                    taken = _share_seconds(share, shape, device, repeats)
                    table = share.plan.table(block, block)
                    observations.append(
                        (int(table.full_blocks.sum()), int(table.partial_blocks.sum()), table.num_rows, taken)
                    )
                    seconds.append(taken)
                slowest[policy] = max(seconds)
                of_policies.append(
                    {
                        "policy": policy,
                        "slowest_ms": max(seconds) * 1e3,
                        "mean_ms": float(np.mean(seconds)) * 1e3,
                        "max_over_mean": max(seconds) / float(np.mean(seconds)),
                        "counted_max_over_mean": placement.imbalance,
                        "blocks_of_fullest_rank": int(placement.counts.max()),
                    }
                )
            for entry in of_policies:
                entry["lpt_is_faster"] = slowest[str(entry["policy"])] / slowest["lpt"]
            results.append(
                {
                    "mask": kind,
                    "tokens": tokens,
                    "ranks": ranks,
                    "policies": of_policies,
                    "modelled_gather_ms": _gather_milliseconds(tokens, ranks, shape),
                }
            )
    return results, observations


def fit_block_cost(observations: Sequence[tuple[int, int, int, float]]) -> dict[str, float]:
    """Seconds of a full block, a partial block and a row of blocks, by non-negative least squares on relative errors,
    and the costs they mean in full blocks."""
    table: NDArray = np.array(observations, dtype=float)
    counts, seconds = table[:, :3], table[:, 3]
    held = list(range(3))
    fitted = np.zeros(3)
    while held:  # leave out what comes out negative, the most negative first
        found, *_ = np.linalg.lstsq(counts[:, held] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if (found >= 0).all():
            fitted[held] = found
            break
        held.pop(int(np.argmin(found)))
    error = np.abs(counts @ fitted / seconds - 1)
    full = fitted[0] or float("nan")
    return {
        "full_block_seconds": float(fitted[0]),
        "partial_block_seconds": float(fitted[1]),
        "row_seconds": float(fitted[2]),
        "partial_in_full_blocks": float(fitted[1] / full),
        "row_in_full_blocks": float(fitted[2] / full),
        "observations": len(seconds),
        "median_relative_error": float(np.median(error)),
        "worst_relative_error": float(error.max()),
    }


def measure_splitting(
    kinds: Sequence[str], tokens: int, shape: Shape, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """What cutting long rows gains: one rank of eight with few heads at a time, and the whole row with all heads (where
    nothing should change). Triton kernels alone cut rows."""
    from dilatant.attention.kernels import triton_kernel
    from dilatant.attention.kernels.triton_tuning import tuning_for

    tuning = tuning_for(shape.head_dim, shape.dtype.itemsize, torch.cuda.get_device_capability(device))
    kernels = {
        "cut": triton_kernel.kernel(tuning),
        "whole": triton_kernel.kernel(replace(tuning, smallest_piece_tokens=1 << 40)),
    }
    few = Shape(4, 1, shape.head_dim, shape.dtype)
    results = []
    for kind in kinds:
        mask = make_problem(kind, tokens, few, device).mask
        placement = place_blocks(block_workloads(mask), 8)
        for where, ranks, heads in (("a rank of 8, 4 heads", 8, few), ("the whole row, all heads", 1, shape)):
            placed = placement if ranks == 8 else place_blocks(block_workloads(mask), 1)
            seconds = {}
            for name, kernel in kernels.items():
                share = ContextParallelRow(mask, placed, Rank(0, ranks))  # type: ignore[arg-type]
                seconds[name] = _share_seconds(share, heads, device, repeats, kernel)
            results.append(
                {
                    "mask": kind,
                    "where": where,
                    **{f"{name}_ms": taken * 1e3 for name, taken in seconds.items()},
                    "speedup": seconds["whole"] / seconds["cut"],
                }
            )
    return results


def _share_seconds(
    share: ContextParallelRow, shape: Shape, device: torch.device, repeats: int, kernel: Kernel | None = None
) -> float:
    """Forward and backward of a rank's queries against all keys, as if they had been gathered."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, device=device, generator=generator).to(shape.dtype)

    own, everybody = share.plan.mask.num_tokens, share.plan.keys.num_tokens
    query, grad_output = draw(own, shape.query_heads), draw(own, shape.query_heads)
    key, value = draw(everybody, shape.kv_heads), draw(everybody, shape.kv_heads)
    if kernel is None:
        request = request_of(query, key, value, share.plan)
        kernel = load_kernel(choose_kernel(request, installed(device)))
    scores = Scores(shape.head_dim**-0.5)

    def call() -> None:
        output, logsumexp = kernel.forward(query, key, value, None, share.plan, scores)
        kernel.backward(grad_output, query, key, value, None, output, logsumexp, share.plan, scores)

    return median_seconds({"share": call}, device, repeats)["share"]


def _gather_milliseconds(tokens: int, ranks: int, shape: Shape) -> dict[str, float]:
    """A model, not a measurement: keys and values of the other ranks, received once forward and once backward, and the
    float32 gradients of all of them sent."""
    others = (ranks - 1) / ranks * tokens * shape.kv_heads * shape.head_dim * 2
    received = 2 * others * shape.dtype.itemsize + others * 4
    return {name: received / bandwidth * 1e3 for name, bandwidth in BANDWIDTHS.items()}
