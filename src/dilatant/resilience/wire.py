"""How agents, workers and the coordinator talk: a message a frame, over a connection whose two sides share a token.

Both sides prove the token as they do to the rendezvous store, and derive a key from that exchange. A frame is its
length (4 bytes), the protocol's version (1), an HMAC-SHA256 by that key over the direction, the number of the frame and
its body (32), and the body: JSON, decoded into a dataclass of its name, every field checked. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import msgspec

from dilatant.comm import store_protocol as store
from dilatant.comm.store_server import keep_alive
from dilatant.resilience.job import Ask, Job
from dilatant.resilience.protocol import agent, values

VERSION = 1
MAX_FRAME_BYTES = 1 << 24
_HEAD = struct.Struct(">IB")
_MAC_BYTES = 32
PORT_SECONDS = 2.0
"""How long a port that is in use is asked for again."""
MAX_HANDSHAKES = 64
"""Connections that have not shown the token yet; more are closed at once."""


class LinkClosed(ConnectionError):
    """The other side is gone, or what it sent was not of this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a worker. index: among those of its node. pid: of its process."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class StoreAt:
    """Where ranks meet from now on: who led before is gone."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Warm:
    """A worker has what it needs to become part of a generation, but for the state of the run."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker is alive."""


_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        values.Status,
        values.Order,
        agent.Fence,
        agent.Rebuild,
        agent.Activate,
        agent.Apply,
        agent.SaveAndEnd,
        agent.End,
        agent.Stopped,
        agent.Made,
        agent.Computing,
        agent.Prepared,
        agent.Broken,
        agent.Done,
        agent.Died,
        agent.Slow,
        Ask,
        Job,
        Hello,
        StoreAt,
        Beat,
        Warm,
    )
}


class Link:
    """One authenticated connection. `send` from any thread, `receive` from one. Use `connect` or `accept`."""

    def __init__(self, connection: socket.socket, key: bytes, is_client: bool) -> None:
        self._socket = connection
        self._key = key
        self._own, self._theirs = (b"c", b"s") if is_client else (b"s", b"c")
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises LinkClosed."""
        if not is_dataclass(message) or type(message).__name__ not in _KINDS:
            raise TypeError(f"{type(message).__name__} is no message")
        body = msgspec.json.encode({"kind": type(message).__name__, "value": message})
        with self._lock:
            mac = self._mac(self._own, self._sent, body)
            self._sent += 1
            try:
                self._socket.sendall(_HEAD.pack(len(body), VERSION) + mac + body)
            except OSError as error:
                raise LinkClosed(str(error)) from None

    def receive(self) -> Any:
        """The next message, when there is one. Raises LinkClosed."""
        try:
            length, version = _HEAD.unpack(store.receive_exactly(self._socket, _HEAD.size))
            if version != VERSION or length > MAX_FRAME_BYTES:
                raise LinkClosed(f"a frame of version {version} and {length} bytes")
            mac = store.receive_exactly(self._socket, _MAC_BYTES)
            body = store.receive_exactly(self._socket, length)
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise LinkClosed("a frame that was not signed by the other side")
        self._received += 1
        try:
            document = msgspec.json.decode(body)
            return msgspec.convert(document["value"], _KINDS[document["kind"]])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
            raise LinkClosed(f"a message that makes no sense: {error}") from None

    def close(self) -> None:
        """End the connection, and what is blocked in it. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.new(self._key, direction + number.to_bytes(8, "big") + body, hashlib.sha256).digest()


def connect(host: str, port: int, token: bytes, timeout_seconds: float = 10.0) -> Link:
    """Raises OSError, or ValueError for a server of another kind."""
    connection = socket.create_connection((host, port), timeout_seconds)
    try:
        # On one machine, TCP connects a port that nobody listens at to itself, now and then: it would then be taken.
        if connection.getsockname() == connection.getpeername():
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # free it at once
            raise ConnectionRefusedError(f"nobody listens at {host}:{port} yet")
        challenge = store.receive_exactly(connection, store.CHALLENGE_BYTES)
        if not challenge.startswith(store.GREETING):
            raise store.ProtocolError("what listens there is none of ours")
        theirs, own = challenge[len(store.GREETING) :], secrets.token_bytes(store.NONCE_BYTES)
        connection.sendall(own + store.proof(token, b"client", theirs, own))
        if not store.proves(
            store.receive_exactly(connection, store.PROOF_BYTES), token, b"server", theirs, own
        ):
            raise store.Refused("the token of this process is not that of the run")
        return _ready(connection, token, theirs, own, is_client=True)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, token: bytes, timeout_seconds: float = 10.0) -> Link:
    """The server's half. Raises OSError or ValueError; the connection is closed then."""
    try:
        connection.settimeout(timeout_seconds)
        own = secrets.token_bytes(store.NONCE_BYTES)
        connection.sendall(store.GREETING + own)
        answer = store.receive_exactly(connection, store.ANSWER_BYTES)
        theirs, given = answer[: store.NONCE_BYTES], answer[store.NONCE_BYTES :]
        if not store.proves(given, token, b"client", own, theirs):
            connection.sendall(store.REFUSED)
            raise store.Refused("a connection without the run's token")
        connection.sendall(store.proof(token, b"server", own, theirs))
        return _ready(connection, token, own, theirs, is_client=False)
    except BaseException:
        connection.close()
        raise


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket. Raises OSError; of a port in use late, as an agent that dials may have it for a moment."""
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return socket.create_server((host, port), backlog=256, reuse_port=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """What one of several connections brought. message: None when it is closed, which is said once and last."""

    link: Link
    message: Any


def receive_into(received: queue.Queue[Received], link: Link) -> None:
    """Put all messages of a connection into a queue, until it is closed."""
    with contextlib.suppress(LinkClosed):
        while True:
            received.put(Received(link, link.receive()))
    link.close()
    received.put(Received(link, None))


def accept_into(received: queue.Queue[Received], listener: socket.socket, token: bytes) -> None:
    """Put all messages of all who connect with the token into a queue; from threads of their own, for ever."""
    handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)

    def read(connection: socket.socket) -> None:
        try:
            link = accept(connection, token)
        except (OSError, ValueError):
            return
        finally:
            handshakes.release()
        receive_into(received, link)

    def listening() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.01)
                continue
            if not handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=read, args=(connection,), daemon=True).start()

    threading.Thread(target=listening, name="accept", daemon=True).start()


def close_all(links: Iterable[Link]) -> None:
    for link in links:
        link.close()


def _ready(connection: socket.socket, token: bytes, first: bytes, second: bytes, is_client: bool) -> Link:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    key = hmac.new(token, b"dilatant-link" + first + second, hashlib.sha256).digest()
    return Link(connection, key, is_client)
