"""What a worker says of the steps that it computes, and when."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from dilatant.comm.wire.link import Connections, LinkClosed, Received, WireLink, listen
from dilatant.resilience.processes.messages import MESSAGES, Hello, Warm
from dilatant.resilience.protocol.agent import Computing, Prepared
from dilatant.resilience.worker.worker_link import SOON_BEATS, WorkerLink

TOKEN = b"of links under test"
BEAT = 0.2


@contextmanager
def linked() -> Iterator[tuple[WorkerLink, WireLink]]:
    """A worker's link, which beats, and the other side of it."""
    listener = listen("127.0.0.1")
    with closing(Connections(listener, TOKEN, MESSAGES)) as connections:
        heard: list[Received] = []

        def serve() -> None:
            while not heard:
                heard.extend(connections.wait(0.1))

        thread = threading.Thread(target=serve)
        thread.start()
        worker = WorkerLink(listener.getsockname()[1], TOKEN, 0, lambda generation: None, BEAT)
        thread.join()
        with closing(heard[0].link) as agent, closing(worker):
            worker.warm()
            assert [type(heard[0].message), type(agent.receive())] == [Hello, Warm]
            yield worker, agent


@pytest.mark.parametrize("changed", ["again", "later", "back", "bit"])
def test_frames_count_once_in_their_order_and_direction(changed: str) -> None:
    ours, theirs = socket.socketpair()
    one, other = (WireLink(each, b"key", is_client=each is ours, decoder=MESSAGES) for each in (ours, theirs))
    with closing(one), closing(other):
        one.send(Prepared(1, 7))
        frame = theirs.recv(1 << 16)
        ours.sendall(frame)
        assert other.receive() == Prepared(1, 7)
        if changed == "again":
            ours.sendall(frame)
        elif changed == "later":
            one.send(Prepared(1, 8))
            theirs.recv(1 << 16)  # which is held up on its way
            one.send(Prepared(1, 9))
        elif changed == "back":
            theirs.sendall(frame)
        else:
            one.send(Prepared(1, 8))
            frame = theirs.recv(1 << 16)
            ours.sendall(frame[:-1] + bytes([frame[-1] ^ 1]))
        with pytest.raises(LinkClosed, match="not signed"):
            (one if changed == "back" else other).receive()


def said(agent: WireLink, beats: int) -> list[object]:
    """What comes until so many beats are heard, in its order; of a beat what it says with it is in the next one."""
    found: list[object] = []
    while beats:
        message = agent.receive()
        if type(message).__name__ == "Beat":
            beats -= 1
        else:
            found.append(message)
    return found


def test_computing_is_reported_once_and_only_for_long_steps() -> None:
    with linked() as (worker, agent):
        for step in range(5):
            worker.begin(step, 60.0)
            worker.propose(step, {})
        worker.begin(5, 60.0)
        found = said(agent, 4)
        assert [message for message in found if isinstance(message, Prepared)] == [
            Prepared(0, step, {}) for step in range(5)
        ]
        *_, computing = found
        assert isinstance(computing, Computing)
        assert computing.step == 5
        assert 0.0 < computing.limit_seconds < 60.0  # less what it has taken by now
        assert len(found) == 6
        worker.propose(5, {})
        worker.begin(6, 60.0)
        worker.propose(6, {})
        assert said(agent, 3) == [Prepared(0, 5, {}), Prepared(0, 6, {})]


def test_step_with_short_deadline_reports_computing_at_once() -> None:
    with linked() as (worker, agent):
        worker.begin(0, SOON_BEATS * BEAT)
        assert [one for one in said(agent, 1) if isinstance(one, Computing)] == [Computing(0, 0, SOON_BEATS * BEAT)]
