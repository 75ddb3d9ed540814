"""The warehouse's files: one writer, readers that never wait, steps that survive a kill."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import duckdb
import pytest

import warehouse.publish
from tasks import record
from tests.support.bundle_maker import Lab
from tests.warehouse.conftest import Stored
from warehouse import connection as files
from warehouse.connection import open_snapshot, open_writer, transaction
from warehouse.errors import BadInput, CannotFindOut, WarehouseBusy
from warehouse.publish import publish
from warehouse.query import run_sql
from warehouse.tables import TABLES

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )


def test_second_writer_is_told_who_holds_the_warehouse(tmp_path: Path) -> None:
    """The message names the process, what to do, and that readers are not affected."""
    live = tmp_path / "live.duckdb"
    with (
        open_writer(live),
        pytest.raises(WarehouseBusy, match=r"another process writes .*process \d+, .*readers"),
        open_writer(live),
    ):
        pass


def test_writer_waits_for_the_one_before(tmp_path: Path) -> None:
    """With a wait, the second writer comes after the first instead of failing."""
    live = tmp_path / "live.duckdb"
    order = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with open_writer(live, wait_s=20):
            order.append("second")

    with open_writer(live):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(10)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_no_other_process_can_write_while_a_snapshot_is_published(tmp_path: Path) -> None:
    """A copy made by the writing process itself would drop DuckDB's lock: two writers, one loss."""
    live, snapshot = tmp_path / "live.duckdb", tmp_path / "snapshot.duckdb"
    with open_writer(live) as writer:
        publish(writer, live, snapshot)
        publish(writer, live, snapshot)
        tried = python("import duckdb, sys; duckdb.connect(sys.argv[1])", str(live))
    assert tried.returncode != 0
    assert "Could not set lock" in tried.stderr


def test_reader_keeps_its_snapshot_while_another_is_published(lab: Lab) -> None:
    """A reader in another process is not blocked, blocks nobody and sees one state."""
    record.ingest(lab.home, [lab.seal()])
    code = """
        import duckdb, sys
        con = duckdb.connect(sys.argv[1], read_only=True)
        print(con.execute("SELECT count(*) FROM run").fetchone()[0], flush=True)
        sys.stdin.readline()
        print(con.execute("SELECT count(*) FROM run").fetchone()[0], flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(lab.home.warehouse_snapshot)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "1\n"
        record.ingest(lab.home, [lab.seal(repeat=2)])
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "1\n"
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        assert connection.execute("SELECT count(*) FROM run").fetchone() == (2,)


def test_copy_that_cannot_be_read_is_not_published(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old snapshot stays when the copy is cut short, and nothing is left lying about."""
    record.ingest(lab.home, [lab.seal()])
    before = lab.home.warehouse_snapshot.read_bytes()
    short = "import sys; open(sys.argv[2], 'wb').write(open(sys.argv[1], 'rb').read(5000))"
    monkeypatch.setattr(warehouse.publish, "_COPY", short)
    with pytest.raises(CannotFindOut):
        record.ingest(lab.home, [lab.seal(repeat=2)])
    assert lab.home.warehouse_snapshot.read_bytes() == before
    assert not list(lab.home.warehouse_snapshot.parent.glob("*.tmp"))


def test_failing_copy_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is named; the run is stored all the same and the next ingest publishes it."""
    full = "raise OSError(28, 'No space left on device')"
    path = lab.seal()
    with monkeypatch.context() as patched:
        patched.setattr(warehouse.publish, "_COPY", full)
        with pytest.raises(
            CannotFindOut, match=r"No space left on device; .*run `memsweep ingest`"
        ):
            record.ingest(lab.home, [path])
    report = record.ingest(lab.home, [path])
    assert (report.unchanged, report.publications) == ([path.name], 1)


def test_missing_and_damaged_snapshots_are_named(lab: Lab) -> None:
    """No warehouse yet is bad input; a damaged one says how to make it anew."""
    with (
        pytest.raises(BadInput, match="no warehouse is published yet"),
        open_snapshot(lab.home.warehouse_snapshot),
    ):
        pass
    lab.home.warehouse_snapshot.write_bytes(b"junk" * 5000)
    with (
        pytest.raises(CannotFindOut, match="memsweep rebuild"),
        open_snapshot(lab.home.warehouse_snapshot),
    ):
        pass


def test_swap_is_finished_after_a_kill_at_any_step(tmp_path: Path) -> None:
    """A rebuilt file takes the old one's place whole, and never with the old one's log."""
    live, fresh = tmp_path / "live.duckdb", tmp_path / "rebuild.duckdb"

    def prepare() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        live.write_text("old")
        (tmp_path / "live.duckdb.wal").write_text("old log")
        fresh.write_text("new")
        (tmp_path / files.SWAP).write_text(json.dumps({"fresh": fresh.name}))

    prepare()
    files.finish_swap(live)
    assert [p.name for p in tmp_path.iterdir()] == ["live.duckdb"]
    assert live.read_text() == "new"
    prepare()  # killed after the log was removed
    (tmp_path / "live.duckdb.wal").unlink()
    files.finish_swap(live)
    assert live.read_text() == "new"
    prepare()  # killed after the rename, before the marker went
    (tmp_path / "live.duckdb.wal").unlink()
    fresh.replace(live)
    files.finish_swap(live)
    assert live.read_text() == "new"
    prepare()  # killed while the marker was written
    (tmp_path / files.SWAP).write_text("{")
    files.finish_swap(live)
    assert live.read_text() == "old"
    assert (tmp_path / "live.duckdb.wal").exists()


def test_writer_loads_no_extension(tmp_path: Path) -> None:
    """Results must not depend on extensions a machine happens to have."""
    with open_writer(tmp_path / "live.duckdb") as writer:
        rows = dict(
            writer.execute(
                "SELECT name, value FROM duckdb_settings() WHERE name LIKE 'auto%extensions'"
            ).fetchall()
        )
        assert rows == {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        with pytest.raises(duckdb.Error):
            writer.execute("SELECT * FROM read_csv('/etc/passwd')")


def test_file_can_be_opened_by_the_older_duckdb(tmp_path: Path) -> None:
    """The file is written in the storage format that both supported DuckDB versions read."""
    live = tmp_path / "live.duckdb"
    with open_writer(live):
        pass
    header = live.read_bytes()[:64]
    assert header[8:12] == b"DUCK"
    assert int.from_bytes(header[12:20], "little") <= 68


def test_a_commit_that_fails_is_told_and_not_hidden_by_its_rollback() -> None:
    """On a full disk COMMIT ends the transaction, so ROLLBACK fails too."""

    class Full:
        def execute(self, statement: str) -> None:
            if statement == "COMMIT":
                raise duckdb.IOException("Could not write file: No space left on device")
            if statement == "ROLLBACK":
                raise duckdb.TransactionException("cannot rollback - no transaction is active")

    with (
        pytest.raises(CannotFindOut, match="No space left on device; nothing of this was kept"),
        transaction(Full()),  # type: ignore[arg-type]
    ):
        pass


def test_a_folder_in_a_files_place_is_one_clear_line(lab: Lab) -> None:
    """Neither "no warehouse yet" nor an error of the operating system says what is wrong."""
    path = lab.seal()
    lab.home.warehouse_snapshot.mkdir()
    wanted = f"{lab.home.warehouse_snapshot}: is a folder, wanted a file"
    for call in (
        lambda: record.verify(lab.home),
        lambda: record.ingest(lab.home, [path]),
        lambda: record.rebuild(lab.home),
    ):
        with pytest.raises(CannotFindOut, match=re.escape(wanted)):
            call()
    lab.home.warehouse_snapshot.rmdir()
    lab.home.warehouse_live.unlink()
    lab.home.warehouse_live.mkdir()
    wanted = f"{lab.home.warehouse_live}: is a folder, wanted a file"
    for call in (lambda: record.ingest(lab.home, [path]), lambda: record.rebuild(lab.home)):
        with pytest.raises(CannotFindOut, match=re.escape(wanted)):
            call()
    lab.home.warehouse_live.rmdir()
    assert record.rebuild(lab.home).runs == 1


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.01, "cannot be opened"), (0.5, "cannot be read"), (0.97, "cannot be read")],
)
def test_a_snapshot_that_was_cut_off_is_told_with_what_to_do(
    share: float, said: str, stored: Stored
) -> None:
    """DuckDB opens most of them: the damage then shows only in the first query that reads there."""
    record.rebuild(stored.lab.home)
    snapshot = stored.lab.home.warehouse_snapshot
    whole = snapshot.read_bytes()
    snapshot.write_bytes(whole[: int(len(whole) * share)])
    for read in (_by_sql, _in_a_connection):
        with pytest.raises(CannotFindOut, match=f"{said}.*memsweep rebuild"):
            read(snapshot)


def _by_sql(snapshot: Path) -> None:
    for table in TABLES:
        run_sql(snapshot, f"SELECT * FROM {table}")


def _in_a_connection(snapshot: Path) -> None:
    with open_snapshot(snapshot) as connection:
        for table in TABLES:
            connection.execute(f"SELECT * FROM {table}").fetchall()
