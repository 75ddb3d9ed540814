"""Fixtures of the warehouse's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.home import Home
from tests.support.bundle_maker import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return an empty state folder that can make bundles."""
    return Lab(Home(tmp_path / "home"))
