"""Fixtures every tier shares. No ``__init__.py`` under tests: a folder there must never shadow a
package of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.home import Home
from tests.double.runs import MakeRun, PodRun, end_what_is_left


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
    left = end_what_is_left(tmp_path)
    assert not left, f"left running: {left}"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run only the default tier side by side: the others share engines, services and the clock."""
    return None if "not real" in (config.option.markexpr or "") else 0
