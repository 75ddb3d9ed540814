"""What is here measures; a plain ``pytest`` leaves it out. Run ``pytest -m bench tests/bench``."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, before anything is chosen by its marks."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("bench")
