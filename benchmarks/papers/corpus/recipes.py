"""What NVIDIA's recipes set besides what their published rows tell: overlaps, CUDA graphs and chunks, by model, GPU and
release, as read in NVIDIA-NeMo/Megatron-Bridge @067f987df and its history, and in NeMo-Framework-Launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.papers.corpus.models import NVLINK_DOMAIN
from benchmarks.papers.corpus.programs import has_delayed_scales

FINE_TUNING_CHUNKS = {"LLAMA2-13B": 10, "LLAMA2-70B": 20}
"""Virtual stages of NeMo 24.07's fine-tuning on H100, by its scripts (examples/peft/llama/h100 of
NeMo-Framework-Launcher); the table of its runs leaves them out."""

EAGER_EXPERTS = 1.25
"""Operations of the host in a block with experts, as a multiple of those of `papers.corpus.models`: 350 a pass, fitted
to Qwen3 30B, whose blocks take 9.3 ms forward and backward on H100 and on B200, however few tokens they have."""

GRAPHED = "26.06"
"""First release of Megatron Bridge's containers whose recipes for experts in MXFP8 run a step as one CUDA graph, in
which experts' exchanges run beside computation: on GB200 and GB300 all but Kimi K2's, on B300 Qwen3's, by
`perf_recipes` in its repository @067f987df. Layouts shared with 26.04 take 0.6 to 0.7 of the time. Earlier ones had
such graphs only with a fixed number of tokens an expert."""

GRAPHED_LAYERS = {"Qwen3_235B": ("GB200",), "Qwen3_30B": ("GB200", "B200"), "DeepSeekV3": ("B200",)}
"""GPUs on which recipes of 25.09 that drop tokens run a layer as one CUDA graph (`cuda_graphs` of scripts/performance
then); the others had none."""

GRAPHED_ATTENTION = {
    ("Qwen3_235B", "GB200"): "25.11",
    ("Qwen3_235B", "GB300"): "26.02",
    ("Qwen3_30B", "B200"): "26.02.01",
}
"""First release whose recipes run attention and the router as CUDA graphs (`cuda_graph_scope` of scripts/performance in
December 2025, February and March 2026): half of a block's operations are left to the host, as in `papers.corpus.vision`
."""


TAKEN_APART = 1.8
"""Operations of the host where exchanges run beside computation of another microbatch, as a multiple of other eager
ones: each block is five nodes with a graph of gradients each, and weights' gradients are later ones
(`overlap_moe_expert_parallel_comm`, `delay_wgrad_compute`). Fitted to Qwen3 30B on H100 in 26.02, whose blocks take
16.7 ms where 26.02.01, without it, takes 9.4."""


class Scales(NamedTuple):
    """How a program scales numbers of eight bits. speed: of its products, as a share of those with a scale for each
    tensor. cast_bytes: as in `Runner`. gathered: elements, in widths of a row, that each tensor-parallel rank moves in
    a pass to cast what it gathered in bf16, where others cast before. sent: bytes of tensor-parallel messages, as a
    share of those in bf16: others gather in eight bits, and reduce and scatter in bf16 (`gather_along_first_dim` in
    layernorm_linear.py of TransformerEngine @d0067d0d, `Float8ColwiseParallel` of torchao)."""

    speed: float = 1.0
    cast_bytes: int = 6
    gathered: float = 0.0
    sent: float = 0.75


DELAYED = Scales(cast_bytes=4)
"""The scale is that of steps before, so that a number is read once: Transformer Engine's first recipe, which
llm-foundry of 2023 and NeMo 24.07 use."""

BY_BLOCKS = Scales(0.95, 4)
"""MXFP8, a scale for 32 numbers: read once. Products of a 5B in 7.16 ms where a scale for each tensor takes 6.81 (B300,
docs/examples/gemm_profiling of TransformerEngine @d0067d0d, pre-quantized)."""

BY_ROWS = Scales(0.79, gathered=4.0, sent=1.0)
"""CUTLASS where others are cuBLAS (pytorch/pytorch issue 147971). By 5,760, 6,412 and 7,186 tokens a second of Llama 3
8B on 8 H100 in bf16, by rows and by tensor (pytorch/torchtitan @7a04053)."""


def scales_of(row: Mapping[str, Any]) -> Scales:
    """Return how a row in FP8 scales."""
    if row["source_id"] in ("llm-foundry", "nemo-24.07") or has_delayed_scales(row):
        return DELAYED
    if re.search("MX|finer", row["precision"]) and "H100" not in row["hardware"]:
        return BY_BLOCKS
    return BY_ROWS if "rowwise" in row["precision"] else Scales()


def tensor_parallel_beside(row: Mapping[str, Any], low: str | None) -> bool:
    """Return True if tensor-parallel collectives run beside products: in NeMo 24.07 with all but GPT-3 175B
    (`ub_tp_comm_overlap` of its scripts for H100, NeMo-Framework-Launcher), in Megatron Bridge with all dense models
    of 70B and 405B but not in FP4 (`tp_comm_overlap` of its recipes @067f987df)."""
    name = row["model"]["name"]
    if row["source_id"] == "nemo-24.07":
        return "175B" not in name
    return row["source_id"] == "megatron-bridge-summary" and low == "float8"


def _release(row: Mapping[str, Any]) -> str:
    """Return the release of NVIDIA's container that a row names, "" if none."""
    found = re.search(r"(\d\d\.\d\d[.\d]*) NeMo", row["source"])
    return found[1] if found else ""


def left_to_host(row: Mapping[str, Any], gpus: str, low: str | None) -> float:
    """Return the share of a block's operations, with experts, that are in no CUDA graph."""
    model = row["model"]["name"].split("_a")[0].split(" ")[0]
    graphed = gpus in GRAPHED_LAYERS.get(model, ()) if "tokendrop" in row["model"]["name"] else False
    if graphed or is_one_graph(row, gpus, low):
        return 0.0
    if exchanges_beside(row, gpus):
        return TAKEN_APART
    first = GRAPHED_ATTENTION.get((model, gpus))
    return 0.5 if first and _release(row) >= first else 1.0


def is_one_graph(row: Mapping[str, Any], gpus: str, low: str | None) -> bool:
    """Return True if a run with experts is one CUDA graph (`GRAPHED`)."""
    name = row["model"]["name"]
    if _release(row) < GRAPHED or low != "float8":
        return False
    return (gpus in NVLINK_DOMAIN and "Kimi" not in name) or (gpus == "B300" and name.startswith("Qwen3"))


def exchanges_beside(row: Mapping[str, Any], gpus: str) -> bool:
    """Return True for the other recipes that run exchanges of experts beside computation, those with virtual stages
    (`moe_a2a_overlap` of scripts/performance in the releases of such rows)."""
    name, layout = row["model"]["name"], (row["pp"], row["vpp"] or 1)
    if name == "Qwen3_30B_a3B":
        return gpus == "H100" and layout[1] > 1 and _release(row) < "26.02.01"
    overlapped = {
        ("Qwen3_235B_a22B", "H100"): (8, 4),
        ("Qwen3_235B_a22B", "B300"): (8, 4),
        ("Qwen3_235B_a22B", "B200"): (8, 2),
        ("DeepSeekV3", "B200"): (8, 2),
    }
    return overlapped.get((name, gpus)) == layout
