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

from benchmarks.papers.corpus.facts import (
    completed,
    gpu_of,
    is_gated,
    is_half,
    low_precision,
    network_of,
    node_of,
    recompute_of,
    replicas,
    zero_of,
)
from benchmarks.papers.corpus.models import NVLINK_DOMAIN, parts_of
from benchmarks.papers.corpus.programs import (
    NANOTRON_HOST,
    OF_EXPERTS,
    OVERLAPPED,
    Sums,
    hides_exchanges,
    hides_tensor_parallelism,
    program_of,
    sums_of,
)
from benchmarks.papers.corpus.recipes import (
    EAGER_EXPERTS,
    FINE_TUNING_CHUNKS,
    exchanges_beside,
    is_one_graph,
    left_to_host,
    scales_of,
    tensor_parallel_beside,
)
from benchmarks.papers.corpus.vision import recipe_of, with_vision
from benchmarks.papers.models import Part, llama, parameters
from dilatant.config.memory_modes import Recompute, Shard
from dilatant.cost.analytic import BESIDE, Runner, analytic_cost
from dilatant.cost.hardware import Hardware, Link, load_hardware
from dilatant.cost.memory import Zero

FILLED = 0.9
"""Fraction of a device's memory that a run with as little recomputation as possible fills."""

EFA = 160e9
"""Bytes per second of the ports of a node of Hugging Face's cluster."""

FOUR_LINKS = 100e9
"""Bytes per second between two GPUs of a node of Jean Zay, which four NVLinks join (of the A100's twelve), as BLOOM's
model card says."""

REACHED = 0.75
"""Fraction of a port's bytes per second that is reached, as in the hardware file."""

DOMAIN = 64
"""GPUs that use a rack whose 72 NVLink joins, where there are several racks: powers of two."""

CONTRADICTS = 1.6
"""A row of nanotron that takes so many times as long as one on the same layout, bubbles aside, whose microbatches are
as small or smaller, is reported apart: its source says that speeds of two implementations are mixed."""


BALANCED = ("nanotron-ultrascale",)
"""Sources whose stages are cut by the operations of their layers, not by their number."""

FITTED = ("llm-foundry", "internevo", "nanotron-ultrascale", "bridge-cards", "bridge-skills")
"""Sources on which constants were fitted. Of nanotron's models, the 3B and the 80B are held out."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all objects of a file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. gpus: name of the entry in the hardware file. shard: what is sharded besides optimizer state. group:
    what is trained, besides dense language models. recomputed: share of the blocks, if not all. stages: blocks of each
    stage, if they are told. per_node: GPUs that NVLink joins."""

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
    zero: Zero
    shard: Shard
    seconds: float
    runner: Runner
    group: str = ""
    recomputed: float = 1.0
    sums: Sums = OVERLAPPED
    stages: tuple[int, ...] = ()
    per_node: int = 8

    @property
    def label(self) -> str:
        """What is trained, and in which precision, if not dense language models in 16 bits."""
        words = [self.group, (self.runner.products or "").replace("float", "FP")]
        return "".join(f", {word}" for word in words if word)

    @property
    def place(self) -> tuple[Any, ...]:
        """What it shares with runs of which only the microbatch or ZeRO differs."""
        return self.source, self.model, self.tp, self.pp, self.dp, self.batch

    def contradicts(self, other: Measured) -> bool:
        """Return True if a run at the same place with no larger microbatches is much faster."""
        return other.microbatch <= self.microbatch and CONTRADICTS * other.steady_seconds < self.steady_seconds

    @property
    def steady_seconds(self) -> float:
        """Seconds of a step without the bubbles of a pipeline of equal stages."""
        return self.seconds / (1 + (self.pp - 1) * self.dp * self.microbatch / self.batch)

    @property
    def held_out(self) -> bool:
        """True if no constant was fitted to runs of its source, or of its model."""
        if "experts" in self.group and self.model.startswith("Qwen3_30B"):
            return False
        return self.source not in FITTED or self.model in ("Llama 3B", "Llama 80B")


def measured_runs(rows: Iterator[Mapping[str, Any]]) -> Iterator[Measured | str]:
    """Yield each row as a run, or the reason why it cannot be predicted. A row without its number of heads has that of
    its source's other rows of as many and as wide layers, where they agree."""
    known, heads = [completed(row, number) for number, row in enumerate(rows)], dict[tuple[Any, ...], set[int]]()
    for row in known:
        if own := row["model"]["heads"]:
            heads.setdefault(_shape(row), set()).add(own)
    sweep: dict[tuple[Any, ...], list[Measured]] = {}
    runs: list[Measured | str] = []
    for row in known:
        found = heads.get(_shape(row), set())
        if not row["model"]["heads"] and len(found) == 1:
            row["model"]["heads"] = min(found)
        try:
            runs.append(run := _run(row))
        except ValueError as error:
            runs.append(str(error))
        else:
            if run.source == "nanotron-ultrascale":
                sweep.setdefault(run.place, []).append(run)
    for one in runs:
        if isinstance(one, Measured) and any(map(one.contradicts, sweep.get(one.place, []))):
            yield replace(one, group="contradicted")
        else:
            yield one


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["source_id"], row["model"]["layers"], row["model"]["hidden"]


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
    seconds = float(
        figures.get("step_seconds") or figures.get("seconds_per_step") or row["derived_step_seconds"] or 0.0
    )
    needed = [model.get(key) for key in ("layers", "hidden", "vocab", "seq")]
    needed += [model.get("ffn") or experts]
    needed += [row.get(key) for key in ("gpus", "tp", "pp", "dp", "mbs", "gbs")] + [seconds]
    if not all(needed):
        raise ValueError("incomplete")
    row = {**row, "dp": replicas(row)}
    if row["gbs"] % (row["dp"] * row["mbs"]):
        raise ValueError("incomplete")
    # InternEvo's cluster: its own text calls the GPUs A100, but says RoCE and NVLink of 400 GB/s.
    name = "A800" if row["source_id"] == "internevo" else gpu_of(row["hardware"])
    hardware, node = load_hardware(name), node_of(row["hardware"])
    if row["pp"] * (row["vpp"] or 1) > model["layers"] + 2 or model["layers"] < row["pp"]:
        raise ValueError("more stages than layers")
    if row["tp"] > 8:
        raise ValueError("tensor groups across nodes")
    if node != 8 and name not in NVLINK_DOMAIN:  # as many ports as GPUs
        ports = max(1, hardware.ports * node // 8)
        between = Link(hardware.between.bandwidth * ports / hardware.ports, hardware.between.latency)
        hardware = replace(hardware, between=between, ports=ports)
    network = EFA if "EFA" in row["hardware"] else network_of(row["hardware"], node)
    if network is not None and name not in NVLINK_DOMAIN:
        hardware = replace(hardware, between=Link(REACHED * network, hardware.between.latency))
    if "Jean Zay" in row["hardware"]:
        hardware = replace(hardware, inside=Link(REACHED * FOUR_LINKS, hardware.inside.latency))
    if name in NVLINK_DOMAIN:  # as many ports as GPUs
        node = row["gpus"] if row["gpus"] <= NVLINK_DOMAIN[name] else DOMAIN
        port = hardware.between.bandwidth / hardware.ports
        hardware = replace(hardware, between=Link(port * node, hardware.between.latency), ports=node)
    if "500 W" in row["hardware"]:  # of 700: power grows with the cube of the clock; HBM2e
        hardware = replace(hardware.clocked((5 / 7) ** (1 / 3)), bandwidth=2.4e12)
    low = low_precision(row["precision"])
    if low is not None and low not in hardware.peak_flops:
        raise ValueError(f"{name} has no products in {low}")
    runner, chunks = replace(program_of(row), products=low), row["vpp"] or 1
    if row["source_id"] == "nemo-24.07" and "Fine" in row["source"] and row["pp"] > 1:
        chunks = FINE_TUNING_CHUNKS[model["name"]]
    if low or experts:  # products too short to hide the sums that they add to
        runner = replace(runner, gradient_bytes=max(8, runner.gradient_bytes))
    if (tensor_parallel_beside(row, low) or hides_tensor_parallelism(row)) and not experts:
        runner = replace(runner, hidden=1.0 - BESIDE)
    if re.search("async ?tp", str(row["notes"]).lower()):  # products write where collectives read
        runner = replace(runner, whole_rows=0.0)
    if low == "float8":
        scales = scales_of(row)
        share = scales.speed * hardware.flops(low) / hardware.peak_flops[low]
        hardware = replace(hardware, efficiency={**hardware.efficiency, low: share})
        widths = runner.whole_rows + scales.gathered
        hidden = 1.0 - scales.sent * (1.0 - runner.hidden)
        runner = replace(runner, cast_bytes=scales.cast_bytes, whole_rows=widths, hidden=hidden)
    if experts:
        runner = replace(runner, operations=EAGER_EXPERTS * left_to_host(row, name, low))
    stages: tuple[int, ...] = ()
    sums = sums_of(row)
    if experts:
        sums = OF_EXPERTS if group == "experts" else OVERLAPPED
    if "vision" in model:
        recipe = recipe_of(row)
        stages, sums = recipe.stages, Sums(bytes=recipe.gradient, overlap=False)
        runner = replace(runner, whole_rows=10.0)
        parts = with_vision(row, hardware, runner)
    else:
        parts = parts_of(row, hardware, runner, is_gated(row))
    if experts and (is_one_graph(row, name, low) or exchanges_beside(row, name) or hides_exchanges(row)):
        parts = tuple(replace(part, sent=part.sent.scaled(BESIDE)) for part in parts)
    if row["source_id"] == "nanotron-ultrascale":
        seconds_of_host, more = NANOTRON_HOST
        seconds_of_host += more * row["tp"] if row["tp"] > 1 and row["pp"] > 1 and row["gpus"] > 8 else 0.0
        runner = replace(runner, operations=seconds_of_host / (parts[1].shape.operations * hardware.host))
    weights = sum(part.count * part.shape.matmul for part in parts)
    peak = hardware.peak_flops[runner.products or "bfloat16"] * row["tp"] * row["pp"] * row["dp"] * (row["cp"] or 1)
    if 6.0 * weights * row["gbs"] * model["seq"] / peak > seconds:
        raise ValueError("faster than the peak of its devices")
    recompute = recompute_of(row["recompute"])
    if row["source_id"] == "torchtitan" and "selective" in str(row["recompute"]):  # its default kind
        recompute = "block_keep_attention"
    recomputed = 1.0
    if is_half(row["precision"]):  # written, and read and added in 16 bits
        sums, runner = replace(sums, bytes=2.0), replace(runner, gradient_bytes=min(8, runner.gradient_bytes))
    if row["recompute"] == "selective" and row["source_id"] == "fms-fsdp":  # of some blocks; how many is not told
        recompute, recomputed = "block", _least_recomputed(row, parts, hardware, runner)
    zero, shard = zero_of(row["zero"])
    return Measured(
        row["id"], row["source_id"], name, hardware, model["name"], parts, model["seq"], row["tp"], row["cp"] or 1,
        row["pp"], row["dp"], chunks, row["mbs"], row["gbs"], recompute, zero, shard,
        seconds, runner, group, recomputed, sums, stages, node,
    )  # fmt: skip


def _least_recomputed(row: Mapping[str, Any], parts: tuple[Part, ...], hardware: Hardware, runner: Runner) -> float:
    """Return the smallest share of blocks whose recomputation lets a run with sharded weights fit its device."""
    _, block, head = parts
    kept, logits = (
        analytic_cost(part.shape, hardware, runner=runner).activation_bytes(row["model"]["seq"]) * row["mbs"]
        for part in (block, head)
    )
    states = 16.0 * parameters(parts) / row["dp"] + 2 * 6.0 * block.shape.parameters  # and two gathered blocks
    room = FILLED * hardware.memory - states - logits
    return min(1.0, max(0.0, 1.0 - room / (block.count * kept)))


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Peak of the bytes that the last rank of a run of Megatron-LM's own tests allocated, and what it trained. ahead:
    microbatches by which a group that one chunk runs before the next one exceeds the number of stages."""

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
    ahead: int = 0


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
    backend, inner = flags.get("attention-backend"), flags.get("transformer-impl")
    if row["environment"] == "lts" and backend is None and inner != "local" and row["recompute"] != "full":
        raise ValueError("an old image, and its kernel of attention is not told")
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
    if backend == "unfused" or inner == "local":
        # Of every head and pair: the softmax, and what dropout keeps, a mask of a byte and its output.
        kept += heads * row["seq"] * (2.5 if flags.get("attention-dropout", 0.1) else 1.0)
    if not row["sequence_parallel"]:  # norms and residual sums of all tokens on every rank
        kept += (tp - 1) * 5 * hidden
    group = flags.get("microbatch-group-size-per-virtual-pipeline-stage", pp)
    tied = "untie-embeddings-and-output-weights" not in flags and pp == 1
    parts = (
        embedding,
        replace(block, shape=replace(block.shape, kept=kept, weight_kept=kept)),
        replace(head, shape=replace(head.shape, parameters=hidden)) if tied else head,
    )
    return MeasuredMemory(
        f"{row['test']}, {row['environment']}, {row['hardware']}", parts, row["seq"], tp, cp, pp, dp, chunks,
        row["mbs"], max(1, row["gbs"] // (row["mbs"] * dp)), "block" if row["recompute"] == "full" else "none",
        "all" if row["dist_optimizer"] else "none", float(measured), group - pp,
    )  # fmt: skip
