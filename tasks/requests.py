"""EvalScope's result tables of a run as one table: a row a request.

EvalScope keeps one SQLite file per load point, with pickled responses in it; only numbers are taken
out and nothing is unpickled. ``success`` means a whole answer (tasks/answers.py), not what
EvalScope calls so.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks import answers
from tasks.files import read_json
from tasks.pins import PARSER_VERSION
from warehouse.errors import CannotFindOut

FILE = "requests.parquet"
DATABASE = "benchmark_data.db"
_VERSION = "memsweep.parser_version"
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
    requests, and the check ``requests_complete`` says so.
    """
    rows: list[dict[str, Any]] = []
    wanted = _answer_tokens(folder)
    for index, path in databases(folder).items():
        with contextlib.suppress(CannotFindOut):
            rows.extend(_rows(index, path.read_bytes(), wanted.get(index, 1)))
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_table(folder: Path) -> None:
    """Write ``requests.parquet`` beside EvalScope's files, where there are any."""
    if databases(folder):
        rows = read(folder).replace_schema_metadata({_VERSION: str(PARSER_VERSION)})
        pq.write_table(rows, folder / FILE, compression="zstd")


def read_table(folder: Path) -> pa.Table:
    """Return every request of a run: from its Parquet where this version wrote it, else raw."""
    path = folder / FILE
    if path.is_file():
        rows = pq.read_table(path)
        metadata = rows.schema.metadata or {}
        if metadata.get(_VERSION.encode()) == str(PARSER_VERSION).encode():
            return rows.replace_schema_metadata(None)
    return read(folder)


def _answer_tokens(folder: Path) -> dict[int, int]:
    """Return what a whole answer of each load point has at least, by the bundle's cell."""
    setting = (read_json(folder / "cell.json") or {}).get("setting")
    load = setting.get("load") if isinstance(setting, dict) else None
    return {
        index: answers.answer_tokens(
            output_tokens=point["output_tokens"], ignore_eos=point["ignore_eos"]
        )
        for index, point in enumerate(load if isinstance(load, list) else [])
    }


def _rows(load_point: int, database: bytes, answer_tokens: int) -> list[dict[str, Any]]:
    from tasks.capture import evalscope

    rows = []
    for request in evalscope.requests(database, answer_tokens=answer_tokens):
        gaps = request.inter_token_s
        rows.append(
            {
                "load_point": load_point,
                "request": request.index + 1,
                "success": request.whole,
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
