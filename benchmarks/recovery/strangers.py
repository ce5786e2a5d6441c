"""Connections without the token, as a process of its own that starts at once: standard library alone.

    python -m benchmarks.recovery.strangers KIND COUNT SECONDS PORT...

Prints a line when all are there, and at the end its CPU seconds.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time

RETURN_SECONDS = 1.0
DRIP_SECONDS = 3.0
SHOUT = (b"\xff" * 65536, b"\x00\xff\xff\xff" * 1024, b"GET / HTTP/1.1\r\n\r\n" * 8)


class Stranger:
    """One connection, and when it does its next thing."""

    def __init__(self, port: int, kind: str, at: float) -> None:
        self.port, self.kind, self.at = port, kind, at
        self.connection: socket.socket | None = None

    def act(self, now: float, selector: selectors.BaseSelector) -> None:
        if self.connection is None:
            self.connection = connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", self.port))
            selector.register(connection, selectors.EVENT_READ, self)
            self.at = now + (0.05 if self.kind == "shouting" else DRIP_SECONDS)
            return
        self.at = now + DRIP_SECONDS
        if self.kind != "idle":
            try:
                self.connection.send(b"x" if self.kind == "dripping" else SHOUT[id(self) // 64 % len(SHOUT)])
            except BlockingIOError:
                pass
            except OSError:
                self.leave(now, selector)

    def hear(self, now: float, selector: selectors.BaseSelector) -> None:
        """Take the challenge, or the end."""
        assert self.connection is not None
        try:
            if self.connection.recv(1 << 12):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.leave(now, selector)

    def leave(self, now: float, selector: selectors.BaseSelector) -> None:
        assert self.connection is not None
        selector.unregister(self.connection)
        self.connection.close()
        self.connection, self.at = None, now + RETURN_SECONDS


def main() -> None:
    kind, count, seconds, *ports = sys.argv[1:]
    began = time.monotonic()
    strangers = [
        Stranger(int(ports[number % len(ports)]), kind, began + number / int(count)) for number in range(int(count))
    ]
    is_said, ends = False, began + 1.0 + float(seconds)
    with selectors.DefaultSelector() as selector:
        while (now := time.monotonic()) < ends:
            for stranger in strangers:
                if stranger.at <= now:
                    stranger.act(now, selector)
            for key, _ in selector.select(0.02):
                key.data.hear(now, selector)
            if not is_said and now > began + 1.0:
                is_said, ends = True, now + float(seconds)
                print("there", flush=True)
            time.sleep(0.02)
    print(time.process_time())


if __name__ == "__main__":
    main()
