"""Fixtures every tier shares. No ``__init__.py`` under tests: a folder there must never shadow a
package of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty state folder."""
    return Home(tmp_path / "home")
