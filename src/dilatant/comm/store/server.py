"""Server of the rendezvous store: keys, values and queues of one run, for clients that hold its token.

One thread and one selector serve all ranks. Imports no torch. `PendingHandshakes` bounds the cost of unauthenticated
connections.
"""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import cast

from dilatant.comm.store import protocol as protocol
from dilatant.comm.store.newcomers import BACKLOG, PendingConnection, PendingHandshakes

MAX_STORED_BYTES = 1 << 30
_LENGTH_BYTES = 4


@dataclass(eq=False, slots=True)
class _Client:
    connection: socket.socket
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    writes: bool = False
    waiting: _Waiting | None = None


class _Waiting:
    """A request that is answered when its keys exist, or at its deadline."""

    __slots__ = ("awaited", "keys", "operation")

    def __init__(self, operation: bytes, keys: list[bytes]) -> None:
        self.operation = operation
        self.keys = keys
        self.awaited = set(keys)


class StoreServer:
    """Serves clients until `close()`. host: "127.0.0.1" for one machine, "" for all interfaces. port 0: a free one."""

    def __init__(self, host: str, port: int, token: bytes) -> None:
        if not token:
            raise ValueError("a store without a token would serve everybody")
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = defaultdict(deque)
        self._stored_bytes = 0
        self._clients: dict[socket.socket, _Client] = {}
        self._waiters: dict[bytes, set[_Client]] = defaultdict(set)
        self._deadlines: list[tuple[float, int, _Client, _Waiting]] = []
        self._num_deadlines = 0
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._newcomers = PendingHandshakes(token, self._selector)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="dilatant-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5.0)
        self._wake.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._seconds_to_next_deadline()):
                if key.fileobj is self._woken:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._newcomers.accept(self._listener)
                elif isinstance(key.data, PendingConnection):
                    if (proved := self._newcomers.read(key.data)) is not None:
                        self._admit(proved.connection)
                elif (client := self._clients.get(cast(socket.socket, key.fileobj))) is not None:
                    self._on_ready(client, events)
            self._newcomers.expire()
            self._expire(time.monotonic())

    def _close_all(self) -> None:
        self._newcomers.close()
        for client in [*self._clients.values()]:
            self._drop(client)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _seconds_to_next_deadline(self) -> float | None:
        seconds = self._newcomers.seconds_to_deadline()
        if not self._deadlines:
            return seconds
        left = max(0.0, self._deadlines[0][0] - time.monotonic())
        return left if seconds is None else min(left, seconds)

    def _set_deadline(self, seconds: float, client: _Client, waiting: _Waiting) -> None:
        self._num_deadlines += 1  # unique, so that the heap never compares clients
        heapq.heappush(self._deadlines, (time.monotonic() + seconds, self._num_deadlines, client, waiting))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, client, waiting = heapq.heappop(self._deadlines)
            if client.waiting is waiting:
                self._stop_waiting(client)
                self._answer(client, [b"timeout"])

    def _admit(self, connection: socket.socket) -> None:
        keep_alive(connection)
        self._clients[connection] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _on_ready(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if not events & selectors.EVENT_READ:
                return
            data = client.connection.recv(1 << 16)
            if not data:
                raise ConnectionError
            client.incoming += data
            self._read(client)
        except (OSError, protocol.ProtocolError):
            self._drop(client)

    def _read(self, client: _Client) -> None:
        while client.connection in self._clients and len(client.incoming) >= _LENGTH_BYTES:
            length = protocol.frame_bytes(bytes(client.incoming[:_LENGTH_BYTES]))
            if len(client.incoming) < _LENGTH_BYTES + length:
                return
            body = bytes(client.incoming[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del client.incoming[: _LENGTH_BYTES + length]
            if client.waiting is not None:
                raise protocol.ProtocolError("a request before the last one was answered")
            self._handle(client, protocol.unpack(body))

    def _handle(self, client: _Client, fields: list[bytes]) -> None:
        match fields:
            case [b"set", *pairs] if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2]):
                    self._put(key, value)
                self._answer(client, [b"ok"])
            case [b"add", key, amount]:
                total = _number(self._values.get(key, b"0")) + _number(amount)
                self._put(key, str(total).encode())
                self._answer(client, [b"ok", str(total).encode()])
            case [b"append", key, value]:
                self._put(key, self._values.get(key, b"") + value)
                self._answer(client, [b"ok"])
            case [b"swap", key, expected, desired]:
                if self._values.get(key, b"") == expected:
                    self._put(key, desired)
                # torch's stores return `expected` if there is no value
                self._answer(client, [b"ok", self._values.get(key, expected)])
            case [b"check", *keys]:
                self._answer(client, [b"ok", b"yes" if self._values.keys() >= set(keys) else b"no"])
            case [b"delete", *keys]:
                gone = [self._values.pop(key, None) for key in keys]
                self._stored_bytes -= sum(len(value) for value in gone if value is not None)
                self._answer(client, [b"ok", str(sum(value is not None for value in gone)).encode()])
            case [b"count"]:
                self._answer(client, [b"ok", str(len(self._values)).encode()])
            case [b"push", key, value]:
                self._keep(len(value))
                self._queues[key].append(value)
                self._answer(client, [b"ok"])
                self._notify(key)
            case [b"get" | b"wait" | b"pop", milliseconds, *keys] if keys:
                client.waiting = _Waiting(fields[0], keys)
                if not self._try_answer(client):
                    for key in client.waiting.awaited:
                        self._waiters[key].add(client)
                    if _number(milliseconds) >= 0:
                        self._set_deadline(_number(milliseconds) / 1000, client, client.waiting)
            case _:
                raise protocol.ProtocolError(f"no request: {fields[:1]}")

    def _try_answer(self, client: _Client) -> bool:
        """Answer a client's pending request if its keys exist."""
        waiting = client.waiting
        if waiting is None:
            return True
        if waiting.operation == b"pop":
            key = waiting.keys[0]
            if not self._queues.get(key):
                return False
            value = self._queues[key].popleft()
            self._stored_bytes -= len(value)
            if not self._queues[key]:
                del self._queues[key]
            answer = [value]
        elif not self._values.keys() >= waiting.awaited:
            return False
        else:
            answer = [self._values[key] for key in waiting.keys] if waiting.operation == b"get" else []
        self._stop_waiting(client)
        self._answer(client, [b"ok", *answer])
        return True

    def _stop_waiting(self, client: _Client) -> None:
        if client.waiting is not None:
            for key in client.waiting.awaited:
                self._waiters[key].discard(client)
                if not self._waiters[key]:
                    del self._waiters[key]
            client.waiting = None

    def _put(self, key: bytes, value: bytes) -> None:
        self._keep(len(value) - len(self._values.get(key, b"")))
        self._values[key] = value
        self._notify(key)

    def _keep(self, more: int) -> None:
        self._stored_bytes += more
        if self._stored_bytes > MAX_STORED_BYTES:
            self._stored_bytes -= more
            raise protocol.ProtocolError("the store is full")

    def _notify(self, key: bytes) -> None:
        for client in [*self._waiters.get(key, ())]:
            self._try_answer(client)

    def _answer(self, client: _Client, fields: list[bytes]) -> None:
        try:
            frame = protocol.pack(fields)
        except protocol.ProtocolError:
            self._drop(client)
        else:
            self._send(client, frame)

    def _send(self, client: _Client, data: bytes) -> None:
        client.outgoing += data
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        if client.outgoing:
            with contextlib.suppress(BlockingIOError):
                del client.outgoing[: client.connection.send(client.outgoing)]
        if client.writes != bool(client.outgoing):
            client.writes = bool(client.outgoing)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.writes else 0)
            self._selector.modify(client.connection, events)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.connection, None) is None:
            return
        self._stop_waiting(client)
        self._selector.unregister(client.connection)
        client.connection.close()


def keep_alive(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and detect within a minute that the peer's machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # TCP sends no keep-alive probes while sent data is unacknowledged, so limit that time as well.
    unacknowledged = ("TCP_USER_TIMEOUT", 60_000)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), unacknowledged):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET if host else socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6
    )


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise protocol.ProtocolError("a number is too long")
    try:
        return int(text)
    except ValueError as error:
        raise protocol.ProtocolError(str(error)) from None
