"""Predictions against measured runs of other programs: distances that are reached stay reached."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.papers.corpus.predictions import corpus_report, predicted_bytes, predicted_seconds
from benchmarks.papers.corpus.programs import OVERLAPPED, SUMS, Sums
from benchmarks.papers.corpus.rows import Measured, MeasuredMemory, measured_memory, measured_runs, read_lines
from benchmarks.papers.planner import cuts_by_work, even_chain
from dilatant.cost.published_runs import published_runs

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared")) / "data/published"

needs_corpus = pytest.mark.skipif(not CORPUS.exists(), reason="the measured runs are absent")

REACHED = {
    "bloom-prequel": 0.043,
    "fms-fsdp": 0.046,
    "torchtitan": 0.012,
    "torchtitan, FP8": 0.096,
    "megatron-bridge-summary, FP8": 0.049,
    "megatron-bridge-summary, FP4": 0.07,
    "megatron-bridge-summary, experts": 0.168,  # 24 of 28 are GPT OSS; 3 percent without
    "megatron-bridge-summary, experts, FP8": 0.118,
    "nemo-24.07, FP8": 0.062,
    "nanotron-ultrascale": 0.128,
    "internevo": 0.037,
    "llm-foundry": 0.027,
    "llm-foundry, FP8": 0.034,
    "bridge-cards, images": 0.042,
    "bridge-cards, images and experts": 0.234,  # one of four empties the allocator's cache; 8.5 percent without
}
"""Largest mean distance by source, held-out ones first: what the committed results reach, rounded up to a
tenth of a percent. docs/results.md says why it is not less."""


@pytest.fixture(scope="module")
def runs() -> list[Measured]:
    return [run for run in measured_runs(read_lines(CORPUS / "rows.jsonl.gz")) if isinstance(run, Measured)]


@pytest.mark.parametrize("source", REACHED)
def test_committed_distances_stay_reached(source):
    document = json.loads((ROOT / "benchmarks/results/published.json").read_text(encoding="utf-8"))
    groups = {one["runs"].removeprefix("source: "): one for one in document["corpus"]["groups"]}
    assert groups[source]["mean_distance"] <= REACHED[source]


def test_constants_of_one_source_hold_for_others():
    document = json.loads((ROOT / "benchmarks/results/published.json").read_text(encoding="utf-8"))
    pairs = {(one["fitted"], one["tested"]): one["mean_distance"] for one in document["in_turn"]}
    # Eight runs, of which most recompute an unknown part, fit nothing.
    other = [own for (fitted, tested), own in pairs.items() if fitted not in (tested, "fms-fsdp")]
    assert len(other) == 16
    assert np.mean(other) < 0.058  # 5.7 percent
    assert max(other) < 0.107  # 10.6 percent, of llm-foundry by what is fitted on BLOOM's kernels of 2021


def test_bytes_of_committed_large_runs_are_near():
    document = json.loads((ROOT / "benchmarks/results/published.json").read_text(encoding="utf-8"))
    groups = {one["runs"]: one for one in document["memory"]["groups"]}
    assert groups["4 GiB and more"]["mean_distance"] <= 0.02
    assert groups["smaller"]["within_300_mib"] >= 0.9


@needs_corpus
def test_runs_that_nothing_was_fitted_to_are_predicted_near(runs):
    dense = sorted((run for run in runs if run.held_out and not run.group and not run.runner.products), key=str)
    own = [run for run in dense if run.source in ("bloom-prequel", "fms-fsdp", "torchtitan")][::14]
    off = [abs(predicted_seconds(run) / run.seconds - 1.0) for run in own]
    assert len(own) >= 8
    assert np.mean(off) < 0.05  # 4.8 percent of this fourteenth, 4.2 of all (docs/results.md)


@needs_corpus
def test_distances_are_told_by_size_length_degrees_and_devices(runs):
    own = [run for run in runs if run.source == "bloom-prequel"]
    found = corpus_report(own, [1.25 * run.seconds for run in own], Console(file=io.StringIO()))
    assert all(one["mean_distance"] == pytest.approx(0.25) for one in found)
    counts = {one["runs"]: one["number"] for one in found}
    for kind in ("source: ", "GPU: ", "tokens: ", "weights in billions: ", "devices: ", "tp "):
        assert sum(number for name, number in counts.items() if name.startswith(kind)) == len(own)
    assert counts["weights in billions: more"] > 0  # of 176B and more, on up to 384 GPUs
    assert counts["devices: more"] > counts.get("devices: up to 8", 0)


@needs_corpus
def test_a_contradicted_row_has_a_much_faster_neighbour(runs):
    own = [run for run in runs if run.source == "nanotron-ultrascale"]
    assert {run.group for run in own} == {"", "contradicted"}
    for run in own[::7]:
        alike = [one for one in own if one.place == run.place and one.microbatch <= run.microbatch]
        slower = any(one.steady_seconds * 1.6 < run.steady_seconds for one in alike)
        assert (run.group == "contradicted") == slower
    assert Counter(run.group for run in runs if run.source != "nanotron-ultrascale")["contradicted"] == 0


@needs_corpus
def test_bytes_of_large_runs_are_within_three_percent():
    cases = [*measured_memory(read_lines(CORPUS / "megatron_ci_memory.jsonl.gz"))]
    large = [one for one in cases if isinstance(one, MeasuredMemory) and one.measured >= 4 * 2**30]
    unlike = {replace(one, name="", measured=0.0): one for one in large}.values()
    ratios = [predicted_bytes(one) / one.measured for one in unlike]
    assert len(ratios) >= 4
    assert max(abs(ratio - 1.0) for ratio in ratios) < 0.035


def test_a_part_of_the_blocks_may_be_recomputed():
    modes = even_chain("language", 12, 1, 1, 1, recompute="block", recomputed=0.3).recompute["language"]
    assert modes == ("block",) * 4 + ("none",) * 8


def test_stages_end_where_the_work_reaches_their_share():
    # An embedding, 16 blocks, and a head that takes as long as four.
    assert cuts_by_work([0, *[1] * 16, 4], 2) == (0, 11)
    assert cuts_by_work([0, *[1] * 16, 4], 4) == (0, 6, 11, 16)
    assert cuts_by_work([0, 1, 1, 1], 4) == (0, 1, 2, 3)


@needs_corpus
def test_hosts_of_nanotron_take_longer_in_pipelines_over_nodes(runs):
    own = [run for run in runs if run.source == "nanotron-ultrascale"]
    floors = {
        (run.tp, run.pp > 1 and run.tp > 1 and run.tp * run.pp * run.dp > 8): run.runner.operations for run in own
    }
    assert floors[8, True] > floors[4, True] > floors[2, True] > floors[1, False] == floors[8, False]


@needs_corpus
def test_heads_of_a_row_are_those_of_rows_as_wide_and_deep(runs):
    wide = [run for run in runs if run.source == "bloom-prequel" and run.parts[1].shape.output_width == 14_400]
    assert {run.parts[1].shape.heads for run in wide if run.parts[1].count == 80} == {96}


@needs_corpus
def test_steps_that_are_one_graph_exchange_beside_computation(runs):
    """By their recipes: those of Qwen3 on GB200 from one release on, never those of Kimi K2 or on H100."""
    graphed = {(run.model, run.gpus): set() for run in runs}
    for run in runs:
        if "experts" in run.group and run.runner.products == "float8" and "tokendrop" not in run.model:
            graphed[run.model, run.gpus].add(run.runner.operations == 0.0)
    assert graphed["Qwen3_235B_a22B", "GB200"] == {True, False}
    assert graphed["Kimi_K2", "GB300"] == graphed["Qwen3_30B_a3B", "H100"] == {False}
    own = [run for run in runs if (run.model, run.gpus) == ("Qwen3_235B_a22B", "GB200") and run.runner.products]
    sent = {run.runner.operations == 0.0: run.parts[1].sent.b for run in own if run.pp == 8}
    assert sent[True] == pytest.approx(0.2 * sent[False])


@needs_corpus
def test_tensor_parallel_messages_hide_where_recipes_say_so(runs):
    hidden = {(run.source, run.model, run.runner.products): run.runner.hidden for run in runs}
    bridge = "megatron-bridge-summary"
    # Of bytes in bf16: four fifths run beside products; a gather in FP8 has half, so a quarter of all are not sent.
    assert hidden[bridge, "LLAMA3.1_405B", "float8"] == hidden["nemo-24.07", "LLAMA2-70B", "float8"]
    assert hidden["nemo-24.07", "LLAMA2-70B", "float8"] == pytest.approx(1 - 0.2 * 0.75)
    assert hidden[bridge, "LLAMA3.1_405B", "float4"] == 0.0
    assert hidden["nemo-24.07", "GPT3-175B", "float8"] == 0.25
    experts = {(run.runner.products, run.runner.hidden) for run in runs if "experts" in run.group}
    assert experts == {(None, 0.0), ("float8", 0.25)}


@needs_corpus
def test_rows_in_eight_bits_are_cast_and_multiplied_as_their_scales_need(runs):
    """Read twice for a scale of the tensor itself, once where the scale is known before or is that of a few numbers."""
    cast, speed = {}, {}
    for run in runs:
        if run.runner.products == "float8":
            own = run.source, run.gpus, run.id in BY_ROWS
            speed.setdefault(own, set()).add(
                round(run.hardware.efficiency["float8"] / run.hardware.matmul_efficiency, 2)
            )
            cast.setdefault(own, set()).add(run.runner.cast_bytes)
    assert cast["llm-foundry", "H100", False] == cast["nemo-24.07", "H100", False] == {4}
    assert cast["megatron-bridge-summary", "H100", False] == cast["torchtitan", "H100", False] == {6}
    assert cast["megatron-bridge-summary", "B200", False] == {4, 6}
    # 0.645 of peak where bf16 reaches 0.65, 0.59 where it reaches 0.6; in MXFP8 0.95 of that.
    assert speed["nemo-24.07", "H100", False] == {0.99}
    assert speed["megatron-bridge-summary", "B200", False] == {0.98, 0.93}
    assert speed["torchtitan", "H100", True] == {0.78}  # 0.79 of 0.99


BY_ROWS = {f"torchtitan-05{number}" for number in (74, 75, 80, 81)}


@needs_corpus
def test_recipes_leave_to_the_host_what_is_in_no_graph(runs):
    left = {
        (run.model.split("_a")[0], run.gpus, run.pp, run.chunks): run.runner.operations
        for run in runs
        if run.group and "tokendrop" not in run.model
    }
    eager = left["Qwen3_235B", "B300", 8, 1]
    assert eager > 0.0
    assert left["Qwen3_235B", "GB200", 8, 1] == left["Qwen3_235B", "GB300", 4, 1] == eager / 2
    assert left["Qwen3_235B", "H100", 8, 4] == left["Qwen3_235B", "B300", 8, 4] == 1.8 * eager  # taken apart
    dropped = {(run.model, run.gpus): run for run in runs if "tokendrop" in run.model}
    assert dropped["Qwen3_235B_a22B (tokendrop)", "B200"].runner.operations == eager
    assert dropped["Qwen3_235B_a22B (tokendrop)", "GB200"].runner.operations == 0.0


@needs_corpus
def test_the_last_bucket_of_gradients_is_summed_alone(runs):
    (run,) = (run for run in runs if run.id == "internevo-0622")  # 512 GPUs, ZeRO-1 inside nodes
    whole, none = (predicted_seconds(replace(run, sums=replace(run.sums, bucket=size))) for size in (1e12, 0.0))
    half, weights = 2.0**29, sum(part.count * part.shape.parameters for part in run.parts)
    assert predicted_seconds(run) - none == pytest.approx((whole - none) * half / weights)


@needs_corpus
def test_table_of_runs_in_the_package_is_that_of_the_corpus(runs):
    by_id = {run.id: run for run in runs}
    assert {one.source for one in published_runs()} <= {*by_id}
    for one in published_runs()[::20]:
        run = by_id[one.source]
        assert (one.hardware, one.tp, one.pp, one.devices) == (
            run.gpus,
            run.tp,
            run.pp,
            run.tp * run.cp * run.pp * run.dp,
        )
        assert predicted_seconds(run) / run.seconds == pytest.approx(one.ratio, abs=0.01)  # two digits are written


@needs_corpus
def test_gathers_of_nanotron_cost_more_than_their_bytes(runs):
    """Of runs that differ in ZeRO alone, where tensor parallelism fills the nodes: ZeRO-1 is measured to be slower."""
    of_layout: dict[tuple[int, int], dict[str, Measured]] = {}
    for run in runs:
        if (run.source, run.model, run.tp, run.pp, run.group) == ("nanotron-ultrascale", "Llama 8B", 8, 1, ""):
            of_layout.setdefault((run.dp, run.microbatch), {})[run.zero] = run
    pairs = [own for (ranks, _), own in of_layout.items() if ranks == 32 and len(own) == 2]
    assert len(pairs) == 4
    assert all(own["all"].seconds > own["none"].seconds for own in pairs)

    def off(own: dict[str, Measured], sums: Sums) -> float:
        whole, sharded = (replace(own[zero], sums=sums) for zero in ("none", "all"))
        more = predicted_seconds(sharded) - predicted_seconds(whole)
        return abs(more - (sharded.seconds - whole.seconds))

    # A third of what is missing in the mean; the rest is in sums that overlap less than is taken.
    assert np.mean([off(own, SUMS["nanotron-ultrascale"]) for own in pairs]) < 0.75 * np.mean(
        [off(own, OVERLAPPED) for own in pairs]
    )
