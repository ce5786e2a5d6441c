"""Coordinator and agents as real processes, with workers that only exchange messages."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dilatant.comm.wire import link as wire
from dilatant.comm.wire.handshake import AuthenticatedConnection, TokenMismatch
from dilatant.comm.wire.link import MAX_FRAME_BYTES, Connections, LinkClosed, WireLink, listen, open_link
from dilatant.config.errors import UserError
from dilatant.resilience.processes import messages
from dilatant.resilience.processes.agent_run import AgentOptions, run_agent
from dilatant.resilience.processes.coordinator_process import STATE, read_record
from dilatant.resilience.processes.messages import MESSAGES, Hello, Job, StoreAt, TrainingStart, Warm, connect
from dilatant.resilience.processes.process import AGENT, COORDINATOR, NO_MAJORITY_EXIT_CODE, Child, ProcessStart
from dilatant.resilience.processes.standby import Standby
from dilatant.resilience.protocol.agent import Done, End, Prepared
from dilatant.resilience.protocol.values import Record, Settings, Status
from dilatant.resilience.worker.worker_link import WorkerLink
from harness.patience import HANG_SECONDS

TOKEN = b"t" * 32


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Child, list[Child], Path]]:
    """A coordinator and two agents; the test may say the seconds of their lease."""
    settings = Settings(lease_seconds=getattr(request, "param", HANG_SECONDS), initial=2)
    coordinator = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, str(tmp_path)))
    start = [
        ProcessStart("127.0.0.1", coordinator.port, TOKEN.hex(), settings, str(tmp_path), f"node{node}")
        for node in range(2)
    ]
    agents = [Child(AGENT, each) for each in start]
    yield coordinator, agents, tmp_path
    for child in (*agents, coordinator):
        child.close()


def link_to(agent: Child) -> WorkerLink:
    return WorkerLink(agent.port, TOKEN, 0, lambda generation: None, beat_seconds=0.1)


def stopped(folder: Path) -> str:
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        record = read_record(folder)
        if record is not None and record.stopped:
            return record.stopped
        time.sleep(0.02)
    raise AssertionError("the coordinator does not stop")


def test_the_small_processes_import_no_torch() -> None:
    modules = (AGENT, COORDINATOR, "dilatant.resilience.processes.agent_run", "dilatant.cli.agent")
    code = "; ".join(
        f"import sys, {module}; print('{module}', *({{'torch', 'numpy'}} & {{*sys.modules}}))" for module in modules
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [*modules]


def test_steps_are_committed_through_real_processes(cluster: tuple[Child, list[Child], Path]) -> None:
    _, agents, folder = cluster
    done: list[int] = []

    def work(agent: Child) -> None:
        link = link_to(agent)
        link.warm()
        link.await_rebuild(-1, 0, None)
        link.await_activation(0)
        for step in range(5):
            link.propose(step, {"layer": step})
            link.await_commit()
        link.await_end()
        done.append(5)
        link.close()

    threads = [threading.Thread(target=work, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert done == [5, 5]
    assert stopped(folder) == "finished"


def test_an_agent_that_nobody_answers_any_more_ends_with_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = Settings(lease_seconds=0.2)
    agent = Child(AGENT, ProcessStart("127.0.0.1", port, TOKEN.hex(), settings, str(tmp_path), "late"))
    worker = subprocess.Popen(["sleep", "6000"])
    link = connect("127.0.0.1", agent.port, TOKEN)
    link.send(Hello(0, worker.pid))
    link.send(Warm())
    with pytest.raises(subprocess.TimeoutExpired):
        agent.process.wait(0.6)
    (tmp_path / STATE).write_bytes(msgspec.json.encode(Record(2, 5, ("n0",), "finished")))
    assert agent.process.wait(HANG_SECONDS) == 0
    assert worker.wait(HANG_SECONDS) != 0  # it ends its workers
    link.close()


def test_an_agent_reads_that_the_run_is_over_when_it_is_cut_off(tmp_path: Path) -> None:
    listener = listen("127.0.0.1")
    leader = Connections(listener, TOKEN, MESSAGES)
    settings = Settings(lease_seconds=3600.0)  # it would look into the record after an hour
    port = listener.getsockname()[1]
    agent = Child(AGENT, ProcessStart("127.0.0.1", port, TOKEN.hex(), settings, str(tmp_path), "late"))
    worker = subprocess.Popen(["sleep", "6000"])
    link = connect("127.0.0.1", agent.port, TOKEN)
    link.send(Hello(0, worker.pid))
    link.send(Warm())
    while not leader.wait(0.1):
        assert agent.process.poll() is None
    (tmp_path / STATE).write_bytes(msgspec.json.encode(Record(1, 0, (), "node1 is gone")))
    leader.close()  # no order has told this agent
    assert link.receive() == End("node1 is gone")
    assert agent.process.wait(HANG_SECONDS) == 0
    assert worker.wait(HANG_SECONDS) != 0
    link.close()


@pytest.mark.slow
def test_agents_follow_the_standby_and_their_workers_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LEADER_SECONDS", 0.5)
    settings = Settings(lease_seconds=0.7, initial=3)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        standby = f"127.0.0.1:{probe.getsockname()[1]}"
    job = Job(TrainingStart("", "", "", False, "nothing"), 1, True, 1, 0, str(tmp_path), settings, standby)
    leader = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, str(tmp_path), job=job))
    begin = ProcessStart("127.0.0.1", leader.port, TOKEN.hex(), settings, str(tmp_path), job=job)
    agents = [Child(AGENT, replace(begin, node=f"node{number}")) for number in range(3)]
    next_leader = Standby(job, "127.0.0.1", leader.port, TOKEN)
    stores: list[StoreAt | None] = []

    def work(agent: Child) -> None:
        link = link_to(agent)
        link.warm()
        link.await_rebuild(-1, 0, None)
        link.await_activation(0)
        for step in range(3):
            if step == 2:
                leader.process.kill()
            link.propose(step, {"layer": step})
            link.await_commit()
        stores.append(link.store_at)
        link.await_end()
        link.close()

    threads = [threading.Thread(target=work, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert stopped(tmp_path) == "finished"
    record = read_record(tmp_path)
    assert record is not None
    assert (record.term, record.generation) == (2, 1)  # nobody had to begin again
    assert len({*stores}) == 1
    assert stores[0] is not None
    assert stores[0].port not in (1, leader.port)
    next_leader.close()
    for child in (*agents, leader):
        child.close(5.0)


def test_without_most_members_a_standby_leaves_the_record_alone(tmp_path: Path) -> None:
    before = Record(5, 3, ("node0", "node1", "node2", "node3"))
    (tmp_path / STATE).write_bytes(msgspec.json.encode(before))
    settings = Settings()
    begin = ProcessStart("127.0.0.1", 0, TOKEN.hex(), settings, str(tmp_path), majority_seconds=0.5)
    standby = Child(COORDINATOR, begin)
    links = [connect("127.0.0.1", standby.port, TOKEN) for _ in range(2)]  # two of four
    for number, link in enumerate(links):
        link.send(Status(f"node{number}", 1, 3))
    assert standby.process.wait(HANG_SECONDS) == NO_MAJORITY_EXIT_CODE
    assert read_record(tmp_path) == before
    with pytest.raises(LinkClosed):
        links[0].receive()
    standby.close()


# An agent that connects only after the coordinator has ended looks into the record after a lease.
@pytest.mark.parametrize("cluster", [20.0], indirect=True)
def test_a_worker_that_is_lost_before_the_beginning_ends_the_run(
    cluster: tuple[Child, list[Child], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, agents, folder = cluster
    worker = subprocess.Popen(["sleep", "6000"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: worker.pid)  # an agent kills workers that stay, and this process stays
        told = link_to(agents[0])
    told.warm()
    link = connect("127.0.0.1", agents[1].port, TOKEN)
    link.send(Hello(0, 2**22 + 1))  # no such process
    link.close()
    assert "node1: its worker 0 is gone" in stopped(folder)
    told.await_end()  # a worker that loses its agent before ends its process, which is this one
    assert worker.wait(HANG_SECONDS) != 0


def test_who_has_not_the_token_is_refused(cluster: tuple[Child, list[Child], Path]) -> None:
    coordinator, agents, _ = cluster
    for child in (coordinator, *agents):
        with pytest.raises(TokenMismatch):
            connect("127.0.0.1", child.port, b"x" * 32)


@pytest.mark.parametrize("wrong", ["secret", "run", "address"])
def test_an_agent_that_cannot_join_says_why(
    wrong: str, cluster: tuple[Child, list[Child], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This coordinator's run is on one machine and has started its own agents."""
    coordinator, *_ = cluster
    monkeypatch.setenv("DILATANT_TOKEN", "x" * 32 if wrong == "secret" else TOKEN.decode())
    port = 1 if wrong == "address" else coordinator.port
    said = {"secret": "tokens differ", "run": "on one machine", "address": "no coordinator answers"}
    with pytest.raises(UserError, match=said[wrong]):
        run_agent(AgentOptions("127.0.0.1", port, wait_seconds=0.2))


def pair() -> tuple[WireLink, WireLink, socket.socket, socket.socket]:
    """Return both ends of a connection, and the sockets through which an attacker in between would write."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, (theirs, _) = socket.create_connection(listener.getsockname()), listener.accept()
    client, server = (
        open_link(AuthenticatedConnection(each, b"", b""), TOKEN, MESSAGES, is_client=each is ours)
        for each in (ours, theirs)
    )
    return client, server, ours, theirs


def test_dialing_an_unused_port_never_connects_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP sometimes connects an unused local port to itself; in this test it always does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = probe.getsockname()
    dial = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, seconds: dial(to, seconds, source_address=place))
    with pytest.raises(ConnectionRefusedError):
        connect(*place, b"token")
    listen(*place).close()


def test_what_is_said_arrives_as_it_was() -> None:
    client, server, *_ = pair()
    said = Prepared(3, 7, {"a": 2**62, "b": 0})
    client.send(said)
    server.send(Done(3))
    assert server.receive() == said
    assert client.receive() == Done(3)
    client.close()
    with pytest.raises(LinkClosed):
        server.receive()


@pytest.mark.parametrize("change", ["flip", "repeat", "reflect", "garbage"])
def test_what_somebody_in_between_writes_ends_the_connection(change: str) -> None:
    client, server, socket_of_client, socket_of_server = pair()
    client.send(Done(1))
    frame = bytearray(socket_of_server.recv(1 << 16))
    if change == "flip":
        frame[-2] ^= 1
    elif change == "garbage":
        frame = bytearray(b"\xff" * 64)
    elif change == "repeat":
        socket_of_client.sendall(frame)
        assert server.receive() == Done(1)
    if change == "reflect":
        socket_of_server.sendall(frame)
        with pytest.raises(LinkClosed):
            client.receive()
    else:
        socket_of_client.sendall(frame)
        with pytest.raises(LinkClosed):
            server.receive()


def test_connection_broken_after_a_message_is_reported_closed() -> None:
    listener = listen("127.0.0.1")
    connections = Connections(listener, TOKEN, MESSAGES)
    heard: list[object] = []

    def say_and_break() -> None:
        client = connect(*listener.getsockname(), TOKEN)
        client.send(Done(1))
        client.socket.sendall(b"\xff" * 64)  # read together with the message before it

    threading.Thread(target=say_and_break).start()
    deadline = time.monotonic() + HANG_SECONDS
    while len(heard) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        heard += [received.message for received in connections.wait(0.1)]
    assert heard == [Done(1), None]
    connections.close()


def test_peer_that_reads_nothing_is_cut_off_at_send_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEND_SECONDS", 1)
    client, server, *_ = pair()

    def send_more_than_buffers_hold() -> None:
        for _ in range(16):
            server.send(Prepared(1, 1, {str(number): number for number in range(1 << 16)}))

    with pytest.raises(LinkClosed):
        send_more_than_buffers_hold()
    with pytest.raises(LinkClosed):
        server.receive()
    client.close()


def test_a_message_of_another_kind_ends_the_connection() -> None:
    client, server, *_ = pair()
    client.send(Done("three"))  # type: ignore[arg-type]
    with pytest.raises(LinkClosed, match="makes no sense"):
        server.receive()


def test_a_frame_longer_than_any_message_is_not_waited_for() -> None:
    _, server, socket_of_client, _ = pair()
    socket_of_client.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(LinkClosed, match="is larger than"):
        server.receive()
