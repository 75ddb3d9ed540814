"""EvalScope's files to rows: served counts, no pickle, no sentinel."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tasks.capture import evalscope
from warehouse.errors import CannotFindOut

TREE = Path(__file__).parents[1] / "data" / "evalscope-1.9.1" / "tight-dense"


def database(folder: str) -> bytes:
    return (TREE / folder / "benchmark_data.db").read_bytes()


def made(rows: Sequence[Mapping[str, object]]) -> bytes:
    """Return a database with ``rows``; its columns are those of the first row."""
    connection = sqlite3.connect(":memory:")
    names = list(rows[0])
    connection.execute(f"CREATE TABLE result ({', '.join(names)})")
    for row in rows:
        marks = ", ".join("?" * len(names))
        connection.execute(f"INSERT INTO result VALUES ({marks})", [row[name] for name in names])
    connection.commit()
    content = connection.serialize()
    connection.close()
    return content


def test_requests_of_a_real_level() -> None:
    requests = evalscope.requests(database("parallel_16_number_32"))
    assert len(requests) == 32
    assert all(request.success for request in requests)
    assert {request.completion_tokens for request in requests} == {128}
    assert {request.prompt_tokens for request in requests} <= {518, 519, 520}
    first = requests[0]
    assert first.index == 0
    assert first.end_s is not None
    assert first.latency_s is not None
    assert first.first_token_s is not None
    assert first.start_s < first.first_token_s < first.end_s
    assert first.end_s - first.start_s == pytest.approx(first.latency_s, abs=1e-3)


@pytest.mark.parametrize("level", ["parallel_16_number_32", "parallel_64_number_64"])
def test_numbers_recomputed_from_requests_agree_with_evalscopes_summary(level: str) -> None:
    requests = evalscope.requests(database(level))
    asked = int(level.rsplit("_", 1)[1])
    numbers = evalscope.load_point(requests, asked)
    summary = evalscope.summary((TREE / level / "benchmark_summary.json").read_text())
    rows = json.loads((TREE / level / "benchmark_percentile.json").read_text())
    shown = {row["Percentiles"]: row for row in rows}
    assert numbers.state == "ok"
    assert numbers.requests_succeeded == summary["requests_succeeded"] == asked
    assert numbers.ttft_p50_ms == pytest.approx(shown["50%"]["TTFT (ms)"], rel=0.05)
    assert numbers.latency_p99_ms == pytest.approx(shown["99%"]["Latency (s)"] * 1000, rel=0.05)
    assert numbers.output_tokens_per_s == pytest.approx(summary["output_tokens_per_s"], rel=0.02)


def test_failed_requests_have_no_times_and_make_the_load_point_partial() -> None:
    """A failed request has completed_time 0.0 and latency NULL: neither is a time."""
    good: dict[str, object] = {
        "start_time": 10.0, "success": 1, "completed_time": 12.0, "latency": 2.0,
        "first_chunk_latency": 0.5, "prompt_tokens": 518, "completion_tokens": 128,
    }  # fmt: skip
    bad = good | {
        "success": 0, "completed_time": 0.0, "latency": None, "first_chunk_latency": -1.0,
        "prompt_tokens": None, "completion_tokens": None,
    }  # fmt: skip
    requests = evalscope.requests(made([good, bad]))
    assert (requests[1].end_s, requests[1].latency_s, requests[1].ttft_s) == (None, None, None)
    assert requests[1].prompt_tokens is None
    numbers = evalscope.load_point(requests, asked=2)
    assert numbers.state == "partial"
    assert numbers.window_s == 2.0
    assert evalscope.load_point(requests[:1], asked=2).state == "partial"
    assert evalscope.load_point(requests[1:], asked=1).state == "failed"
    assert evalscope.load_point(requests[1:], asked=1).ttft_p50_ms is None
    assert evalscope.load_point([], asked=1).window_s is None


def test_columns_of_another_version_are_absent_not_zero() -> None:
    request = evalscope.requests(made([{"start_time": 1.0, "success": 1}]))[0]
    assert request.success
    assert (request.latency_s, request.completion_tokens, request.inter_token_s) == (None, None, ())


def test_pickles_are_not_read() -> None:
    """A pickle that would raise when loaded stays what it is: a column that is not selected."""
    bomb = "gASVHAAAAAAAAACMCGJ1aWx0aW5zlIwEZXZhbJSTlIwDMS8wlIWUUpQu"
    content = made([{"start_time": 1.0, "success": 1, "response_messages": bomb, "request": bomb}])
    assert len(evalscope.requests(content)) == 1


def test_write_ahead_log_header_is_no_obstacle() -> None:
    content = made([{"start_time": 1.0, "success": 1}])
    assert len(evalscope.requests(content[:18] + b"\x02\x02" + content[20:])) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"not a database", database("parallel_16_number_32")[:5000], made([{"other": 1}])],
    ids=["empty", "text", "cut", "other columns"],
)
def test_unreadable_databases_raise_one_line(content: bytes) -> None:
    with pytest.raises(CannotFindOut) as caught:
        evalscope.requests(content)
    assert "\n" not in str(caught.value)


def test_sentinels_are_never_stored() -> None:
    """With every request failed EvalScope ends normally and prints -1.0, -1000.0 and 0.0."""
    numbers = evalscope.summary(
        json.dumps(
            {
                "Test Duration (s)": 0.0, "Concurrency": 16, "Request Rate (req/s)": -1.0,
                "Total Requests": 64, "Success Requests": 0, "Failed Requests": 64,
                "Avg Latency (s)": -1.0, "TTFT (ms)": -1000.0, "Output Throughput (tok/s)": 0.0,
            }
        )
    )  # fmt: skip
    assert numbers["requests_total"] == 64
    assert numbers["requests_failed"] == 64
    assert {numbers[name] for name in numbers} == {16, 64, 0, None}


def test_summary_of_real_run_translates_every_known_name() -> None:
    numbers = evalscope.summary((TREE / "parallel_16_number_32/benchmark_summary.json").read_text())
    assert numbers["ttft_mean_ms"] == 554.48
    assert numbers["request_rate_per_s"] is None
    assert [name for name, value in numbers.items() if value is None] == ["request_rate_per_s"]


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_summary_that_is_no_object(content: str) -> None:
    with pytest.raises(CannotFindOut):
        evalscope.summary(content)


def test_percentile() -> None:
    assert evalscope.percentile([], 0.5) is None
    assert evalscope.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert evalscope.percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
