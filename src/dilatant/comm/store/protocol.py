"""The wire of the rendezvous store: length-prefixed frames after a mutual challenge by a shared token.

Imports no torch. A frame is its length (4 bytes, big-endian) and that many bytes; these are fields, each with a length
of its own. Nothing is unpickled or evaluated. The token never travels: each side proves it by an HMAC-SHA256 over both
sides' nonces and its own role, so that neither an answer of before nor the other side's own answer passes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

GREETING = b"dilatant-store-1"
NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_BYTES = len(GREETING) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_FRAME_BYTES = 1 << 24
"""Addresses, names and error messages are kilobytes; nobody may ask a side to hold more than this."""
MAX_FIELDS = 1 << 16
CROWDED_SECONDS = 3.0
REFUSED = b"refused".ljust(PROOF_BYTES, b"\0")
"""What the server sends in place of its proof to a client without the token."""

_LENGTH = struct.Struct(">I")


class ProtocolError(ValueError):
    """Bytes that are no frame of ours."""


class Refused(ConnectionError):
    """The two sides do not hold the same token."""


def proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """What shows that `role` ("server" or "client") holds the token, for one pair of nonces."""
    return hmac.new(token, GREETING + role + first + second, hashlib.sha256).digest()


def proves(given: bytes, token: bytes, role: bytes, first: bytes, second: bytes) -> bool:
    """Whether `given` is that proof, in constant time."""
    return hmac.compare_digest(given, proof(token, role, first, second))


def pack(fields: Sequence[bytes]) -> bytes:
    """One frame. Raises ProtocolError if it were too large."""
    body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    if len(body) > MAX_FRAME_BYTES or len(fields) > MAX_FIELDS:
        raise ProtocolError(
            f"{len(fields)} fields of {len(body)} bytes are more than a message of the store holds"
        )
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The fields of a frame's body. Raises ProtocolError."""
    fields: list[bytes] = []
    at = 0
    while at < len(body):
        if len(body) - at < _LENGTH.size or len(fields) == MAX_FIELDS:
            raise ProtocolError("a field is cut short, or there are too many")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if length > len(body) - at:
            raise ProtocolError("a field is longer than its frame")
        fields.append(body[at : at + length])
        at += length
    return fields


def frame_bytes(prefix: bytes) -> int:
    """The length of a body from the four bytes before it. Raises ProtocolError."""
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return int(length)


def dial(host: str, port: int, token: bytes, seconds: float) -> tuple[socket.socket, bytes, bytes]:
    """A connection whose two sides have proved the token, and the random bytes of server and client.

    seconds: for all of it. Strangers who crowd a server may push out a connection before its handshake: another one is
    tried then, for up to CROWDED_SECONDS. Raises Refused, ProtocolError or OSError.
    """
    began = time.monotonic()
    deadline = began + seconds
    while True:
        connection = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
        try:
            # On one machine, TCP connects a port that nobody listens at to itself, now and then: it is taken then.
            if connection.getsockname() == connection.getpeername():
                at_once = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)  # free it
                raise ConnectionRefusedError(f"nobody listens at {host}:{port} yet")
            return connection, *_authenticate(connection, token, deadline)
        except BaseException as error:
            connection.close()
            is_final = isinstance(error, Refused | ConnectionRefusedError) or not isinstance(
                error, ConnectionError
            )
            if is_final or time.monotonic() > min(deadline, began + CROWDED_SECONDS):
                raise
        time.sleep(0.02)


def _authenticate(connection: socket.socket, token: bytes, deadline: float) -> tuple[bytes, bytes]:
    """The client's half of the challenge."""
    challenge = receive_exactly(connection, CHALLENGE_BYTES, deadline)
    if not challenge.startswith(GREETING):
        raise ProtocolError("what listens there is none of ours, or of another version of dilatant")
    theirs, own = challenge[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own + proof(token, b"client", theirs, own))
    if not proves(receive_exactly(connection, PROOF_BYTES, deadline), token, b"server", theirs, own):
        raise Refused("the token of this process is not that of the run")
    return theirs, own


def request(connection: socket.socket, fields: Sequence[bytes]) -> list[bytes]:
    """Send one frame and return the fields of the one that answers. Raises ProtocolError or OSError."""
    connection.sendall(pack(fields))
    return unpack(receive_exactly(connection, frame_bytes(receive_exactly(connection, _LENGTH.size))))


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """The next `count` bytes. Raises ConnectionError when the other side closes before, or OSError.

    deadline: for all of them, by `time.monotonic`; without one, each read has the timeout of the socket.
    """
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side does not answer in time")
            connection.settimeout(left)
        part = connection.recv(min(count - len(parts), 1 << 16))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts += part
    return bytes(parts)
