"""File systems of fsspec for tests: one that counts what is read, a server of HTTP, and a stand-in for S3."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class CountedFileSystem(MemoryFileSystem):
    """Files in memory; `reads` lists path, first byte and number of bytes of each request."""

    protocol = "counted"
    store: dict = {}  # noqa: RUF012 - as its base has it
    pseudo_dirs = [""]  # noqa: RUF012
    reads: list[tuple[str, int, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("counted://", "memory://", 1))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.reads.append((path, start, end - start))
        return super().cat_file(path, start, end, **kwargs)


def upload(folder: Path, address: str) -> str:
    """Copy a folder to an address."""
    system, name = fsspec.core.url_to_fs(address)
    for file in folder.rglob("*"):
        if file.is_file():
            system.makedirs(f"{name}/{file.relative_to(folder).parent}", exist_ok=True)
            system.pipe_file(f"{name}/{file.relative_to(folder)}", file.read_bytes())
    return address


class _Ranged(BaseHTTPRequestHandler):
    root: Path
    ranged = True

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        file = self.root / self.path.lstrip("/").partition("?")[0]
        if not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranged else None
        part = data[int(span[1]) : int(span[2]) + 1] if span else data
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(data)}"')
        if span:
            self.send_header("Content-Range", f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            with suppress(ConnectionError):  # who asked for a part may leave when all comes
                self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def http_server(root: Path, ranged: bool = True) -> Iterator[str]:
    """Serve the files of a folder on loopback; `ranged`: with requests for ranges of bytes."""
    handler = type("Handler", (_Ranged,), {"root": root, "ranged": ranged})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
