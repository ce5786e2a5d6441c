"""File systems of fsspec for tests: one that counts what is read, and servers of HTTP and of Google Cloud Storage."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

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
    password = ""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        if self.password and self.headers.get("Authorization") != f"Basic {self.password}":
            self.send_error(401)
            return
        file = self.root / unquote(self.path.lstrip("/").partition("?")[0])
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


class _Bucket(_Ranged):
    """The reading half of the JSON interface of Google Cloud Storage: one bucket, whose objects are files."""

    def _answer(self, with_body: bool) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        asked = re.fullmatch(r"(/download)?/storage/v1/b/bucket(/o)?(/.+)?", address.path)
        key = unquote((asked and asked[3]) or "")
        if asked and asked[1]:
            self.path = quote(key)
            super()._answer(with_body)
        elif asked and key and (self.root / key[1:]).is_file():
            self._say(200, self._about(self.root / key[1:]))
        elif asked and asked[2] and not key:
            self._say(200, self._listed(query.get("prefix", [""])[0], query.get("delimiter", [""])[0]))
        else:
            self._say(404, {"error": {"code": 404, "message": "Not Found"}})

    def _listed(self, prefix: str, delimiter: str) -> dict[str, Any]:
        files = sorted(file for file in self.root.rglob("*") if file.is_file())
        objects, folders = [], set()
        for file in files:
            name = file.relative_to(self.root).as_posix()
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                objects.append(self._about(file))
        return {"kind": "storage#objects", "items": objects, "prefixes": sorted(folders)}

    def _about(self, file: Path) -> dict[str, Any]:
        digest = base64.b64encode(hashlib.md5(file.read_bytes()).digest()).decode()
        name = file.relative_to(self.root).as_posix()
        return {"kind": "storage#object", "bucket": "bucket", "name": name, "size": str(file.stat().st_size),
                "md5Hash": digest, "generation": "1"}  # fmt: skip

    def _say(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def http_server(root: Path, ranged: bool = True, bucket: bool = False, password: str = "") -> Iterator[str]:
    """Serve the files of a folder on loopback; `ranged`: with requests for ranges of bytes; `bucket`: as the bucket
    `bucket` of Google Cloud Storage; `password`: only to who sends USER:PASSWORD, in base 64."""
    about = {"root": root, "ranged": ranged, "password": password}
    handler = type("Handler", (_Bucket if bucket else _Ranged,), about)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
