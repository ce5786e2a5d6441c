"""The store of a run: values for those who hold its token, a closed door for everybody else."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import pytest

from dilatant.comm import rendezvous
from dilatant.comm.store import server as store_server
from dilatant.comm.store import store
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import Store, StoreGone, connect
from dilatant.comm.wire import handshake
from dilatant.config.errors import UserError
from harness.patience import HANG_SECONDS

TOKEN = b"correct horse battery staple"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, TOKEN)
    yield server
    server.close()


def _connect(server: StoreServer, token: bytes = TOKEN) -> Store:
    return connect("127.0.0.1", server.port, token, on_one_machine=True, timeout_seconds=HANG_SECONDS)


def _still_serves(server: StoreServer) -> bool:
    store = _connect(server)
    store.set("alive", b"yes")
    answer = store.get("alive") == b"yes"
    store.close()
    return answer


def test_store_values_counters_and_queues_share_a_prefix(server: StoreServer) -> None:
    one, other = _connect(server).prefixed("run"), _connect(server)
    one.set("a", b"\0\xff" * 70_000)  # larger than any socket buffer takes at once
    assert other.get("run/a") == b"\0\xff" * 70_000
    assert not other.check(["a"])
    assert [one.add("n", 2), other.prefixed("run").add("n", 3)] == [2, 5]
    one.append("log", "x")
    one.append("log", "y")
    one.multi_set(["k", "l"], ["1", b"2"])
    assert one.multi_get(["log", "k", "l", "k"]) == [b"xy", b"1", b"2", b"1"]
    assert one.delete_key("k")
    assert not one.check(["k", "l"])
    one.push("q", "1")
    one.push("q", "2")
    assert [other.pop("run/q"), one.pop("q")] == [b"1", b"2"]


def test_a_store_wait_returns_the_value_or_times_out(server: StoreServer) -> None:
    store, other = _connect(server), _connect(server)
    with pytest.raises(TimeoutError, match="waiting for never"):
        store.wait(["never"], timedelta(seconds=0.05))
    with pytest.raises(TimeoutError, match="waiting for never"):
        store.wait(["never"], timedelta())  # no time is left, which is not no limit
    threading.Timer(0.1, other.set, ("late", b"here")).start()
    assert store.get("late") == b"here"
    assert store.get("late") == b"here"  # the answer to the timed-out request is not taken for another one's
    threading.Timer(0.1, store.close).start()
    with pytest.raises(StoreGone, match="was closed"):
        store.wait(["never"])


def test_the_deadline_of_an_answered_request_ends_no_later_one(server: StoreServer) -> None:
    store, other = _connect(server), _connect(server)
    is_answered, attempt = False, 0
    while not is_answered:  # a busy machine may set it too late
        attempt += 1
        began = time.monotonic()
        threading.Timer(0.05, other.set, (f"first {attempt}", b"1")).start()
        with suppress(TimeoutError):
            store.wait([f"first {attempt}"], timedelta(seconds=0.2))
            is_answered = True
    threading.Timer(max(0.0, began + 0.4 - time.monotonic()), other.set, ("second", b"2")).start()
    store.wait(["second"], timedelta(seconds=HANG_SECONDS))  # it waits beyond the first one's deadline
    assert store.get("second") == b"2"


def test_what_is_taken_deleted_or_replaced_gives_its_room_back(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_STORED_BYTES", 3000)
    store, value = _connect(server), b"x" * 1000
    for _ in range(4):
        for _ in range(2):
            store.push("q", value)
        assert [store.pop("q"), store.pop("q")] == [value, value]
    for round_ in range(4):
        store.set("k", value)
        store.set(f"l{round_}", value)
        store.delete_key(f"l{round_}")
        store.set("k", value)
    store.push("q", value)
    store.push("q", value)
    with pytest.raises(StoreGone):  # the third queue item and "k" are more than there is room for
        store.push("q", value)
    again = _connect(server)
    assert [again.pop("q"), again.get("k")] == [value, value]


def test_each_value_of_a_queue_goes_to_one_of_those_who_wait(server: StoreServer) -> None:
    values: list[bytes] = []
    threads = [threading.Thread(target=lambda: values.append(_connect(server).pop("q"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    store = _connect(server)
    for number in range(8):
        store.push("q", str(number))
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert sorted(values) == [str(number).encode() for number in range(8)]


@pytest.mark.parametrize("token", [b"", b"x", b"correct horse battery stable", TOKEN + b" "])
def test_who_lacks_the_token_is_refused_and_told_the_remedy(server: StoreServer, token: bytes) -> None:
    with pytest.raises(UserError, match=r"refused this process.*DILATANT_TOKEN"):
        _connect(server, token)
    assert _still_serves(server)


def test_a_server_without_the_token_is_not_believed() -> None:
    impostor = StoreServer("127.0.0.1", 0, TOKEN[::-1])
    with pytest.raises(UserError, match="refused"):
        _connect(impostor)
    impostor.close()
    # One that sends its challenge back to the client and echoes its proof holds no token either.
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"dilatant-wire-2" + bytes(32))
        answer = connection.recv(64)
        connection.sendall(answer[32:])

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(UserError, match="refused"):
        connect("127.0.0.1", listener.getsockname()[1], TOKEN, True, timeout_seconds=HANG_SECONDS)
    listener.close()


def test_garbage_and_huge_lengths_hurt_nobody(server: StoreServer) -> None:
    draw = random.Random(7)
    steady = _connect(server)
    waiting: list[bytes] = []
    waiter = threading.Thread(target=lambda: waiting.append(_connect(server).pop("message")))
    waiter.start()
    for case in range(60):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(HANG_SECONDS)
            garbage = draw.randbytes(draw.choice([1, 63, 64, 65, 5000])) if case % 3 else b"\xff" * 4096
            with contextlib.suppress(OSError):  # the server may have ended the connection before all was sent
                stranger.sendall(garbage)
                if case % 2:
                    stranger.shutdown(socket.SHUT_WR)
        steady.set("a", b"b")
    # With the token, malformed requests end their own connection only.
    for request in (b"\xff\xff\xff\xff", b"\0\0\0\4\0\0\1\0", b"\0\0\0\0", b"\0\0\0\5\0\0\0\1?"):
        friend = _connect(server)
        friend._connection._link.socket.sendall(request)
        friend._connection._link.socket.settimeout(HANG_SECONDS)
        assert friend._connection._link.socket.recv(1) == b""
    for fields in ([b"add", b"k", b"1" * 10_000], [b"add", b"a", b"1"], [b"get", b"soon", b"k"], [b"pop", b"1"]):
        with pytest.raises(StoreGone):
            _connect(server)._connection.ask(fields, 5)
    steady.push("message", "still here")
    waiter.join(HANG_SECONDS)
    assert waiting == [b"still here"]


def test_strangers_push_out_each_other_and_nobody_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_PENDING", 20)
    server = StoreServer("127.0.0.1", 0, TOKEN)
    steady = _connect(server)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    assert _still_serves(server)  # later than all of them
    steady.set("a", b"b")
    assert len(server._connections._pending) <= 20
    for connection in silent:
        connection.close()
    server.close()


def test_a_missing_store_prints_a_notice_and_then_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "NOTICE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match=f"no store of the run answers at 127.0.0.1:{port}"):
        connect("127.0.0.1", port, TOKEN, True, timeout_seconds=0.3)
    (word,) = capsys.readouterr().err.splitlines()
    assert word.startswith(f"waits for the store of the run at 127.0.0.1:{port}")


def test_ranks_that_do_not_come_are_named_meanwhile(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_AFTER", timedelta(seconds=0.1))
    with pytest.raises(TimeoutError):
        rendezvous.join(_connect(server), 0, 0, 3, "inbox", timedelta(seconds=0.3))
    assert capsys.readouterr().err == "waits for rank 1, 2 to join, up to 0.3 s\n"


def test_clients_notice_at_once_that_the_store_is_gone(server: StoreServer) -> None:
    store = _connect(server)
    threading.Timer(0.2, server.close).start()
    with pytest.raises(StoreGone):
        store.wait(["never"], timedelta(seconds=60))
    with pytest.raises(StoreGone):
        store.clone()


def test_entries_of_a_rendezvous_are_read_at_once_or_not_at_all(server: StoreServer) -> None:
    class Withdrawing(Store):
        """A store in which an entry is withdrawn once somebody has looked for it."""

        def check(self, keys: Sequence[str]) -> bool:
            found = super().check(keys)
            self.delete_key(keys[0])
            return found

    plain = _connect(server)
    seen = Withdrawing(plain._server, "", plain._connection)
    seen.set_timeout(timedelta(seconds=1))
    plain.multi_set(["a", "b"], ["1", "2"])
    assert rendezvous._read(seen, ["a", "b"]) == [b"1", b"2"]
    assert rendezvous._read(seen, ["a", "c"]) is None
