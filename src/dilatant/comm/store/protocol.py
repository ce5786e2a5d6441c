"""Wire protocol of the rendezvous store: length-prefixed frames after mutual authentication by a shared token.

Imports no torch. A frame is its length (4 bytes, big-endian) and that many bytes, which are fields, each with its own
length prefix. Nothing is unpickled or evaluated. The token is never sent: each side proves it by an HMAC-SHA256 over
both nonces and its own role, so neither a replayed answer nor the peer's own answer is accepted.
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
"""Upper limit of a frame. Addresses, names and error messages are kilobytes; larger requests are refused."""
MAX_FIELDS = 1 << 16
CROWDED_SECONDS = 3.0
REFUSED = b"refused".ljust(PROOF_BYTES, b"\0")
"""Sent by the server in place of its proof to a client without the token."""

_LENGTH = struct.Struct(">I")


class ProtocolError(ValueError):
    """Bytes that are not a frame of this protocol."""


class TokenMismatch(ConnectionError):
    """The two sides do not have the same token."""


def proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof that `role` ("server" or "client") holds the token, for one pair of nonces."""
    return hmac.new(token, GREETING + role + first + second, hashlib.sha256).digest()


def proves(given: bytes, token: bytes, role: bytes, first: bytes, second: bytes) -> bool:
    """Compare `given` with the expected proof, in constant time."""
    return hmac.compare_digest(given, proof(token, role, first, second))


def pack(fields: Sequence[bytes]) -> bytes:
    """Pack fields into one frame. Raises ProtocolError if it is too large."""
    body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    if len(body) > MAX_FRAME_BYTES or len(fields) > MAX_FIELDS:
        raise ProtocolError(
            f"{len(fields)} fields of {len(body)} bytes are more than a message of the store holds"
        )
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """Split a frame's body into fields. Raises ProtocolError."""
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
    """Return the length of a body from its four-byte prefix. Raises ProtocolError."""
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return int(length)


def dial(host: str, port: int, token: bytes, seconds: float) -> tuple[socket.socket, bytes, bytes]:
    """Open an authenticated connection; return it with the random bytes of server and client.

    seconds: limit for the whole call. A crowded server may drop a connection before its handshake; the call then
    retries for up to CROWDED_SECONDS. Raises Refused, ProtocolError or OSError.
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
            return connection, *_authenticate(connection, token, deadline)
        except BaseException as error:
            connection.close()
            is_final = isinstance(error, TokenMismatch | ConnectionRefusedError) or not isinstance(
                error, ConnectionError
            )
            if is_final or time.monotonic() > min(deadline, began + CROWDED_SECONDS):
                raise
        time.sleep(0.02)


def _authenticate(connection: socket.socket, token: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Do the client's half of the handshake. Returns the random bytes of server and client."""
    challenge = receive_exactly(connection, CHALLENGE_BYTES, deadline)
    if not challenge.startswith(GREETING):
        raise ProtocolError("what listens there is none of ours, or of another version of dilatant")
    theirs, own = challenge[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own + proof(token, b"client", theirs, own))
    if not proves(receive_exactly(connection, PROOF_BYTES, deadline), token, b"server", theirs, own):
        raise TokenMismatch("the token of this process is not that of the run")
    return theirs, own


def request(connection: socket.socket, fields: Sequence[bytes]) -> list[bytes]:
    """Send one frame and return the fields of the answer. Raises ProtocolError or OSError."""
    connection.sendall(pack(fields))
    return unpack(receive_exactly(connection, frame_bytes(receive_exactly(connection, _LENGTH.size))))


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Return the next `count` bytes. Raises ConnectionError if the peer closes before, or OSError.

    deadline: for all of them, by `time.monotonic`; without it, each read has the socket's timeout.
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
