"""What a run that outlives its machines pays in every step: votes, heartbeats and hashes of gradients.

Trained: ranks of the Trainer itself, as one node, with the vote and without, in turns, so that noise of the machine
falls on both (see paced_training.py). The bar is 1 % of a step of 100 ms with eight ranks. While a vote is out the
first rank writes down what the step before was, which it does without a vote, too. Of eight, the first alone trains
and the others vote with it, so that two cores have time for a vote; --all lets all of them train.

Measured: the vote alone, of so many workers, one or several for each agent, likewise in turns. A step is a sleep, and
then all wait for each other as for gradients. Nobody has anything to write down. In both all processes share this
machine's cores, which on a cluster only the coordinator's part of the work does.

Simulated: the vote alone, of more nodes, or workers of a node, than there are cores here. Who collects votes is one
process, so a vote takes what one worker's takes, and for every other one what that process spends on its message, its
decision and its answer, all of which are measured, warm.

    python -m benchmarks.recovery.resilience --json benchmarks/results/resilience.json

Attacked (--crowd, alone): steps of a run at whose ports so many strangers are, beside those without (see crowd.py).

    python -m benchmarks.recovery.resilience --crowd 64 500 --json benchmarks/results/resilience_crowd.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.machine import machine
from benchmarks.recovery.paced_training import paced_training
from dilatant.comm.wire.link import WireLink
from dilatant.resilience.processes.messages import MESSAGES
from dilatant.resilience.processes.process import Child, ProcessStart
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import Order, Phase, Settings, Status, Task
from dilatant.resilience.worker.worker_link import WorkerLink

TOKEN = bytes(32)
HASHES = {f"language.{layer}": (layer + 1) * 0x123456789ABCDEF & (2**63 - 1) for layer in range(32)}
TURN_STEPS = 10
BAR, BAR_STEP_SECONDS = 0.01, 0.1
"""What votes may add to a step of eight ranks."""


def _work(port: int, index: int, barrier: Any, turns: int, pace: float, seconds: Any) -> None:
    """Turns of steps without and with the vote; their seconds go to `seconds`, if that is given."""
    link = WorkerLink(port, TOKEN, index, lambda generation: None)
    link.warm()
    link.await_rebuild(-1, 0, None)
    link.await_activation(0)
    voted = 0
    for turn in range(2 * turns):
        barrier.wait()
        began = time.perf_counter()
        for _ in range(TURN_STEPS):
            if turn % 2:
                link.begin(voted, 60.0)
            time.sleep(pace)
            barrier.wait()
            if turn % 2:
                link.propose(voted, HASHES)
                link.await_commit()
                voted += 1
        if seconds is not None:
            seconds.put((turn % 2, (time.perf_counter() - began) / TURN_STEPS))
    link.await_end()


def paired_steps(nodes: int, workers: int, turns: int, pace: float) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with the vote, turn by turn, with so many workers on each node."""
    from dilatant.resilience.processes.process import AGENT, COORDINATOR

    settings = Settings(lease_seconds=30.0, initial=nodes)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, folder))
        start = ProcessStart("127.0.0.1", coordinator.port, TOKEN.hex(), settings, workers=workers)
        agents = [Child(AGENT, with_values(start, node=f"node{node}")) for node in range(nodes)]
        barrier, seconds = context.Barrier(nodes * workers), context.Queue()
        processes = [
            context.Process(
                target=_work, args=(agent.port, index, barrier, turns, pace, None if node or index else seconds)
            )
            for node, agent in enumerate(agents)
            for index in range(workers)
        ]
        for process in processes:
            process.start()
        found = [seconds.get(timeout=300.0) for _ in range(2 * turns)]
        for process in processes:
            process.join(30.0)
        for child in (*agents, coordinator):
            child.close(5.0)
    return [each for votes, each in found if not votes], [each for votes, each in found if votes]


def train(ranks: int, trains: int, turns: int, sleep: float) -> dict[str, Any]:
    """What a vote adds to a step of so many ranks, of which all or one train."""
    with tempfile.TemporaryDirectory() as folder:
        without, voting = paced_training(Path(folder), ranks, trains, turns, TURN_STEPS, sleep)
    differences = [b - a for a, b in zip(without, voting)]
    base, added, error = (statistics.median(without), statistics.median(differences), error_of_median(differences))
    print(
        f"{trains} of {ranks} ranks train, on these cores: {base * 1e3:6.1f} ms a step, {added * 1e3:+5.2f} ms with "
        f"votes (standard error {error * 1e3:.2f} ms), {added / BAR_STEP_SECONDS:+.1%} of "
        f"{BAR_STEP_SECONDS * 1e3:.0f} ms; the bar is {BAR:.0%}",
        flush=True,
    )
    return {
        "ranks": ranks,
        "trains": trains,
        "sleep_seconds": sleep,
        "step_seconds": base,
        "added_seconds": added,
        "error_seconds": error,
        "share_of_bar_step": added / BAR_STEP_SECONDS,
        "without": without,
        "with": voting,
    }


def error_of_median(values: list[float], rounds: int = 2000) -> float:
    """Its standard error, by drawing the values again."""
    draw = random.Random(0)
    return statistics.stdev(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))


def decision_seconds(voters: int, rounds: int = 20) -> float:
    """Median of what the coordinator computes for a step of so many voters."""
    coordinator = Coordinator(Settings(initial=voters), None, 0.0)
    coordinator.start()
    nodes = [Status(f"n{index}", 1) for index in range(voters)]

    def say(**values: object) -> float:
        """Seconds of hearing that all nodes have changed like this."""
        for index, status in enumerate(nodes):
            nodes[index] = replace(status, serial=status.serial + 1, **values)
        began = time.perf_counter()
        for status in nodes:
            coordinator.hear(status, 0.0)
        return time.perf_counter() - began

    say()
    say(generation=1, phase=Phase.FENCED)
    say(phase=Phase.READY, ready_at=0)
    say(phase=Phase.RUNNING, base=1, hashes=HASHES)
    assert coordinator.task is Task.RUN
    seconds = [say(prepared=step, applied=step) for step in range(rounds)]
    assert coordinator.committed == rounds
    return statistics.median(seconds)


def message_seconds(rounds: int = 500) -> tuple[float, float]:
    """CPU seconds of receiving a vote and of sending the answer, for whoever does it."""
    ours, theirs = socket.socketpair()
    client = WireLink(ours, TOKEN, is_client=True, decoder=MESSAGES)
    server = WireLink(theirs, TOKEN, is_client=False, decoder=MESSAGES)
    vote = Status("node0", 1, generation=1, phase=Phase.RUNNING, prepared=5, applied=5, hashes=HASHES)
    order = Order("node0", 1, 1, Task.RUN, 1)
    received = sent = 0.0
    for _ in range(rounds):
        client.send(vote)
        began = time.thread_time()
        server.receive()
        received += time.thread_time() - began
        began = time.thread_time()
        server.send(order)
        sent += time.thread_time() - began
        client.receive()
    for each in (client, server):
        each.close()
    return received / rounds, sent / rounds


def hash_bytes_per_second() -> float:
    """Of fp32 gradients, in layers of 16 MiB."""
    import torch

    from dilatant.training.gradient_hashes import gradient_hashes

    gradients = {f"layer{index}": torch.randn(4 << 20) for index in range(8)}
    gradient_hashes(gradients, {})
    began = time.perf_counter()
    for _ in range(5):
        gradient_hashes(gradients, {})
    return 5 * 8 * (16 << 20) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layouts", nargs="+", default=["1x1", "1x8", "8x1"], help="nodes x workers on each; 1x1 always"
    )
    parser.add_argument("--turns", type=int, default=15, help=f"pairs of {TURN_STEPS} steps without and with votes")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step computes")
    parser.add_argument("--ranks", type=int, default=8, help="of which one trains; 0: nothing of this")
    parser.add_argument("--all", action="store_true", help="all of them train")
    parser.add_argument(
        "--sleep", type=float, default=0.085, help="seconds of a step that trains; about 0.05 with --all"
    )
    parser.add_argument("--crowd", type=int, nargs="+", help="strangers at each port; nothing else is measured")
    parser.add_argument("--crowd-seconds", type=float, default=15.0, help="of each window of steps; 0: none")
    parser.add_argument("--crowd-turns", type=int, default=4, help="how often each crowd comes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    if options.crowd:
        from benchmarks.recovery.crowd import alone, crowded

        seconds = options.crowd_seconds
        attacked: dict[str, Any] = {"coordinator_alone": alone(options.crowd, 6.0)}
        attacked |= crowded(options.crowd, seconds, options.crowd_turns) if seconds else {}
        if options.json:
            document = {"machine": machine(), "load_before": load, **attacked}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    trains = options.ranks if options.all else 1
    trained = train(options.ranks, trains, options.turns, options.sleep) if options.ranks else None
    measured = {}
    for layout in dict.fromkeys(["1x1", *options.layouts]):
        nodes, workers = map(int, layout.split("x"))
        without, voting = paired_steps(nodes, workers, options.turns, options.pace)
        added = statistics.median(b - a for a, b in zip(without, voting))
        base = statistics.median(without)
        measured[layout] = {"step_seconds": base, "added_seconds": added, "without": without, "with": voting}
        print(
            f"measured, {nodes} x {workers} workers on these cores: {base * 1e3:6.1f} ms a step, "
            f"{added * 1e3:+5.2f} ms with votes ({added / base:+.1%})",
            flush=True,
        )
    receive, send = message_seconds()
    print(f"a vote takes {receive * 1e6:.0f} us to receive, an answer {send * 1e6:.0f} us to send")
    of_node = max(0.0, measured["1x1"]["added_seconds"]) + 7 * (receive + send)
    share = of_node / options.pace
    print(f"simulated, 8 workers of a node with cores of their own: {of_node * 1e3:+6.2f} ms ({share:.1%})")
    simulated = {}
    of_one = decision_seconds(1)  # which is in what one node's vote was measured to take
    for voters in (8, 32, 64, 128, 256):
        decision = decision_seconds(voters) - of_one
        added = max(0.0, measured["1x1"]["added_seconds"]) + (voters - 1) * (receive + send) + decision
        simulated[voters] = {"decision_seconds": decision, "added_seconds": added}
        share = added / options.pace
        print(f"simulated, {voters:3} nodes with cores of their own: {added * 1e3:+6.2f} ms ({share:.1%})")
    rate = hash_bytes_per_second()
    print(f"hashes of gradients: {rate / 1e9:.1f} GB/s")
    if options.json:
        document = {
            "machine": machine(),
            "load_before": load,
            "trained": trained,
            "pace_seconds": options.pace,
            "measured": measured,
            "receive_seconds": receive,
            "send_seconds": send,
            "simulated": simulated,
            "simulated_eight_workers_seconds": of_node,
            "hash_bytes_per_second": rate,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
