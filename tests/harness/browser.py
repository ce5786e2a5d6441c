"""A headless Chromium for tests, spoken to by the W3C WebDriver protocol (plain HTTP and JSON)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from harness.patience import HANG_SECONDS

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key for an element reference
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)


def find_chromium() -> tuple[str, str] | None:
    """The browser and its driver, or None where either is not installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window; `close` ends the browser and its driver."""

    def __init__(self, programs: tuple[str, str], profile: Path, width: int = 1280, height: int = 900) -> None:
        browser, driver = programs
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._root = f"http://127.0.0.1:{port}"
        self._session = ""
        arguments = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        options = {"binary": browser, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._wait_for_driver()
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._session = f"/session/{made['sessionId']}"

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=HANG_SECONDS)

    def open(self, path: Path) -> None:
        """Load a file and wait until the page has drawn."""
        self._call("POST", "/url", {"url": path.resolve().as_uri()})
        self.settle()

    def settle(self) -> None:
        """Wait for two animation frames: what was asked for is on the screen."""
        self._call(
            "POST",
            "/execute/async",
            {"script": "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))", "args": []},
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript function body, after what it changed has been drawn."""
        value = self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})
        self.settle()
        return value

    def errors(self) -> list[str]:
        """What the console has complained about since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self._act([_move(x, y)])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        press, release = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._act([_move(*start), press, _move(*end), release])

    def wheel(self, x: float, y: float, down: int) -> None:
        scroll = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": down, "duration": 0}
        self._call("POST", "/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [scroll]}]})
        self.settle()

    def press(self, selector: str, keys: str) -> None:
        """Type `keys` into the first element that matches."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/value", {"text": keys})
        self.settle()

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/click", {})
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self._call("POST", "/window/rect", {"width": width, "height": height})
        self.settle()

    def emulate(self, **features: str) -> None:
        """Set media features, for example `prefers_color_scheme="dark"`."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": listed}})
        self.settle()

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def _act(self, steps: list[dict[str, Any]]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._call("POST", "/actions", {"actions": [mouse]})
        self.settle()

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                self._call("GET", "/status")
                return
            except OSError:
                if time.monotonic() > deadline or self._driver.poll() is not None:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + self._session + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode(errors='replace')[:2000]}") from None


def _move(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
