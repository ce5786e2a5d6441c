"""Server of the rendezvous store: keys, values and queues of one run, for clients that hold its token.

One thread and one selector serve all ranks (`Connections`, which also bounds what strangers cost). Imports no torch.
A request is a list of byte strings, beginning with its operation; an answer likewise, beginning with its status.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict, deque
from typing import Annotated

import msgspec

from dilatant.comm.wire.handshake import ProtocolError
from dilatant.comm.wire.link import Connections, FrameError, LinkClosed, WireLink, listen

MAX_STORED_BYTES = 1 << 30
FIELDS = msgspec.msgpack.Decoder(Annotated[list[bytes], msgspec.Meta(max_length=1 << 16)])
"""Decodes the messages between the store and its clients."""


class StoreServer:
    """Serves clients until `close()`. host: "127.0.0.1" for one machine, "" for all interfaces. port 0: a free one."""

    def __init__(self, host: str, port: int, token: bytes) -> None:
        if not token:
            raise ValueError("a store without a token would serve everybody")
        listener = listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._connections = Connections(listener, token, FIELDS)
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = defaultdict(deque)
        self._stored_bytes = 0
        self._waiting: dict[WireLink, list[bytes]] = {}  # requests to answer once their keys exist
        self._waiters: dict[bytes, set[WireLink]] = defaultdict(set)
        self._deadlines: list[tuple[float, int, WireLink, list[bytes]]] = []
        self._num_deadlines = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dilatant-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed.set()
        self._connections.wake()
        self._thread.join(5.0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            left = max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None
            for received in self._connections.wait(left):
                if received.message is None:
                    self._stop_waiting(received.link)
                elif not received.link.is_closed:
                    self._hear(received.link, received.message)
            self._expire(time.monotonic())
        self._connections.close()

    def _hear(self, client: WireLink, fields: list[bytes]) -> None:
        try:
            if client in self._waiting:
                raise ProtocolError("a request before the last one was answered")
            self._handle(client, fields)
        except ProtocolError:
            self._drop(client)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, client, fields = heapq.heappop(self._deadlines)
            if self._waiting.get(client) is fields:
                self._stop_waiting(client)
                self._answer(client, [b"timeout"])

    def _handle(self, client: WireLink, fields: list[bytes]) -> None:
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
            case [b"check", *keys]:
                self._answer(client, [b"ok", b"yes" if self._values.keys() >= set(keys) else b"no"])
            case [b"delete", *keys]:
                gone = [self._values.pop(key, None) for key in keys]
                self._stored_bytes -= sum(len(value) for value in gone if value is not None)
                self._answer(client, [b"ok", str(sum(value is not None for value in gone)).encode()])
            case [b"push", key, value]:
                self._keep(len(value))
                self._queues[key].append(value)
                self._answer(client, [b"ok"])
                self._notify(key)
            case [b"get" | b"wait" | b"pop", milliseconds, *keys] if keys:
                limit = _number(milliseconds)
                self._waiting[client] = fields
                if not self._try_answer(client):
                    for key in keys:
                        self._waiters[key].add(client)
                    if limit >= 0:
                        self._num_deadlines += 1  # unique, so that the heap never compares clients
                        deadline = time.monotonic() + limit / 1000
                        heapq.heappush(self._deadlines, (deadline, self._num_deadlines, client, fields))
            case _:
                raise ProtocolError(f"no request: {fields[:1]}")

    def _try_answer(self, client: WireLink) -> bool:
        """Answer a client's pending request if its keys exist."""
        if client not in self._waiting:
            return True
        operation, _, *keys = self._waiting[client]
        key = keys[0]
        if operation == b"pop":
            if not self._queues.get(key):
                return False
            value = self._queues[key].popleft()
            self._stored_bytes -= len(value)
            if not self._queues[key]:
                del self._queues[key]
            answer = [value]
        elif not self._values.keys() >= {*keys}:
            return False
        else:
            answer = [self._values[key] for key in keys] if operation == b"get" else []
        self._stop_waiting(client)
        self._answer(client, [b"ok", *answer])
        return True

    def _stop_waiting(self, client: WireLink) -> None:
        for key in self._waiting.pop(client, [])[2:]:
            self._waiters[key].discard(client)
            if not self._waiters[key]:
                del self._waiters[key]

    def _put(self, key: bytes, value: bytes) -> None:
        self._keep(len(value) - len(self._values.get(key, b"")))
        self._values[key] = value
        self._notify(key)

    def _keep(self, more: int) -> None:
        self._stored_bytes += more
        if self._stored_bytes > MAX_STORED_BYTES:
            self._stored_bytes -= more
            raise ProtocolError("the store is full")

    def _notify(self, key: bytes) -> None:
        for client in [*self._waiters.get(key, ())]:
            self._try_answer(client)

    def _answer(self, client: WireLink, fields: list[bytes]) -> None:
        try:
            client.send(fields)
        except (LinkClosed, FrameError):
            self._drop(client)

    def _drop(self, client: WireLink) -> None:
        self._stop_waiting(client)
        self._connections.drop(client)


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise ProtocolError("a number is too long")
    try:
        return int(text)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
