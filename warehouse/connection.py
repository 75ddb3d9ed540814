"""The one place that opens a warehouse file, and the lock that lets one process write.

DuckDB's own lock is a POSIX lock: it vanishes as soon as the process that holds it closes *any*
other handle of the file (a copy, a hash), and then two processes write and the file is lost. So the
writer's guard is a lock on a separate file, and nothing in the writing process opens the live file
a second time. Readers open only the published snapshot; an open reader of the live file would also
lock the writer out.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from warehouse.errors import BadInput, CannotFindOut, WarehouseBusy

if TYPE_CHECKING:
    import duckdb

LOCK = "warehouse.lock"
#: Written while a rebuilt file takes the live one's place: an interrupted swap is finished by the
#: next writer, so that the old file's write-ahead log is never replayed into the new file.
SWAP = "swap.json"
#: No extension is ever fetched or loaded: results must not depend on what a machine has cached.
SAFE = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
#: Keeps the ingester, Arrow buffers included, well under 1.5 GB.
WRITER_MEMORY = "700MB"


@contextmanager
def writer_lock(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the writer's lock of the warehouse in ``folder``.

    Raises :class:`WarehouseBusy` naming the holder when it is still held after ``wait_s`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise WarehouseBusy(
                        f"{path}: another process writes the warehouse ({_holder(path)}); "
                        "wait for it to end and try again; readers are not affected"
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        holder = {
            "pid": os.getpid(),
            "command": Path(sys.argv[0]).name,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        file.write(json.dumps(holder))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return f"process {facts['pid']}, {facts['command']}, since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "holder unknown"


@contextmanager
def open_writer(live: Path, *, wait_s: float = 0.0) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the live file for writing, migrated to the newest schema, under the writer's lock.

    Raises :class:`WarehouseBusy` when another process writes, :class:`CannotFindOut` when the file
    is damaged (``memsweep rebuild`` makes it anew from the bundles).
    """
    with writer_lock(live.parent, wait_s=wait_s):
        finish_swap(live)
        with connect_writable(live) as connection:
            yield connection


@contextmanager
def connect_writable(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open or create a database file for writing; the caller holds the writer's lock."""
    import duckdb

    from warehouse.migrate import migrate

    refuse_folder(path)
    try:
        # The older storage format is readable and writable by both DuckDB versions we support.
        connection = duckdb.connect(
            path,
            config={
                **SAFE,
                "memory_limit": WRITER_MEMORY,
                "storage_compatibility_version": "v1.5.0",
                "enable_external_access": "false",
            },
        )
    except duckdb.Error as error:
        raise CannotFindOut(
            f"{path}: cannot be opened: {first_line(error)}; "
            "`memsweep rebuild` makes the warehouse anew from the bundles"
        ) from error
    try:
        migrate(connection)
        yield connection
    except duckdb.IOException as error:
        raise CannotFindOut(
            f"{path}: {first_line(error)}; free disk space or, where the file is damaged, "
            "`memsweep rebuild`"
        ) from error
    finally:
        connection.close()


def refuse_folder(path: Path) -> None:
    """Raise :class:`CannotFindOut` where a folder stands in a warehouse file's place."""
    if path.is_dir():
        raise CannotFindOut(
            f"{path}: is a folder, wanted a file of the warehouse; move it away and run "
            "`memsweep rebuild`"
        )


@contextmanager
def open_snapshot(
    snapshot: Path, *, threads: int | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the published snapshot read-only, with file and network access off for good.

    Close it soon: within one process DuckDB shares an open file by its name, so a connection that
    stays open hides snapshots published later. Raises :class:`BadInput` where nothing is published,
    :class:`CannotFindOut` where the file is damaged, also when only reading finds that out.
    """
    import duckdb

    refuse_folder(snapshot)
    if not snapshot.is_file():
        raise BadInput(
            f"{snapshot}: no warehouse is published yet; run a sweep (`memsweep demo`) or "
            "`memsweep ingest` a bundle first"
        )
    config: dict[str, str | bool | int | float | list[str]] = {
        **SAFE,
        "enable_external_access": "false",
        "python_enable_replacements": "false",
        "memory_limit": "1GB",
        "temp_directory": "",
        "lock_configuration": "true",
    }
    if threads is not None:
        config["threads"] = str(threads)
    try:
        connection = duckdb.connect(snapshot, read_only=True, config=config)
    except duckdb.Error as error:
        raise CannotFindOut(
            f"{snapshot}: cannot be opened: {first_line(error)}; "
            "`memsweep rebuild` makes the warehouse anew from the bundles"
        ) from error
    try:
        yield connection
    except (duckdb.IOException, duckdb.FatalException, duckdb.SerializationException) as error:
        raise CannotFindOut(
            f"{snapshot}: cannot be read: {first_line(error)}; "
            "`memsweep rebuild` makes the warehouse anew from the bundles"
        ) from error
    finally:
        connection.close()


def begin_swap(live: Path, fresh: Path) -> None:
    """Put the closed file ``fresh`` in the live file's place, whatever kill comes in between."""
    marker = live.parent / SWAP
    _sync(fresh)
    marker.write_text(json.dumps({"fresh": fresh.name}), encoding="utf-8")
    _sync(marker)
    _sync(live.parent)
    finish_swap(live)


def finish_swap(live: Path) -> None:
    """Finish a swap that was begun; does nothing where none was. The caller holds the lock."""
    marker = live.parent / SWAP
    try:
        fresh = live.parent / json.loads(marker.read_text(encoding="utf-8"))["fresh"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        # The marker itself was cut off: nothing was moved yet.
        marker.unlink()
        return
    if fresh.exists():
        live.with_name(live.name + ".wal").unlink(missing_ok=True)
        fresh.replace(live)
    marker.unlink()
    _sync(live.parent)


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Run the body in one transaction: all of it is kept, or nothing.

    Raises :class:`CannotFindOut` when the file cannot be written (a full disk): a COMMIT that fails
    has ended the transaction already, so that rolling back fails too and must not hide the cause.
    """
    import duckdb

    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException as error:
        with suppress(duckdb.Error):
            connection.execute("ROLLBACK")
        if isinstance(error, duckdb.IOException | duckdb.FatalException):
            raise CannotFindOut(
                f"the warehouse cannot be written: {first_line(error)}; nothing of this was kept"
            ) from error
        raise


def first_line(error: BaseException) -> str:
    """Return an error's text as one line."""
    return str(error).strip().split("\n", 1)[0]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
