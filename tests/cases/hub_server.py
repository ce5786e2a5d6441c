"""A hub of models on loopback: the requests of an upload, in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_thetoken"


@dataclass
class Hub:
    """A hub with one user. address: its URL. files: path → content of the repository's files. made: what was asked for
    when it was made. lost_at: a part of the path of requests whose connection is cut. code: answer to all requests
    instead, if it is set. asked: method and path of every request."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    lost_at: str | None = None
    code: int | None = None
    asked: list[str] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        if hub.lost_at is not None and hub.lost_at in path:
            self.close_connection = True
            self.connection.close()
        elif path.startswith("/large/"):  # has a signed address instead of a token
            hub.large[path.removeprefix("/large/")] = body
            self._say(200, {})
        elif hub.code is not None or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._say(hub.code or 401, {"error": "Invalid username or password."})
        else:
            self._serve(path, body)

    def _serve(self, path: str, body: bytes) -> None:
        hub = self.hub
        if path == "/api/repos/create":
            hub.made = json.loads(body)
            owner = hub.made.get("organization") or "me"
            self._say(200, {"url": f"{hub.address}/{owner}/{hub.made['name']}", "id": f"{owner}/{hub.made['name']}"})
        elif path == "/api/validate-yaml":
            self._say(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = {
                each["path"]: "lfs" if each["path"].endswith(".safetensors") else "regular"
                for each in json.loads(body)["files"]
            }
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._say(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {
                each["oid"]: {"href": f"{hub.address}/large/{each['oid']}"} for each in json.loads(body)["objects"]
            }
            objects = [{**each, "actions": {"upload": upload[each["oid"]]}} for each in json.loads(body)["objects"]]
            self._say(200, {"transfer": "basic", "objects": objects})
        elif "/tree/" in path:
            self._say(200, [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in
                            hub.files.items()])  # fmt: skip
        elif "/commit/" in path:
            for line in body.splitlines():
                self._commit(**json.loads(line))
            self._say(
                200,
                {"commitUrl": f"{hub.address}{path.removeprefix('/api/models')}", "commitOid": "1", "success": True},
            )
        else:
            self._say(404, {"error": f"{path} is not there"})

    def _commit(self, key: str, value: dict[str, Any]) -> None:
        hub = self.hub
        if key == "header":
            hub.messages.append(value["summary"])
        elif key == "file":
            hub.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            hub.files[value["path"]] = hub.large[value["oid"]]
        elif key == "deletedFile":
            del hub.files[value["path"]]

    def _say(self, code: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub on loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
