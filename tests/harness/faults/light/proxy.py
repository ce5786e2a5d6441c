"""A network that fails: it holds what two sides say, in both directions or one, delays it, or breaks the connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Proxy:
    """Listens at `port`, and connects to `target()`; nothing is held at first."""

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delay_seconds = 0.0
        self._passes = {"in": threading.Event(), "out": threading.Event()}
        self._sockets: list[socket.socket] = []
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, *directions: str) -> None:
        """Keep what comes "in" to the target, or goes "out" of it; by default both."""
        for direction in directions or ("in", "out"):
            self._passes[direction].clear()

    def heal(self) -> None:
        self.delay_seconds = 0.0
        for event in self._passes.values():
            event.set()

    def reset(self) -> None:
        """Break all connections; new ones work."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._passes["in"].wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._target()), 5.0)
            far.settimeout(None)
        except (OSError, ValueError):
            near.close()
            return
        self._sockets += [near, far]
        for source, sink, direction in ((near, far, "in"), (far, near, "out")):
            threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                self._passes[direction].wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
