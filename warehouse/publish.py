"""The published snapshot: what readers open, replaced in one step.

The live file is copied by a child process: a copy made by the process that has it open would drop
DuckDB's lock on it. The child syncs the copy, this process checks that it opens and renames it over
the old snapshot; readers that have the old one open keep it until they close it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from warehouse.connection import first_line, open_snapshot, refuse_folder
from warehouse.errors import CannotFindOut

if TYPE_CHECKING:
    import duckdb

_COPY = """
import os, shutil, sys
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 22)
    target.flush()
    os.fsync(target.fileno())
"""


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication cost."""

    bytes: int
    seconds: float


def publish(connection: duckdb.DuckDBPyConnection, live: Path, snapshot: Path) -> Published:
    """Replace the snapshot by the live file's committed content.

    ``connection`` is the writer's, with no transaction open. Raises :class:`CannotFindOut` when the
    copy cannot be made; the old snapshot then stays.
    """
    began = time.monotonic()
    refuse_folder(snapshot)
    connection.execute("CHECKPOINT")
    for stale in snapshot.parent.glob(f".{snapshot.name}.*.tmp"):
        stale.unlink(missing_ok=True)
    copy = snapshot.with_name(f".{snapshot.name}.{os.getpid()}.tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _COPY, os.fspath(live), os.fspath(copy)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise CannotFindOut(
                f"{snapshot}: the snapshot cannot be written: {lines[-1]}; free disk space and "
                "run `memsweep ingest` again; the old snapshot is still in place"
            )
        _check(copy)
        size = copy.stat().st_size
        copy.replace(snapshot)
    finally:
        copy.unlink(missing_ok=True)
    descriptor = os.open(snapshot.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Published(size, time.monotonic() - began)


def _check(copy: Path) -> None:
    import duckdb

    try:
        with open_snapshot(copy) as connection:
            connection.execute("SELECT count(*) FROM run").fetchone()
    except duckdb.Error as error:
        raise CannotFindOut(
            f"{copy}: the copy of the warehouse cannot be read: {first_line(error)}"
        ) from error
