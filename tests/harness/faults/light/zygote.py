"""A process that forks coordinators, agents and light workers, so that each costs a moment. It reads JSON lines."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from dilatant.resilience.processes import agent_process, coordinator_process
from dilatant.resilience.processes.process import ProcessStart, end_with_parent
from dilatant.resilience.protocol.values import Effect, Order, Record
from harness.faults.light.mesh import write
from harness.faults.light.worker import LightWorker, WorkerOptions


class MortalCoordinator(coordinator_process.CoordinatorService):
    """Dies where it was asked to: before or after it has written a membership down, or half way through orders."""

    def _persist(self, record: Record) -> None:
        _die_at(self._folder, "before_persist")
        super()._persist(record)
        _die_at(self._folder, "after_persist")

    def _carry_out(self, effects: list[Effect]) -> None:
        orders = [effect for effect in effects if isinstance(effect, Order)]
        if len(orders) > 1 and _asked(self._folder, "half_orders"):
            super()._carry_out(effects[: effects.index(orders[len(orders) // 2])])
            _die_at(self._folder, "half_orders")
        super()._carry_out(effects)


def coordinator(start: ProcessStart) -> None:
    service = MortalCoordinator(start)
    signal.signal(signal.SIGTERM, lambda *_: service.end())
    write(Path(start.folder) / "coordinator.port", f"{service.port} {os.getpid()}")
    service.serve()


def node(start: ProcessStart, options: dict[str, Any]) -> None:
    """An agent, and its worker as a process of its own."""
    port_read, port_write = os.pipe()
    if os.fork() == 0:
        os.close(port_write)
        port = int(os.read(port_read, 16))
        folder = Path(start.folder)
        token = bytes.fromhex(start.token)
        LightWorker(WorkerOptions(start.node, port, token, folder, **options)).run()
        os._exit(0)
    os.close(port_read)
    service = agent_process.AgentService(start)
    signal.signal(signal.SIGTERM, lambda *_: service.leave())
    os.write(port_write, str(service.port).encode())
    service.serve()


def _asked(folder: Path, point: str) -> bool:
    file = folder / "coordinator.fail"
    return file.exists() and file.read_text() == point


def _die_at(folder: Path, point: str) -> None:
    if _asked(folder, point):
        (folder / "coordinator.fail").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    life_read, _life = os.pipe()
    for line in sys.stdin:
        task = json.loads(line)
        if os.fork():
            continue
        os.close(_life)
        os.dup2(life_read, 0)  # ends with this process
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 0
        try:
            start = msgspec.convert(task["start"], ProcessStart)
            end_with_parent()
            coordinator(start) if task["role"] == "coordinator" else node(start, task["options"])
        except SystemExit:
            code = 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        os._exit(code)


if __name__ == "__main__":
    main()
