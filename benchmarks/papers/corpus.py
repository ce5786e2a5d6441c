"""Published measurements from files of one JSON object a line: what was trained, on what, how, and how long a step
took. Files and their keys are described where they lie; none of them is part of this package."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dilatant.config.memory_modes import Recompute
from dilatant.cost.analytic import Runner
from dilatant.cost.hardware import Hardware, Link, load_hardware
from dilatant.cost.memory import Zero
from papers.corpus_models import parts_of
from papers.models import Part, llama

HARDWARE = {
    "RoCE a node": "A800",
    "GB300": "GB300", "GB200": "GB200", "B300": "B300", "B200": "B200", "H200": "H200", "H20": "H20", "H100": "H100",
    "A800": "A800", "A100": "A100", "MI325X": "MI325X", "MI355X": "MI355X",
}  # fmt: skip
"""Words in a row's hardware → entry of the hardware file; the first that matches counts."""

NETWORKS = (
    ("4 x Omni-Path 100 Gb/s", 50e9),
    ("4 x 100 Gb/s", 50e9),
    ("400 Gb/s a node", 50e9),
    ("800 Gb/s a node", 100e9),
)
"""Words in a row's hardware → bytes per second of a node's ports, if they differ from the hardware file's."""

REACHED = 0.75
"""Fraction of a port's bytes per second that is reached, as in the hardware file."""

RUNNERS = {
    "llm-foundry": Runner("fsdp of 2023", "early", operations=0.8),
    "fms-fsdp": Runner("fsdp, compiled", "flash", fused=True, operations=0.4),
    "torchtitan": Runner("torchtitan", "flash", operations=0.8),
    "torchtitan compiled": Runner("torchtitan, compiled", "flash", fused=True, operations=0.4),
    "internevo": Runner("internevo", "flash", operations=0.4),
    "bloom-prequel": Runner("megatron of 2022", "unfused", fused=True, shards_rows=False, operations=0.4),
    "nanotron-ultrascale": Runner("nanotron", "flash", fused=True, operations=0.5, wait=0.3e-3),
}
"""Runner by source, and by whether it was compiled; other sources are Megatron with the newest kernels."""
MEGATRON = Runner("megatron", "library", fused=True, operations=0.4)

HELD_OUT = ("bloom-prequel", "fms-fsdp", "torchtitan", "megatron-bridge-summary", "nemo-24.07", "amd-primus")
"""Sources on which no constant was fitted. Of nanotron's models, the 3B and the 80B are held out."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all objects of a file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. gpus: name of the entry in the hardware file; zero: None if the weights are sharded, too. group: what
    is trained, besides dense language models."""

    id: str
    source: str
    gpus: str
    hardware: Hardware
    model: str
    parts: tuple[Part, ...]
    tokens: int
    tp: int
    cp: int
    pp: int
    dp: int
    chunks: int
    microbatch: int
    batch: int
    recompute: Recompute
    zero: Zero | None
    seconds: float
    runner: Runner
    group: str = ""

    @property
    def held_out(self) -> bool:
        """True if no constant was fitted to runs of its source, or of its model."""
        return self.source in HELD_OUT or self.model in ("Llama 3B", "Llama 80B")


def measured_runs(rows: Iterator[Mapping[str, Any]]) -> Iterator[Measured | str]:
    """Yield each row as a run, or the reason why it cannot be predicted. A row without its number of heads has that of
    its source's other rows of the same model, where they agree."""
    known, heads = [*rows], dict[tuple[str, str], set[int]]()
    for row in known:
        if own := row["model"].get("heads"):
            heads.setdefault((row["source_id"], row["model"]["name"]), set()).add(own)
    for row in known:
        found = heads.get((row["source_id"], row["model"]["name"]), set())
        if not row["model"].get("heads") and len(found) == 1:
            row = {**row, "model": {**row["model"], "heads": min(found)}}
        try:
            yield _run(row)
        except ValueError as error:
            yield str(error)


def _run(row: Mapping[str, Any]) -> Measured:
    model, figures = row["model"], row["measured"]
    if row["quality"] not in ("A", "B"):
        raise ValueError("of lower quality")
    if row["multimodal"] and "vision" not in model:
        raise ValueError("multimodal: the work per sample is not told")
    if "lora" in str(row.get("task")).lower():
        raise ValueError("adapters")
    group, experts = "", model.get("moe") or model.get("language", {}).get("moe")
    if "vision" in model:
        group = "images and experts" if experts else "images"
        model = {**model, **model["language"]}
    elif experts:
        group = "experts"
    seconds = figures.get("step_seconds") or figures.get("seconds_per_step") or row.get("derived_step_seconds")
    needed = [model.get(key) for key in ("layers", "hidden", "vocab", "seq")]
    needed += [model.get("ffn") or experts]
    needed += [row.get(key) for key in ("gpus", "tp", "pp", "dp", "mbs", "gbs")] + [seconds]
    name = next((HARDWARE[word] for word in HARDWARE if word in row["hardware"]), None)
    if not all(needed) or name is None or row["gbs"] % (row["dp"] * row["mbs"]):
        raise ValueError("incomplete")
    hardware = load_hardware(name)
    if row["pp"] * (row["vpp"] or 1) > model["layers"] + 2 or model["layers"] < row["pp"]:
        raise ValueError("more stages than layers")
    if "fp4" in row["precision"].lower():
        raise ValueError("products in four bits")
    if row["tp"] > 8:
        raise ValueError("tensor groups across nodes")
    for words, bandwidth in NETWORKS:
        if words in row["hardware"]:
            hardware = replace(hardware, between=Link(REACHED * bandwidth, hardware.between.latency))
            break
    if "500 W" in row["hardware"]:  # of 700: power grows with the cube of the clock; HBM2e
        efficiency = hardware.matmul_efficiency * (5 / 7) ** (1 / 3)
        hardware = replace(hardware, matmul_efficiency=efficiency, bandwidth=2.4e12)
    low = re.search("fp8|float8|fp4", row["precision"].lower()) is not None
    key = row["source_id"] + (" compiled" if row["source_id"] == "torchtitan" and row.get("compile") else "")
    runner = replace(RUNNERS.get(key, MEGATRON), products="float8" if low else None)
    gated = row["source_id"] not in ("llm-foundry", "bloom-prequel") and "GPT" not in model["name"]
    parts = parts_of(row, hardware, runner, gated)
    weights = sum(part.count * part.shape.matmul for part in parts)
    peak = hardware.peak_flops[runner.products or "bfloat16"] * row["tp"] * row["pp"] * row["dp"] * (row["cp"] or 1)
    if 6.0 * weights * row["gbs"] * model["seq"] / peak > seconds:
        raise ValueError("faster than the peak of its devices")
    recompute: Recompute = "none"
    if re.match("full|gradient_check", row["recompute"] or ""):
        recompute = "block"
    elif "op" in str(row["recompute"]):  # attention is kept, and every second product
        recompute = "block_keep_attention"
    words = str(row["zero"])
    zero: Zero | None = "node" if "groups" in words else "none" if "ZeRO-0" in words else "all"
    if "FSDP" in words or "ZeRO-3" in words:
        zero = None
    return Measured(
        row["id"], row["source_id"], name, hardware, model["name"], parts, model["seq"], row["tp"], row["cp"] or 1,
        row["pp"], row["dp"], row["vpp"] or 1, row["mbs"], row["gbs"], recompute, zero,
        float(seconds), runner, group,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Peak of the bytes that the last rank of a run of Megatron-LM's own tests allocated, and what it trained."""

    name: str
    parts: tuple[Part, ...]
    tokens: int
    tp: int
    cp: int
    pp: int
    dp: int
    chunks: int
    microbatch: int
    microbatches: int
    recompute: Recompute
    zero: Zero
    measured: float


def measured_memory(rows: Iterator[Mapping[str, Any]]) -> Iterator[MeasuredMemory | str]:
    """Yield each test case, or the reason why it cannot be predicted. Settings without flags have Megatron's defaults:
    GPT-2's vocabulary, a feed-forward of four times the width, dropout, tied embeddings."""
    for row in rows:
        try:
            yield _memory(row)
        except ValueError as error:
            yield str(error)


def _memory(row: Mapping[str, Any]) -> MeasuredMemory:
    flags, hidden, heads, layers = row["args"], row["hidden"], row["heads"], row["layers"]
    measured = row["mem_max_allocated_bytes"]
    if row["family"] != "gpt" or row["experts"] or row["fsdp"]:
        raise ValueError("not a dense GPT")
    if not measured or any(word in row["test"] for word in ("frozen", "grpo", "rl_")):
        raise ValueError("frozen parts, reinforcement learning, or no bytes")
    tp, pp, cp = row["tp"] or 1, row["pp"] or 1, row["cp"] or 1
    per_chunk = row["vp_layers"]
    chunks = layers // pp // per_chunk if per_chunk else row["vpp"] or 1
    dp = (row["gpus"] or 8) // (tp * pp * cp)
    if not dp or layers % (pp * chunks) or not row["gbs"]:
        raise ValueError("stages of unlike lengths, or no batch")
    padded = 128 * tp
    vocabulary = -(-(row["vocab"] or 50_257) // padded) * padded
    grouped = "group-query-attention" in flags
    gated = "swiglu" in flags
    kv_heads = flags.get("num-query-groups", row["kv_heads"]) if grouped else heads
    embedding, block, head = llama(
        layers, hidden, row["ffn"] or 4 * hidden, heads, kv_heads, vocabulary, gated=gated, fused=True
    )
    kept = block.shape.kept
    if flags.get("hidden-dropout", 0.1):
        kept += hidden  # two masks of a byte
    if flags.get("attention-backend") == "unfused" or flags.get("transformer-impl") == "local":
        # Of every head and pair: the softmax, and what dropout keeps, a mask of a byte and its output.
        kept += heads * row["seq"] * (2.5 if flags.get("attention-dropout", 0.1) else 1.0)
    if not row["sequence_parallel"]:  # norms and residual sums of all tokens on every rank
        kept += (tp - 1) * 5 * hidden
    tied = "untie-embeddings-and-output-weights" not in flags and pp == 1
    parts = (
        embedding,
        replace(block, shape=replace(block.shape, kept=kept, weight_kept=kept)),
        replace(head, shape=replace(head.shape, parameters=hidden)) if tied else head,
    )
    return MeasuredMemory(
        f"{row['test']}, {row['environment']}, {row['hardware']}", parts, row["seq"], tp, cp, pp, dp, chunks,
        row["mbs"], max(1, row["gbs"] // (row["mbs"] * dp)), "block" if row["recompute"] == "full" else "none",
        "all" if row["dist_optimizer"] else "none", float(measured),
    )  # fmt: skip
