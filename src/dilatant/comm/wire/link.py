"""Authenticated links: typed messages in signed frames, over connections whose sides have proved the run's token.

A frame is the length of its body (4 bytes, big-endian) and the body. A link's body is a keyed BLAKE2b (32 bytes) of
direction, frame number and message, then the message: MessagePack, decoded into the types that the link's decoder
names, every field checked. The key is derived from token and handshake. A length above the limit is refused before its
body is read. Nothing is unpickled.
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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from dilatant.comm.wire.handshake import (
    ACCEPTED_AT_ONCE,
    AuthenticatedConnection,
    PendingConnection,
    PendingHandshakes,
    dial,
)

MAX_FRAME_BYTES = 1 << 24
_LENGTH = struct.Struct(">I")
_MAC_BYTES = 32
_READ_BYTES = 1 << 16
BACKLOG = 1024
"""Length of the system's queue of connections that a listener has not accepted yet."""
PORT_SECONDS = 2.0
"""How long to retry a port that is in use."""
ROUND_SECONDS = 0.01
"""Pause between rounds while many connections are pending, to serve them in batches without busy waiting."""
SEND_SECONDS = 5
"""A peer that has not read for this long, with full buffers, is disconnected, since the sender serves others, too."""
_ENCODER = msgspec.msgpack.Encoder()


class FrameError(ValueError):
    """A frame that is larger than any message, or a body that is no message."""


class LinkClosed(ConnectionError):
    """The other side is gone, or sent something that violates the protocol."""


def framed(body: bytes, longest: int = MAX_FRAME_BYTES) -> bytes:
    """Return a body of at most `longest` bytes with its length prefix. Raises FrameError."""
    if len(body) > longest:
        raise FrameError(f"a message of {len(body)} bytes is larger than {longest}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frame bodies of at most `longest` bytes each."""

    def __init__(self, longest: int = MAX_FRAME_BYTES) -> None:
        self._longest = longest
        self._arrived = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete. Raises FrameError for one that is too long."""
        self._arrived += data
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > self._longest:
                raise FrameError(f"a message of {length} bytes is larger than {self._longest}")
            end = _LENGTH.size + length
            if len(self._arrived) < end:
                return
            with memoryview(self._arrived) as view:
                body = bytes(view[_LENGTH.size : end])
            del self._arrived[:end]
            yield body


class WireLink:
    """One authenticated connection. Send from any thread, receive from one. decoder: of the messages received."""

    def __init__(
        self, connection: socket.socket, key: bytes, is_client: bool, decoder: msgspec.msgpack.Decoder[Any]
    ) -> None:
        self.socket = connection
        self.is_closed = False
        self._key = key
        self._decoder = decoder
        self._sending, self._receiving = (b"c", b"s") if is_client else (b"s", b"c")
        self._num_sent = self._num_received = 0
        self._frames = FrameReader()
        self._messages: deque[Any] = deque()
        self._failure: LinkClosed | None = None
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises LinkClosed, or FrameError for one that is too large."""
        body = _ENCODER.encode(message)
        with self._lock:
            frame = framed(self._mac(self._sending, self._num_sent, body) + body)
            self._num_sent += 1
            try:
                self.socket.sendall(frame)
            except OSError as error:
                self._shut_down()  # half a frame may have been sent; wakes the reader
                raise LinkClosed(str(error)) from None

    def receive(self) -> Any:
        """Wait for the next message. Raises LinkClosed."""
        while not self._messages:
            self._messages.extend(self.receive_some())
        return self._messages.popleft()

    def receive_some(self) -> list[Any]:
        """Read once and return the messages that are then complete, perhaps none; blocks only if there is nothing to
        read. Raises LinkClosed if the connection ends without a message."""
        if self._failure is not None:
            raise self._failure
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            raise LinkClosed("the other side closed the connection")
        messages: list[Any] = []
        try:
            for body in self._frames.feed(data):
                messages.append(self._open(body))
        except (FrameError, LinkClosed) as error:
            self._failure = LinkClosed(str(error))  # raised by the next read; the shutdown wakes a waiting reader
            if not messages:
                raise self._failure from None
            self._shut_down()
        return messages

    def close(self) -> None:
        """Close the connection and interrupt threads that are blocked in it. May be called twice."""
        self.is_closed = True
        self._shut_down()
        self.socket.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _open(self, frame: bytes) -> Any:
        """Verify a frame and decode its message. Raises LinkClosed."""
        mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._receiving, self._num_received, body)):
            raise LinkClosed("a frame that was not signed by the other side")
        self._num_received += 1
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LinkClosed(f"a message that makes no sense: {error}") from None

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hashlib.blake2b(
            direction + number.to_bytes(8, "big") + body, key=self._key, digest_size=_MAC_BYTES
        ).digest()


def connect(
    host: str, port: int, token: bytes, timeout_seconds: float = 10.0, *, decoder: msgspec.msgpack.Decoder[Any]
) -> WireLink:
    """Connect to a server. Raises OSError, or ValueError for a server of another kind."""
    return open_link(dial(host, port, token, timeout_seconds), token, decoder, is_client=True)


def open_link(
    proved: AuthenticatedConnection, token: bytes, decoder: msgspec.msgpack.Decoder[Any], is_client: bool
) -> WireLink:
    """Return the link over a connection whose handshake is done. Raises OSError if it is gone again."""
    connection = proved.connection
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Detect within a minute that the peer's machine is gone. TCP sends no keep-alive probes while sent data is
    # unacknowledged, so limit that time as well.
    unacknowledged = ("TCP_USER_TIMEOUT", 60_000)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), unacknowledged):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if not is_client:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
    key = hmac.new(token, b"dilatant-link" + proved.nonce + proved.theirs, hashlib.sha256).digest()
    return WireLink(connection, key, is_client, decoder)


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket, for all interfaces if host is ""; retries a port in use, which a connecting client may
    hold briefly. Raises OSError."""
    family = socket.AF_INET6 if not host and socket.has_dualstack_ipv6() else socket.AF_INET
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6
            )
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

    No peer can block it: handshakes never wait, and a peer that does not read is disconnected.
    """

    def __init__(self, listener: socket.socket, token: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._token = token
        self._decoder = decoder
        self._selector = selectors.DefaultSelector()
        self._pending = PendingHandshakes(token, self._selector)
        self._woken, self._waker = socket.socketpair()
        for each in (listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._added: queue.SimpleQueue[WireLink] = queue.SimpleQueue()

    def add(self, link: WireLink) -> None:
        """Add a link; may be called from any thread."""
        self._added.put(link)
        self.wake()

    def wake(self) -> None:
        """Let `wait` return soon; may be called from any thread."""
        with contextlib.suppress(OSError):  # closed
            self._waker.send(b"x")

    def drop(self, link: WireLink) -> None:
        """Close a connection without further messages from it; called by the waiting thread."""
        with contextlib.suppress(KeyError, ValueError):  # dropped twice
            self._selector.unregister(link.socket)
        link.close()

    def wait(self, seconds: float | None) -> list[Received]:
        """Return messages as soon as there are any; an empty list after `seconds` (None: no limit), or earlier."""
        received: list[Received] = []
        limits = [limit for limit in (seconds, self._pending.seconds_to_deadline()) if limit is not None]
        for key, _ in self._selector.select(min(limits, default=None)):
            if key.fileobj is self._listener:
                self._pending.accept(self._listener)
            elif key.fileobj is self._woken:
                self._woken.recv(1 << 12)
                while not self._added.empty():
                    self._register(self._added.get())
            elif isinstance(key.data, PendingConnection):
                if (proved := self._pending.read(key.data)) is not None:
                    with contextlib.suppress(OSError):  # it is gone again
                        self._register(open_link(proved, self._token, self._decoder, is_client=False))
            else:
                link: WireLink = key.data
                try:
                    received += [Received(link, message) for message in link.receive_some()]
                except LinkClosed:
                    self.drop(link)
                    received.append(Received(link, None))
        self._pending.expire()
        if not received and len(self._pending) > ACCEPTED_AT_ONCE:
            time.sleep(ROUND_SECONDS)
        return received

    def close(self) -> None:
        """Close all connections and the listener; called by the waiting thread."""
        self._pending.close()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.data, WireLink):
                self.drop(key.data)
        self._selector.close()
        for each in (self._listener, self._woken, self._waker):
            each.close()

    def _register(self, link: WireLink) -> None:
        self._selector.register(link.socket, selectors.EVENT_READ, link)
