"""Server-side handshake: connections that have not yet proved the run's token, limited in number and time.

Imports no torch. Unauthenticated connections cost the server memory for at most `most` challenge answers, and no
thread. One deadline covers the whole handshake, however many bytes arrive before it. When there are too many, the
oldest is dropped, never an authenticated one: a peer with the token answers at once, before it is the oldest.
"""

from __future__ import annotations

import errno
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dilatant.comm.store import protocol as protocol

HANDSHAKE_SECONDS = 10.0
MAX_NEWCOMERS = 1024
"""Upper limit of pending connections; never more than half of this process's file descriptors."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before authenticated clients are served again."""
NONCE = protocol.NONCE_BYTES
BACKLOG = 1024
"""Length of the system's queue of connections that a listener has not accepted yet."""


@dataclass(eq=False, slots=True)
class PendingConnection:
    """A connection that has been sent a challenge. deadline: by the clock of its `PendingHandshakes`."""

    connection: socket.socket
    nonce: bytes
    deadline: float
    arrived: bytearray = field(default_factory=bytearray)


class AuthenticatedConnection(NamedTuple):
    """A connection whose peer has proved the token. nonce, theirs: the random bytes of server and client."""

    connection: socket.socket
    nonce: bytes
    theirs: bytes


class PendingHandshakes:
    """The server's half of the handshake (see `protocol`), for an event loop around `selector`, whose keys carry the
    pending connections as data. The loop calls `accept`, `read` and `expire`; none of them blocks."""

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
        self._most = most or min(MAX_NEWCOMERS, max(1, soft // 2))
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
        newcomer = PendingConnection(connection, secrets.token_bytes(NONCE), self._clock() + self._seconds)
        self._waiting[newcomer] = None
        self._selector.register(connection, selectors.EVENT_READ, newcomer)
        try:
            connection.setblocking(False)
            connection.sendall(protocol.GREETING + newcomer.nonce)
        except OSError:
            self.drop(newcomer)

    def read(self, newcomer: PendingConnection) -> AuthenticatedConnection | None:
        """Read what has arrived. Return the connection once it is authenticated and unregistered."""
        if newcomer not in self._waiting:  # dropped after the selector reported it
            return None
        try:
            data = newcomer.connection.recv(protocol.ANSWER_BYTES - len(newcomer.arrived))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        newcomer.arrived += data
        if data and len(newcomer.arrived) < protocol.ANSWER_BYTES:
            return None
        theirs, answer = (bytes(part) for part in (newcomer.arrived[:NONCE], newcomer.arrived[NONCE:]))
        reply, is_proved = protocol.REFUSED, False
        if protocol.proves(answer, self._token, b"client", newcomer.nonce, theirs):
            reply, is_proved = protocol.proof(self._token, b"server", newcomer.nonce, theirs), True
        try:
            newcomer.connection.sendall(reply)
        except OSError:
            is_proved = False
        if not is_proved:
            self.drop(newcomer)
            return None
        del self._waiting[newcomer]
        self._selector.unregister(newcomer.connection)
        return AuthenticatedConnection(newcomer.connection, newcomer.nonce, theirs)

    def expire(self) -> None:
        """Drop the connections whose deadline has passed."""
        now = self._clock()
        while self._waiting and (oldest := next(iter(self._waiting))).deadline <= now:
            self.drop(oldest)

    def seconds_to_deadline(self) -> float | None:
        """Return how long the selector may wait before `expire` has work; None: without limit."""
        return max(0.0, next(iter(self._waiting)).deadline - self._clock()) if self._waiting else None

    def drop(self, newcomer: PendingConnection) -> None:
        if newcomer in self._waiting:
            del self._waiting[newcomer]
            self._selector.unregister(newcomer.connection)
            newcomer.connection.close()

    def close(self) -> None:
        """Drop all pending connections."""
        for newcomer in [*self._waiting]:
            self.drop(newcomer)
