"""The agreement of every step: how long small values take from all ranks to all, against Gloo's own collective.

Ranks of this machine gather 16 numbers of 8 bytes, our way (`AsyncAllGather`) and by Gloo's all-reduce in a ring, in
turn in the same processes. More ranks than cores share the cores, both ways alike.

    python -m benchmarks.ranks.agreement --json benchmarks/results/agreement.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import machine
from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather
from dilatant.comm.launch import Worker, launch_local


def measure(worker: Worker, rounds: int) -> dict[str, float]:
    """Median seconds of one agreement each way, as seen by this rank."""
    torch.set_num_threads(1)
    comm = Comm(worker.store, worker.rank, worker.size)
    values = torch.arange(16)
    ways: dict[str, Callable[[], object]] = {
        "ring": lambda: comm.world.sum_(values.clone()).wait(),
        "ours": lambda: AsyncAllGather(comm, values, "a benchmark").wait(),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, agree in ways.items():
            comm.world.barrier()
            began = time.perf_counter()
            agree()
            seconds[way].append(time.perf_counter() - began)
    comm.world.barrier()
    comm.close()
    return {way: statistics.median(times) for way, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    print(f"{'ranks':>5} {'ring':>9} {'ours':>9} {'ratio':>6}")
    for ranks in options.ranks:
        of_ranks = launch_local(measure, ranks, options.rounds)
        ring, ours = (statistics.median(one[way] for one in of_ranks) for way in ("ring", "ours"))
        runs.append({"ranks": ranks, "ring_seconds": ring, "ours_seconds": ours, "ratio": ours / ring})
        print(f"{ranks:5} {ring * 1e3:6.2f} ms {ours * 1e3:6.2f} ms {ours / ring:6.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
