"""A light worker: a process that does as its agent says, and writes down every step that it applies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import NO_STATE
from dilatant.resilience.worker.worker_link import Fenced, RunEnded, WorkerLink
from harness.faults.light.arithmetic import LAYERS, State, digest, gradient, initial, samples_of, update
from harness.faults.light.mesh import Meeting, Mesh, PeerLost

SAVED_EVERY = 10
FAILPOINTS = ("fenced", "rebuilding", "made", "activated", "prepared", "applied")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """folder: of addresses, histories and failpoints. steps: of the run. limit_seconds: of a step."""

    node: str
    port: int
    token: bytes
    folder: Path
    steps: int
    copies: int
    limit_seconds: float
    step_seconds: float


@dataclass
class Held:
    base: int
    step: int
    state: State


class LightWorker:
    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._mesh = Mesh(options.folder, options.node, timeout_seconds=3 * options.limit_seconds)
        self._ending = False
        self._held = Held(NO_STATE, 0, {})
        self._pending: Held | None = None
        self._gradients: dict[int, list[int]] | None = None
        self._history = (options.folder / f"{options.node}.history").open("a")
        self._link = WorkerLink(options.port, options.token, 0, self._mesh.sever, beat_seconds=0.2, on_ending=self._end)

    def run(self) -> None:
        try:
            self._take_part()
        except AssertionError as error:
            self._write("violated", error=str(error))
            raise

    def _take_part(self) -> None:
        self._link.warm()
        while True:
            try:
                order = self._await_rebuild()
                try:
                    meeting = self._mesh.join(order.generation, order.members)
                    self._rebuild(order, meeting)
                    self._train(order, meeting)
                    self._link.await_end()
                    return
                except PeerLost as error:
                    if not self._link.is_fenced:
                        self._link.broken(str(error), accuses=error.peer)
                except OSError as error:
                    if not self._link.is_fenced:
                        self._link.broken(repr(error))
                except Fenced:
                    pass
            except RunEnded:
                return

    def _end(self) -> None:
        self._ending = True

    def _await_rebuild(self) -> Rebuild:
        held = self._held
        prepared = None if self._gradients is None else held.step
        order = self._link.await_rebuild(held.base, held.step, prepared)
        self._fail("fenced")
        if self._pending is not None and self._pending.base == order.base:
            self._held = held = self._pending
        self._pending = None
        if held.base == order.base != NO_STATE and held.step == order.committed - 1:
            self._apply()
        if held.base == order.base != NO_STATE:
            assert held.step == order.committed, f"told to go on at {order.committed}, and has {held.step} steps"
        self._gradients = None
        return order

    def _rebuild(self, order: Rebuild, meeting: Meeting) -> None:
        held = self._held if self._held.base == order.base != NO_STATE else None
        mine = None if held is None else [held.step, [[k, v] for k, v in held.state.items()]]
        members = len(order.members)

        def answers(brought: list[Any]) -> list[Any]:
            found: State = {}
            steps = set()
            for each in brought:
                if each is not None:
                    steps.add(each[0])
                    found |= {int(layer): values for layer, values in each[1]}
            assert len(steps) <= 1, f"members hold the state of unlike steps {steps}"
            step, where = (steps or {0}).pop(), "members"
            if len(found) < LAYERS:
                step, found, where = *self._saved(order.base != NO_STATE), "saved"
            return [
                [step, where, [[layer, found[layer]] for layer in self._layers_of(place, members)]]
                for place in range(members)
            ]

        self._fail("rebuilding")
        step, where, layers = meeting.exchange(mine, answers)
        state = {layer: list(values) for layer, values in layers}
        self._pending = Held(order.generation, step, state)
        self._fail("made")
        self._link.await_activation(step)
        self._held, self._pending = self._pending, None
        self._write("activated", where=where)
        self._fail("activated")

    def _layers_of(self, place: int, members: int) -> list[int]:
        copies = min(self._options.copies, members)
        return [layer for layer in range(LAYERS) if any((layer + k) % members == place for k in range(copies))] or [
            place % LAYERS
        ]

    def _saved(self, was_run: bool) -> tuple[int, State]:
        path = self._options.folder / "saved.json"
        if not was_run or not path.is_file():
            return 0, initial()
        step, layers = json.loads(path.read_text())
        return step, {int(layer): values for layer, values in layers}

    def _train(self, order: Rebuild, meeting: Meeting) -> None:
        place, members = order.members.index(self._options.node), len(order.members)
        ends = meeting.exchange(self._ending, lambda asked: [any(asked)] * members)
        while self._held.step < self._options.steps and not ends:
            step = self._held.step
            self._link.begin(step, self._options.limit_seconds)
            time.sleep(self._options.step_seconds)
            own = [sample for sample in samples_of(step) if sample % members == place]
            save = step % SAVED_EVERY == 0
            mine = [
                self._ending,
                [gradient(layer, own) for layer in range(LAYERS)],
                [[layer, values] for layer, values in self._held.state.items()] if save else None,
            ]
            ends, sums = meeting.exchange(mine, lambda brought, step=step: self._reduced(step, brought))
            self._gradients = dict(enumerate(sums))
            hashes = {f"layer{layer}": digest(values) for layer, values in self._gradients.items()}
            self._fail("prepared")
            self._link.propose(step, hashes)
            self._link.await_commit()
            self._apply()
            self._fail("applied")

    def _reduced(self, step: int, brought: list[Any]) -> list[Any]:
        sums = [[sum(column) for column in zip(*(each[1][layer] for each in brought))] for layer in range(LAYERS)]
        if brought[0][2] is not None:
            state = {layer: values for each in brought for layer, values in each[2]}
            if len(state) == LAYERS:
                path = self._options.folder / "saved.json"
                draft = path.with_name(f".saved{os.getpid()}")
                draft.write_text(json.dumps([step, list(state.items())]))
                draft.rename(path)
        return [[any(each[0] for each in brought), sums]] * len(brought)

    def _apply(self) -> None:
        assert self._gradients is not None, "told to apply what it has not got"
        update(self._held.state, self._gradients)
        self._held.step += 1
        self._gradients = None
        self._write("applied")

    def _write(self, what: str, **more: Any) -> None:
        held = self._held
        record = {
            "what": what,
            "base": held.base,
            "step": held.step,
            "layers": {str(layer): digest(values) for layer, values in held.state.items()},
            "time": time.monotonic(),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            **more,
        }
        self._history.write(json.dumps(record) + "\n")
        self._history.flush()

    def _fail(self, point: str) -> None:
        """Die here, if somebody asked for that."""
        file = self._options.folder / f"{self._options.node}.fail"
        if file.exists() and file.read_text() == point:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
