"""Fixtures every tier shares. No ``__init__.py`` under tests: a folder there must never shadow a
package of the same name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import processes
from tasks.home import Home
from tests.double.runs import MakeRun, PodRun


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty state folder."""
    return Home(tmp_path / "home")


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Make runs below ``tmp_path``; fails the test when one leaves a process behind."""
    made: list[PodRun] = []

    def make(name: str = "run", **parts: Any) -> PodRun:
        folder = tmp_path / name
        folder.mkdir()
        made.append(PodRun(folder, **parts))
        return made[-1]

    yield make
    left = [
        process
        for process in processes.table().values()
        if process.running and _belongs(process.pid, tmp_path)
    ]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def _belongs(pid: int, folder: Path) -> bool:
    """Whether a process was started for one of the test's runs: they all name its folder."""
    try:
        command = (
            Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False
    return str(folder).encode() in command
