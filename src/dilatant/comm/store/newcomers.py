"""Connections that have not proved the run's token yet, as a server holds them: few, each for a bounded time.

Imports no torch. Strangers cost the server memory for `most` answers to a challenge and no thread. Each connection has
one deadline for the whole handshake, however many bytes arrive before it. When there are too many, the oldest one gives
way, never one that has proved the token: who holds the token answers at once, and is through before it is the oldest.
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
"""At most, and no more than half of the descriptors that this process may open."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before those who have proved the token are served again."""
NONCE = protocol.NONCE_BYTES
BACKLOG = 1024
"""Connections that the system keeps for a listener of ours until they are accepted."""


@dataclass(eq=False, slots=True)
class Newcomer:
    """A connection that has been sent a challenge. deadline: by the clock of its `Newcomers`."""

    connection: socket.socket
    nonce: bytes
    deadline: float
    arrived: bytearray = field(default_factory=bytearray)


class Proved(NamedTuple):
    """A connection whose other side holds the token. nonce, theirs: the random bytes of server and client."""

    connection: socket.socket
    nonce: bytes
    theirs: bytes


class Newcomers:
    """The server's half of the handshake (see `store_protocol`), for a loop around `selector`, in whose keys newcomers
    are the data. The loop calls `accept`, `read` and `expire`; none of them waits."""

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
        self._waiting: dict[Newcomer, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def accept(self, listener: socket.socket) -> None:
        """Accept who has connected to a listener that does not block, at most ACCEPTED_AT_ONCE."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._waiting:
                        self.drop(next(iter(self._waiting)))
                    else:
                        time.sleep(0.01)  # those who are served hold all descriptors
                return
            self.greet(connection)

    def greet(self, connection: socket.socket) -> None:
        """Send a challenge, and wait for its answer from now on."""
        if len(self._waiting) >= self._most:
            self.drop(next(iter(self._waiting)))
        newcomer = Newcomer(connection, secrets.token_bytes(NONCE), self._clock() + self._seconds)
        self._waiting[newcomer] = None
        self._selector.register(connection, selectors.EVENT_READ, newcomer)
        try:
            connection.setblocking(False)
            connection.sendall(protocol.GREETING + newcomer.nonce)
        except OSError:
            self.drop(newcomer)

    def read(self, newcomer: Newcomer) -> Proved | None:
        """Take what has arrived; the connection, once it has proved the token. It is not in the selector then."""
        if newcomer not in self._waiting:  # dropped since the selector found it
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
        return Proved(newcomer.connection, newcomer.nonce, theirs)

    def expire(self) -> None:
        """Drop those whose time is over."""
        now = self._clock()
        while self._waiting and (oldest := next(iter(self._waiting))).deadline <= now:
            self.drop(oldest)

    def seconds_to_deadline(self) -> float | None:
        """How long the selector may wait before `expire` has something to do; None: for ever."""
        return max(0.0, next(iter(self._waiting)).deadline - self._clock()) if self._waiting else None

    def drop(self, newcomer: Newcomer) -> None:
        if newcomer in self._waiting:
            del self._waiting[newcomer]
            self._selector.unregister(newcomer.connection)
            newcomer.connection.close()

    def close(self) -> None:
        """Drop all."""
        for newcomer in [*self._waiting]:
            self.drop(newcomer)
