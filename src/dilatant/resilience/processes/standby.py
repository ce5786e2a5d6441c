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
from dilatant.resilience.processes.coordinator_process import read_record
from dilatant.resilience.processes.job import Job, is_loopback
from dilatant.resilience.processes.process import (
    NO_MAJORITY_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    Child,
    ProcessStart,
)
from dilatant.resilience.processes.wire import connect
from dilatant.resilience.protocol.values import FINISHED, Record

COORDINATOR = "dilatant.resilience.processes.coordinator_process"
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
        spoke = time.monotonic()
        while not self._closed.wait(self._job.leader_patience_seconds / 10):
            if self._answers():
                spoke = time.monotonic()
            elif time.monotonic() - spoke > self._job.leader_patience_seconds:
                record = self._record()
                if record.generation and not record.stopped:
                    self._lead()
                spoke = time.monotonic()

    def _lead(self) -> None:
        """Coordinate the run until it ends, another machine takes over, or most members fail to connect."""
        assert self._job.next_address is not None
        host, port = self._job.next_address
        host = host if is_loopback(host) else ""
        store = StoreServer(host, 0, self._token)
        job = replace(self._job, store_port=store.port, standby="")
        start = ProcessStart(
            host,
            port,
            self._token.hex(),
            job.settings,
            job.folder,
            job=job,
            majority_seconds=MAJORITY_SECONDS,
        )
        before = self._record().term
        child, is_leading = Child(COORDINATOR, start), False
        try:
            while not self._record().stopped:
                time.sleep(WATCH_SECONDS)
                if not is_leading and self._record().term > before:
                    is_leading = True
                    print("this machine leads the run now", file=sys.stderr, flush=True)
                if child.stands_still():
                    child.close()
                if child.is_alive:
                    if self._closed.is_set() and not is_leading:
                        return
                    continue
                if child.process.returncode in (NO_MAJORITY_EXIT_CODE, SUPERSEDED_EXIT_CODE):
                    return
                child.close()
                child = Child(COORDINATOR, start)
        finally:
            child.close(LAST_SECONDS if is_leading else 0.0)
            store.close()
        if is_leading and self._record().stopped == FINISHED:
            self._export()

    def _export(self) -> None:
        """Export the model for the lost `dilatant train`; in another process, since it needs torch."""
        run = str(self._folder.parent)
        if subprocess.run([sys.executable, "-P", "-m", "dilatant", "export", run], check=False).returncode:
            print(
                f"warning: the run is finished, but not exported: `dilatant export {shlex.quote(run)}`",
                file=sys.stderr,
            )

    def _answers(self) -> bool:
        """Return True if a coordinator answers; connecting does not suffice: a stopped process has an open port."""
        try:
            connect(*self._leader, self._token, self._job.leader_patience_seconds / 3).close()
        except (OSError, ValueError):
            return False
        return True

    def _record(self) -> Record:
        """Return the last coordinator's record; an empty one where it cannot be read now."""
        try:
            return read_record(self._folder) or Record()
        except (OSError, ValueError):
            return Record()
