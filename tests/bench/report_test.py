"""The page of 60 cells, 4 load points and 2 repeats: made in seconds, small enough to send."""

from __future__ import annotations

from pathlib import Path

from tests.bench import report as bench


def test_a_large_sweeps_page_is_quick_and_small(tmp_path: Path) -> None:
    """Under 10 s and 5 MB; CPU time, so that a busy machine does not decide."""
    found = bench.measure(tmp_path)
    assert (found["runs"], found["load_points"]) == (120, 480)
    assert found["bytes"] < 5_000_000
    assert found["cpu_s"] < 10
