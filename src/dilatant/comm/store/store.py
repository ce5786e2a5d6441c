"""Client of the rendezvous store: a torch.distributed store over one authenticated connection."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from dilatant.comm.store.server import FIELDS
from dilatant.comm.store.token import REMEDY
from dilatant.comm.wire import link as wire
from dilatant.comm.wire.handshake import TokenMismatch
from dilatant.config.errors import UserError

DEFAULT_TIMEOUT = timedelta(seconds=300)
ANSWER_SECONDS = 15.0
"""Time limit of the server's answer to a non-blocking request; added to the timeout of a blocking one."""


NOTICE_SECONDS = 10.0
"""Time after which a client prints that it still waits for the store."""


class StoreGone(RuntimeError):
    """The store's server does not answer any more, or this connection to it was closed."""


class Store(dist.Store):
    """Keys and values of all ranks, under a prefix. Serves one call at a time: a blocked call blocks the connection.

    Torch's backends use it for their rendezvous and do not keep it alive; the caller must. `wait`, `get` and `pop`
    raise TimeoutError, all methods StoreGone. Create with `connect`.
    """

    def __init__(self, server: _Server, prefix: str, connection: _Connection) -> None:
        super().__init__()
        self._server = server
        self._prefix = prefix
        self._connection = connection
        self._timeout = DEFAULT_TIMEOUT

    @property
    def on_one_machine(self) -> bool:
        """Return True if all ranks are on the store's machine, so that nothing has to listen to other machines."""
        return self._server.on_one_machine

    @property
    def local_address(self) -> str:
        """Return this machine's address towards the store."""
        return self._connection.local_address

    def prefixed(self, prefix: str) -> Store:
        """Return a store on the same connection, with `prefix` appended to the key prefix."""
        return Store(self._server, f"{self._prefix}{prefix}/", self._connection)

    def clone(self) -> Store:
        """Return a store for the same keys with its own connection. Raises StoreGone."""
        try:
            return Store(self._server, self._prefix, _Connection(self._server))
        except (OSError, ValueError) as error:
            raise StoreGone(f"the store does not answer: {error}") from error

    def close(self) -> None:
        """Close the connection; a call blocked in it raises StoreGone. Thread-safe and idempotent."""
        self._connection.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", self._key(key), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(field for key, value in pairs for field in (self._key(key), _bytes(value))))

    def get(self, key: str) -> bytes:
        return self._await(b"get", [key], self._timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        return self._await(b"get", keys, self._timeout if timeout is None else timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(b"wait", keys, self._timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", self._key(key), str(amount).encode())[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", self._key(key), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *map(self._key, keys))[0] == b"yes"

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", self._key(key))[0] == b"1"

    def push(self, key: str, value: str | bytes) -> None:
        self._ask(b"push", self._key(key), _bytes(value))

    def pop(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Wait for a queue to have a value and remove the oldest; without a timeout, wait without limit."""
        return self._await(b"pop", [key], timeout)[0]

    def has_extended_api(self) -> bool:
        return True

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()

    def _ask(self, *fields: bytes) -> list[bytes]:
        return self._connection.ask(fields, ANSWER_SECONDS)

    def _await(self, operation: bytes, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        if not keys:
            return []
        seconds = None if timeout is None else timeout.total_seconds()
        milliseconds = -1 if seconds is None else int(seconds * 1000)
        fields = [operation, str(milliseconds).encode(), *map(self._key, keys)]
        try:
            return self._connection.ask(fields, None if seconds is None else seconds + ANSWER_SECONDS)
        except TimeoutError:
            names = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
            # torch and Comm recognize a timeout by these words
            raise TimeoutError(f"Timed out after {seconds:g} s of waiting for {names} in the store") from None


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    token: bytes = field(repr=False)
    on_one_machine: bool


class _Connection:
    """One authenticated connection, for one request at a time."""

    def __init__(self, server: _Server) -> None:
        self._lock = threading.Lock()
        self._link = wire.connect(server.host, server.port, server.token, ANSWER_SECONDS, decoder=FIELDS)
        self.local_address: str = self._link.socket.getsockname()[0]

    def ask(self, fields: Sequence[bytes], timeout_seconds: float | None) -> list[bytes]:
        """Return the server's answer. Raises TimeoutError if the server reports one, StoreGone without an answer."""
        with self._lock:
            if self._link.is_closed:
                raise StoreGone("this connection to the store is closed")
            try:
                self._link.socket.settimeout(timeout_seconds)
                self._link.send(fields)
                status, *values = self._link.receive()
            except (OSError, ValueError) as error:
                closed = self._link.is_closed
                self.close()  # a late answer would be taken for the answer to the next request
                if closed:
                    raise StoreGone("this connection to the store was closed") from None
                raise StoreGone(f"the store does not answer: {error}") from error
        if status == b"timeout":
            raise TimeoutError
        return values

    def close(self) -> None:
        self._link.close()


def connect(host: str, port: int, token: bytes, on_one_machine: bool, timeout_seconds: float = 300.0) -> Store:
    """Connect to the store, which may not listen yet. Raises UserError if the tokens differ, or if nothing answers in
    time."""
    server = _Server(host, port, token, on_one_machine)
    began, is_reported = time.monotonic(), False
    deadline = began + timeout_seconds
    while True:
        try:
            return Store(server, "", _Connection(server))
        except TokenMismatch:
            raise UserError(
                f"the store of the run at {host}:{port} refused this process, or is not the run's: their tokens "
                f"differ; {REMEDY}"
            ) from None
        except (OSError, ValueError) as error:
            now = time.monotonic()
            if now > began + NOTICE_SECONDS and not is_reported:
                is_reported = True
                where = f"{host}:{port} ({error}), up to {timeout_seconds:g} s"
                print(f"waits for the store of the run at {where}", file=sys.stderr, flush=True)
            if now > deadline:
                raise UserError(
                    f"no store of the run answers at {host}:{port} within {timeout_seconds:g} s ({error}): rank 0 did "
                    "not start there, or a firewall is in between"
                ) from None
            time.sleep(0.1)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
