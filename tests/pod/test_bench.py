"""What counts of a level: its rows. EvalScope's exit code is 0 with every request failed."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tasks.pod import bench_driver
from tasks.pod.bench import LoadPointState, count_rows, verdict

Row = tuple[int, int | None, int | None, float, float | None]


def database(path: Path, rows: list[Row]) -> Path:
    """Write a result table of (success, prompt, completion, start, end) rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE result"
            " (success, prompt_tokens, completion_tokens, start_time, completed_time,"
            " response_messages, request)"
        )
        connection.executemany("INSERT INTO result VALUES (?, ?, ?, ?, ?, '', '{}')", rows)
    return path


def test_rows_are_counted_and_the_window_leaves_out_absent_times(tmp_path: Path) -> None:
    table = database(
        tmp_path / "a.db",
        [
            (1, 518, 128, 10.0, 12.0),
            (1, 518, 128, 9.5, 11.0),
            (0, None, None, 0.0, 0.0),
        ],
    )
    rows = count_rows(table, answer_tokens=128)
    assert (rows.total, rows.succeeded) == (3, 2)
    assert (rows.first_start_s, rows.last_end_s) == (9.5, 12.0)


def test_a_stream_that_an_error_ended_is_no_success(tmp_path: Path) -> None:
    """Rows as EvalScope 1.9.1 wrote them when vLLM's engine was killed: all called successful."""
    table = database(
        tmp_path / "a.db",
        [(1, 524, 128, 1.0, 2.0), (1, 512, 83, 1.0, 2.0), (1, 0, 0, 1.0, 2.0)],
    )
    assert count_rows(table, answer_tokens=128).succeeded == 1
    assert count_rows(table, answer_tokens=1).succeeded == 2


def test_an_empty_table_has_no_window(tmp_path: Path) -> None:
    rows = count_rows(database(tmp_path / "a.db", []), answer_tokens=1)
    assert (rows.total, rows.succeeded, rows.first_start_s, rows.last_end_s) == (0, 0, None, None)


def test_a_database_that_is_not_there_or_not_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        count_rows(tmp_path / "absent.db", answer_tokens=1)
    (tmp_path / "noise.db").write_bytes(b"noise" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        count_rows(tmp_path / "noise.db", answer_tokens=1)


def test_the_requests_sent_have_one_hash_whatever_order_they_ended_in(tmp_path: Path) -> None:
    """Two runs that sent the same requests must show it, whoever answered sooner."""

    def sent(name: str, *rows: tuple[float, str]) -> str | None:
        path = database(tmp_path / name, [(1, 518, 128, start, start + 1) for start, _ in rows])
        with closing(sqlite3.connect(path)) as connection, connection:
            for number, (_, body) in enumerate(rows, 1):
                connection.execute("UPDATE result SET request = ? WHERE rowid = ?", (body, number))
        return count_rows(path, answer_tokens=128).requests_sha256

    first, second = '{"a": 1, "b": 2}', '{"a": 3}'
    wanted = sent("1.db", (1.0, first), (2.0, second))
    assert wanted is not None
    assert sent("2.db", (2.5, second), (1.5, '{"b":2,"a":1}')) == wanted
    assert sent("3.db", (1.0, second), (2.0, first)) != wanted
    assert sent("4.db", (1.0, first)) != wanted
    assert sent("5.db", (1.0, first), (2.0, "")) is None
    assert sent("6.db") is None


@pytest.mark.parametrize(
    ("sent", "succeeded", "error", "state"),
    [
        (4, 4, None, "ok"),
        (4, 4, "SystemExit: 1", "partial"),
        (4, 3, None, "partial"),
        (3, 3, None, "partial"),
        (5, 4, None, "partial"),
        (4, 0, None, "failed"),
        (0, 0, None, "failed"),
    ],
)
def test_ok_needs_every_request(sent: int, succeeded: int, error: str | None, state: str) -> None:
    point = LoadPointState(0, 4, 42, 0, sent=sent, succeeded=succeeded, error=error)
    assert verdict(point) == state


def test_a_loop_that_was_held_up_was_late_for_all_that_was_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One wake-up after a second of nothing must not count as one of many: it hides the second."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    lag = bench_driver.LoopLag()
    assert lag.summary() is None
    now_s += 1.01
    found = lag.summary()
    assert found is not None
    assert (found["wakeups"], found["interval_s"]) == (50, 0.02)
    assert found["max_s"] == pytest.approx(0.99)
    assert found["p99_s"] == pytest.approx(0.99)
    assert found["p50_s"] == pytest.approx(0.49)


def test_a_free_loop_wakes_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule is absolute: what is late once does not move what comes after."""
    now_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        if now_s > 2.0:
            raise asyncio.CancelledError
        now_s += max(seconds, 0.0) + (0.001 if now_s < 1.0 else 0.0)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    lag = bench_driver.LoopLag()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lag.watch())
    found = lag.summary()
    assert found is not None
    assert found["wakeups"] == pytest.approx(100, abs=1)
    assert found["max_s"] == pytest.approx(0.001)
