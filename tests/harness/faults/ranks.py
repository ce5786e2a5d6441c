"""Ranks that train a tiny model, each under its own agent, and a coordinator that admits new nodes at once; visitors
join as members and leave before they have done their part."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import yaml
from msgspec.structs import replace

from dilatant.comm.comm import Comm
from dilatant.comm.fork_server import RANK_PRELOAD
from dilatant.comm.launch import Worker
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import connect as connect_store
from dilatant.config.config import load_config
from dilatant.planning.layout import TrainingPlan
from dilatant.report.metrics import StepMetrics
from dilatant.report.run_folder import last_step
from dilatant.resilience.processes.coordinator_process import COMMIT, EVENTS, known_record
from dilatant.resilience.processes.messages import Seat, connect
from dilatant.resilience.processes.process import AGENT, COORDINATOR, Child, ProcessStart
from dilatant.resilience.protocol.values import Order, Phase, Settings, Status, Task
from dilatant.resilience.worker import rank as rank_module
from dilatant.resilience.worker.rank import FOLDER, ResilientRank
from dilatant.resilience.worker.worker_link import WorkerLink
from dilatant.training.checkpoints.starting_point import StartingPoint as StartingPoint
from dilatant.training.prepare import prepare
from dilatant.training.rank import Observer
from dilatant.training.trainer import Trainer
from harness.patience import HANG_SECONDS

TOKEN = b"of ranks under test, and no other"
DYING_STEP = 5
LATER_SECONDS = 0.3
"""Value of `rank.LATER_SECONDS` in these ranks."""
Leaves = Literal["fenced", "rebuilding", "joined"]
"""Point at which a visitor leaves: fenced, ordered to rebuild, or joined while ranks build their groups."""
Dies = Literal["with its vote out", "before it catches up", "out of memory", "broken"]
"""Point at which a rank kills itself: after its vote, when others commit the step but neither this step nor the one
before is logged; or before it logs the steps that another rank did not. "out of memory", "broken": it does not, but
builds its part in no generation after the first, for lack of memory or because of a bug."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that a process holds."""

    files: int
    threads: int
    mebibytes: float


class Visitor:
    """A node that asks to join a run and does not train."""

    def __init__(self, coordinator: int, store: int) -> None:
        self._link = connect("127.0.0.1", coordinator, TOKEN)
        self._store = store
        self._status = Status(f"visitor{secrets.token_hex(4)}", 1)
        self._comm: Comm | None = None
        self._link.send(self._status)

    def take_part(self, leaves: Leaves) -> int:
        """Take part up to the point `leaves`; return the generation at that point."""
        while True:
            order, own = self._link.receive(), self._status
            if not isinstance(order, Order) or order.generation < own.generation:
                continue
            if order.task is Task.FENCE and order.generation > own.generation:
                if leaves == "fenced":
                    return order.generation
                own = replace(own, serial=own.serial + 1, generation=order.generation, phase=Phase.FENCED)
                self._status = own
                self._link.send(own)
            elif order.task is Task.REBUILD:
                if leaves == "joined":
                    store = connect_store("127.0.0.1", self._store, TOKEN, on_one_machine=True)
                    rank, size = order.members.index(own.node), len(order.members)
                    self._comm = Comm(store, rank, size, order.generation, timeout_seconds=HANG_SECONDS)
                return order.generation

    def leave(self) -> None:
        self._link.close()
        if self._comm is not None:
            self._comm.close()


class Ranks:
    """A run in `folder` with `size` copies of the model; call `close`. config: of the same run in one process. workers:
    data workers. guests: visitors that the run waits for at its start. dying: nodes whose ranks kill themselves.
    adapted: changes the plan. budget: most weights that a rank holds; one with more runs out of memory."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        size: int,
        workers: int = 0,
        guests: int = 0,
        dying: Mapping[str, Dies] = MappingProxyType({}),
        adapted: Callable[[TrainingPlan], TrainingPlan] = lambda planned: planned,
        budget: int | None = None,
    ) -> None:
        tree = {**config, "output_dir": str(folder / "run"), "data": {**config["data"], "workers": workers}}
        tree["parallel"] = {
            "units": {"language": {"replicas": min(size, 4)}},  # of a batch of eight
            "colocated": {"vision": "language"},
            "microbatches": 2,
        }
        tree["resilience"] = {"enabled": True}
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(tree), encoding="utf-8")
        self.plan = adapted(prepare(load_config(self._config)).planned).to_json()
        self._size = size
        self._dying = dying
        self._budget = budget
        self._folder = folder / "run" / FOLDER
        self._folder.mkdir(parents=True)
        self._settings = Settings(lease_seconds=HANG_SECONDS, join_seconds=0.0, initial=size + guests)
        self._store = StoreServer("127.0.0.1", 0, TOKEN)
        self._coordinator = Child(COORDINATOR, self._start(0))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(RANK_PRELOAD))
        self._nodes: dict[str, tuple[Child, Any]] = {}
        self._added = 0
        for _ in range(size):
            self.add()

    def add(self) -> str:
        """Start a node with one rank; return its name."""
        name = f"node{self._added}"
        index = self._added % self._size
        self._added += 1
        agent = Child(AGENT, dataclasses.replace(self._start(self._coordinator.port), node=name))
        arguments = (str(self._config), self.plan, self._store.port, name, agent.port, index, self._size)
        fails = self._dying.get(name), self._budget
        process = self._context.Process(target=_train, args=(*arguments, *fails))
        process.start()
        self._nodes[name] = agent, process
        return name

    def lose_late(self, name: str) -> int:
        """Call `lose` once the others have done all that they can do of a step without that rank. The wait before skips
        the first step of a generation, during which ranks still agree on the next."""
        time.sleep(0.5)
        pids = [process.pid for other, (_, process) in self._nodes.items() if other != name]
        os.kill(self._nodes[name][1].pid, signal.SIGSTOP)
        looks = 0
        while looks < 20:
            looks = looks + 1 if all(map(_sleeps, pids)) else 0
            time.sleep(0.01)
        return self.lose(name)

    def lose(self, name: str) -> int:
        """Kill a rank; return the generation that it was in."""
        generation = max(event["generation"] for event in self._events())
        agent, process = self._nodes.pop(name)
        process.kill()
        process.join()
        agent.close(HANG_SECONDS)
        return generation

    def visit(self, *leaves: Leaves, later: float = 0.0) -> int:
        """Let visitors join, each before the previous one leaves; return the last generation that one was in. later:
        seconds that each visitor waits at its point of `leaves`."""
        visitor = self._visitor()
        for number, stage in enumerate(leaves):
            generation = visitor.take_part(stage)
            successor = self._visitor() if number + 1 < len(leaves) else None
            time.sleep(later)
            visitor.leave()
            if successor is not None:
                visitor = successor
        return generation

    def _visitor(self) -> Visitor:
        return Visitor(self._coordinator.port, self._store.port)

    def await_steps(self, count: int) -> None:
        """Wait until metrics.jsonl has `count` steps."""
        self._await(lambda: count if last_step(self._folder.parent / "metrics.jsonl") >= count else None)

    def await_commit(self, after: int) -> int:
        """Wait until a generation later than `after` commits a step; return that generation."""
        return self._await(lambda: next((g for g in self._committed() if g > after), None))

    def held(self) -> dict[str, Held]:
        """Return process name → its resources, after the work that follows the beginning of a generation."""
        time.sleep(LATER_SECONDS + 0.3)
        pids = {"coordinator": self._coordinator.process.pid}
        for name, (agent, process) in self._nodes.items():
            pids |= {f"agent of {name}": agent.process.pid, f"rank of {name}": process.pid}
        return {name: _least(pid) for name, pid in pids.items()}

    def await_end(self) -> str:
        """Wait until the run has stopped; return why."""
        self._await(lambda: len(known_record(self._folder).stopped) or None)
        return known_record(self._folder).stopped

    def plans(self) -> dict[int, tuple[TrainingPlan, tuple[str, ...]]]:
        """Return generation → plan and members, for all generations that ran, in order."""
        store = connect_store("127.0.0.1", self._store.port, TOKEN, on_one_machine=True)
        ran = [event["generation"] for event in self._events() if event["task"] == Task.RUN]
        found = {each: json.loads(store.get(f"resilience/plan/{each}")) for each in dict.fromkeys(ran)}
        return {
            each: (TrainingPlan.from_json(published["plan"]), tuple(published["members"]))
            for each, published in found.items()
        }

    def reasons(self) -> list[str]:
        """Return the reasons of all new generations."""
        return [event["reason"] for event in self._events() if event["task"] == Task.FENCE]

    def close(self) -> None:
        for agent, process in self._nodes.values():
            process.kill()
            process.join()
            agent.close()
        self._coordinator.close()
        self._store.close()

    def _start(self, port: int) -> ProcessStart:
        return ProcessStart("127.0.0.1", port, TOKEN.hex(), self._settings, str(self._folder))

    def _committed(self) -> list[int]:
        return [event["generation"] for event in self._events() if event["task"] == COMMIT]

    def _events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return [json.loads(line) for line in (self._folder / EVENTS).read_text().splitlines()]
        return []

    def _await(self, found: Callable[[], int | None]) -> int:
        deadline = time.monotonic() + HANG_SECONDS
        while (value := found()) is None:
            assert time.monotonic() < deadline, self.reasons()
            time.sleep(0.01)
        return value


def _train(
    config: str,
    plan: str,
    store: int,
    node: str,
    agent: int,
    rank: int,
    size: int,
    dies: Dies | None,
    budget: int | None,
) -> None:
    torch.set_num_threads(1)
    rank_module.LATER_SECONDS = LATER_SECONDS
    if dies is not None:
        _die(dies)
    if budget is not None:
        _limit(budget)
    at = connect_store("127.0.0.1", store, TOKEN, on_one_machine=True)
    worker = Worker(rank, size, rank, torch.device("cpu"), at)
    seat = Seat(node, 0, agent, TOKEN)
    ResilientRank(worker, load_config(config), plan, StartingPoint(None), "nothing", seat).run()


def _die(where: Dies) -> None:
    """Patch this process so that it kills itself at the point `where`."""
    propose, catch_up = WorkerLink.propose, Observer.catch_up

    def proposes(link: WorkerLink, step: int, hashes: Mapping[str, int]) -> None:
        propose(link, step, hashes)
        if step == DYING_STEP:
            time.sleep(0.5)  # until the others have applied the step and wait for this rank in the next one
            os.kill(os.getpid(), signal.SIGKILL)

    def catches_up(observer: Observer, recent: Sequence[StepMetrics]) -> None:
        if recent:
            os.kill(os.getpid(), signal.SIGKILL)
        catch_up(observer, recent)

    class Failing(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if self.membership.generation > 1:
                if where == "broken":
                    raise KeyError(f"of {object()}")
                raise torch.OutOfMemoryError("the device is full")

    if where in ("out of memory", "broken"):
        rank_module.Trainer = Failing  # type: ignore[misc]
    elif where == "with its vote out":
        WorkerLink.propose = proposes  # type: ignore[method-assign]
    else:
        Observer.catch_up = catches_up  # type: ignore[method-assign]


def _limit(budget: int) -> None:
    """Patch this process so that a trainer with more weights than `budget` runs out of memory."""

    class Limited(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            held = sum(weight.numel() for weight in self.runtime.parameters.values())
            if held > budget:
                raise torch.OutOfMemoryError(f"{held} weights on a device for {budget}")

    rank_module.Trainer = Limited  # type: ignore[misc]


def _sleeps(pid: int) -> bool:
    """Return True if all threads of a process sleep."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def _least(pid: int) -> Held:
    """Return the least of five measurements, since connections and messages take resources for a moment."""
    looks = []
    for _ in range(5):
        looks.append(_held(pid))
        time.sleep(0.02)
    return Held(
        min(look.files for look in looks), min(look.threads for look in looks), min(look.mebibytes for look in looks)
    )


def _held(pid: int) -> Held:
    files, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Held(files, threads, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
