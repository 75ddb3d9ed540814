"""EvalScope's output to typed rows: its per-request database and its summaries.

EvalScope keys its JSON by display strings, prints -1.0 and -1000.0 for "nothing", and keeps
responses as base64 pickles. Here its names are translated once, its sentinels become None, its
pickles are never loaded, and what its summary rounds is computed again from the requests.
Its exit code is no evidence: with every request failed it ends normally. Nor is its column
``success``: see tasks/answers.py.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks import answers
from warehouse.errors import CannotFindOut

LoadPointState = Literal["ok", "partial", "failed"]

#: Columns read. Of ``response_messages`` (a base64 pickle) only whether it ends well is asked.
_COLUMNS: tuple[str, ...] = (
    "start_time",
    "completed_time",
    "latency",
    "first_chunk_latency",
    "prompt_tokens",
    "completion_tokens",
    "success",
    "time_per_output_token",
    "inter_token_latencies",
    "response_messages",
)
#: What EvalScope prints when there is nothing to print.
_SENTINELS = frozenset((-1.0, -1000.0))

#: benchmark_summary.json of 1.9.1 and later: display string -> our name.
_SUMMARY: dict[str, str] = {
    "Test Duration (s)": "duration_s",
    "Concurrency": "parallel",
    "Request Rate (req/s)": "request_rate_per_s",
    "Total Requests": "requests_total",
    "Success Requests": "requests_succeeded",
    "Failed Requests": "requests_failed",
    "Req Throughput (req/s)": "requests_per_s",
    "Avg Latency (s)": "latency_mean_s",
    "Avg Input Tokens": "prompt_tokens_mean",
    "Avg Output Tokens": "output_tokens_mean",
    "Output Throughput (tok/s)": "output_tokens_per_s",
    "Input Throughput (tok/s)": "input_tokens_per_s",
    "Total Throughput (tok/s)": "total_tokens_per_s",
    "TTFT (ms)": "ttft_mean_ms",
    "TPOT (ms)": "tpot_mean_ms",
    "ITL (ms)": "itl_mean_ms",
}
_COUNTS = frozenset(("parallel", "requests_total", "requests_succeeded", "requests_failed"))
#: Averages of nothing are printed as 0.0: they mean something only when a request succeeded.
_OF_SUCCESSES = frozenset(_SUMMARY.values()) - _COUNTS - {"request_rate_per_s"}


@dataclass(frozen=True, slots=True)
class Request:
    """One measured request. Times are CLOCK_MONOTONIC seconds of the host that sent it.

    ``end_s`` is None for a request that did not finish; ``ttft_s`` is the time to the first chunk.
    ``whole`` is True where every token that was asked for came and the answer ended; ``success`` is
    EvalScope's word and no evidence. Token counts are the served ones, as the server reported them,
    so they are None unless the answer was whole: those of a cut one EvalScope counted itself.
    """

    index: int
    start_s: float
    end_s: float | None
    latency_s: float | None
    ttft_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    success: bool
    whole: bool
    tpot_s: float | None
    inter_token_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float | None:
        """When the first token arrived, on the same clock."""
        return None if self.ttft_s is None else self.start_s + self.ttft_s


@dataclass(frozen=True, slots=True)
class LoadPointNumbers:
    """What the requests of one load point amount to; None where no request says."""

    requests_asked: int
    requests_sent: int
    requests_succeeded: int
    state: LoadPointState
    prompt_tokens_min: int | None
    prompt_tokens_max: int | None
    output_tokens_max: int | None
    window_start_s: float | None
    window_end_s: float | None
    window_s: float | None
    output_tokens_per_s: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    latency_p50_ms: float | None
    latency_p99_ms: float | None


def requests(database: bytes, *, answer_tokens: int = 1) -> list[Request]:
    """Return the requests in ``database``, the bytes of EvalScope's benchmark_data.db.

    ``answer_tokens`` is what a whole answer has at least, see :func:`tasks.answers.answer_tokens`.
    The database lives in memory only, is not written to, and no pickle is loaded. Columns that
    another EvalScope version lacks are None.

    Raises:
        CannotFindOut: the bytes are no SQLite database or hold no table ``result``.
    """
    if not database:
        raise CannotFindOut("EvalScope database is empty; the load point has no per-request rows")
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(_without_wal(database))
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        held = {row[1] for row in connection.execute("PRAGMA table_info(result)")}
        wanted = [name for name in _COLUMNS if name in held]
        if "start_time" not in held:
            raise CannotFindOut(
                "EvalScope database: wanted a table 'result' with a column 'start_time', got "
                f"columns {_names(held)}; keep the file and read it with another parser version"
            )
        rows = connection.execute(f"SELECT {', '.join(wanted)} FROM result ORDER BY rowid")
        found = [
            _request(index, dict(zip(wanted, row, strict=True)), answer_tokens)
            for index, row in enumerate(rows)
        ]
    except (sqlite3.Error, ValueError, OverflowError) as error:
        raise CannotFindOut(
            f"EvalScope database of {len(database)} bytes cannot be read: {_one_line(error)}; "
            "the load point has no per-request rows"
        ) from error
    finally:
        connection.close()
    return [request for request in found if request is not None]


def _names(columns: set[str]) -> str:
    return repr(sorted(columns)[:40])


def _one_line(error: Exception) -> str:
    """Return what ``error`` says on one line: SQLite quotes a broken schema as it finds it."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())[:300]


def _without_wal(database: bytes) -> bytes:
    """Return ``database`` marked as not using a write-ahead log, which memory cannot open."""
    if database[:16] == b"SQLite format 3\x00" and database[18:20] == b"\x02\x02":
        return database[:18] + b"\x01\x01" + database[20:]
    return database


def _request(index: int, row: dict[str, object], answer_tokens: int) -> Request | None:
    start = _number(row.get("start_time"))
    if start is None:
        return None
    prompt, output = _count(row.get("prompt_tokens")), _count(row.get("completion_tokens"))
    whole = answers.whole(
        success=row.get("success"),
        prompt=prompt,
        output=output,
        messages=row.get("response_messages"),
        answer_tokens=answer_tokens,
    )
    return Request(
        index=index,
        start_s=start,
        end_s=_positive(row.get("completed_time")),
        latency_s=_positive(row.get("latency")),
        ttft_s=_positive(row.get("first_chunk_latency")),
        prompt_tokens=prompt if whole else None,
        completion_tokens=output if whole else None,
        success=row.get("success") in (1, "1", "true", "True"),
        whole=whole,
        tpot_s=_positive(row.get("time_per_output_token")),
        inter_token_s=_times(row.get("inter_token_latencies")),
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _positive(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 and number not in _SENTINELS else None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def _times(value: object) -> tuple[float, ...]:
    if not isinstance(value, str) or not value:
        return ()
    try:
        held = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(held, list):
        return ()
    return tuple(t for t in (_number(item) for item in held) if t is not None)


def summary(text: str) -> dict[str, float | int | None]:
    """Return benchmark_summary.json under our names, its sentinels as None.

    Raises:
        CannotFindOut: ``text`` is no JSON object.
    """
    try:
        held = json.loads(text)
    except ValueError as error:
        raise CannotFindOut(f"benchmark_summary.json is no JSON: {_one_line(error)}") from error
    if not isinstance(held, dict):
        raise CannotFindOut(
            f"benchmark_summary.json: wanted a JSON object, got {type(held).__name__}"
        )
    result: dict[str, float | int | None] = {}
    for shown, name in _SUMMARY.items():
        number = _number(held.get(shown))
        if number is None or number in _SENTINELS:
            result[name] = None
        else:
            result[name] = int(number) if name in _COUNTS else number
    if not result["requests_succeeded"]:
        for name in _OF_SUCCESSES:
            result[name] = None
    return result


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` (0..1) of ``values`` lies, interpolated linearly."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def load_point(found: Sequence[Request], asked: int) -> LoadPointNumbers:
    """Return what ``found``, the requests of a load point that asked for ``asked``, amount to.

    The load point is ``ok`` only when every asked request was sent and answered whole. The window
    is the first request's start to the last one's end, as everywhere in this project.
    """
    good = [request for request in found if request.whole]
    starts = [request.start_s for request in found]
    ends = [request.end_s for request in found if request.end_s is not None]
    start = min(starts) if starts else None
    end = max(ends) if ends else None
    window = end - start if start is not None and end is not None and end > start else None
    prompts = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    outputs = [r.completion_tokens for r in good if r.completion_tokens is not None]
    first = [r.ttft_s for r in good if r.ttft_s is not None]
    whole = [r.latency_s for r in good if r.latency_s is not None]
    return LoadPointNumbers(
        requests_asked=asked,
        requests_sent=len(found),
        requests_succeeded=len(good),
        state=_state(asked, len(found), len(good)),
        prompt_tokens_min=min(prompts, default=None),
        prompt_tokens_max=max(prompts, default=None),
        output_tokens_max=max(outputs, default=None),
        window_start_s=start,
        window_end_s=end,
        window_s=window,
        output_tokens_per_s=sum(outputs) / window if outputs and window else None,
        ttft_p50_ms=_ms(percentile(first, 0.5)),
        ttft_p99_ms=_ms(percentile(first, 0.99)),
        latency_p50_ms=_ms(percentile(whole, 0.5)),
        latency_p99_ms=_ms(percentile(whole, 0.99)),
    )


def _state(asked: int, sent: int, succeeded: int) -> LoadPointState:
    if succeeded == 0:
        return "failed"
    return "ok" if asked == sent == succeeded else "partial"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
