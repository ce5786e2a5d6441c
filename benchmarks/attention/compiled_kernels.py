"""Ahead-of-time compilation of the Triton attention kernels for any GPU generation, with the compiler's statistics.

It needs no GPU, so any machine can check that a change of a kernel or a tile still fits the registers and still uses
the tensor cores.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dilatant.attention.kernels.triton_backward import grad_key_value_kernel, grad_query_kernel
from dilatant.attention.kernels.triton_forward import forward_kernel
from dilatant.attention.kernels.triton_tuning import PRECISION, Tile, Tuning, padded_head_dim

KERNELS = {"forward": forward_kernel, "grad_query": grad_query_kernel, "grad_key_value": grad_key_value_kernel}
_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LOADED = {"query": "queries", "grad_output": "queries", "key": "keys", "value": "keys"}
_STORED = {"output", "grad_query", "grad_key", "grad_value"}
_SUMS = {"logsumexp", "delta", "partial_output", "partial_logsumexp", "partial_grad", "partial_grad_key"}
_SUMS |= {"partial_grad_value"}
_TABLES = {"units", "intervals", "query_positions", "key_positions"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """Statistics of one compiled kernel: registers per thread, bytes of spill stores and loads, bytes of shared memory,
    warpgroup and warp matrix instructions, and whether the assembler serialized the warpgroup ones."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    warpgroup_products: int
    warp_products: int
    serialized: bool


def compile_kernel(
    name: str,
    tuning: Tuning,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    capability: int = 90,
    group: int = 4,
    windowed: bool = False,
    together: bool = True,
    softcap: bool = False,
) -> Compiled:
    """Compile kernel `name` (a key of `KERNELS`) for a compute capability (90 is Hopper) as a launch would. Raises
    RuntimeError if Triton or its assembler refuses the kernel."""
    kernel = KERNELS[name]
    tile: Tile = getattr(tuning, name)
    constants = {
        "QUERY_HEADS": 8 * group,
        "KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": padded_head_dim(head_dim),
        "ROW_BLOCK": tuning.block,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "TOGETHER": together,
        "WINDOWED": windowed,
        "SOFTCAP": softcap,
        "SINKS": False,
        "TMA": tuning.tma,
        "PRECISION": PRECISION,
        "STAGES": tile.stages,
        "sinks": None,
    }
    signature, constexprs, attributes = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        signature[argument] = _type(argument, tuning, tile, head_dim, dtype)
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[argument] = constants[argument]
        elif signature[argument].startswith("*") or "_stride_" in argument:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    log = io.StringIO()
    # A separate empty cache, because the assembler reports nothing about cached kernels.
    with (
        knobs.nvidia.scope(),
        knobs.cache.scope(),
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(log),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = folder
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": tile.warps, "num_stages": tile.stages},
        )
    return _inspect(log.getvalue(), compiled.asm["cubin"], compiled.metadata.shared)


def _type(argument: str, tuning: Tuning, tile: Tile, head_dim: int, dtype: torch.dtype) -> str:
    element = _ELEMENT[dtype]
    if argument in _LOADED:
        rows = getattr(tile, _LOADED[argument])
        return f"tensordesc<{element}[{rows},{padded_head_dim(head_dim)}]>" if tuning.tma else f"*{element}"
    if argument in _STORED:
        return f"*{element}"
    if argument in _SUMS:
        return "*fp32"
    if argument in _TABLES:
        return "*i32"
    if argument.endswith("_fields"):
        return "*i64"
    return "fp32" if argument in ("scale", "inner", "outer") else "i32"


def _inspect(log: str, cubin: bytes, shared_bytes: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        code = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", binary.name], capture_output=True, text=True, check=True
        ).stdout
    return Compiled(
        registers=_number(r"Used (\d+) registers", log),
        spill_store_bytes=_number(r"(\d+) bytes spill stores", log),
        spill_load_bytes=_number(r"(\d+) bytes spill loads", log),
        shared_bytes=shared_bytes,
        warpgroup_products=len(re.findall(r"\b[HIQ]GMMA\b", code)),
        warp_products=len(re.findall(r"\b[HI]MMA\b", code)),
        serialized="serialized" in log,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the assembler's report lacks {pattern!r}: {text}")
    return int(found.group(1))
