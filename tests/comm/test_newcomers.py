"""What connections without the token cost a server, by a clock of the test's own."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dilatant.comm.wire import handshake
from dilatant.comm.wire.handshake import AuthenticatedConnection, PendingHandshakes

TOKEN = b"correct horse battery staple"
SECONDS = 10.0
MOST = 4


class Door:
    """Newcomers whose clock the test sets, with the other ends of their connections."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 100.0
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self.newcomers = PendingHandshakes(TOKEN, self._selector, SECONDS, MOST, lambda: self.now)
        stack.callback(self.newcomers.close)

    def enter(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._stack.callback(theirs.close)
        theirs.settimeout(5.0)
        self.newcomers.greet(ours)
        return theirs

    def turn(self) -> list[AuthenticatedConnection]:
        """Read whatever has arrived; who has proved the token."""
        found = [self.newcomers.read(key.data) for key, _ in self._selector.select(0)]
        self.newcomers.expire()
        return [proved for proved in found if proved is not None]


@pytest.fixture
def door() -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack)


def received(connection: socket.socket, count: int) -> bytes:
    return handshake.receive_exactly(connection, count, time.monotonic() + 5.0)


def answer(connection: socket.socket, token: bytes = TOKEN) -> bytes:
    challenge = received(connection, handshake.CHALLENGE_BYTES)
    own = b"c" * handshake.NONCE_BYTES
    return own + handshake.proof(token, b"client", challenge[len(handshake.GREETING) :], own)


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 12):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_byte_now_and_then_does_not_move_the_deadline(door: Door) -> None:
    dripping = door.enter()
    data = answer(dripping)
    for byte in data[:9]:
        door.now += 1.0
        dripping.sendall(bytes([byte]))
        assert not door.turn()
        assert len(door.newcomers) == 1
    assert door.newcomers.seconds_to_deadline() == 1.0
    door.now += 1.0
    door.turn()
    assert is_closed(dripping)
    assert door.newcomers.seconds_to_deadline() is None


def test_the_oldest_gives_way_and_who_proved_the_token_never(door: Door) -> None:
    friend = door.enter()
    friend.sendall(answer(friend))
    (proved,) = door.turn()
    strangers = [door.enter() for _ in range(MOST + 2)]
    assert len(door.newcomers) == MOST
    assert [is_closed(each) for each in strangers[:2]] == [True, True]
    late = door.enter()  # behind all of them
    late.sendall(answer(late))
    assert len(door.turn()) == 1
    proved.connection.sendall(b"still here")
    received(friend, handshake.PROOF_BYTES)
    assert received(friend, 10) == b"still here"


@pytest.mark.parametrize("wrong", ["token", "garbage", "replayed", "half", "reflected"])
def test_what_does_not_answer_its_own_challenge_is_closed(door: Door, wrong: str) -> None:
    stranger = door.enter()
    if wrong == "token":
        stranger.sendall(answer(stranger, b"another secret of somebody"))
    elif wrong == "garbage":
        stranger.sendall(b"\xff" * 4096)
    elif wrong == "half":
        stranger.sendall(answer(stranger)[:40])
        stranger.shutdown(socket.SHUT_WR)
    elif wrong == "reflected":  # the server's own proof of another connection
        challenge = received(stranger, handshake.CHALLENGE_BYTES)
        nonce = challenge[len(handshake.GREETING) :]
        stranger.sendall(nonce + handshake.proof(TOKEN, b"server", nonce, nonce))
    else:
        friend = door.enter()
        right = answer(friend)
        friend.sendall(right)
        stranger.sendall(right)
        assert len(door.turn()) == 1
    assert not door.turn() + door.turn()  # of half an answer, its bytes and its end
    assert len(door.newcomers) == 0
    assert is_closed(stranger)


def test_a_partial_answer_does_not_extend_the_client_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 8)
        with pytest.raises(TimeoutError, match="in time"):
            handshake.receive_exactly(ours, 16, deadline=0.0)  # long ago
