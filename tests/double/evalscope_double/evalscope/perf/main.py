"""``run_perf_benchmark`` of the double: same arguments, same files, same silence about failures."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import sqlite3
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from evalscope.perf.core.strategies.closed_loop import (  # type: ignore[import-not-found]
    ClosedLoopStrategy,
)
from evalscope.perf.request import Outcome  # type: ignore[import-not-found]

#: Behaviour, as JSON in the environment of the double's Python; see tests/double/README.md.
MODES: dict[str, Any] = json.loads(os.environ.get("EVALSCOPE_DOUBLE", "{}"))

if MODES.get("no_import"):
    raise ImportError("the double was told not to be importable")
if MODES.get("no_hook"):
    ClosedLoopStrategy._run_all = ClosedLoopStrategy._run_phase

    async def _renamed(self: Any, *arguments: Any, **named: Any) -> None:
        await self._run_all(*arguments, **named)

    ClosedLoopStrategy._run_phase = _renamed

TABLE = """CREATE TABLE IF NOT EXISTS result(
  request TEXT, start_time REAL, inter_token_latencies TEXT, success INTEGER,
  response_messages TEXT, completed_time REAL, latency REAL, first_chunk_latency REAL,
  prompt_tokens INTEGER, completion_tokens INTEGER, max_gpu_memory_cost REAL,
  time_per_output_token REAL, request_id TEXT)"""


def run_perf_benchmark(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one level. Raises ``SystemExit`` where EvalScope does; failed requests are no error."""
    level = f"parallel_{arguments['parallel']}_number_{arguments['number']}"
    folder = Path(arguments["outputs_dir"]) / arguments["name"] / level
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "benchmark_data.db"
    if database.exists():
        sys.exit(1)
    if MODES.get("exit_at_level") == arguments["name"]:
        sys.exit(1)
    if MODES.get("hang_at_level") == arguments["name"]:
        time.sleep(3600)
    if MODES.get("die_at_level") == arguments["name"]:
        os._exit(9)
    (folder / "benchmark_args.json").write_text(json.dumps(arguments, indent=4))
    outcomes: list[Outcome] = []
    requests = [_body(arguments, index) for index in range(_total(arguments))]
    strategy = ClosedLoopStrategy(arguments, outcomes, hold_s=MODES.get("hold_loop_s", 0.0))
    asyncio.run(strategy.run(requests, int(arguments["warmup_num"])))
    _write(database, outcomes)
    _summarise(folder, arguments, outcomes)
    return {level: {}}


def _total(arguments: dict[str, Any]) -> int:
    return int(arguments["number"]) + int(arguments["warmup_num"])


def _messages(arguments: dict[str, Any], index: int) -> Any:
    if arguments["dataset"] == "line_by_line":
        lines = Path(arguments["dataset_path"]).read_text(encoding="utf-8").splitlines()
        return json.loads(lines[index % len(lines)])
    offset = arguments["dataset_offset"] + index
    words = " ".join(f"w{offset + i}" for i in range(arguments["max_prompt_length"]))
    return [{"role": "user", "content": words}]


def _body(arguments: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "messages": _messages(arguments, index),
        "model": arguments["model"],
        "max_tokens": arguments["max_tokens"],
        "min_tokens": arguments["min_tokens"],
        "seed": arguments["seed"],
        "stream": arguments["stream"],
        "stream_options": {"include_usage": True},
        "temperature": arguments["temperature"],
        **arguments["extra_args"],
    }


def _write(database: Path, outcomes: list[Outcome]) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(TABLE)
        for outcome in outcomes:
            connection.execute(
                "INSERT INTO result VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", _row(outcome)
            )


def _row(outcome: Outcome) -> tuple[object, ...]:
    pickled = base64.b64encode(pickle.dumps(outcome.messages)).decode()
    times = outcome.chunk_times
    gaps = json.dumps([b - a for a, b in pairwise(times)])
    if not outcome.success:
        head = (outcome.request, outcome.start_time, gaps, 0, pickled, outcome.completed_time)
        return (*head, None, None, None, None, None, None, None)
    latency = outcome.completed_time - outcome.start_time
    first = times[0] - outcome.start_time if times else 0.0
    tokens = outcome.completion_tokens or 1
    return (
        outcome.request,
        outcome.start_time,
        gaps,
        1,
        pickled,
        outcome.completed_time,
        latency,
        first,
        outcome.prompt_tokens,
        tokens,
        0.0,
        (latency - first) / max(1, tokens - 1),
        None,
    )


def _summarise(folder: Path, arguments: dict[str, Any], outcomes: list[Outcome]) -> None:
    good = [outcome for outcome in outcomes if outcome.success]
    summary = {
        "Test Duration (s)": _span(good) if good else 0.0,
        "Concurrency": arguments["parallel"],
        "Total Requests": len(outcomes),
        "Success Requests": len(good),
        "Failed Requests": len(outcomes) - len(good),
        "Avg Input Tokens": _mean([outcome.prompt_tokens or 0 for outcome in good]),
        "Avg Output Tokens": _mean([outcome.completion_tokens or 0 for outcome in good]),
        # EvalScope's sentinel for "no request succeeded".
        "TTFT (ms)": -1000.0 if not good else 1.0,
    }
    (folder / "benchmark_summary.json").write_text(json.dumps(summary, indent=4))
    (folder / "benchmark_percentile.json").write_text("[]")


def _span(outcomes: list[Outcome]) -> float:
    ends, starts = [o.completed_time for o in outcomes], [o.start_time for o in outcomes]
    return float(max(ends) - min(starts))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else -1.0
