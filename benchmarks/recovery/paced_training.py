"""Steps of the real Trainer that are committed by votes, beside steps of the same run that are not.

Replicas of a small model train as one node under an agent and a coordinator; the first rank writes metrics.jsonl,
TensorBoard's events and the live line. Their block sleeps (`small_pipelines.pace`), so that ranks outnumber cores.
Turns of steps at a gate that votes, and at one that stands open, alternate, so that noise falls on both. A step counts
from its beginning to that of the next one: what a rank does between steps is in it.

Or the first rank alone trains, and the others only wait for it, as for gradients, and vote: eight Trainers keep two
cores busy for most of a step of 100 ms, and what that takes hides what a vote does.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.planning.small_pipelines import pace
from dilatant.comm import fork_server
from dilatant.comm.launch import Worker, launch_local, local_worker
from dilatant.config.config import Config, parse_config
from dilatant.planning.layout import TrainingPlan
from dilatant.report.run_folder import RunFolder
from dilatant.resilience.processes.process import AGENT, COORDINATOR, Child, ProcessStart
from dilatant.resilience.protocol.values import Settings
from dilatant.resilience.worker.worker_link import WorkerLink
from dilatant.training.commit import RunMembership
from dilatant.training.gradient_hashes import gradient_hashes, owned_gradients
from dilatant.training.prepare import prepare
from dilatant.training.rank import train_to_end
from dilatant.training.stop_signal import StopSignal
from dilatant.training.trainer import Trainer

TOKEN = bytes(32)
WARM_UP_STEPS = 10


def _nobody() -> None:
    """To wait for."""


class _EveryOtherTurn:
    """A gate that votes in every other turn, with numbers of its own, and stands open between. began: when steps did.
    trainer: the one at it, if that is one. meet: waits for ranks that do not train."""

    def __init__(self, link: WorkerLink, turn_steps: int, meet: Callable[[], object]) -> None:
        self.began: list[float] = []
        self.trainer: Trainer | None = None
        self._meet = meet
        self._link = link
        self._turn_steps = turn_steps
        self._votes = False
        self._voted = 0

    def begin(self, step: int, limit_seconds: float) -> None:
        self.began.append(time.perf_counter())
        self._votes = step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) // self._turn_steps % 2 == 1
        if self._votes:
            self._link.begin(self._voted, limit_seconds)

    def slow(self, times: float) -> None:
        pass  # they slow each other, on the same cores

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        self._meet()
        if self._votes:
            # The trainer has hashed, also where the gate stands open: once more is what only a vote should take.
            if self.trainer is not None:
                gradient_hashes(owned_gradients(self.trainer.runtime.owned), {})
            self._link.propose(self._voted, hashes)

    def await_commit(self) -> None:
        if self._votes:
            self._link.await_commit()
            self._voted += 1


def config_of(folder: Path, ranks: int, steps: int) -> Config:
    """One narrow block, whole on every rank: what a step computes is mostly Python."""
    messages = [{"role": "user", "content": "Even or odd?"}, {"role": "assistant", "content": "even"}]
    lines = [json.dumps({"id": f"{number}", "messages": messages}) for number in range(64)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    language = {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True, **width}
    train = {"steps": steps, "global_batch_size": ranks, "save_steps": None, "zero": "none", "device": "cpu"}
    tree = {
        "output_dir": "run",
        "model": {"language_model": {"tokenizer": "bytes", "config": language}},
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 64, "workers": 0},
        "train": train,
        "plan": {"correct_costs": False},  # else samples move away from ranks that others slow
        "parallel": {"units": {"language": {"replicas": ranks}}, "microbatches": 1},
    }
    return parse_config(tree, base=folder)


def _linked(port: int, index: int) -> WorkerLink:
    link = WorkerLink(port, TOKEN, index, lambda generation: None)
    link.warm()
    link.await_rebuild(-1, 0, None)
    link.await_activation(0)
    return link


def _vote(port: int, index: int, steps: int, turn_steps: int, barrier: Any) -> None:
    """A rank that does not train."""
    link = _linked(port, index)
    gate = _EveryOtherTurn(link, turn_steps, barrier.wait)
    for step in range(steps):
        gate.begin(step, 60.0)
        gate.propose(step, {})
        gate.await_commit()
    link.await_end()


def _train(
    worker: Worker,
    config: Config,
    plan_json: str,
    port: int,
    pace_seconds: float,
    turn_steps: int,
    meet: Callable[[], object] = _nobody,
) -> list[float]:
    """When steps began on this rank."""
    planned = TrainingPlan.from_json(plan_json)
    prepared = prepare(config, planned)
    sizes = prepared.samples.train_sizes
    assert sizes is not None
    link = _linked(port, worker.rank)
    folder, gate = RunFolder(config.output_dir), _EveryOtherTurn(link, turn_steps, meet)
    membership = RunMembership(1, (0,) * worker.size, gate=gate, keeps_gradients=config.resilience.salvage)
    given = config, prepared.samples, prepared.model, planned, worker, folder.checkpoints, membership
    trainer = gate.trainer = Trainer(*given)
    # As long again as in the forward for each of the two gradients in the backward; all samples are alike.
    pace(prepared.model, pace_seconds / (3 * int(sizes.tokens[0].sum())))
    try:
        with StopSignal() as stop:
            train_to_end(config, trainer, folder, "nothing", stop)
        link.await_end()
        return gate.began
    finally:
        trainer.close()
        folder.close()


def paced_training(
    folder: Path, ranks: int, trains: int, turns: int, turn_steps: int, pace_seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with the vote, turn by turn, of so many ranks on one node. trains: how many of them
    do, all or the first, whose block sleeps for `pace_seconds` of a step. folder: for the run."""
    steps = WARM_UP_STEPS + 2 * turns * turn_steps + 1
    config = config_of(folder, trains, steps)
    planned = prepare(config).planned.to_json()
    settings = Settings(lease_seconds=30.0, initial=1)
    coordinator = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, str(folder)))
    start = ProcessStart("127.0.0.1", coordinator.port, TOKEN.hex(), settings, str(folder), "node0", ranks)
    agent = Child(AGENT, start)
    fork_server.warm_up()
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(1 + ranks - trains)
    voters = [
        context.Process(target=_vote, args=(agent.port, index, steps, turn_steps, barrier))
        for index in range(trains, ranks)
    ]
    given = config, planned, agent.port, pace_seconds, turn_steps
    try:
        for voter in voters:
            voter.start()
        if trains == 1:
            began = _train(local_worker(), *given, barrier.wait)
        else:
            began, *_ = launch_local(_train, ranks, *given)
        for voter in voters:
            voter.join(30.0)
    finally:
        for voter in voters:
            voter.kill()
        for child in (agent, coordinator):
            child.close(5.0)
    found: tuple[list[float], list[float]] = [], []
    for turn in range(2 * turns):
        first = WARM_UP_STEPS + turn * turn_steps
        found[turn % 2].append((began[first + turn_steps] - began[first]) / turn_steps)
    return found
