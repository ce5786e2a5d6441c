"""Compare published step times with predictions for the very same layouts.

    python -m benchmarks.planning.published [--only NAME ..] [--json FILE]
    python -m benchmarks.planning.published [--rows FILE [--in-turn | --table FILE]] [--memory FILE] [--every N]

Files of rows are those of `benchmarks.papers.corpus.rows`. A prediction is the exact simulation of a step of the
published layout, gradient sums included, with the shipped analytic costs of the GPU (its efficiencies are assumptions
of the hardware file; nothing is fitted to these figures). `ours` is what `plan.search` chooses on the same devices for
the same batch. Nothing here is measured on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine
from benchmarks.papers.corpus.predictions import corpus, in_turn, memory, simulated
from benchmarks.papers.corpus.programs import (
    AFTERWARDS,
    AFTERWARDS_FP16,
    MEGATRON_2021,
    MEGATRON_2022,
    OVERLAPPED,
    SEQUENCE_PARALLEL,
    Sums,
)
from benchmarks.papers.models import PaperUnit, Part, gpt, llama, operations_only, seconds
from benchmarks.papers.planner import Case, even_chain, layout_text, same_samples
from benchmarks.papers.tables import Outcome, PaperTable, figure, judged, spread
from dilatant.config.memory_modes import Recompute
from dilatant.cost.analytic import MEGATRON, Runner
from dilatant.cost.hardware import load_hardware
from dilatant.cost.memory import ParameterBytes, bytes_text
from dilatant.plan.cluster import cluster_of
from dilatant.plan.rank_mapping import RankOrder

MOST_SEARCHED = 300
"""Largest number of GPUs for which our own search is run, too."""

TENSOR_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Published:
    """A published run: model, hardware, layout and step time.

    `seconds` are as printed, or from the printed rate by the source's own count of operations (`counted` says how).
    microbatch: in samples; chunks: per device; order: of ranks. If the source does not say, they are None, and the best
    in simulation is taken, of 1, 2, 4 or 8 samples, 1 or 4 chunks, and all orders. runner: the program that ran it.
    sums: how it sums gradients.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    tokens: int
    hardware: str
    tp: int
    cp: int
    pp: int
    dp: int
    batch: int
    microbatch: int | None
    chunks: int | None
    recompute: Recompute
    seconds: float
    counted: str = "printed"
    order: RankOrder | None = None
    runner: Runner = MEGATRON_2021
    sums: Sums = OVERLAPPED

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def megatron_operations(batch: int, tokens: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the operations of a step with all activations recomputed, as Narayanan et al. (SC'21, 5) count them."""
    blocks = 96.0 * batch * tokens * layers * hidden * hidden
    return blocks * (1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden))


def narayanan() -> Iterator[Published]:
    """Yield the runs of SC'21, Table 1, on Selene's A100s; it does not give microbatches and chunks."""
    source = "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC'21), Table 1"
    for name, heads, hidden, layers, tp, pp, gpus, batch, teraflops in (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
        ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    ):
        step = megatron_operations(batch, 2048, layers, hidden, 51_200) / (gpus * teraflops * 1e12)
        yield Published(
            f"GPT {name}", source, gpt(layers, hidden, heads, 51_200), 2048, "A100", tp, 1, pp, gpus // (tp * pp),
            batch, None, 1, "block", step, "from its TFLOP/s, by its own formula",
            runner=replace(MEGATRON_2021, gradient_bytes=8), sums=AFTERWARDS_FP16,
        )  # fmt: skip


def korthikanti() -> Iterator[Published]:
    """Yield the runs of MLSys'23, Tables 3 and 5, on A100s; they give all settings."""
    source = "Korthikanti et al., Reducing Activation Recomputation (MLSys'23), Tables 3 and 5"
    for name, heads, hidden, layers, pp, batch, micro, chunks, full, selective in (
        ("22B", 64, 6144, 48, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 512, 1, 1, 94.42, 71.49),
    ):
        parts = gpt(layers, hidden, heads, 51_200)
        for how, recompute, step in (("full", "block", full), ("selective", "none", selective)):
            yield Published(
                f"GPT {name}, {how} recomputation", source, parts, 2048, "A100", 8, 1, pp, 1, batch, micro, chunks,
                recompute, step, runner=MEGATRON_2022 if how == "full" else SEQUENCE_PARALLEL,  # type: ignore[arg-type]
            )  # fmt: skip


def megascale() -> Iterator[Published]:
    """Yield the Megatron-LM runs of NSDI'24, Table 2; MegaScale's have other blocks and windows, not modelled here.
    Fused attention and gradients summed beside the backward are among what MegaScale has more than they."""
    source = "Jiang et al., MegaScale (NSDI'24), Tables 1 and 2, Megatron-LM rows"
    parts = gpt(96, 12288, 128, 64_000)
    for gpus, batch, step in (
        (256, 768, 40.0),
        (512, 768, 21.2),
        (1024, 768, 11.9),
        (3072, 6144, 29.02),
        (12_288, 6144, 8.57),
    ):
        yield Published(
            f"GPT 175B on {gpus:,} GPUs",
            source,
            parts,
            2048,
            "A100",
            8,
            1,
            8,
            gpus // 64,
            batch,
            1,
            6,
            "none",
            step,
            runner=SEQUENCE_PARALLEL,
            sums=AFTERWARDS,
        )


def llama_3() -> Iterator[Published]:
    """Yield the runs of Table 4, on H100s; it does not give chunks. The first and the last stage have one block fewer,
    and the stages of a pipeline lie side by side; keys and values are gathered before attention begins (3.3.2)."""
    source = "Grattafiori et al., The Llama 3 Herd of Models (2024), Tables 3 and 4"
    parts = llama(126, 16_384, 53_248, 128, 8, 128_256)
    for gpus, cp, dp, tokens, per_replica, teraflops in (
        (8192, 1, 64, 8192, 32, 430),
        (16_384, 1, 128, 8192, 16, 400),
        (16_384, 16, 8, 131_072, 16, 380),
    ):
        batch = dp * per_replica
        step = model_operations(parts, tokens) * batch / (gpus * teraflops * 1e12)
        yield Published(
            f"Llama 3 405B on {gpus:,} GPUs, {tokens // 1024}k tokens", source, parts, tokens, "H100", 8, cp, 16, dp,
            batch, 1, None, "none", step, "from its TFLOP/s, causal attention counted half", RankOrder.STAGES,
            replace(MEGATRON, exposed=1.0, merged=0.0),
        )  # fmt: skip


SOURCES = {"narayanan": narayanan, "korthikanti": korthikanti, "megascale": megascale, "llama3": llama_3}


def model_operations(parts: tuple[Part, ...], tokens: int) -> float:
    """Return the operations of a sample's forward and backward: nothing recomputed, attention's visible half only."""
    hardware = operations_only("A100")
    rate = hardware.flops("bfloat16")
    forward = float(seconds(parts, hardware, tokens)) * rate
    return 3.0 * forward


def compare(run: Published, searched: bool = True) -> tuple[Any, ...]:
    """Return a run's row: predicted and published seconds, MFU by one count of operations, our plan if `searched`."""
    hardware = load_hardware(run.hardware).among(run.gpus)
    # Megatron and Llama 3 shard optimizer state over replicas; older runs did not, which costs no time here.
    rules = ParameterBytes(zero="all", gradient=run.sums.bytes)
    layers = sum(part.count for part in run.parts)
    unit = PaperUnit("language", run.parts, (), None, ((run.tp, run.cp),), run.recompute, run.runner)
    nodes = -(-run.gpus // 8)
    workload = same_samples({"language": run.tokens}, run.batch)
    case = Case((unit,), hardware, cluster_of(hardware, nodes, min(run.gpus, 8)), workload, run.batch, rules)
    found = []
    for size, chunks in itertools.product(
        [run.microbatch] if run.microbatch else [1, 2, 4, 8], [run.chunks] if run.chunks else [1, 4]
    ):
        count, rest = divmod(run.batch, run.dp * size)
        if rest:
            continue
        chain = even_chain("language", layers, run.dp, run.tp, run.pp, run.cp, chunks, run.recompute)
        schedule = "interleaved" if chunks > 1 else "1f1b"
        for plan in case.plans([chain], [run.order] if run.order else tuple(RankOrder)):
            found.append((simulated(case, plan, count, schedule, run.sums), size, chunks))
    score, size, chunks = min(found, key=lambda one: one[0].seconds)
    peak = hardware.peak_flops["bfloat16"] * run.gpus
    operations = model_operations(run.parts, run.tokens) * run.batch
    ours, layout = None, ""
    if searched and run.gpus <= MOST_SEARCHED:
        degrees = tuple((tp, 1) for tp in TENSOR_DEGREES)
        free = PaperUnit("language", run.parts, (), None, degrees, runner=run.runner)
        best = Case((free,), hardware, case.cluster, workload, run.batch, rules).search(
            sizes=(1, 2, 4), chunks=(1, 2, 4)
        )
        if best is not None:
            ours, layout = (
                best.seconds,
                f"{layout_text(best.winner.plan)}, {best.winner.microbatch_size} a microbatch",
            )
    return (
        run.name,
        run.gpus,
        f"tp{run.tp} cp{run.cp} pp{run.pp} dp{run.dp}" + (f" x {chunks} chunks" if chunks > 1 else ""),
        size,
        run.seconds,
        score.seconds,
        score.seconds / run.seconds,
        operations / (peak * run.seconds),
        operations / (peak * score.seconds),
        bytes_text(max(score.peak_bytes)),
        ours,
        None if ours is None else score.seconds / ours,
        layout,
        run.counted,
        run.source,
    )


COLUMNS = (
    "run", "GPUs", "layout", "microbatch", "published s", "predicted s", "predicted / published", "MFU published",
    "MFU predicted", "peak memory", "our search s", "layout / ours", "our layout", "published from",
    "source",
)  # fmt: skip


def rows_of(names: Sequence[str], known: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of all runs: computed for the named sources, as in `known` for others."""
    kept = {row["run"]: tuple(row[column] for column in COLUMNS) for row in known}
    for name, runs in SOURCES.items():
        for run in runs():
            if name in names:
                row = compare(run)
                print(f"{run.name}: predicted / published {row[6]:.2f}", flush=True)
                yield row
            elif run.name in kept:
                yield kept[run.name]


def table(rows: Sequence[tuple[Any, ...]]) -> PaperTable:
    """Return the table of the runs, with an outcome for each source's figures."""
    ratios = [row[6] for row in rows]
    outcomes = []
    for source in dict.fromkeys(row[-1] for row in rows):
        own = [row for row in rows if row[-1] == source]
        off = statistics.fmean(abs(row[6] - 1.0) for row in own)
        outcomes.append(
            Outcome(
                f"step seconds of {len(own)} layouts: {source}",
                f"{figure(min(row[4] for row in own))} to {figure(max(row[4] for row in own))} s",
                f"{spread(row[6] for row in own)} of that",
                "agrees" if off <= 0.1 else "falls short",
                "predicted",
                f"mean distance {off:.0%}",
            )
        )
    gains = [row[11] for row in rows if row[11] is not None]
    if gains:
        outcomes.append(
            judged(
                "our search on the same devices over the published layout, in simulation", 1.0, statistics.fmean(gains),
                "predicted", within=0.01, more_is_better=True,
                note=f"{spread(gains)} over {len(gains)} runs of up to {MOST_SEARCHED:,} GPUs; the "
                "search optimises the simulator that scores it",
            )
        )  # fmt: skip
    return PaperTable(
        "Published layouts",
        "step times that others measured, predicted for the same layout",
        "predicted: shipped analytic costs, exact simulation of the step with gradient sync; operations are 3 forwards "
        "with causal attention counted half, in both MFU columns",
        COLUMNS,
        tuple(rows),
        tuple(outcomes),
        (
            f"Over all {len(rows)} layouts predicted / published is {statistics.median(ratios):.2f} in the median, "
            f"{spread(ratios)}.",
            "The sources' tables were written down without the papers at hand; compared with public text were five of "
            "Narayanan's rows in part, Llama 3's TFLOP/s, and of MegaScale 55.2 % and 1.34 x. Check one before citing "
            "it.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SOURCES), default=tuple(SOURCES), help="what to run")
    parser.add_argument("--rows", type=Path, help="predict the measured runs of this file instead")
    parser.add_argument("--memory", type=Path, help="predict the bytes of the test cases of this file")
    parser.add_argument("--in-turn", action="store_true", help="fit constants on one source of --rows after another")
    parser.add_argument("--table", type=Path, help="write the runs that plans name here, too")
    parser.add_argument("--every", type=int, default=1, help="of the runs of --rows, every so many")
    parser.add_argument("--json", type=Path, help="write the figures here as well; others of this file stay")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)
    document: dict[str, Any] = {}
    if options.json and options.json.exists():
        document = json.loads(options.json.read_text(encoding="utf-8"))
    document |= machine()
    of_rows = ("in_turn", in_turn) if options.in_turn else ("corpus", partial(corpus, table=options.table))
    for path, (name, report) in ((options.rows, of_rows), (options.memory, ("memory", memory))):
        if path:
            document[name] = report(path, options.every, console)
    if not (options.rows or options.memory):
        known = document["tables"][0]["rows"] if "tables" in document else []
        found = table(tuple(rows_of(options.only, known)))
        found.show(console)
        document["tables"] = [found.to_plain()]
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
