"""EvalScope's result tables of a run as one table: a row a request.

EvalScope keeps one SQLite file per load point, with pickled responses in it; only numbers are taken
out and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.errors import CannotFindOut

FILE = "requests.parquet"
DATABASE = "benchmark_data.db"
SCHEMA = pa.schema(
    [
        ("load_point", pa.int32()),
        ("request", pa.int32()),
        ("success", pa.bool_()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("latency_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("itl_mean_s", pa.float64()),
        ("itl_max_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
    ]
)


def databases(folder: Path) -> dict[int, Path]:
    """Return each load point's result database in a bundle or outputs folder."""
    found = {}
    for path in sorted(folder.glob(f"bench/load_point_*/**/{DATABASE}")):
        match = re.fullmatch(r"load_point_(\d+)", path.relative_to(folder).parts[1])
        if match:
            found[int(match[1])] = path
    return found


def read(folder: Path) -> pa.Table:
    """Return every request of a run, from EvalScope's own files.

    A database that a kill left unreadable gives no rows: its load point then has no numbers of
    requests, and the check ``requests_on_record`` says so.
    """
    rows: list[dict[str, Any]] = []
    for index, path in databases(folder).items():
        with contextlib.suppress(CannotFindOut):
            rows.extend(_rows(index, path.read_bytes()))
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_table(folder: Path) -> None:
    """Write ``requests.parquet`` beside EvalScope's files, where there are any."""
    if databases(folder):
        pq.write_table(read(folder), folder / FILE, compression="zstd")


def _rows(load_point: int, database: bytes) -> list[dict[str, Any]]:
    from tasks.capture import evalscope

    rows = []
    for request in evalscope.requests(database):
        gaps = request.inter_token_s
        rows.append(
            {
                "load_point": load_point,
                "request": request.index + 1,
                "success": request.success,
                "start_s": request.start_s,
                "end_s": request.end_s,
                "latency_s": request.latency_s,
                "ttft_s": request.ttft_s,
                "tpot_s": request.tpot_s,
                "itl_mean_s": sum(gaps) / len(gaps) if gaps else None,
                "itl_max_s": max(gaps) if gaps else None,
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": request.completion_tokens,
            }
        )
    return rows
