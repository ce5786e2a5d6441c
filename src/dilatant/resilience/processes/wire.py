"""Wire protocol between agents, workers and the coordinator: framed messages over a mutually authenticated connection.

Both sides prove the shared token as they do to the rendezvous store, and derive a key from that exchange. A frame is
the body's length (4 bytes), the protocol version (1), a keyed BLAKE2b of direction, frame number and body (32), and the
body: msgpack, decoded into the struct that it names, every field checked. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from dilatant.comm.store import protocol as store
from dilatant.comm.store.newcomers import BACKLOG, PendingHandshakes
from dilatant.comm.store.server import keep_alive
from dilatant.resilience.processes.job import Job, JobRequest
from dilatant.resilience.protocol import agent, values
from dilatant.resilience.protocol.values import ProtocolMessage

VERSION = 2
MAX_FRAME_BYTES = 1 << 24
_HEAD = struct.Struct(">IB")
_MAC_BYTES = 32
_READ_BYTES = 1 << 16
PORT_SECONDS = 2.0
"""How long to retry a port that is in use."""
ROUND_SECONDS = 0.01
"""Pause between rounds of accepting and reading, to serve many connections in batches without busy waiting."""
SEND_SECONDS = 5
"""A peer that has not read for this long, with full buffers, is disconnected, since the sender serves others, too."""


class LinkClosed(ConnectionError):
    """The other side is gone, or sent something that violates the protocol."""


class Hello(ProtocolMessage, frozen=True):
    """The first message of a worker. index: among those of its node. pid: of its process."""

    index: int
    pid: int


class StoreAt(ProtocolMessage, frozen=True):
    """The store's new address, after a change of leader."""

    host: str
    port: int


class Warm(ProtocolMessage, frozen=True):
    """The worker can join a generation; it lacks only the state of the run."""


class Beat(ProtocolMessage, frozen=True):
    """Heartbeat: the worker is alive."""


_Anything = (
    values.Status
    | values.Order
    | agent.Command
    | agent.Event
    | JobRequest
    | Job
    | Hello
    | StoreAt
    | Beat
    | Warm
)
_DECODER = msgspec.msgpack.Decoder(_Anything)
_ENCODER = msgspec.msgpack.Encoder()


class WireLink:
    """One authenticated connection. Send from any thread, receive from one. Use `connect` or `accept` to open it."""

    def __init__(self, connection: socket.socket, key: bytes, is_client: bool) -> None:
        self.socket = connection
        self._key = key
        self._own, self._theirs = (b"c", b"s") if is_client else (b"s", b"c")
        self._sent = self._received = 0
        self._arrived = bytearray()
        self._failure: LinkClosed | None = None
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises LinkClosed."""
        if not isinstance(message, ProtocolMessage | Job):
            raise TypeError(f"{type(message).__name__} is no message")
        body = _ENCODER.encode(message)
        with self._lock:
            mac = self._mac(self._own, self._sent, body)
            self._sent += 1
            try:
                self.socket.sendall(_HEAD.pack(len(body), VERSION) + mac + body)
            except OSError as error:
                with contextlib.suppress(OSError):  # half a frame may have been sent; wakes the reader
                    self.socket.shutdown(socket.SHUT_RDWR)
                raise LinkClosed(str(error)) from None

    def receive(self) -> Any:
        """Wait for the next message. Raises LinkClosed."""
        while (message := self._next_message()) is None:
            self._read()
        return message

    def receive_some(self) -> list[Any]:
        """Read once and return the messages that are then complete, perhaps none; blocks only if there is nothing to
        read. Raises LinkClosed if the connection ends without a message."""
        self._read()
        messages: list[Any] = []
        try:
            while (message := self._next_message()) is not None:
                messages.append(message)
        except LinkClosed as failure:
            if not messages:
                raise
            self._failure = failure  # raised by the next read; the shutdown wakes a waiting reader
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        return messages

    def close(self) -> None:
        """Close the connection and interrupt threads that are blocked in it. May be called twice."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            raise LinkClosed("the other side closed the connection")
        self._arrived += data

    def _next_message(self) -> Any:
        """Return the first message received, or None if it is incomplete. Raises LinkClosed."""
        arrived = self._arrived
        if len(arrived) < _HEAD.size:
            return None
        length, version = _HEAD.unpack_from(arrived)
        if version != VERSION or length > MAX_FRAME_BYTES:
            raise LinkClosed(f"a frame of version {version} and {length} bytes")
        start = _HEAD.size + _MAC_BYTES
        if len(arrived) < start + length:
            return None
        with memoryview(arrived) as frame:
            mac, body = bytes(frame[_HEAD.size : start]), bytes(frame[start : start + length])
        del arrived[: start + length]
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise LinkClosed("a frame that was not signed by the other side")
        self._received += 1
        try:
            return _DECODER.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise LinkClosed(f"a message that makes no sense: {error}") from None

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hashlib.blake2b(
            direction + number.to_bytes(8, "big") + body, key=self._key, digest_size=_MAC_BYTES
        ).digest()


def connect(host: str, port: int, token: bytes, timeout_seconds: float = 10.0) -> WireLink:
    """Connect to a server. Raises OSError, or ValueError for a server of another kind."""
    return _ready(*store.dial(host, port, token, timeout_seconds), token, is_client=True)


def accept(connection: socket.socket, token: bytes, timeout_seconds: float = 10.0) -> WireLink:
    """Authenticate one incoming connection. Raises OSError; the connection is closed then."""
    with selectors.DefaultSelector() as selector:
        newcomers = PendingHandshakes(token, selector, timeout_seconds)
        newcomers.greet(connection)
        while newcomers:
            for key, _ in selector.select(newcomers.seconds_to_deadline()):
                if (proved := newcomers.read(key.data)) is not None:
                    return _ready(*proved, token, is_client=False)
            newcomers.expire()
    raise ConnectionError("a connection without the run's token")


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket; retries a port in use, which a connecting agent may hold briefly. Raises OSError."""
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return socket.create_server((host, port), backlog=BACKLOG, reuse_port=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message from one of several connections. message: None, as the last message, if the connection is closed."""

    link: WireLink
    message: Any


class Connections:
    """Receives, in one thread, messages from all peers that connect with the token, and from added links.

    No peer can block it: handshakes run in their own thread, and a peer that does not read is disconnected.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._newcomers: queue.SimpleQueue[WireLink] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def add(self, link: WireLink) -> None:
        """Add a link; may be called from any thread."""
        self._newcomers.put(link)
        self._wake.send(b"x")

    def drop(self, link: WireLink) -> None:
        """Close a connection without further messages from it; called by the waiting thread."""
        with contextlib.suppress(KeyError, ValueError):  # dropped twice
            self._selector.unregister(link.socket)
        link.close()

    def wait(self, seconds: float) -> list[Received]:
        """Return messages as soon as there are any; an empty list after `seconds`."""
        received: list[Received] = []
        for key, _ in self._selector.select(seconds):
            link: WireLink | None = key.data
            if link is None:
                self._register(len(self._woken.recv(1 << 12)))
                continue
            try:
                received += [Received(link, message) for message in link.receive_some()]
            except LinkClosed:
                self.drop(link)
                received.append(Received(link, None))
        return received

    def _register(self, count: int) -> None:
        for _ in range(count):
            link = self._newcomers.get()
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _accept(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            newcomers = PendingHandshakes(self._token, selector)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(newcomers.seconds_to_deadline()):
                    if key.data is None:
                        newcomers.accept(self._listener)
                    elif (proved := newcomers.read(key.data)) is not None:
                        with contextlib.suppress(OSError):  # it is gone again
                            self.add(_ready(*proved, self._token, is_client=False))
                newcomers.expire()
                time.sleep(ROUND_SECONDS)


def close_all(links: Iterable[WireLink]) -> None:
    for link in links:
        link.close()


def _ready(connection: socket.socket, first: bytes, second: bytes, token: bytes, is_client: bool) -> WireLink:
    connection.settimeout(None)
    keep_alive(connection)
    if not is_client:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
    key = hmac.new(token, b"dilatant-link" + first + second, hashlib.sha256).digest()
    return WireLink(connection, key, is_client)
