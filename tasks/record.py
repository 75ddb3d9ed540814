"""Bundles into the warehouse, the warehouse anew from bundles, and the proof that both agree.

The bundle is the truth and the warehouse a projection of it: ingesting twice changes nothing,
rebuilding gives the same content, and a bundle that fails stops no other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import bundle
from tasks.files import write_json
from tasks.home import Home
from tasks.pins import PARSER_VERSION
from warehouse import ledger
from warehouse.errors import CannotFindOut, CheckFailed

if TYPE_CHECKING:
    import duckdb

    from tasks.rows import RunRows

#: Runs and bytes of rows that go into one transaction of a bulk ingest. A run that arrives alone is
#: a transaction of its own.
BATCH_RUNS = 200
BATCH_BYTES = 96 * 2**20
#: A long ingest publishes what it has at most this often.
PUBLISH_EVERY_S = 30.0
#: How long a writer waits for another one before it says who holds the warehouse.
WAIT_S = 60.0
REASON = "reason.json"


@dataclass(frozen=True, slots=True)
class Refused:
    """A bundle that could not be taken in, and why."""

    path: Path
    reason: str


@dataclass(slots=True)
class IngestReport:
    """What an ingest did; ``snapshot_bytes`` is ``None`` where nothing was published."""

    ingested: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    quarantined: list[Refused] = field(default_factory=list)
    publications: int = 0
    snapshot_bytes: int | None = None
    publish_s: float = 0.0
    seconds: float = 0.0

    def document(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {
            "ingested": self.ingested,
            "replaced": self.replaced,
            "unchanged": self.unchanged,
            "quarantined": [
                {"path": str(refused.path), "reason": refused.reason}
                for refused in self.quarantined
            ],
            "publications": self.publications,
            "snapshot_bytes": self.snapshot_bytes,
            "publish_s": round(self.publish_s, 3),
            "seconds": round(self.seconds, 3),
        }


def ingest(
    home: Home,
    bundle_paths: Iterable[Path],
    *,
    publish: bool = True,
    publish_every_s: float = PUBLISH_EVERY_S,
    wait_s: float = WAIT_S,
) -> IngestReport:
    """Take bundles into the warehouse and publish a snapshot.

    A bundle that is stored already is told by its manifest's hash alone and left as it is; one that
    an older parser read is replaced as a whole run; one that fails its checks goes to quarantine
    with the reason. A bundle from elsewhere is copied among the home's bundles first.

    Raises :class:`warehouse.errors.WarehouseBusy` when another process writes for longer than
    ``wait_s`` seconds.
    """
    from warehouse.connection import open_writer

    began = time.monotonic()
    report = IngestReport()
    with open_writer(home.warehouse_live, wait_s=wait_s) as connection:
        ingester = _Ingester(home, connection, report)
        ingester.take(list(bundle_paths), publish_every_s if publish else None)
        changed = report.ingested or report.replaced
        if publish and (changed or not home.warehouse_snapshot.is_file()):
            ingester.publish()
    report.seconds = time.monotonic() - began
    return report


class _Ingester:
    """One pass over bundles with the warehouse open for writing."""

    def __init__(
        self, home: Home, connection: duckdb.DuckDBPyConnection, report: IngestReport
    ) -> None:
        from warehouse.store import known_runs

        self._home = home
        self._connection = connection
        self._report = report
        self._known = known_runs(connection)
        chain = ledger.read(home.bundles)
        self._ledger, self._pruned = chain.manifests, chain.pruned
        self._batch: dict[str, RunRows] = {}
        self._batch_bytes = 0
        self._published = time.monotonic()

    def take(self, paths: Sequence[Path], publish_every_s: float | None) -> None:
        for path in paths:
            try:
                self._take(path)
            except (CheckFailed, CannotFindOut) as error:
                self._quarantine(path, str(error))
            if self._full():
                self._flush()
                waited = time.monotonic() - self._published
                if publish_every_s is not None and waited >= publish_every_s:
                    self.publish()
        self._flush()

    def publish(self) -> None:
        from warehouse.publish import publish

        done = publish(self._connection, self._home.warehouse_live, self._home.warehouse_snapshot)
        self._report.publications += 1
        self._report.snapshot_bytes = done.bytes
        self._report.publish_s += done.seconds
        self._published = time.monotonic()

    def _take(self, path: Path) -> None:
        from tasks.rows import parse, read_manifest

        manifest, content = read_manifest(path)
        run = manifest["run_uuid"]
        if path.resolve().parent == self._home.bundles.resolve() and path.name != run:
            raise CheckFailed(f"{path}: {bundle.MANIFEST} says run {run}, the folder another")
        if run in self._pruned:
            if path.resolve().parent == self._home.bundles.resolve():
                return  # a killed prune left it; the next one removes it
            raise CheckFailed(f"run {run}: was removed by `memsweep prune`; the ledger says so")
        digest = hashlib.sha256(content).hexdigest()
        if self._known.get(run) == (digest, PARSER_VERSION):
            self._report.unchanged.append(run)
            return
        listed = self._ledger.get(run)
        if listed is not None and listed != digest:
            raise ledger.differs(run, listed, digest)
        rows = parse(self._adopt(path, run))
        self._batch[run] = rows
        self._batch_bytes += rows.nbytes

    def _adopt(self, path: Path, run: str) -> Path:
        """Return the bundle's folder among the home's; one from elsewhere is copied there."""
        target = self._home.bundles / run
        if path.resolve() == target.resolve():
            return target
        problems = bundle.verify(path)
        if problems:
            raise CheckFailed(f"{path}: {problems[0]}")
        if not target.exists():
            staging = self._home.bundles / f".tmp-{run}"
            shutil.rmtree(staging, ignore_errors=True)
            shutil.copytree(path, staging)
            staging.rename(target)
        return target

    def _full(self) -> bool:
        return len(self._batch) >= BATCH_RUNS or self._batch_bytes >= BATCH_BYTES

    def _flush(self) -> None:
        if not self._batch:
            return
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        manifests = {run: rows.manifest_sha256 for run, rows in batch.items()}
        # First the ledger: a stored run without an entry would look like a forged one.
        self._ledger = ledger.append(self._home.bundles, manifests).manifests
        try:
            self._store(batch)
        except CheckFailed as error:
            if len(batch) == 1:
                self._refuse_rows(batch, error)
                return
            # One bundle of many is at fault: store the others, each in a transaction of its own.
            for run, rows in batch.items():
                try:
                    self._store({run: rows})
                except CheckFailed as single:
                    self._refuse_rows({run: rows}, single)

    def _store(self, batch: dict[str, RunRows]) -> None:
        from warehouse.store import replace_runs

        replace_runs(self._connection, {run: rows.tables for run, rows in batch.items()})
        for run, rows in batch.items():
            (self._report.replaced if run in self._known else self._report.ingested).append(run)
            self._known[run] = (rows.manifest_sha256, PARSER_VERSION)

    def _refuse_rows(self, batch: dict[str, RunRows], error: CheckFailed) -> None:
        for run in batch:
            self._quarantine(self._home.bundles / run, str(error))

    def _quarantine(self, path: Path, reason: str) -> None:
        """Move a failed bundle of this home aside; one from elsewhere is left, with a note here."""
        self._report.quarantined.append(Refused(path, reason))
        note = self._home.quarantine / f"{path.name}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        note.mkdir(parents=True)
        if path.is_dir() and path.resolve().parent == self._home.bundles.resolve():
            path.rename(note / "bundle")
        write_json(note / REASON, {"path": path.name, "reason": reason})


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild made and which bundles it left out or lacks, though the ledger lists them."""

    runs: int
    content_hash: str
    refused: list[Refused]
    seconds: float


def rebuild(home: Home, *, wait_s: float = WAIT_S) -> RebuildReport:
    """Make the warehouse anew from every sealed bundle, put it in place and publish it.

    The old file is never read, so a damaged one does not matter; until the new one is whole, the
    old one stays. No bundle is moved: those that fail are reported, as are runs that
    the ledger lists and that have no bundle any more.
    """
    from warehouse.connection import (
        begin_swap,
        connect_writable,
        finish_swap,
        refuse_folder,
        writer_lock,
    )
    from warehouse.publish import publish
    from warehouse.store import content_hash

    began = time.monotonic()
    live = home.warehouse_live
    refused: list[Refused] = []
    for path in (live, home.warehouse_snapshot):
        refuse_folder(path)
    with writer_lock(live.parent, wait_s=wait_s):
        finish_swap(live)
        for stale in live.parent.glob("rebuild.duckdb*"):
            stale.unlink()
        fresh = live.parent / "rebuild.duckdb"
        with connect_writable(fresh) as connection:
            runs = _load_all(home, connection, refused)
            digest = content_hash(connection)
            connection.execute("CHECKPOINT")
        begin_swap(live, fresh)
        with connect_writable(live) as connection:
            publish(connection, live, home.warehouse_snapshot)
    return RebuildReport(runs, digest, refused, time.monotonic() - began)


def _load_all(home: Home, connection: duckdb.DuckDBPyConnection, refused: list[Refused]) -> int:
    from tasks.rows import parse
    from warehouse.store import replace_runs

    chain = ledger.read(home.bundles)
    listed = chain.manifests
    batch: dict[str, RunRows] = {}
    total = held = 0

    def store(runs: dict[str, RunRows]) -> int:
        try:
            replace_runs(connection, {run: rows.tables for run, rows in runs.items()})
        except CheckFailed as error:
            if len(runs) > 1:
                return sum(store({run: rows}) for run, rows in runs.items())
            refused.extend(Refused(home.bundles / run, str(error)) for run in runs)
            return 0
        return len(runs)

    for path in bundle.all_sealed(home):
        if path.name in chain.pruned:  # a killed prune left it
            continue
        try:
            rows = parse(path)
            entry = listed.get(rows.run_uuid)
            if entry is not None and entry != rows.manifest_sha256:
                raise ledger.differs(rows.run_uuid, entry, rows.manifest_sha256)
            batch[rows.run_uuid] = rows
            held += rows.nbytes
        except CheckFailed as error:
            refused.append(Refused(path, str(error)))
        if len(batch) >= BATCH_RUNS or held >= BATCH_BYTES:
            total += store(batch)
            batch, held = {}, 0
    if batch:
        total += store(batch)
    refused.extend(_gone(home, set(listed) - chain.pruned))
    ledger.append(home.bundles, _stored_manifests(connection))
    return total


def _gone(home: Home, listed: Iterable[str]) -> Iterator[Refused]:
    """Yield the runs of the ledger whose bundle is not there: the new warehouse lacks them."""
    sealed = {path.name for path in bundle.all_sealed(home)}
    for run in sorted(set(listed) - sealed):
        aside = sorted(home.quarantine.glob(f"{run}-*"))
        where = f"it is in quarantine, {aside[-1]}" if aside else "it was moved or deleted"
        yield Refused(
            home.bundles / run, f"run {run} is in the ledger, but its bundle is not here: {where}"
        )


def _stored_manifests(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    from warehouse.store import known_runs

    return {run: digest for run, (digest, _) in known_runs(connection).items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be: which run, which file or table, got and wanted."""

    run_uuid: str | None
    where: str
    what: str

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {"run_uuid": self.run_uuid, "where": self.where, "what": self.what}


@dataclass(slots=True)
class VerifyReport:
    """Everything that differs; empty means that bundles, ledger and warehouse agree."""

    bundles: int = 0
    files: int = 0
    numbers: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(home: Home) -> VerifyReport:
    """Re-hash every file, re-parse every raw text and compare every number with the snapshot.

    Changes and moves nothing.
    """
    from warehouse.connection import open_snapshot

    report = VerifyReport()
    chain = ledger.read(home.bundles)
    report.differences += [Difference(None, "ledger", problem) for problem in chain.problems]
    folders = {path.name: path for path in bundle.all_sealed(home)}
    for run in sorted(folders.keys() & chain.pruned):
        what = "was to be removed by a prune that was killed; end it with: memsweep prune --yes"
        report.differences.append(Difference(run, "ledger", what))
    for run in sorted(set(chain.manifests) - set(folders) - chain.pruned):
        report.differences.append(
            Difference(run, "ledger", "its bundle is not among the bundles any more")
        )
    with open_snapshot(home.warehouse_snapshot) as connection:
        stored = _stored_manifests(connection)
        for run in sorted(set(stored) - set(folders)):
            report.differences.append(
                Difference(run, "run", "in the warehouse, but its bundle is not there")
            )
        for path in folders.values():
            if path.name not in chain.pruned:
                _verify_bundle(path, connection, chain.manifests, stored, report)
    return report


def _verify_bundle(
    path: Path,
    connection: duckdb.DuckDBPyConnection,
    listed: dict[str, str],
    stored: dict[str, str],
    report: VerifyReport,
) -> None:
    from tasks.differences import differing_rows
    from tasks.rows import parse, read_manifest

    report.bundles += 1
    run = path.name
    try:
        manifest, content = read_manifest(path)
    except CannotFindOut as error:
        report.differences.append(Difference(run, "manifest.json", str(error)))
        return
    files = manifest.get("files")
    report.files += len(files) if isinstance(files, dict) else 0
    digest = hashlib.sha256(content).hexdigest()
    for name, known in (("the ledger", listed), ("the warehouse", stored)):
        if run in known and known[run] != digest:
            what = f"sha256 is {digest}, {name} has {known[run]}"
            report.differences.append(Difference(run, "manifest.json", what))
        elif run not in known:
            report.differences.append(Difference(run, "manifest.json", f"not in {name}"))
    broken = bundle.verify(path)
    report.differences += [Difference(run, *problem.partition(": ")[::2]) for problem in broken]
    if broken or run not in stored:
        return
    try:
        rows = parse(path, raw=True)
    except CheckFailed as error:
        report.differences.append(Difference(run, "bundle", str(error)))
        return
    for parsed in rows.tables.values():
        report.numbers += parsed.num_rows * parsed.num_columns
    report.differences += [
        Difference(run, where, what) for where, what in differing_rows(connection, run, rows)
    ]


def reasons(home: Home) -> list[Refused]:
    """Return what lies in quarantine and why."""
    found = []
    for note in sorted(home.quarantine.glob(f"*/{REASON}")):
        facts = json.loads(note.read_text(encoding="utf-8"))
        found.append(Refused(note.parent, str(facts.get("reason"))))
    return found
