"""Standby leader: takes over from an unresponsive leader with a new coordinator and store, if most members connect."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from dilatant.comm.store.server import StoreServer
from dilatant.resilience.processes.coordinator_process import known_record
from dilatant.resilience.processes.messages import Job, connect, is_loopback
from dilatant.resilience.processes.process import ProcessStart
from dilatant.resilience.processes.supervisor import CoordinatorSupervisor
from dilatant.resilience.protocol.values import FINISHED

MAJORITY_SECONDS = 20.0
WATCH_SECONDS = 0.2
LAST_SECONDS = 10.0


class Standby:
    """Polls the leader from a thread, and takes over after `job.leader_patience_seconds` without an answer. host, port:
    of the leader."""

    def __init__(self, job: Job, host: str, port: int, token: bytes) -> None:
        self._job = job
        self._leader = host, port
        self._token = token
        self._folder = Path(job.folder)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dilatant-standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling; if this machine has taken over, wait for the end of the run."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        answered_at = time.monotonic()
        while not self._closed.wait(self._job.leader_patience_seconds / 10):
            if self._answers():
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > self._job.leader_patience_seconds:
                record = known_record(self._folder)
                if record.generation and not record.stopped:
                    self._lead()
                answered_at = time.monotonic()

    def _lead(self) -> None:
        """Coordinate the run until it ends, another machine takes over, or most members fail to connect."""
        assert self._job.next_address is not None
        host, port = self._job.next_address
        host = host if is_loopback(host) else ""
        store = StoreServer(host, 0, self._token)
        job = replace(self._job, store_port=store.port, standby="")
        begin = ProcessStart(host, port, self._token.hex(), job.settings, job.folder, job=job)
        start = replace(begin, majority_seconds=MAJORITY_SECONDS)
        before, is_leading = known_record(self._folder).term, False
        coordinator = CoordinatorSupervisor(start)
        try:
            while not (coordinator.watch() or known_record(self._folder).stopped):
                if not is_leading and known_record(self._folder).term > before:
                    is_leading = True
                    print("this machine leads the run now", file=sys.stderr, flush=True)
                if self._closed.is_set() and not is_leading:
                    return
                time.sleep(WATCH_SECONDS)
            if coordinator.failure:
                print(coordinator.failure, file=sys.stderr, flush=True)
        finally:
            coordinator.close(LAST_SECONDS if is_leading else 0.0)
            store.close()
        if is_leading and known_record(self._folder).stopped == FINISHED:
            self._export()

    def _export(self) -> None:
        """Export the model for the lost `dilatant train`; in another process, since it needs torch."""
        run = str(self._folder.parent)
        if subprocess.run([sys.executable, "-P", "-m", "dilatant", "export", run], check=False).returncode:
            print(
                f"warning: the run is finished, but not exported: `dilatant export {shlex.quote(run)}`", file=sys.stderr
            )

    def _answers(self) -> bool:
        """Return True if a coordinator answers; connecting does not suffice: a stopped process has an open port."""
        try:
            connect(*self._leader, self._token, self._job.leader_patience_seconds / 3).close()
        except (OSError, ValueError):
            return False
        return True
