"""Planning attention on a CPU: how long it takes, and how evenly it shares the work.

    python -m benchmarks.attention.attention_placement [--out FILE.json] [--draws N]

Three tables.

1. Time to plan a row of a million tokens in blocks of 128: per-block workloads from the mask's runs, placement, and
   both together, against the bound of 1 ms that Cornstarch states for placement alone (v1 4.3.2), and against the
   same greedy algorithm on Python's heapq. Included in "plan": from the mask's runs to the rank of every block. Not
   included: the mask's runs from the packed row (own column), and compiling on first use (own line).
2. Block tables of the same rows: time and size, against one byte per pair of blocks.
3. Maximal over mean load of each placement policy at 64k tokens. The loads are counts of key blocks to visit, exact for
   the mask; nothing here is a GPU measurement. Causal is the control: there zigzag is as good as anything.

Masks are drawn as thesis 3.5.4 names them: see rows.py.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.attention.clock import host_milliseconds
from benchmarks.attention.rows import build, draw_row
from benchmarks.machine import machine
from dilatant.attention.masks.blocks import BlockTable, block_table, block_workloads
from dilatant.attention.masks.placement import Placement, place_blocks

BOUND_MS = 1.0
KINDS = ("causal", "EP", "EE", "MP")
POLICIES = ("lpt", "zigzag", "contiguous")


def heapq_placement(work: list[int], num_ranks: int) -> list[int]:
    """Longest first with equal counts, as one writes it in Python."""
    heap = [(0, rank) for rank in range(num_ranks)]
    room = [-(-len(work) // num_ranks)] * num_ranks
    rank_of = [0] * len(work)
    for block in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, rank = heapq.heappop(heap)
        rank_of[block] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(heap, (load + work[block], rank))
    return rank_of


def first_use_seconds() -> dict[str, float]:
    """Seconds of the first plan in a fresh process: with nothing compiled, and with compiled code on disk."""
    program = (
        "import time; start = time.perf_counter()\n"
        "from dilatant.attention import RowLayout, block_workloads, document_causal, place_blocks\n"
        "place_blocks(block_workloads(document_causal(RowLayout.of_lengths([4096]))), 4)\n"
        "print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = [
            float(
                subprocess.run(
                    [sys.executable, "-c", program],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, "NUMBA_CACHE_DIR": folder},
                ).stdout
            )
            for _ in range(2)
        ]
    return {"compiling": seconds[0], "compiled_before": seconds[1]}


def measure_planning(tokens: int, repeats: int) -> list[dict]:
    results = []
    for kind in KINDS:
        row = draw_row(kind, tokens, seed=0)
        mask = build(kind, row)
        work = block_workloads(mask)
        listed = work.tolist()
        result = {
            "mask": kind,
            "tokens": tokens,
            "runs": mask.runs.start.size,
            "mask_from_row_ms": host_milliseconds(lambda row=row, kind=kind: build(kind, row), repeats),
            "workloads_ms": host_milliseconds(lambda mask=mask: block_workloads(mask), repeats),
        }
        for ranks in (8, 64, 256):
            placed = place_blocks(work, ranks)
            result[f"G{ranks}"] = {
                "place_ms": host_milliseconds(lambda ranks=ranks, work=work: place_blocks(work, ranks), repeats),
                "plan_ms": host_milliseconds(
                    lambda ranks=ranks, mask=mask: place_blocks(block_workloads(mask), ranks), repeats
                ),
                "heapq_place_ms": host_milliseconds(lambda ranks=ranks, work=listed: heapq_placement(work, ranks), 3),
                "gap": placed.gap,
                "counts_spread": int(np.ptp(placed.counts)),
            }
        results.append(result)
    return results


def measure_tables(tokens: int, repeats: int) -> list[dict]:
    results = []
    for kind in KINDS:
        mask = build(kind, draw_row(kind, tokens, seed=0))
        table = block_table(mask)
        turned = table.transposed()
        results.append(
            {
                "mask": kind,
                "tokens": tokens,
                "table_ms": host_milliseconds(lambda mask=mask: block_table(mask), repeats),
                "transposed_ms": host_milliseconds(lambda table=table: table.transposed(), max(3, repeats // 20)),
                "table_bytes": table.nbytes,
                "transposed_bytes": turned.nbytes,
                "exact": table.exact and turned.exact,
                "byte_per_pair_of_blocks": table.num_rows * table.num_columns,
                "partial_share": float(
                    table.partial_blocks.sum() / (table.partial_blocks.sum() + table.full_blocks.sum())
                ),
            }
        )
    return results


def needed_keys(table: BlockTable, placement: Placement) -> np.ndarray:
    """The key blocks that each rank's queries see at all: `[ranks, key blocks]`, from the table of the whole row."""
    rank = np.repeat(placement.rank_of_block, np.diff(table.offsets))
    opened = np.zeros((placement.num_ranks, table.num_columns + 1), dtype=np.int64)
    np.add.at(opened, (rank, table.start), 1)
    np.add.at(opened, (rank, table.start + table.length), -1)
    return np.cumsum(opened, axis=1)[:, :-1] > 0


def measure_balance(tokens: int, draws: int) -> list[dict]:
    results = []
    for kind in KINDS:
        for ranks in (8, 32):
            found: dict[str, list] = {policy: [] for policy in POLICIES}
            for seed in range(draws):
                mask = build(kind, draw_row(kind, tokens, seed))
                table = block_table(mask)
                work = table.full_blocks + table.partial_blocks
                for policy in POLICIES:
                    placed = place_blocks(work, ranks, policy)
                    held = np.zeros((ranks, work.size), dtype=bool)
                    held[placed.rank_of_block, np.arange(work.size)] = True
                    remote = (needed_keys(table, placed) & ~held).sum() / (~held).sum()
                    found[policy].append((placed.imbalance, remote))
            for policy, values in found.items():
                imbalance, remote = np.array(values).T
                results.append(
                    {
                        "mask": kind,
                        "ranks": ranks,
                        "policy": policy,
                        "max_over_mean": float(imbalance.mean()),
                        "worst_max_over_mean": float(imbalance.max()),
                        "remote_keys_needed": float(remote.mean()),
                    }
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    parser.add_argument("--draws", type=int, default=20, help="random masks per kind in the balance table")
    parser.add_argument("--repeats", type=int, default=200, help="repetitions of which the best time counts")
    arguments = parser.parse_args()

    report = {
        "machine": machine(),
        "planning": measure_planning(1 << 20, arguments.repeats),
        "tables": measure_tables(1 << 20, arguments.repeats),
        "balance": measure_balance(1 << 16, arguments.draws),
        "first_use_seconds": first_use_seconds(),
    }

    print("Planning 1M tokens in 8192 blocks, ms; plan = workloads from runs + lpt; bound 1 ms")
    print(f"{'mask':8}{'runs':>6}{'row->runs':>11}{'workloads':>11}", end="")
    print("".join(f"{f'G={g} lpt':>12}{'plan':>7}{'/bound':>8}{'heapq':>7}{'gap':>9}" for g in (8, 64, 256)))
    for result in report["planning"]:
        print(f"{result['mask']:8}{result['runs']:6}", end="")
        print(f"{result['mask_from_row_ms']:11.3f}{result['workloads_ms']:11.3f}", end="")
        for ranks in (8, 64, 256):
            part = result[f"G{ranks}"]
            print(f"{part['place_ms']:12.3f}{part['plan_ms']:7.3f}{part['plan_ms'] / BOUND_MS:8.2f}", end="")
            print(f"{part['heapq_place_ms']:7.2f}{part['gap']:9.5f}", end="")
        print()
    first = report["first_use_seconds"]
    print(f"first plan of a process: {first['compiled_before']:.2f} s, {first['compiling']:.1f} s if it must compile")

    print("\nBlock tables of the same rows")
    print(f"{'mask':8}{'ms':>8}{'kB':>8}{'transposed ms':>15}{'kB':>8}{'byte/pair kB':>14}{'partial':>9}{'exact':>7}")
    for result in report["tables"]:
        print(f"{result['mask']:8}{result['table_ms']:8.3f}{result['table_bytes'] / 1e3:8.0f}", end="")
        print(f"{result['transposed_ms']:15.3f}{result['transposed_bytes'] / 1e3:8.0f}", end="")
        print(f"{result['byte_per_pair_of_blocks'] / 1e3:14.0f}{result['partial_share']:9.1%}{result['exact']!s:>7}")

    print(f"\nMaximal over mean load at 64k tokens, {arguments.draws} draws: mean (worst), remote keys needed")
    print(f"{'mask':8}{'G':>4}" + "".join(f"{policy:>22}" for policy in POLICIES))
    for kind in KINDS:
        for ranks in (8, 32):
            print(f"{kind:8}{ranks:4}", end="")
            for result in report["balance"]:
                if (result["mask"], result["ranks"]) == (kind, ranks):
                    cell = f"{result['max_over_mean']:.3f} ({result['worst_max_over_mean']:.3f})"
                    print(f"{cell + format(result['remote_keys_needed'], '6.2f'):>22}", end="")
            print()

    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
