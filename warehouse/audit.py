"""The chain of custody of a number: from the warehouse back to raw line, pins and person.

Every link is looked at, not just printed: the file's hash, the line's text, the sample's or
request's value, the manifest, the ledger. A link that does not hold is named; a number without its
chain is not evidence.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warehouse import ledger
from warehouse.errors import BadInput
from warehouse.lookup import records
from warehouse.registry import EXTREME_OF, GROWTH_OF, LOAD_POINT, PEAK_OF, STARTUP

if TYPE_CHECKING:
    import duckdb

MANIFEST = "manifest.json"
#: A sample's whole line, as the sampler writes it.
_TICK = re.compile(r'^\{\s*"tick":\s*(\d+).*\}$', re.MULTILINE)


@dataclass(slots=True)
class Audit:
    """One run's chain: its numbers with their evidence, its provenance, and what is broken."""

    run_uuid: str
    values: list[dict[str, Any]]
    provenance: dict[str, Any]
    broken: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "run_uuid": self.run_uuid,
            "values": self.values,
            **self.provenance,
            "broken": self.broken,
        }


def unit_of(metric: str) -> str:
    """Return a metric's unit; empty for one that this version does not know."""
    known = STARTUP.get(metric) or LOAD_POINT.get(metric)
    return known.unit if known else ""


def audit(
    connection: duckdb.DuckDBPyConnection,
    bundles: Path,
    run_uuid: str,
    metric: str | None = None,
    *,
    load_point: int | None = None,
) -> Audit:
    """Follow one metric of a run, or all of them, back to where they come from.

    Raises :class:`BadInput` when nothing is stored under that name.
    """
    return _Auditor(connection, bundles, run_uuid).follow(metric, load_point)


class _Auditor:
    """Reads each file of the bundle once, however many numbers come from it."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, bundles: Path, run_uuid: str) -> None:
        self._connection = connection
        self._bundles = bundles
        self._folder = bundles / run_uuid
        self._run = run_uuid
        self._broken: list[str] = []
        self._digests: dict[str, str | None] = {}
        self._lines: dict[str, list[str]] = {}
        self._samples: dict[str, dict[int, str]] = {}
        self._started_at: str | None = None
        self._listed = {
            row["path"]: row
            for row in self._records(
                "SELECT path, sha256, bytes FROM artifact WHERE run_uuid = $run::UUID"
            )
        }

    def follow(self, metric: str | None, load_point: int | None) -> Audit:
        """Return the audit; see :func:`audit`."""
        values = self._values(metric, load_point)
        if metric is not None and not values:
            self._unknown(metric, load_point)
        provenance = self._provenance()
        for value in values:
            self._check(value)
        return Audit(self._run, values, provenance, self._broken)

    def _records(self, sql: str, **more: object) -> list[dict[str, Any]]:
        return records(self._connection, sql, {"run": self._run, **more})

    def _break(self, link: str) -> None:
        if link not in self._broken:
            self._broken.append(link)

    # What is stored

    def _values(self, metric: str | None, load_point: int | None) -> list[dict[str, Any]]:
        chosen = " AND metric = $metric" if metric is not None else ""
        chosen += " AND load_point = $load_point" if load_point is not None else ""
        bound = {
            name: value
            for name, value in (("metric", metric), ("load_point", load_point))
            if value is not None
        }
        found = []
        for evidence, table, columns in (
            (
                "measured",
                "measurement",
                "value, low, high, reason, source, file, line, line_end, text",
            ),
            ("predicted", "prediction", "value, kind, made_at, file"),
            ("derived", "derivation", "value, reason, formula, inputs"),
        ):
            rows = self._records(
                f"SELECT load_point, metric, {columns} FROM {table} "
                f"WHERE run_uuid = $run::UUID{chosen} ORDER BY load_point NULLS FIRST, metric",
                **bound,
            )
            found += [{"evidence": evidence, "unit": unit_of(row["metric"]), **row} for row in rows]
        return found

    def _unknown(self, metric: str, load_point: int | None) -> None:
        known = [
            row["metric"]
            for row in self._records(
                "SELECT DISTINCT metric FROM (SELECT run_uuid, metric FROM measurement UNION ALL "
                "SELECT run_uuid, metric FROM prediction UNION ALL "
                "SELECT run_uuid, metric FROM derivation) WHERE run_uuid = $run::UUID ORDER BY 1"
            )
        ]
        where = "" if load_point is None else f" of load point {load_point}"
        raise BadInput(
            f"run {self._run}: nothing is stored as {metric!r}{where}, wanted one of: "
            f"{', '.join(known) or 'nothing: the run has no numbers'}"
        )

    # The number and its evidence

    def _check(self, value: dict[str, Any]) -> None:
        if value["evidence"] == "derived":
            value["inputs"] = json.loads(value["inputs"])
            value["file"] = value["inputs"].get("file")
        if value["value"] is None or not value.get("file"):
            return
        name = _name(value)
        value["file_sha256"] = self._file(value["file"], name)
        if value["evidence"] == "measured":
            check = {
                "log": self._check_line,
                "cache_config_info": self._check_line,
                "samples": self._check_samples,
                "requests": self._check_requests,
            }.get(value["source"])
            if check is not None and value["file_sha256"] is not None:
                check(value, name)
        if value["evidence"] == "predicted":
            self._check_prediction(value, name)

    def _file(self, path: str, name: str) -> str | None:
        """Return a file's sha256 when manifest, warehouse and disk agree on it."""
        if path in self._digests:
            return self._digests[path]
        self._digests[path] = None
        listed = self._listed.get(path)
        if listed is None:
            self._break(f"{name} → {path}: not among the run's artifacts")
            return None
        try:
            with (self._folder / path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            self._break(f"{path}: cannot be read: {error.strerror}")
            return None
        if digest != listed["sha256"]:
            self._break(f"{path}: sha256 is {digest}, the manifest listed {listed['sha256']}")
            return None
        self._digests[path] = digest
        return digest

    def _check_line(self, value: dict[str, Any], name: str) -> None:
        path, number = value["file"], value["line"]
        if path not in self._lines:
            # Only a line feed ends a line: numbers then agree with an editor's.
            content = (self._folder / path).read_bytes().decode("utf-8", "replace")
            self._lines[path] = [line.rstrip("\r") for line in content.split("\n")]
        lines = self._lines[path]
        text = lines[number - 1] if number and number <= len(lines) else None
        if text is None or not _same_line(text, value["text"]):
            self._break(f"{name} → {path} line {number}: reads {text!r}, not {value['text']!r}")

    def _check_samples(self, value: dict[str, Any], name: str) -> None:
        ticks = self._ticks(value["file"])
        found = [ticks.get(value["line"]), ticks.get(value["line_end"])]
        if found[0] is None or found[1] is None:
            self._break(f"{name} → {value['file']}: no tick {value['line']} or {value['line_end']}")
            return
        first, last = found[0], found[1]
        value["raw"] = [first] if first is last else [first, last]
        got = _sampled(value["metric"], _sample(first), _sample(last))
        if got is not None and abs(got - value["value"]) > 1e-9 * max(1.0, abs(got)):
            self._break(f"{name}: stored {value['value']}, the samples say {got}")

    def _ticks(self, path: str) -> dict[int, str]:
        """Return every whole line by its tick; of a long run only a few are read further."""
        if path not in self._samples:
            content = gzip.decompress((self._folder / path).read_bytes()).decode("utf-8", "replace")
            self._samples[path] = {int(line[1]): line[0] for line in _TICK.finditer(content)}
        return self._samples[path]

    def _check_requests(self, value: dict[str, Any], name: str) -> None:
        column = EXTREME_OF.get(value["metric"])
        if column is None:
            return
        got = _request_value(self._folder / value["file"], column[0], value["line"])
        if got != value["value"]:
            self._break(
                f"{name} → {value['file']} row {value['line']}: {column[0]} is {got}, "
                f"stored {value['value']}"
            )

    def _check_prediction(self, value: dict[str, Any], name: str) -> None:
        began = self._started_at
        if began and value["made_at"] and value["made_at"] > began:
            self._break(f"{name}: predicted at {value['made_at']}, after the run began at {began}")

    # Who, where, with what

    def _provenance(self) -> dict[str, Any]:
        run = self._records("SELECT * FROM run WHERE run_uuid = $run::UUID")[0]
        environment = (
            self._records("SELECT * FROM environment WHERE run_uuid = $run::UUID") or [{}]
        )[0]
        self._started_at = run["started_at"]
        self._manifest(run)
        self._pins(run, environment)
        return {
            "manifest": {"file": MANIFEST, "sha256": run["manifest_sha256"]},
            "operation": {
                "file": "operation.json",
                "sha256": environment.get("operation_sha256"),
                "polyaxon": {
                    name: environment.get(f"polyaxon_{name}")
                    for name in ("host", "owner", "project")
                },
                "status": run["polyaxon_status"],
            },
            "environment": {
                name: environment.get(name)
                for name in (
                    "image_digest",
                    "engine_lock_sha256",
                    "bench_lock_sha256",
                    "flow_lock_sha256",
                    "model_revision",
                    "model_config_sha256",
                    "engine_version",
                    "bench_version",
                    "harness",
                    "driver_version",
                    "cuda_version",
                    "gpu_name",
                    "gpu_uuids",
                    "host",
                    "platform",
                    "compile_cache",
                )
            },
            "cell": {
                "cell_key": run["cell_key"],
                "setting_key": run["setting_key"],
                "label": run["label"],
                "model": run["model"],
            },
            "sweep": {
                "sweep": run["sweep"],
                "sha256": run["sweep_sha256"],
                "file": "sweep.yaml",
                "file_sha256": self._file("sweep.yaml", "sweep"),
                "round": run["round"],
                "repeat": run["repeat"],
                "attempt": run["attempt"],
            },
            "code": {
                "memsweep_version": run["memsweep_version"],
                "git_commit": run["git_commit"],
                "git_dirty": run["git_dirty"],
            },
            "started_by": run["started_by"],
            "started_at": run["started_at"],
            "ended_at": run["ended_at"],
            "outcome": run["outcome"],
            "prefect_flow_run_id": run["prefect_flow_run_id"],
        }

    def _manifest(self, run: Mapping[str, Any]) -> None:
        wanted = run["manifest_sha256"]
        try:
            content = (self._folder / MANIFEST).read_bytes()
        except OSError as error:
            self._break(f"{MANIFEST}: the bundle is not there ({error.strerror}: {self._folder})")
            return
        digest = hashlib.sha256(content).hexdigest()
        if digest != wanted:
            self._break(f"{MANIFEST}: sha256 is {digest}, the warehouse has {wanted}")
        chain = ledger.read(self._bundles)
        listed = chain.manifests.get(self._run)
        if listed != wanted:
            self._break(f"{ledger.NAME}: has {listed or 'no entry'} for the run, wanted {wanted}")
        for problem in chain.problems:
            self._break(problem)
        files = json.loads(content)["files"] if digest == wanted else {}
        for path, facts in files.items():
            stored = self._listed.get(path)
            if stored is None or stored["sha256"] != facts["sha256"]:
                self._break(f"{path}: the manifest lists it otherwise than the warehouse")

    def _pins(self, run: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        wanted: Sequence[tuple[str, object]] = (
            ("operation", environment.get("operation_sha256")),
            (
                "image digest or engine lock",
                environment.get("image_digest") or environment.get("engine_lock_sha256"),
            ),
            ("model revision", environment.get("model_revision")),
            ("engine version", run["engine_version"]),
            ("sweep file", self._listed.get("sweep.yaml")),
            ("git commit or version", run["git_commit"] or run["memsweep_version"]),
            ("who started it", run["started_by"]),
            ("when it started", run["started_at"]),
            ("Prefect flow run", run["prefect_flow_run_id"]),
        )
        for link, value in wanted:
            # A cell that the plan refused was never submitted: it has no operation.
            if not value and not (link == "operation" and run["outcome"] == "infeasible"):
                self._break(f"{link}: not recorded")
        if environment.get("operation_sha256"):
            self._file("operation.json", "operation")


def _name(value: Mapping[str, Any]) -> str:
    point = value["load_point"]
    return str(value["metric"]) + ("" if point is None else f" (load point {point})")


def _same_line(raw: str, stored: str | None) -> bool:
    """Return whether a stored text is that line; of very long lines a part is stored."""
    return stored is not None and (raw == stored or (len(stored) >= 200 and stored in raw))


def _sample(line: str) -> dict[str, Any]:
    """Return a sample's line as values; a spoiled one has none."""
    try:
        sample = json.loads(line)
    except ValueError:
        return {}
    return sample if isinstance(sample, dict) else {}


def _sampled(metric: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """Return what one or two raw samples say of a metric; ``None`` for one without a formula."""
    if metric in PEAK_OF:
        return _float(first.get("values", {}).get(PEAK_OF[metric]))
    if metric in GROWTH_OF:
        start = _float(first.get("values", {}).get(GROWTH_OF[metric]))
        end = _float(last.get("values", {}).get(GROWTH_OF[metric]))
        return None if start is None or end is None else end - start
    if metric == "peak_process_rss_bytes":
        return float(sum(process["rss_bytes"] for process in first.get("processes", [])))
    if metric == "peak_gpu_used_bytes":
        return max((float(gpu["used_bytes"]) for gpu in first.get("gpus", [])), default=None)
    return None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _request_value(database: Path, column: str, row: int) -> float | None:
    """Return one number of EvalScope's result table; ``column`` is one of the registry's."""
    connection = sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)
    try:
        found = connection.execute(
            f"SELECT {column} FROM result ORDER BY rowid LIMIT 1 OFFSET ?", (row - 1,)
        ).fetchone()
    except sqlite3.Error:
        return None
    finally:
        connection.close()
    return None if found is None or found[0] is None else float(found[0])
