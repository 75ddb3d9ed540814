"""Headless Chromium as a reader of pages: what it shows, asks for and complains about.

Spoken to by the DevTools protocol over a WebSocket; every wait is bounded. Needs Debian's package
``chromium`` (or MEMSWEEP_CHROMIUM naming another one).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

#: How long the browser may take to start and to answer one call.
START_S = 60.0
CALL_S = 60.0


def chromium() -> str:
    """Return the browser's program; fails with what to install where there is none."""
    named = os.environ.get("MEMSWEEP_CHROMIUM")
    found = named or shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "no chromium: apt-get install chromium, or name one by MEMSWEEP_CHROMIUM"
    return found


@dataclass
class Browser:
    """One tab, and everything it noticed."""

    socket: Connection
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    _calls: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events on the way are noted."""
        self._calls += 1
        self.socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        end = time.monotonic() + CALL_S
        while True:
            message = self._next(end)
            if message.get("id") == self._calls:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def _next(self, end: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(
            self.socket.recv(timeout=max(0.1, end - time.monotonic()))
        )
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(event["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(event["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(event["message"])

    def open(self, page: Path) -> None:
        """Open a file and wait until it has loaded."""
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + CALL_S
        while self.value("document.readyState") != "complete":
            assert time.monotonic() < end, f"{page}: not loaded within {CALL_S:.0f} s"
            time.sleep(0.05)

    def value(self, script: str) -> Any:
        """Return what a script's last expression is; fails where it throws."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self, *, width: int, scheme: str = "light", medium: str = "screen") -> None:
        """Take a width and a colour scheme, as a reader's machine would have them."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            media=medium,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self, path: Path) -> bytes:
        """Write the whole page as a PNG and return it."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        content = base64.b64decode(taken["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return content


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in ``folder``; it is ended whatever happens."""
    process = subprocess.Popen(
        [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with connect(_address(folder, process), max_size=None, open_timeout=START_S) as socket:
            one = Browser(socket)
            for domain in ("Page", "Network", "Runtime", "Log"):
                one.call(f"{domain}.enable")
            yield one
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the WebSocket of the first tab, once the browser has written its port."""
    note = folder / "DevToolsActivePort"
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        if note.is_file() and (lines := note.read_text().splitlines()):
            url = f"http://127.0.0.1:{lines[0]}/json/list"
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError(f"chromium did not open its port within {START_S:.0f} s")
