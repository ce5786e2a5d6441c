"""Handshake of a new connection: both sides prove the run's token before anything else is read.

The server sends a challenge, the client answers, the server proves itself. The token is never sent: each side proves it
by an HMAC-SHA256 over both nonces and its own role, so neither a replayed answer nor the peer's own answer is accepted.

Unauthenticated connections cost the server memory for at most `most` challenge answers, and no thread. One deadline
covers the whole handshake, however many bytes arrive before it. When there are too many, the oldest is dropped, never
an authenticated one: a peer with the token answers at once, before it is the oldest.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

GREETING = b"dilatant-wire-2"
NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_BYTES = len(GREETING) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSED = b"refused".ljust(PROOF_BYTES, b"\0")
"""Sent by the server in place of its proof to a client without the token."""
CROWDED_SECONDS = 3.0
HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 1024
"""Upper limit of pending connections; never more than half of this process's file descriptors."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before authenticated clients are served again."""


class ProtocolError(ValueError):
    """Bytes that violate the protocol."""


class TokenMismatch(ConnectionError):
    """The two sides do not have the same token."""


class AuthenticatedConnection(NamedTuple):
    """A connection whose peer has proved the token. nonce, theirs: the random bytes of server and client."""

    connection: socket.socket
    nonce: bytes
    theirs: bytes


def proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof that `role` ("server" or "client") holds the token, for one pair of nonces."""
    return hmac.new(token, GREETING + role + first + second, hashlib.sha256).digest()


def proves(answer: bytes, token: bytes, role: bytes, first: bytes, second: bytes) -> bool:
    """Compare `answer` with the expected proof, in constant time."""
    return hmac.compare_digest(answer, proof(token, role, first, second))


def dial(host: str, port: int, token: bytes, seconds: float) -> AuthenticatedConnection:
    """Open an authenticated connection to a server.

    seconds: limit for the whole call. A crowded server may drop a connection before its handshake; the call then
    retries for up to CROWDED_SECONDS. Raises TokenMismatch, ProtocolError or OSError.
    """
    began = time.monotonic()
    deadline = began + seconds
    while True:
        connection = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
        try:
            # On one machine, TCP may connect a port without a listener to itself, which then occupies the port.
            if connection.getsockname() == connection.getpeername():
                at_once = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)  # free it
                raise ConnectionRefusedError(f"nobody listens at {host}:{port} yet")
            return _authenticate(connection, token, deadline)
        except BaseException as error:
            connection.close()
            is_final = isinstance(error, TokenMismatch | ConnectionRefusedError) or not isinstance(
                error, ConnectionError
            )
            if is_final or time.monotonic() > min(deadline, began + CROWDED_SECONDS):
                raise
        time.sleep(0.02)


def _authenticate(connection: socket.socket, token: bytes, deadline: float) -> AuthenticatedConnection:
    """Do the client's half of the handshake."""
    challenge = receive_exactly(connection, CHALLENGE_BYTES, deadline)
    if not challenge.startswith(GREETING):
        raise ProtocolError("what listens there is none of ours, or of another version of dilatant")
    nonce, theirs = challenge[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    connection.sendall(theirs + proof(token, b"client", nonce, theirs))
    if not proves(receive_exactly(connection, PROOF_BYTES, deadline), token, b"server", nonce, theirs):
        raise TokenMismatch("the token of this process is not that of the run")
    return AuthenticatedConnection(connection, nonce, theirs)


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Return the next `count` bytes, all of them before `deadline` (by `time.monotonic`). Raises OSError."""
    parts = bytearray()
    while len(parts) < count:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other side does not answer in time")
        connection.settimeout(left)
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts += part
    return bytes(parts)


@dataclass(eq=False, slots=True)
class PendingConnection:
    """A connection that has been sent a challenge. deadline: by the clock of its `PendingHandshakes`."""

    connection: socket.socket
    nonce: bytes
    deadline: float
    arrived: bytearray = field(default_factory=bytearray)


class PendingHandshakes:
    """The server's half of the handshake, for an event loop around `selector`, whose keys carry the pending connections
    as data. The loop calls `accept`, `read` and `expire`; none of them blocks."""

    def __init__(
        self,
        token: bytes,
        selector: selectors.BaseSelector,
        seconds: float = HANDSHAKE_SECONDS,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._selector = selector
        self._seconds = seconds
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most or min(MAX_PENDING, max(1, soft // 2))
        self._clock = clock
        self._waiting: dict[PendingConnection, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def accept(self, listener: socket.socket) -> None:
        """Accept at most ACCEPTED_AT_ONCE connections from a non-blocking listener."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._waiting:
                        self.drop(next(iter(self._waiting)))
                    else:
                        time.sleep(0.01)  # authenticated clients hold all descriptors
                return
            self.greet(connection)

    def greet(self, connection: socket.socket) -> None:
        """Send a challenge and start its deadline."""
        if len(self._waiting) >= self._most:
            self.drop(next(iter(self._waiting)))
        nonce = secrets.token_bytes(NONCE_BYTES)
        pending = PendingConnection(connection, nonce, self._clock() + self._seconds)
        self._waiting[pending] = None
        self._selector.register(connection, selectors.EVENT_READ, pending)
        try:
            connection.setblocking(False)
            connection.sendall(GREETING + nonce)
        except OSError:
            self.drop(pending)

    def read(self, pending: PendingConnection) -> AuthenticatedConnection | None:
        """Read what has arrived. Return the connection once it is authenticated and unregistered."""
        if pending not in self._waiting:  # dropped after the selector reported it
            return None
        try:
            data = pending.connection.recv(ANSWER_BYTES - len(pending.arrived))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.arrived += data
        if data and len(pending.arrived) < ANSWER_BYTES:
            return None
        theirs, answer = bytes(pending.arrived[:NONCE_BYTES]), bytes(pending.arrived[NONCE_BYTES:])
        is_proved = proves(answer, self._token, b"client", pending.nonce, theirs)
        try:
            pending.connection.sendall(proof(self._token, b"server", pending.nonce, theirs) if is_proved else REFUSED)
        except OSError:
            is_proved = False
        if not is_proved:
            self.drop(pending)
            return None
        del self._waiting[pending]
        self._selector.unregister(pending.connection)
        return AuthenticatedConnection(pending.connection, pending.nonce, theirs)

    def expire(self) -> None:
        """Drop the connections whose deadline has passed."""
        now = self._clock()
        while self._waiting and (oldest := next(iter(self._waiting))).deadline <= now:
            self.drop(oldest)

    def seconds_to_deadline(self) -> float | None:
        """Return how long the selector may wait before `expire` has work; None: without limit."""
        return max(0.0, next(iter(self._waiting)).deadline - self._clock()) if self._waiting else None

    def drop(self, pending: PendingConnection) -> None:
        if pending in self._waiting:
            del self._waiting[pending]
            self._selector.unregister(pending.connection)
            pending.connection.close()

    def close(self) -> None:
        """Drop all pending connections."""
        for pending in [*self._waiting]:
            self.drop(pending)
