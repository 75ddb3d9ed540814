"""100 MB of a server's log in under 5 s and 200 MB; the other kinds are in parse_log.py."""

from __future__ import annotations

import pytest

from tests.bench import parse_log as bench


@pytest.mark.parametrize(
    ("kind", "megabytes"), [("serving", 100), ("one-line", 100), ("restarts", 10)]
)
def test_cost(kind: str, megabytes: int) -> None:
    """CPU time, so that a busy machine does not decide; a tenth of the size gets a fifth of it."""
    cost = bench.alone(kind, megabytes * 1_000_000)
    assert cost["cpu_s"] < (5.0 if megabytes == 100 else 1.0)
    assert cost["peak_mib"] < 200
    assert cost["outcome"] == ("incomplete" if kind == "one-line" else "ok")
