"""Runs of the run's own code against the doubles; whatever a test leaves running is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import processes
from tests.double.runs import MakeRun, PodRun


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
