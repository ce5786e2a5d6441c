"""What a machine without a GPU can tell about the GPU kernels: their results under Triton's interpreter, and what the
compiler makes of them for Hopper. And the memory of tables, which is the same everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.attention.rows import KINDS, build, draw_row
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.blockwise import visible_pairs
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout, media_mask
from dilatant.attention.masks.work import work_list

INTERPRETED_TOKENS = 160


def interpreted_errors() -> dict[str, Any]:
    """Largest differences of the interpreted kernels to a dense softmax in float64, by mask; in a process of its own,
    because the interpreter is chosen when the kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        return {"skipped": "Triton is not installed (pip install 'dilatant[gpu]')"}
    program = "import json; from benchmarks.attention.without_gpu import interpret; print(json.dumps(interpret()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout)


def interpret() -> dict[str, Any]:
    """Runs under TRITON_INTERPRET=1."""
    from dilatant.attention.kernels.triton_kernel import kernel
    from dilatant.attention.kernels.triton_tuning import Tile, Tuning

    tile = Tile(32, 32, 4, 1)
    whole = Tuning(tile, tile, tile, block=32, processors=1)
    tunings = {
        "pointers": whole,
        "descriptors": Tuning(tile, tile, tile, block=32, processors=1, tma=True),
        "cut rows": Tuning(tile, tile, tile, block=32, processors=64, smallest_piece_tokens=32),
    }
    errors: dict[str, Any] = {"tokens": INTERPRETED_TOKENS, "dtype": "float32"}
    for kind in KINDS:
        mask = _small_mask(kind)
        errors[kind] = {name: _error(mask, kernel(tuning)) for name, tuning in tunings.items()}
    return errors


def _small_mask(kind: str) -> AttentionMask:
    """The kinds of `rows`, in a row so short that the interpreter runs it in a second."""
    samples: dict[str, list[list[tuple[str, int]]]] = {
        "causal": [[("text", 160)]],
        "document_causal": [[("text", 70)], [("text", 13)], [("text", 77)]],
        "EP": [[("vision", 60), ("audio", 25), ("text", 75)]],
        "EE": [[("text", 20), ("vision", 50), ("text", 30), ("audio", 25), ("text", 35)]],
        "MP": [[("text", 20), ("vision", 40), ("text", 21)], [("vision", 33), ("text", 30)], [("text", 16)]],
    }
    row = RowLayout.of_samples(samples[kind])
    assert row.num_tokens == INTERPRETED_TOKENS
    return media_mask(row, "embedded")


def _error(mask: AttentionMask, kernel: Any) -> float:
    """Over output and the gradients of query, key and value, two query heads on one KV head."""
    generator = torch.Generator().manual_seed(0)
    query, grad_output = (torch.randn(mask.num_tokens, 2, 32, generator=generator) for _ in range(2))
    key, value = (torch.randn(mask.num_tokens, 1, 32, generator=generator) for _ in range(2))
    plan, scores = AttentionPlan(mask), Scores(32**-0.5)
    output, logsumexp = kernel.forward(query, key, value, None, plan, scores)
    gradients = kernel.backward(grad_output, query, key, value, None, output, logsumexp, plan, scores)

    words, positions = torch.tensor(mask.fields), torch.tensor(mask.positions)
    seen = visible_pairs(words[:, None], words, positions[:, None], positions, mask.window)
    q, k, v = (x.double().requires_grad_() for x in (query, key, value))
    score = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * scores.scale
    expected = torch.einsum("hqk,kd->qhd", score.masked_fill(~seen, -torch.inf).softmax(-1), v[:, 0])
    wanted = [expected, *torch.autograd.grad(expected, (q, k, v), grad_output.double())]
    found = [output, gradients.query, gradients.key, gradients.value]
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def compiled_for_hopper(head_dims: Sequence[int]) -> list[dict[str, Any]]:
    """Registers, spills, shared memory and tensor-core instructions of every kernel, compiled for sm_90."""
    if importlib.util.find_spec("triton") is None:
        return []
    from benchmarks.attention.compiled_kernels import KERNELS, compile_kernel
    from dilatant.attention.kernels.triton_tuning import tuning_for

    return [
        {
            "kernel": name,
            "head_dim": head_dim,
            "tile": asdict(getattr(tuning_for(head_dim, 2, (9, 0)), name)),
            **asdict(compile_kernel(name, tuning_for(head_dim, 2, (9, 0)), head_dim)),
        }
        for head_dim in head_dims
        for name in KERNELS
    ]


def table_memory(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes of all that a mask becomes for the kernels, beside the bytes of a dense mask of booleans."""
    results = []
    for kind in KINDS:
        for tokens in sizes:
            mask = build(kind, draw_row(kind, tokens, seed=0))
            plan = AttentionPlan(mask)
            tables = [plan.table(128, 128, transposed) for transposed in (False, True)]
            work = [work_list(table, 32, 132) for table in tables]
            parts = {
                "tables_bytes": sum(table.nbytes for table in tables),
                "work_list_bytes": sum(x.units.nbytes + x.intervals.nbytes + x.splits.nbytes for x in work),
                "words_and_positions_bytes": mask.fields.nbytes + mask.positions.nbytes,
            }
            total = sum(parts.values())
            results.append(
                {
                    "mask": kind,
                    "tokens": tokens,
                    **parts,
                    "bytes_per_token": total / tokens,
                    "dense_mask_bytes": tokens**2,
                    "of_a_dense_mask": total / tokens**2,
                }
            )
    return results
