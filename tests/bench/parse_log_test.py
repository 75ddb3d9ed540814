"""100 MB of any server's log in under 5 s of CPU time and 200 MiB; about a minute in all."""

from __future__ import annotations

import pytest

from tests.bench import parse_log as bench

OUTCOMES = {"serving": "ok", "restarts": "ok", "failures": "failed", "one-line": "incomplete"}


@pytest.mark.parametrize("kind", bench.KINDS)
def test_cost(kind: str) -> None:
    """CPU time, so that a busy machine does not decide."""
    cost = bench.alone(kind, 100_000_000)
    print(cost)
    assert cost["cpu_s"] < 5.0
    assert cost["peak_mib"] < 200
    assert cost["outcome"] == OUTCOMES[kind]
