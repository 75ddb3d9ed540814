"""The warehouse's speed as a soak test: CPU time, so that a busy machine does not decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import warehouse as bench

pytestmark = pytest.mark.soak


def test_samples(tmp_path: Path) -> None:
    """Half a million samples a CPU second on long runs, 50 times MLflow's store on SQLite."""
    ours, theirs = bench.long_runs(tmp_path / "ours"), bench.mlflow(tmp_path)
    assert ours["samples_per_cpu_s"] >= 500_000
    assert ours["samples_per_cpu_s"] >= 50 * theirs["samples_per_cpu_s"]


def test_bundles(tmp_path: Path) -> None:
    """Whole small bundles in bulk, and the same again without reading them."""
    found = bench.small_bundles(tmp_path)
    assert found["bundles_per_cpu_s"] >= 25
    assert found["unchanged_per_cpu_s"] >= 2_000


def test_large(tmp_path: Path) -> None:
    """10,000 runs with 20 million samples: linear, bounded memory, answers at once."""
    found = bench.large(tmp_path)
    assert found["slope"] <= 1.1
    assert found["peak_rss_mb"] < 1500
    assert found["audit_ms"] < 50
    assert found["audit_samples_ms"] < 50
    assert found["slowest_query_ms"] < 1000
