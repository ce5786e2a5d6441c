"""Ctrl-C and SIGTERM: the first is a wish, its echoes are the same wish, and who ignored them goes on to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dilatant.training import stop_signal
from dilatant.training.stop_signal import StopSignal


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's own handlers, whatever started the tests; those of the test run come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_launcher_may_pass_the_same_wish_on() -> None:
    told = []
    with StopSignal() as stop:
        stop.on_signal = lambda: told.append(stop.signal)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert told == [signal.SIGINT]
    assert stop.exit_code == 128 + signal.SIGINT


def test_who_insists_is_not_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "SAME_WISH_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), StopSignal():  # noqa: PT012  # the second is what raises
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
    assert not stop.received
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_a_thread_signals_stay_as_they_are() -> None:
    seen = []

    def run() -> None:
        with StopSignal() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.received))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(signal.default_int_handler, False)]
