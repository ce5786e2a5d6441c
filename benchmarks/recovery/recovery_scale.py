"""What a run of a thousand nodes asks of its coordinator, of every rank's planning and of the data set's index.

    python -m benchmarks.recovery.recovery_scale [--agents N] [--nodes N] [--samples N] [--measured N] [--folder FOLDER]
        [--only PART] [--json FILE]

1. agents: light agents (the protocol's own state machine, over real sockets on loopback, without workers) on one
   coordinator process: its CPU for heartbeats, the seconds of a vote, and, after the loss of a node, the seconds until
   the last agent is fenced, has the order to rebuild, and runs again; the same for a node that joins during a loss; its
   memory. Goal: 2 s for a loss.
2. planning: seconds of a membership after a loss and after a join, and of a step (assignment, schedule, simulation and
   routes of one rank) for as many replicas and 8 samples each. Goal: 50 ms a rank.
3. copies: bytes a second that a recovery's copy takes besides its transfer, on one core at each end.
4. index: finding and measuring samples of 100 bytes; then the index of so many distinct ones, whose sizes are drawn:
   finding them, storing their sizes, opening it again, bytes a sample on disk, and the memory of a rank that has
   opened it.

Everything is measured on this machine; agents and coordinator share its cores. Planning and copies are measured in
seconds of a core, so that other work on the machine counts less. The last lines name what takes most,
and so limits ten times as many.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.recovery.light_agents import DRIVERS, TOKEN, drive, last_of
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import Settings, Task

VOTES, BEAT_SECONDS, LOSSES = 20, 10.0, 3
LOSS_GOAL, PLAN_GOAL = 2.0, 0.05


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def coordination(count: int) -> dict[str, Any]:
    """Measure one coordinator with `count` light agents."""
    from dilatant.resilience.processes.process import COORDINATOR, Child, ProcessStart

    settings = Settings(initial=count, join_seconds=0.0)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, folder))
        pid, heard = coordinator.process.pid, context.Queue()
        votes, lost = context.Value("q", 0), context.Value("q", -1)
        each, news, joins, now = -(-count // DRIVERS), context.Queue(), context.Event(), context.Event()
        now.set()
        crowds = [(first, min(each, count - first), heard, now) for first in range(0, count, each)]
        drivers = [
            context.Process(
                target=drive, args=(first, own, coordinator.port, settings, votes, to, lost, begin), daemon=True
            )
            for first, own, to, begin in [*crowds, (count, 1, news, joins)]
        ]
        began = time.monotonic()
        for driver in drivers:
            driver.start()
        begun = last_of(heard, Task.RUN, 1) - began
        before, since = cpu_seconds(pid), time.monotonic()
        time.sleep(BEAT_SECONDS)
        beats = (cpu_seconds(pid) - before) / (time.monotonic() - since)
        before, since = cpu_seconds(pid), time.monotonic()
        votes.value = VOTES
        voted = last_of(heard, Task.RUN, 1, VOTES) - since
        voting = cpu_seconds(pid) - before
        losses, at, joined = [], 0.0, 0.0
        for number in range(LOSSES + 1):
            lost.value, generation = number, number + 2
            while (first := heard.get(timeout=60.0))[0] != "lost":
                pass
            at = first[3]
            if number == LOSSES:
                joins.set()
            losses.append(
                {task.value: last_of(heard, task, generation) - at for task in (Task.FENCE, Task.REBUILD, Task.RUN)}
            )
        votes.value += 1  # where it was too late for that generation, it joins at the end of a step
        while not joined:
            what, generation, _, seconds = news.get(timeout=60.0)
            joined = seconds if what == Task.RUN else 0.0
        if generation > LOSSES + 2:
            joined = max(joined, last_of(heard, Task.RUN, generation))
        loss_and_join = {**losses.pop(), "all with the new one": joined - at}
        memory = resident_bytes(pid)
        for driver in drivers:
            driver.terminate()
            driver.join()
        coordinator.close()
    found = {
        "agents": count,
        "seconds_to_begin": begun,
        "heartbeat_cpu_share": beats,
        "vote_seconds": voted / VOTES,
        "vote_cpu_seconds": voting / VOTES,
        "losses": losses,
        "loss_and_join": loss_and_join,
        "memory_bytes": memory,
    }
    slowest = max(times[Task.RUN.value] for times in losses)
    parts = ", ".join(f"{name} {max(times[name] for times in losses):.2f} s" for name in losses[0])
    print(f"{count:,} agents: begun after {begun:.2f} s; heartbeats take {beats:.1%} of a core")
    print(f"  a vote takes {1e3 * voted / VOTES:.0f} ms, and {1e3 * voting / VOTES:.0f} ms of the coordinator's core")
    print(f"  a loss, until the last agent has the order (slowest of {LOSSES}): {parts}; goal {LOSS_GOAL:g} s")
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in loss_and_join.items())
    print(f"  a loss while another joins: {parts}")
    print(f"  memory of the coordinator: {memory / 2**20:.0f} MiB", flush=True)
    return found | {"loss_seconds": slowest}


RUNS = 8
"""The first one is not counted."""


def milliseconds(function: Callable[[int], Any]) -> float:
    """Return the median of this process's time on a core over the numbers of runs."""
    found = []
    for number in range(RUNS):
        began = time.process_time()
        function(number)
        found.append(1e3 * (time.process_time() - began))
    return statistics.median(found[1:])


@dataclass(frozen=True)
class Sized:
    """A sample, as planning a step sees it."""

    sizes: dict[str, int]
    draw: int


def planning(nodes: int) -> dict[str, Any]:
    """Measure membership planning on `nodes` nodes, and a step of as many replicas."""
    import numpy as np

    from dilatant.config.degrees import Degrees
    from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
    from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner
    from dilatant.plan.templates.templates import LayerMemory

    layers = {"vision": 27, "language": 34}
    total = sum(layers.values())
    draw = np.random.default_rng(0)
    seconds = (0.02 + 0.002 * draw.random(total)).tolist()
    costs = ChainCosts(
        layers=layers,
        feeds={"vision": ("language",), "language": ()},
        recompute=dict.fromkeys(layers, ()),
        degrees={name: {1: Degrees()} for name in layers},
        seconds={1: seconds},
        memory=LayerMemory({1: [1.0] * total}, {1: [0.05] * total}, total / 3.0, 1),
        layer_bytes=[10**9] * total,
        devices=1,
        num_microbatches=8 * nodes,
        fault_tolerance=2,
        bytes_per_second=1e9,
    )
    planner = MembershipPlanner(costs)
    began = time.perf_counter()
    first = planner.first(nodes)
    first_seconds = time.perf_counter() - began
    survivors = {rank: rank - (rank > 5) for rank in range(nodes) if rank != 5}
    everyone = {rank: rank for rank in range(nodes)}
    lost = milliseconds(lambda _: planner.next(first.plan, survivors, range(nodes - 1)))
    joined = milliseconds(lambda _: planner.next(first.plan, everyone, range(nodes + 1)))
    print(
        f"membership of {nodes:,} nodes: first {first_seconds:.2f} s (templates included), after a loss {lost:.0f} ms, "
        f"after a join {joined:.0f} ms; goal {1e3 * PLAN_GOAL:.0f} ms"
    )
    document = document_milliseconds(planner, first.plan, nodes)
    parts = ", ".join(f"{name} {value:.0f} ms" for name, value in document.items())
    print(f"  the plan of a generation with the costs of its steps, in the store: {parts}")
    step = step_milliseconds(
        Plan((UnitPlan("language", tuple(Replica((Stage(0, 2, (rank,)),)) for rank in range(nodes)), ()),)), nodes
    )
    parts = ", ".join(f"{name} {value:.0f} ms" for name, value in step.items())
    print(f"a step of {nodes:,} replicas and {8 * nodes:,} samples, on one rank: {parts}", flush=True)
    return {
        "nodes": nodes,
        "first_seconds": first_seconds,
        "loss_milliseconds": lost,
        "join_milliseconds": joined,
        "document_milliseconds": document,
        "step_milliseconds": step,
    }


def document_milliseconds(planner: Any, plan: Any, nodes: int) -> dict[str, float]:
    """Milliseconds of reading the plan before, planning and writing on the first rank, and of reading on the others."""
    from dilatant.plan.costs.step_costs import token_costs
    from dilatant.planning.layout import TrainingPlan
    from dilatant.resilience.worker.generation_plan import next_plan, publish_plan

    class Entries(dict[str, Any]):
        """A store of this process."""

        set = dict.__setitem__

    costs = token_costs(plan, (True,) * len(plan.stages()))
    planned, store = TrainingPlan(plan, 8, "1f1b", "balanced", None, costs, chain=planner.costs), Entries()
    names = tuple(f"n{number:05}" for number in range(nodes))
    left = [name for name in names if name != "n00005"]
    publish_plan(store, Rebuild("", 1, 1, Task.REBUILD, 1, names, (1,) * nodes), planned)  # type: ignore[arg-type]
    (text,) = store.values()
    written = json.loads(text)["plan"]
    return {
        "read and planned": milliseconds(lambda _: next_plan(planner, planned, text, left, [1] * len(left))),
        "written": milliseconds(lambda _: planned.to_json(indent=None)),
        "read by others": milliseconds(lambda _: TrainingPlan.from_json(written)),
    }


def step_milliseconds(plan: Any, nodes: int) -> dict[str, float]:
    """Milliseconds of planning a step on one rank, in all and by part."""
    import numpy as np

    from dilatant.models.core.unit import ModelGraph
    from dilatant.plan.costs.step_costs import token_costs
    from dilatant.runtime.routes import derive_routes
    from dilatant.runtime.step.cost_correction import CostCorrection
    from dilatant.runtime.step.step_planner import StepPlanner
    from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
    from dilatant.schedule.families.families import one_f_one_b
    from dilatant.schedule.packed import cut_pieces
    from dilatant.schedule.simulator.graph import build
    from dilatant.schedule.simulator.predict import time_step
    from dilatant.schedule.trainability import all_trainable

    draw = np.random.default_rng(0)
    steps = [np.exp(draw.normal(6.0, 0.8, 8 * nodes)).astype(np.int64) + 1 for _ in range(RUNS)]
    samples = [[Sized({"language": int(count)}, number) for number, count in enumerate(tokens)] for tokens in steps]
    trains, microbatching = all_trainable(plan), Microbatching(8)
    costs = CostCorrection(plan, token_costs(plan, trains.backward))
    graph = ModelGraph(("language",), {"language": ()}, "language")
    planner = StepPlanner(plan, trains, graph, microbatching, costs, 0)
    whole = milliseconds(lambda run: planner.plan_step(samples[run], 0))
    origin = costs.origin
    work = [origin.workload({"language": tokens.astype(np.float64)}) for tokens in steps]
    assigned = [assign_step(plan, origin, each, microbatching, "language") for each in work]
    schedules = [one_f_one_b(plan, each, trains) for each in assigned]
    built = [build(plan, assignment, schedule) for assignment, schedule in zip(assigned, schedules)]
    timed = [time_step(each, origin, workload) for each, workload in zip(built, work)]
    backward = {index for index, flag in enumerate(trains.backward) if flag}
    cut_pieces.cache_clear()  # of which every step has others
    return {
        "all": whole,
        "assignment": milliseconds(lambda run: assign_step(plan, origin, work[run], microbatching, "language")),
        "schedule": milliseconds(lambda run: one_f_one_b(plan, assigned[run], trains)),
        "graph": milliseconds(lambda run: build(plan, assigned[run], schedules[run])),
        "simulation": milliseconds(lambda run: time_step(built[run], origin, work[run])),
        "routes": milliseconds(lambda run: derive_routes(built[run], 0, backward, timed[run].durations)),
    }


def copies() -> dict[str, Any]:
    """Measure what a copy of state takes at both ends, without the connection between them."""
    import torch

    from dilatant.planning.memberships import HANDLED_BYTES_PER_SECOND
    from dilatant.resilience.state_transfer import pack, unpack

    sent = [torch.randn(1 << 20) for _ in range(16)]
    received = [torch.empty_like(tensor) for tensor in sent]
    count = sum(tensor.nbytes for tensor in sent)
    packing = count / milliseconds(lambda _: pack(sent)) * 1e3
    packed = pack(sent)
    unpacking = count / milliseconds(lambda _: unpack(packed, 0, received)) * 1e3
    both = 1.0 / (1.0 / packing + 1.0 / unpacking)
    print(
        f"a copy: packed and hashed at {packing / 1e9:.2f} GB/s, checked and unpacked at {unpacking / 1e9:.2f} GB/s, "
        f"together {both / 1e9:.2f}; plans count with {HANDLED_BYTES_PER_SECOND / 1e9:.2f}",
        flush=True,
    )
    return {"packed_bytes_per_second": packing, "unpacked_bytes_per_second": unpacking, "bytes_per_second": both}


def write_samples(path: Path, count: int) -> None:
    """Write distinct samples of 100 bytes."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            file.write(f'{{"question": "what is {number:010}?", "answer": "{"x" * 44}"}}\n')


def index(samples: int, measured: int, folder: Path) -> dict[str, Any]:
    """Measure the index of a JSON Lines file of `measured` samples; then of `samples` distinct ones: finding them,
    storing their sizes, and opening all of it again. These sizes are drawn, since measuring takes as long for each."""
    import numpy as np

    from dilatant.config import DataSource
    from dilatant.data.cache import SETTLED_NS, open_cache
    from dilatant.data.index.measure import SampleMeasurements
    from dilatant.data.index.sizes import _arrays, _entry, blend_sizes
    from dilatant.data.order.blend import Blend, open_blend
    from dilatant.data.text.chat import chat_tokenizer
    from dilatant.data.text.encoding import Encoding
    from dilatant.data.text.tokenizer import byte_tokenizer

    encoding, kept = Encoding(chat_tokenizer(byte_tokenizer())), list[Any]()

    def opened(name: str) -> float:
        began = time.perf_counter()
        blend = open_blend([DataSource(path=str(folder / f"{name}.jsonl"))], cache_dir=folder / name)
        assert isinstance(blend, Blend)
        kept[:] = [(blend, blend_sizes(blend, encoding, cache_dir=folder / name, workers=0))]
        return time.perf_counter() - began

    for name, count in (("few", measured), ("all", samples)):
        write_samples(folder / f"{name}.jsonl", count)
    core = time.process_time()
    cold = opened("few")  # in this process: workers divide it by their number
    core = time.process_time() - core
    began = time.perf_counter()
    blend = open_blend([DataSource(path=str(folder / "all.jsonl"))], cache_dir=folder / "all")
    assert isinstance(blend, Blend)
    assert len(blend) == samples
    scanned = time.perf_counter() - began
    numbers = np.random.default_rng(0).integers(1, 4096, (len(encoding.unit_names) + 2, samples))
    began = time.perf_counter()
    open_cache(folder / "all").kept(*_entry(blend.readers[0], encoding), partial(_arrays, SampleMeasurements(numbers)))
    stored = time.perf_counter() - began
    del blend, numbers
    kept.clear()
    gc.collect()
    before = resident_bytes(os.getpid())
    time.sleep(2 * SETTLED_NS / 1e9)
    opened("all")  # the files are checked, and marked as whole
    warm = min(opened("all") for _ in range(3))
    gc.collect()
    memory = resident_bytes(os.getpid()) - before
    on_disk = sum(file.stat().st_size for file in (folder / "all").rglob("*") if file.is_file())
    print(
        f"index: {measured:,} samples measured in {cold:.1f} s ({1e6 * core / measured:.0f} us of a core for each); "
        f"{samples:,} distinct ones: found in {scanned:.1f} s, their sizes stored in {stored:.1f} s, opened again in "
        f"{1e3 * warm:.1f} ms; {on_disk / samples:.1f} bytes a sample on disk, {memory / samples:.1f} in the memory of "
        f"a rank ({memory / 2**20:.0f} MiB)",
        flush=True,
    )
    return {
        "samples": samples,
        "measured": measured,
        "cold_seconds": cold,
        "core_microseconds_per_sample": 1e6 * core / measured,
        "scanned_seconds": scanned,
        "stored_seconds": stored,
        "warm_seconds": warm,
        "disk_bytes_per_sample": on_disk / samples,
        "memory_bytes": memory,
    }


def limits(found: dict[str, Any]) -> list[str]:
    """Say for each part what takes most, which ten times as many would multiply by about ten."""
    lines = []
    if (agents := found.get("agents")) is not None:
        shares = {
            "votes, of which the coordinator decides one at a time": agents["vote_seconds"],
            "a loss, whose orders name all members to each": agents["loss_seconds"] / 10,
            "heartbeats": agents["heartbeat_cpu_share"] / 10,
        }
        lines.append(f"coordination: {max(shares, key=shares.__getitem__)}")
    if (plans := found.get("planning")) is not None:
        parts = {name: value for name, value in plans["step_milliseconds"].items() if name != "all"}
        largest = max(parts, key=parts.__getitem__)
        membership = max(plans["loss_milliseconds"], plans["join_milliseconds"])
        lines.append(f"planning: membership {membership:.0f} ms; of a step the {largest} ({parts[largest]:.0f} ms)")
    if (data := found.get("index")) is not None:
        lines.append(f"index: measuring, {data['core_microseconds_per_sample']:.0f} us of a core for each sample")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--measured", type=int, default=50_000, help="samples whose sizes are measured")
    parser.add_argument("--folder", type=Path, help="where the data set is written, below which it is deleted again")
    parser.add_argument("--only", choices=("agents", "planning", "copies", "index"))
    parser.add_argument("--json", type=Path, help="file of results; parts that are not measured now are kept")
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "agents": lambda: coordination(options.agents),
        "planning": lambda: planning(options.nodes),
        "copies": copies,
    }
    before = options.json.read_text(encoding="utf-8") if options.json and options.json.exists() else "{}"
    found: dict[str, Any] = {**json.loads(before), "machine": machine()}
    for name, measure in parts.items():
        if options.only in (None, name):
            found[name] = measure()
    if options.only in (None, "index"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found["index"] = index(options.samples, min(options.measured, options.samples), Path(folder))
    print("What limits ten times as many:")
    for line in limits(found):
        print(f"  {line}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
