"""The command line as the real tier calls it, and waiting for what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass
class Memsweep:
    """The command line as a user calls it, in one state folder."""

    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        own = {"MEMSWEEP_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | own

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[str]:
        """Start a command in a session of its own, its output in ``log``."""
        with log.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *arguments],
                cwd=ROOT,
                env=self.environment(),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                # Python keeps SIGINT ignored when a shell started it in the background.
                preexec_fn=lambda: (
                    signal.signal(signal.SIGINT, signal.default_int_handler) and None
                ),
            )
        self.started.append(process)
        return process

    def call(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command with --json and return its object; fails unless it exits 0."""
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        assert value["format"] == 1
        return value

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return a query's rows as objects."""
        answer = self.json("sql", query)
        return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for(what: str, look: Callable[[], Any], *, timeout: float, poll: float = 0.25) -> Any:
    """Poll ``look`` until it gives something true and return that."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(poll)
    raise AssertionError(f"{what}: not seen within {timeout:.0f} s")
