"""The sampler's accounting: no tick without a row, no gap without a reason."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tasks.pod.outputs import Lines
from tasks.pod.sampler import Missed, Sampler

ROOT = Path(__file__).parents[2]


def sample(path: Path, take: Any, *, interval_s: float = 0.02, for_s: float = 0.3) -> list[Any]:
    """Run a sampler for a while; return its rows."""
    sampler = Sampler("test", interval_s, Lines(path / "rows.jsonl"), take)
    sampler.start()
    time.sleep(for_s)
    counts = sampler.stop()
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    assert sum(counts.values()) == len(rows)
    assert [row["tick"] for row in rows] == list(range(len(rows)))
    return rows


def test_ticks_do_not_drift(tmp_path: Path) -> None:
    rows = sample(tmp_path, lambda: {"values": {"a": 1.0}})
    assert len(rows) >= 10
    first = rows[0]["due_s"]
    for row in rows:
        assert abs(row["due_s"] - first - row["tick"] * 0.02) < 1e-6
        assert row["state"] == "missed" or row["t_s"] >= row["due_s"]
    assert sum(row["state"] == "ok" for row in rows) >= len(rows) - 2


def test_a_slow_sample_costs_ticks_that_are_accounted_for(tmp_path: Path) -> None:
    calls = 0

    def take() -> dict[str, object]:
        nonlocal calls
        calls += 1
        if calls == 3:
            time.sleep(0.09)
        return {"values": {}}

    rows = sample(tmp_path, take)
    overrun = [row for row in rows if row["state"] == "missed"]
    assert 3 <= len(overrun) <= 5
    assert all(row["reason"].startswith("tick 2 took 0.") for row in overrun)
    assert all(row["t_s"] is None for row in overrun)
    # The tick whose interval is still running is taken, late.
    assert rows[overrun[-1]["tick"] + 1]["state"] in ("late", "ok")


def test_a_sample_that_fails_is_missed_with_its_reason(tmp_path: Path) -> None:
    def take() -> dict[str, object]:
        raise Missed("HTTP 500")

    rows = sample(tmp_path, take, for_s=0.1)
    assert {(row["state"], row["reason"]) for row in rows} == {("missed", "HTTP 500")}


def test_an_unexpected_error_does_not_end_the_sampler(tmp_path: Path) -> None:
    def take() -> dict[str, object]:
        raise KeyError("odd")

    rows = sample(tmp_path, take, for_s=0.1)
    assert len(rows) > 2
    assert rows[0]["reason"] == "KeyError: 'odd'"


def test_a_full_disk_does_not_end_the_sampler() -> None:
    sampler = Sampler("test", 0.02, Lines(Path("/dev/full")), lambda: {"values": {}})
    sampler.start()
    time.sleep(0.1)
    assert sum(sampler.stop().values()) >= 3


def test_a_thread_that_computes_holds_up_no_sample_for_long() -> None:
    """Python lets a thread compute for 5 ms before another may go on; the run for a tenth."""
    code = (
        "import gc, sys; from tasks.pod.__main__ import be_punctual; be_punctual()\n"
        "print(sys.getswitchinterval() < 0.001, gc.get_freeze_count() > 1000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]
