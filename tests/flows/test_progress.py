"""The live block of a terminal: what it says of a round, and who gets it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flows import progress
from flows.progress import Going, Standing, block
from tasks.glance import Glance, glance


def shown(standing: Standing, now_s: float = 100.0) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(block(standing, now_s))
    return out.getvalue()


def test_the_block_tells_counts_phase_usage_and_time_left() -> None:
    seen = Glance("measure", 1, 0.953, 12.0, 4.0)
    text = shown(Standing(3, 8, 1, 240.0, [Going("pressure", 2, 4, since_s=25.0, seen=seen)]))
    assert "3 of 8 runs, 1 not as expected, about 4 min left" in text
    assert "pressure #2" in text
    assert "1:15" in text
    assert "measure 2/4" in text
    assert "KV cache 95.3%, 12 running, 4 waiting" in text


def test_a_run_that_shows_nothing_yet_is_queued() -> None:
    text = shown(Standing(0, 1, 0, 60.0, [Going("[red]x", 1, 1, since_s=99.0, seen=Glance())]))
    assert "queued" in text
    assert "[red]x" in text  # a label is text, not markup
    assert "KV cache" not in text


def test_a_count_that_was_never_sampled_is_no_zero() -> None:
    seen = Glance("measure", 0, 0.5, None, None)
    text = shown(Standing(0, 1, 0, 60.0, [Going("x", 1, 1, since_s=99.0, seen=seen)]))
    assert "KV cache 50.0%" in text
    assert "running" not in text


def test_a_glance_reads_the_last_phase_and_the_last_whole_sample(tmp_path: Path) -> None:
    marks = [
        {"name": "boot", "load_point": None, "start_s": 1.0, "end_s": 2.0},
        {"name": "measure", "load_point": 0, "start_s": 3.0, "end_s": None},
    ]
    (tmp_path / "phases.json").write_text(json.dumps({"phases": marks}))
    (tmp_path / "raw").mkdir()
    rows = [
        {"tick": n, "values": {"kv_usage_ratio": n / 10, "requests_running": n}} for n in (1, 2)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "raw" / "server_samples.jsonl").write_text(lines + '{"tick": 3, "val')
    assert glance(tmp_path) == Glance("measure", 0, 0.2, 2.0, None)


def test_a_run_that_left_nothing_shows_nothing(tmp_path: Path) -> None:
    assert glance(tmp_path / "absent") == Glance()


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_neither_ci_nor_a_dumb_terminal_gets_the_block(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert progress.wanted()
    monkeypatch.setenv(name, value)
    assert not progress.wanted()
