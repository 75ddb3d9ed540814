"""Kills, crowds, flipped bits and the other DuckDB: minutes, run before a release (`-m soak`)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from tasks import bundle, record
from tasks.home import Home
from tests.support.bundle_maker import Lab
from warehouse import ledger
from warehouse.connection import open_snapshot, open_writer
from warehouse.errors import MemsweepError
from warehouse.store import content_hash

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
KILLS = 50
BUNDLES = 12
#: What a killed process did: each prints "ready", then one line for each run it acknowledged.
WORK = {
    "ingest": """
        for path in bundle.all_sealed(home):
            report = record.ingest(home, [path])
            for run in report.ingested + report.unchanged:
                print(run, flush=True)
    """,
    "bulk": """
        report = record.ingest(home, bundle.all_sealed(home), publish_every_s=0)
        for run in report.ingested + report.unchanged:
            print(run, flush=True)
    """,
    "migrate": """
        from warehouse.connection import open_writer
        for _ in range(20):
            with open_writer(home.warehouse_live):
                pass
    """,
    "publish": """
        from warehouse.connection import open_writer
        from warehouse.publish import publish
        with open_writer(home.warehouse_live) as connection:
            for _ in range(20):
                publish(connection, home.warehouse_live, home.warehouse_snapshot)
    """,
    "rebuild": """
        for _ in range(5):
            record.rebuild(home)
    """,
}
PREAMBLE = """
    import sys
    from pathlib import Path
    from tasks import bundle, record
    from tasks.home import Home
    import duckdb, pyarrow.parquet, tasks.rows, tasks.plan.prediction, warehouse.store
    home = Home(Path(sys.argv[1]))
    print("ready", flush=True)
"""


def start(work: str, home: Home, *more: str) -> subprocess.Popen[str]:
    """Start a process of its own that does one kind of work."""
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(work)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(home.root), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def killed(work: str, home: Home, after_s: float) -> list[str]:
    """Kill the work so long after it began; return the runs that it had acknowledged."""
    with start(work, home) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        return process.stdout.read().split()


def whole_runs(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Return the runs stored, each of them whole: the same number of rows in every table."""
    rows = connection.execute(
        """
        SELECT r.run_uuid::VARCHAR,
            (SELECT count(*) FROM ingest i WHERE i.run_uuid = r.run_uuid),
            (SELECT count(*) FROM server_sample s WHERE s.run_uuid = r.run_uuid),
            (SELECT count(*) FROM process_sample s WHERE s.run_uuid = r.run_uuid),
            (SELECT count(*) FROM measurement m WHERE m.run_uuid = r.run_uuid),
            (SELECT count(*) FROM request q WHERE q.run_uuid = r.run_uuid),
            (SELECT count(*) FROM artifact a WHERE a.run_uuid = r.run_uuid)
        FROM run r
        """
    ).fetchall()
    assert len({row[1:] for row in rows}) <= 1, rows
    assert all(row[1] == 1 for row in rows)
    strays = connection.execute(
        "SELECT count(*) FROM server_sample WHERE run_uuid NOT IN (SELECT run_uuid FROM run)"
    ).fetchone()
    assert strays == (0,)
    return {row[0] for row in rows}


def test_kills_lose_nothing_and_leave_no_half_run(lab: Lab) -> None:
    """SIGKILL at random moments of all work: openable, whole, nothing acknowledged lost."""
    for index in range(BUNDLES):
        lab.seal(repeat=index + 1, run_uuid=str(uuid.uuid5(uuid.NAMESPACE_URL, f"kill-{index}")))
    seed = int(os.environ.get("MEMSWEEP_SEED", "20261129"))
    chance = random.Random(seed)
    acknowledged: set[str] = set()
    kinds = list(WORK)
    for number in range(KILLS):
        kind = kinds[number % len(kinds)]
        if kind == "ingest" and len(acknowledged) == BUNDLES:
            for path in lab.home.warehouse_live.parent.iterdir():
                path.unlink()
            acknowledged = set()
        acknowledged |= set(killed(WORK[kind], lab.home, chance.uniform(0.0, 1.2)))
        with open_writer(lab.home.warehouse_live, wait_s=10) as connection:
            found = whole_runs(connection)
        assert acknowledged <= found, (seed, number, kind)
        if lab.home.warehouse_snapshot.exists():
            with open_snapshot(lab.home.warehouse_snapshot) as connection:
                assert whole_runs(connection) <= found, (seed, number, kind)
        assert ledger.read(lab.home.bundles).problems == [], (seed, number, kind)
        assert len(bundle.all_sealed(lab.home)) == BUNDLES
    record.ingest(lab.home, bundle.all_sealed(lab.home))
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        assert len(whole_runs(connection)) == BUNDLES
        kept = content_hash(connection)
    assert record.rebuild(lab.home).content_hash == kept
    assert record.verify(lab.home).differences == []


PRODUCE = """
    import uuid
    from tests.support.bundle_maker import Lab
    lab = Lab(home)
    for index in range(10):
        name = str(uuid.uuid5(uuid.NAMESPACE_URL, f"crowd-{sys.argv[2]}-{index}"))
        lab.seal(repeat=index + 1, round=sys.argv[2], run_uuid=name)
"""
READ = """
    import time
    from warehouse.connection import open_snapshot
    seen, until = 0, Path(sys.argv[2])
    while not until.exists():
        if home.warehouse_snapshot.exists():
            with open_snapshot(home.warehouse_snapshot) as connection:
                runs, stored = connection.execute(
                    "SELECT (SELECT count(*) FROM run), (SELECT count(*) FROM ingest)"
                ).fetchone()
                assert runs == stored >= seen, (runs, stored, seen)
                seen = runs
        time.sleep(0.01)
    print(seen, flush=True)
"""


def crowd(folder: Path, new_lab: Callable[[Path], Lab]) -> str:
    """Let 8 processes seal, one ingest and 4 read; return the content hash of what came out."""
    folder.mkdir()
    lab = new_lab(folder)
    lab.home.bundles.mkdir()
    done = folder / "done"
    producers = [start(PRODUCE, lab.home, str(number)) for number in range(8)]
    readers = [start(READ, lab.home, str(done)) for _ in range(4)]
    while any(process.poll() is None for process in producers):
        record.ingest(lab.home, bundle.all_sealed(lab.home), publish_every_s=0)
    record.ingest(lab.home, bundle.all_sealed(lab.home))
    done.touch()
    for process in producers + readers:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.startswith("ready")
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        assert len(whole_runs(connection)) == 80
        return content_hash(connection)


def test_producers_ingester_and_readers_at_once(
    tmp_path: Path, new_lab: Callable[[Path], Lab]
) -> None:
    """Three times the same crowd gives three times the same content; no reader ever fails."""
    hashes = {crowd(tmp_path / str(turn), new_lab) for turn in range(3)}
    assert len(hashes) == 1


def test_flipped_bits_of_the_file_never_change_a_number(lab: Lab) -> None:
    """A damaged file is refused or says the same as before; bundles make it anew."""
    record.ingest(lab.home, [lab.seal(repeat=i + 1) for i in range(5)])
    live = lab.home.warehouse_live
    whole = live.read_bytes()
    with open_writer(live) as connection:
        kept = content_hash(connection)
    chance = random.Random(7)
    detected = 0
    for _ in range(40):
        damaged = bytearray(whole)
        for _flip in range(8):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        live.write_bytes(damaged)
        try:
            with open_writer(live) as connection:
                assert content_hash(connection) == kept
        except (MemsweepError, duckdb.Error):
            detected += 1
        live.with_name(live.name + ".wal").unlink(missing_ok=True)
    assert detected > 0
    assert record.rebuild(lab.home).content_hash == kept
    assert record.verify(lab.home).differences == []


OTHER = "2.0.1"


def test_the_other_duckdb_rebuilds_the_same_content(lab: Lab, tmp_path: Path) -> None:
    """Both supported versions give one content hash, and read each other's file."""
    record.ingest(lab.home, [lab.seal(repeat=i + 1) for i in range(3)])
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        kept = content_hash(connection)
    target = tmp_path / "other"
    subprocess.run(
        # Without the project's own constraints: they pin the version in use.
        ["uv", "pip", "install", "-q", "--no-config", "--target", str(target), f"duckdb=={OTHER}"],
        cwd=tmp_path,
        check=True,
    )
    code = textwrap.dedent(
        """
        import json, sys
        from pathlib import Path
        import duckdb
        from tasks import record
        from tasks.home import Home
        from warehouse.connection import open_writer
        from warehouse.store import content_hash
        home = Home(Path(sys.argv[1]))
        with open_writer(home.warehouse_live) as connection:
            read = content_hash(connection)
        made = record.rebuild(home).content_hash
        print(json.dumps([duckdb.__version__, read, made, len(record.verify(home).differences)]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(lab.home.root)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])},
        check=True,
    )
    assert json.loads(done.stdout) == [OTHER, kept, kept, 0]
    with open_writer(lab.home.warehouse_live) as connection:  # the older one reads its file
        assert content_hash(connection) == kept
    shutil.rmtree(target)
