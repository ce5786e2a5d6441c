"""Programs that ran a corpus of measured runs: their kernels, what they overlapped, and how they summed gradients. Of
sources that are not listed here a row's own words tell, and its date, before which its kernels were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.corpus.facts import zero_of
from dilatant.cost.analytic import AUTOMODEL, MEGATRON, TORCHTITAN, Runner

MEGATRON_2021 = replace(MEGATRON, name="megatron of 2021", attention="unfused", whole_rows=10.0, gradient_bytes=12)
MEGATRON_2022 = replace(MEGATRON_2021, name="megatron of 2022", gradient_bytes=0)
"""From 2022 on products add to sums of gradients themselves."""
SEQUENCE_PARALLEL = replace(MEGATRON_2022, attention="unfused, recomputed", whole_rows=0.0)
"""Megatron of 2022 with sequence parallelism and selective recomputation."""

RUNNERS = {
    "llm-foundry": Runner("fsdp of 2023", "early", operations=0.8, stops_early=True, weight_casts=1),
    "fms-fsdp": Runner("fsdp, compiled", "flash", fused=True, operations=0.4, stops_early=True),
    "torchtitan": TORCHTITAN,
    "torchtitan compiled": replace(TORCHTITAN, name="torchtitan, compiled", fused=True, operations=0.4),
    "internevo": Runner("internevo", "flash", operations=0.4, whole_rows=42.0),
    "automodel": AUTOMODEL,
    "torchtune": Runner("torchtune", "library", operations=0.8, stops_early=True),
    "paddle": Runner("paddle", "flash", operations=0.8, whole_rows=10.0),
    "bloom-prequel": replace(MEGATRON_2021, name="megatron-deepspeed"),
    "nanotron-ultrascale": Runner("nanotron", "flash", wait=0.1e-3),
}
"""Runner by source or by the name of its program, and by whether it was compiled."""

NANOTRON_HOST = 2.3e-3, 1.2e-3
"""Seconds in which nanotron's host issues a pass of a block, and more for each tensor-parallel rank in pipelines over
several nodes. Fitted to its 1B and 8B: however many tokens a microbatch has, forward and backward of a block take no
less than 4.6 ms, and there 9.5, 14 and 23.5 ms with tp 2, 4 and 8."""


@dataclass(frozen=True, slots=True)
class Sums:
    """How a program sums gradients over replicas: `bytes` of a gradient that are sent; whether the sums run beside the
    last backward; `hidden`: whether new weights are gathered beside the next step's first forward; bucket: weights of
    one sum, of which the last has nothing beside it. Seconds of gathers of new weights, besides their bytes: broadcast:
    for each rank, if all others get its weights in a message of its own; sliced: for each rank and block, if each part
    of a weight is copied by itself; weights: for each weight of a device. whole: seconds of sums in pipelines without
    sharded state, besides, for each weight of a device."""

    bytes: float = 4.0
    overlap: bool = True
    hidden: bool = False
    bucket: float = 0.0
    broadcast: float = 0.0
    sliced: float = 0.0
    weights: float = 0.0
    whole: float = 0.0

    def gather_seconds(self, ranks: int, blocks: float, weights: float) -> float:
        """Return these seconds for `ranks` that share the state of so many blocks and weights of a device."""
        return ranks * (self.broadcast + self.sliced * blocks) + self.weights * weights


OF_EXPERTS = Sums(bytes=2.0, hidden=True)
"""Sums of Megatron Bridge's runs with experts, as its recipes for performance set them (`_perf_precision` and
`_pretrain_common` @067f987df): in bf16, and weights are gathered beside the next forward."""

OVERLAPPED, AFTERWARDS, AFTERWARDS_FP16 = Sums(), Sums(overlap=False), Sums(bytes=2.0, overlap=False)
IN_BF16 = Sums(bytes=2.0)
SUMS = {
    "internevo": Sums(bytes=2.0, bucket=float(2**29), broadcast=2.6e-3),
    "bloom-prequel": AFTERWARDS,
    "nanotron-ultrascale": Sums(sliced=40e-6, weights=0.05e-9, whole=0.16e-9),
    "megatron-bridge-summary": IN_BF16,
    "nemo-24.07": IN_BF16,
}
"""Sums by source, where they are not those of Megatron and FSDP. InternEvo sends gradients in bf16, half a billion a
bucket (`reduce_bucket_size` of its configs), and each rank's weights by a broadcast (seconds fitted to its runs with 8
to 1,024 ranks); the pipelines of DeepSpeed sum afterwards. Megatron Bridge and NeMo 24.07 send dense models' gradients
in bf16 (`grad_reduce_in_fp32`, `grad_sync_dtype`).
nanotron's ZeRO-1 gathers each weight into one slice for each rank (`_all_gather_params`, its optim/zero.py @069c21cf),
six weights a block; seconds fitted to its 1B and 8B on several nodes. Its pipelines without ZeRO take longer than with
it by what 8 bytes a weight take through a port of 50 GB/s, in the median of its 1B and 8B: sums in fp32, forth and
back, that nothing hides."""

NAMES = {
    "torchtitan": "torchtitan", "torchtune": "torchtune", "automodel": "automodel", "internevo": "internevo",
    "fms.?fsdp": "fms-fsdp", "llm.?foundry|mosaic": "llm-foundry", "paddle": "paddle",
}  # fmt: skip
"""Words of a row → key of `RUNNERS`."""

EAGER_TORCH = "fsdp|deepspeed|accelerate|hugging|transformers|lightning|litgpt"
IN_MEGATRON = "megatron|nemo|transformer.?engine|primus|flagscale|mcore|dgxc|mlperf"
COMPILED_XLA = "maxtext|paxml|jax|xla"
BY_NVIDIA = "nemo(?!tron)|dgxc|megatron.?bridge|mlperf"
"""Words of rows whose programs NVIDIA tuned for its benchmarks."""

FLASH, FUSED, OVERLAP = (2022, 12), (2024, 1), (2023, 8)
"""Months in which Megatron-LM got FlashAttention (commit d693034ecf), a fused activation and rotary embedding
(6b3b8844e5, a01b42ccac), and sums of gradients beside the backward (2d5220a424)."""

CURRENT_SCALES = (2025, 2)
"""Month of Transformer Engine 2.0, before which scales of eight bits are delayed ones."""


def words_of(row: Mapping[str, Any]) -> str:
    """Return what a row says of its program."""
    keys = "source_id", "source", "framework", "program", "settings", "notes", "zero", "mp_mode"
    return " ".join(str(row[key]) for key in keys if row.get(key)).lower()


def written(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the latest year and month in which a row's program was written: of its source, or of its container."""
    words = f"{words_of(row)} {row.get('date')}"
    found = [(int(year), int(month)) for year, month in re.findall(r"\b(20\d\d)-(\d\d)", words)]
    found += [(int(year), 12) for year in re.findall(r"\bof (20\d\d)\b", words)]
    found += [(2000 + int(year), int(month)) for year, month in re.findall(r"nemo[ :/-]*(2\d)\.(\d\d)", words)]
    return min(found, default=(9999, 12))


def program_of(row: Mapping[str, Any]) -> Runner:
    """Return the program that ran a row."""
    source, words = row["source_id"], words_of(row)
    compiled = " compiled" if row.get("compile") else ""
    if source in RUNNERS:
        runner = RUNNERS.get(source + compiled, RUNNERS[source])
        # llm-foundry's rows in pure bf16 are those of PyTorch 1.13 (README @300cc5c58 of May 2023).
        return replace(runner, stops_early=False) if row.get("mp_mode") == "PURE" else runner
    for pattern, name in NAMES.items():
        if re.search(pattern, words):
            return RUNNERS.get(name + compiled, RUNNERS[name])
    sharded = zero_of(row["zero"])[1] != "none"
    if re.search(COMPILED_XLA, words):
        runner = replace(MEGATRON, name="xla", stops_early=True)  # only what a backward needs is in its graph
    elif re.search(IN_MEGATRON, words):
        runner = _megatron(row, words)
    elif sharded or re.search(EAGER_TORCH, words):
        runner = RUNNERS["torchtitan" + compiled]
    else:
        runner = MEGATRON
    return _with_kernels(runner, words)


def _megatron(row: Mapping[str, Any], words: str) -> Runner:
    """Return Megatron as it was when a row was written. Norms with a bias were one kernel before others were."""
    when = written(row)
    if when < FLASH:
        return SEQUENCE_PARALLEL if "selective" in str(row["recompute"]) else MEGATRON_2022
    if when < FUSED and not re.search(BY_NVIDIA, words):
        return replace(MEGATRON, name="megatron of 2023", attention="flash", fused=False)
    return MEGATRON


def _with_kernels(runner: Runner, words: str) -> Runner:
    """Return the program with the kernels that a row names."""
    flash = r"flash[-_ ]?att[a-z]*[-_ ]*(?:v?{0})|\bfa{0}\b"
    if re.search(flash.format("3") + "|cudnn", words):
        runner = replace(runner, attention="library")
    elif re.search(flash.format("2"), words):
        runner = replace(runner, attention="flash")
    elif re.search("unfused|no flash", words):
        runner = replace(runner, attention="unfused")
    if re.search(r"fused (?:rms|layer)?[-_ ]?norm|liger", words):
        runner = replace(runner, fused=True)
    if re.search("no[-_ ]gradient[-_ ]accumulation[-_ ]fusion", words):
        runner = replace(runner, gradient_bytes=12)
    return runner


def hides_tensor_parallelism(row: Mapping[str, Any]) -> bool:
    """Return True if tensor-parallel collectives of a source that is not listed run beside products: if a row says so,
    and in what NVIDIA tuned (`ub_tp_comm_overlap` of its scripts and configs), unless the row denies it."""
    words = words_of(row)
    told = r"(not? |without )?(?:ub_)?(?:tp|tensor.parallel)[-_ ]?(?:comm)?[-_ ]?overlap(.{0,9})"
    if found := re.search(told, words):
        return not found[1] and not re.search("false|off|none", found[2])
    return re.search(BY_NVIDIA, words) is not None and row["source_id"] not in SUMS and not row["multimodal"]


def hides_exchanges(row: Mapping[str, Any]) -> bool:
    """Return True if a row says that exchanges of experts run beside computation."""
    return re.search(r"(?:a2a|all.to.all|expert|\bep)\w*[-_ ](?:comm[a-z]* )?overlap", words_of(row)) is not None


def sums_of(row: Mapping[str, Any]) -> Sums:
    """Return how the program of a row sums gradients."""
    if row["source_id"] in SUMS:
        return SUMS[row["source_id"]]
    words = words_of(row)
    if re.search(BY_NVIDIA, words):
        return IN_BF16  # `grad_sync_dtype` of its configs
    early = written(row) < OVERLAP and re.search(IN_MEGATRON, words) and row["source_id"] not in RUNNERS
    return AFTERWARDS if early or re.search("(?:no|nothing|not|without) overlap", words) else OVERLAPPED


def has_delayed_scales(row: Mapping[str, Any]) -> bool:
    """Return True if scales of eight bits are those of steps before: JAX's, and what Transformer Engine had first."""
    words, precision = words_of(row), row["precision"].lower()
    if re.search("mx|block|row|current|finer|tensorwise", precision):
        return False
    early = written(row) < CURRENT_SCALES and re.search(IN_MEGATRON, words) is not None
    return "delayed" in precision or early or re.search(COMPILED_XLA, words) is not None
