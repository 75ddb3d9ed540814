"""Sample lines as a run wrote them, as tables: one place that knows both forms.

A killed run may leave a last line that is cut; it is left out, every whole line counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.registry import SERVER_FAMILIES

SERVER = pa.schema(
    [
        ("tick", pa.int64()),
        ("due_s", pa.float64()),
        ("t_s", pa.float64()),
        ("took_s", pa.float64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        *((name, pa.float64()) for name in SERVER_FAMILIES),
    ]
)
PROCESS = pa.schema(
    [
        ("tick", pa.int64()),
        ("due_s", pa.float64()),
        ("t_s", pa.float64()),
        ("state", pa.string()),
        ("pid", pa.int64()),
        ("start_ticks", pa.int64()),
        ("name", pa.string()),
        ("rss_bytes", pa.int64()),
    ]
)
GPU = pa.schema(
    [
        ("tick", pa.int64()),
        ("due_s", pa.float64()),
        ("t_s", pa.float64()),
        ("state", pa.string()),
        ("gpu_uuid", pa.string()),
        ("used_bytes", pa.int64()),
        ("reserved_bytes", pa.int64()),
        ("free_bytes", pa.int64()),
        ("total_bytes", pa.int64()),
        ("utilization_percent", pa.float64()),
        ("power_mw", pa.int64()),
        ("sm_clock_mhz", pa.int64()),
        ("mem_clock_mhz", pa.int64()),
        ("temperature_c", pa.float64()),
        ("throttle_reasons", pa.int64()),
        ("ecc_uncorrected", pa.int64()),
        ("processes", pa.string()),
        ("foreign_pids", pa.string()),
    ]
)


def whole_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield every line that is a whole JSON object."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def server_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return one row a tick of the server sampler; absent values are ``None``."""
    rows = []
    for line in whole_lines(lines):
        values = line.get("values") or {}
        row = {
            name: line.get(name) for name in ("tick", "due_s", "t_s", "took_s", "state", "reason")
        }
        row.update({name: _number(values.get(name)) for name in SERVER_FAMILIES})
        rows.append(row)
    return rows


def process_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return one row per tick and process."""
    rows = []
    for line in whole_lines(lines):
        tick = {name: line.get(name) for name in ("tick", "due_s", "t_s", "state")}
        for process in line.get("processes") or []:
            rows.append(
                tick | {k: process.get(k) for k in ("pid", "start_ticks", "name", "rss_bytes")}
            )
    return rows


def gpu_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return one row per tick and GPU; lists of processes stay JSON text."""
    rows = []
    names = [n for n in GPU.names if n not in ("tick", "due_s", "t_s", "state", "gpu_uuid")]
    for line in whole_lines(lines):
        tick = {name: line.get(name) for name in ("tick", "due_s", "t_s", "state")}
        for gpu in line.get("gpus") or []:
            row = tick | {"gpu_uuid": gpu.get("uuid")} | {name: gpu.get(name) for name in names}
            for name in ("processes", "foreign_pids"):
                row[name] = None if row[name] is None else json.dumps(row[name])
            rows.append(row)
    return rows


def write_tables(folder: Path) -> None:
    """Write ``*_samples.parquet`` in ``folder`` from the lines under ``raw/``."""
    for kind, schema, parse in (
        ("server", SERVER, server_rows),
        ("process", PROCESS, process_rows),
        ("gpu", GPU, gpu_rows),
    ):
        raw = folder / "raw" / f"{kind}_samples.jsonl"
        if not raw.is_file():
            continue
        with raw.open(encoding="utf-8", errors="replace") as lines:
            table = pa.Table.from_pylist(parse(lines), schema=schema)
        pq.write_table(table, folder / f"{kind}_samples.parquet", compression="zstd")


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
