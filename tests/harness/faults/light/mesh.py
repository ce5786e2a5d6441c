"""How light workers exchange values: everybody sends to the first member, which answers each; over sockets that a fence
closes, and through whatever stands between them."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_HEAD = struct.Struct(">I")


class Mesh:
    """One worker's sockets of all generations. folder: where addresses are written."""

    def __init__(self, folder: Path, node: str, timeout_seconds: float) -> None:
        self.node = node
        self._folder = folder
        self._timeout = timeout_seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._waiting: dict[tuple[int, str], socket.socket] = {}
        self._open: list[socket.socket] = []
        self._condition = threading.Condition()
        self._dead = 0
        write(folder / f"{node}.listens", str(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def sever(self, generation: int) -> None:
        """End what generations up to this one wait for."""
        with self._condition:
            self._dead = max(self._dead, generation)
            sockets, self._open = self._open, []
            sockets += [each for (old, _), each in self._waiting.items() if old <= generation]
            self._waiting = {key: each for key, each in self._waiting.items() if key[0] > generation}
            self._condition.notify_all()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def join(self, generation: int, members: Sequence[str]) -> Meeting:
        """Raises OSError where that fails, or the generation is over."""
        if self.node != members[0]:
            file = self._folder / f"{members[0]}.data"
            with _of(members[0]):
                peer = socket.create_connection(("127.0.0.1", int(file.read_text())), self._timeout)
                send(peer, [generation, self.node])
            return Meeting(self._kept(generation, [peer]), members, self.node)
        deadline = time.monotonic() + self._timeout
        wanted = [(generation, node) for node in members[1:]]
        with self._condition:
            while not all(key in self._waiting for key in wanted):
                if self._dead >= generation:
                    raise OSError("the generation is over")
                if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                    absent = next(node for _, node in wanted if (generation, node) not in self._waiting)
                    raise PeerLost(absent, OSError("did not come"))
            peers = [self._waiting.pop(key) for key in wanted]
        return Meeting(self._kept(generation, peers), members, self.node)

    def _kept(self, generation: int, sockets: list[socket.socket]) -> list[socket.socket]:
        with self._condition:
            if self._dead >= generation:
                for each in sockets:
                    each.close()
                raise OSError("the generation is over")
            self._open += sockets
        for each in sockets:
            each.settimeout(self._timeout)
        return sockets

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(self._timeout)
            # Each in a thread: who says nothing, for it is cut off, holds up nobody.
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            generation, node = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        with self._condition:
            if generation <= self._dead:
                connection.close()
                return
            self._waiting[generation, node] = connection
            self._condition.notify_all()


class Meeting:
    """The members of a generation."""

    def __init__(self, sockets: list[socket.socket], members: Sequence[str], node: str) -> None:
        self._sockets = sockets
        self._members = members
        self._is_first = node == members[0]

    def exchange(self, value: Any, answers: Callable[[list[Any]], list[Any]]) -> Any:
        """This member's answer to what all brought. answers: by the first member. Raises OSError with its `peer`."""
        if not self._is_first:
            with _of(self._members[0]):
                send(self._sockets[0], value)
                return receive(self._sockets[0])
        brought = [value]
        for node, each in zip(self._members[1:], self._sockets):
            with _of(node):
                brought.append(receive(each))
        own, *others = answers(brought)
        for node, each, answer in zip(self._members[1:], self._sockets, others):
            with _of(node):
                send(each, answer)
        return own


class PeerLost(OSError):
    def __init__(self, peer: str, error: OSError) -> None:
        super().__init__(f"{peer}: {error!r}")
        self.peer = peer


class _of:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | ValueError):
            raise PeerLost(self._peer, OSError(str(error))) from None


def send(connection: socket.socket, value: Any) -> None:
    body = json.dumps(value).encode()
    connection.sendall(_HEAD.pack(len(body)) + body)


def receive(connection: socket.socket) -> Any:
    (length,) = _HEAD.unpack(_exactly(connection, _HEAD.size))
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise OSError("closed")
        data += chunk
    return data


def write(path: Path, text: str) -> None:
    """A reader sees all of it."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)
