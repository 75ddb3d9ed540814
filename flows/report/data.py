"""What the published snapshot says about the runs of a page, as typed values that do not change.

Everything a page shows is read here, once and in bulk; sections only choose and arrange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flows.report.content import Ref
from warehouse.lookup import records
from warehouse.registry import Outcome

if TYPE_CHECKING:
    import duckdb

Numbers = npt.NDArray[np.float64]
_CHOSEN = "run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what it was asked, with what it ran, how it ended."""

    run_uuid: str
    sweep: str
    sweep_sha256: str
    round: str
    label: str
    repeat: int
    attempt: int
    outcome: str
    expect: str | None
    phase: str | None
    message: str | None
    started_at: str | None
    ended_at: str | None
    cell_key: str
    setting_key: str
    model: str
    engine_version: str
    hardware: str | None
    device: str
    #: vLLM's own arguments, as asked.
    server: Mapping[str, Any]
    #: Versions, digests and machine, by the names of the audit.
    pins: Mapping[str, Any]
    #: Kind, line number and text of the line that says why the run failed.
    failure: tuple[str, int | None, str] | None

    @property
    def name(self) -> str:
        """The cell's label, with repeat and attempt where there are several."""
        repeat = "" if self.repeat == 1 else f" #{self.repeat}"
        return self.label + repeat + ("" if self.attempt == 1 else f" (attempt {self.attempt})")

    @property
    def as_expected(self) -> bool:
        """Whether the run ended as its cell and its own prediction expect."""
        return self.outcome == (self.expect or Outcome.OK.value)

    @property
    def group(self) -> tuple[str, str, str | None]:
        """What runs must share to be drawn as one: the cell with its pins, and the machine."""
        return (self.label, self.cell_key, self.hardware)


@dataclass(frozen=True, slots=True)
class Point:
    """One load point of a run: what was asked, and whether it may be used."""

    run: Run
    index: int
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int
    parallel: int
    requests: int
    state: str | None
    valid: bool | None
    broken: str | None
    case: str | None

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens of prompt, answer and shared prefix: what a line of a chart is about."""
        return (self.prompt_tokens, self.output_tokens, self.prefix_tokens)

    @property
    def name(self) -> str:
        """Prompt, answer and concurrency in short."""
        return f"{self.prompt_tokens}+{self.output_tokens} tokens × {self.parallel}"


@dataclass(frozen=True, slots=True)
class Number:
    """A stored number, or why there is none."""

    ref: Ref
    value: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check that does not hold."""

    run_uuid: str
    load_point: int | None
    name: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Residual:
    """A prediction beside what was measured."""

    run_uuid: str
    load_point: int | None
    metric: str
    kind: str
    predicted: float
    measured: float | None
    residual: float | None
    alarm: bool


@dataclass(frozen=True, slots=True)
class DerivedCell:
    """What a run's measured pool would hold at a context limit that nobody ran."""

    run_uuid: str
    max_model_len_tokens: int
    kv_cache_size_tokens: float
    max_concurrency: float
    formula: str


@dataclass(frozen=True)
class Data:
    """The runs of a page and every number stored about them."""

    title: str
    runs: tuple[Run, ...]
    points: tuple[Point, ...]
    numbers: Mapping[Ref, Number]
    checks: tuple[Check, ...]
    residuals: tuple[Residual, ...]
    derived_cells: tuple[DerivedCell, ...]

    def number(
        self, run: Run, metric: str, point: int | None = None, evidence: str = "measured"
    ) -> Number:
        """Return a number; one that nothing is stored of has no value and says so."""
        ref = Ref(run.run_uuid, point, metric, evidence)
        return self.numbers.get(ref) or Number(ref, None, "nothing is stored of it")

    def value(self, run: Run, metric: str, point: int | None = None) -> float | None:
        """Return a measured number's value."""
        return self.number(run, metric, point).value

    def derived(self, point: Point, metric: str) -> Number:
        """Return a derived number of a load point."""
        return self.number(point.run, metric, point.index, "derived")

    @cached_property
    def points_by_run(self) -> Mapping[str, list[Point]]:
        """Load points by run."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.run.run_uuid, []).append(point)
        return found

    @cached_property
    def groups(self) -> Mapping[tuple[str, str, str | None], list[Run]]:
        """Runs by cell, pins and machine, in the order they began."""
        found: dict[tuple[str, str, str | None], list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.group, []).append(run)
        return found


def gather(connection: duckdb.DuckDBPyConnection, title: str, runs: Sequence[str]) -> Data:
    """Return everything that pages say about these runs, in the order they began."""
    chosen = {"runs": list(runs)}
    found = _runs(connection, chosen)
    by_uuid = {run.run_uuid: run for run in found}
    return Data(
        title=title,
        runs=tuple(found),
        points=_points(connection, chosen, by_uuid),
        numbers=_numbers(connection, chosen),
        checks=tuple(
            Check(row["run_uuid"], row["load_point"], row["check_name"], row["kind"], row["detail"])
            for row in records(
                connection,
                f"SELECT * FROM validity WHERE {_CHOSEN} AND NOT passed "
                "ORDER BY run_uuid, load_point NULLS FIRST, check_name",
                chosen,
            )
        ),
        residuals=tuple(
            Residual(**row)
            for row in records(
                connection,
                "SELECT run_uuid, load_point, metric, kind, predicted, measured, residual, "
                f"coalesce(alarm, false) AS alarm FROM residual WHERE {_CHOSEN} "
                "AND predicted IS NOT NULL ORDER BY run_uuid, load_point NULLS FIRST, metric",
                chosen,
            )
        ),
        derived_cells=tuple(
            DerivedCell(**row)
            for row in records(
                connection,
                "SELECT run_uuid, max_model_len_tokens, kv_cache_size_tokens, max_concurrency, "
                f"formula FROM derived_cell WHERE {_CHOSEN} ORDER BY ALL",
                chosen,
            )
        ),
    )


#: Columns of ``environment`` that a page states at its top.
PINS = (
    "image_digest",
    "engine_lock_sha256",
    "bench_version",
    "bench_lock_sha256",
    "flow_lock_sha256",
    "model_revision",
    "model_config_sha256",
    "harness",
    "driver_version",
    "cuda_version",
    "gpu_name",
    "gpu_count",
    "gpu_total_bytes",
    "host",
    "platform",
    "memory_total_bytes",
    "compile_cache",
)


def _runs(connection: duckdb.DuckDBPyConnection, chosen: dict[str, list[str]]) -> list[Run]:
    pins = ", ".join(f"e.{name}" for name in PINS)
    found = []
    for row in records(
        connection,
        "SELECT r.run_uuid, r.sweep, r.sweep_sha256, r.round, r.label, r.repeat, r.attempt, "
        "r.outcome, r.expect, r.phase, r.message, r.started_at, r.ended_at, r.cell_key, "
        "r.setting_key, r.model, r.engine_version, r.hardware, c.device, "
        "c.setting::VARCHAR AS setting, "
        f"{pins}, r.memsweep_version, r.git_commit, r.git_dirty, r.started_by, "
        "f.type AS failure_type, f.line AS failure_line, f.text AS failure_text "
        "FROM run r JOIN cell c USING (cell_key) "
        "LEFT JOIN environment e ON e.run_uuid = r.run_uuid "
        "LEFT JOIN failure f ON f.run_uuid = r.run_uuid "
        f"WHERE r.{_CHOSEN} ORDER BY r.started_at NULLS LAST, r.run_uuid",
        chosen,
    ):
        setting = json.loads(row.pop("setting"))
        failure = tuple(row.pop(f"failure_{name}") for name in ("type", "line", "text"))
        own = {name: row[name] for name in Run.__slots__ if name in row}
        named = (*PINS, "memsweep_version", "git_commit", "git_dirty", "started_by")
        found.append(
            Run(
                **own,
                server=setting.get("server") or {},
                pins={name: row[name] for name in named},
                failure=failure if failure[0] is not None else None,
            )
        )
    return found


def _points(
    connection: duckdb.DuckDBPyConnection, chosen: dict[str, list[str]], runs: Mapping[str, Run]
) -> tuple[Point, ...]:
    rows = records(
        connection,
        "SELECT run_uuid, load_point, asked_prompt_tokens, asked_output_tokens, "
        "coalesce(prefix_tokens, 0) AS prefix_tokens, parallel, asked_requests, state, valid, "
        "broken_checks, peak_kv_usage_case "
        f"FROM load_points_wide WHERE {_CHOSEN} ORDER BY run_uuid, load_point",
        chosen,
    )
    order = {run_uuid: number for number, run_uuid in enumerate(runs)}
    rows.sort(key=lambda row: (order[row["run_uuid"]], row["load_point"]))
    return tuple(
        Point(
            run=runs[row["run_uuid"]],
            index=row["load_point"],
            prompt_tokens=row["asked_prompt_tokens"],
            output_tokens=row["asked_output_tokens"],
            prefix_tokens=row["prefix_tokens"],
            parallel=row["parallel"],
            requests=row["asked_requests"],
            state=row["state"],
            valid=row["valid"],
            broken=row["broken_checks"] or None,
            case=row["peak_kv_usage_case"],
        )
        for row in rows
    )


def _numbers(
    connection: duckdb.DuckDBPyConnection, chosen: dict[str, list[str]]
) -> dict[Ref, Number]:
    found = {}
    for evidence, name, reason in (
        ("measured", "measurement", "reason"),
        ("derived", "derivation", "reason"),
        ("predicted", "prediction", "NULL"),
    ):
        rows = connection.execute(
            f"SELECT run_uuid::VARCHAR, load_point, metric, value, {reason} FROM {name} "
            f"WHERE {_CHOSEN}",
            chosen,
        ).fetchall()
        for run, point, metric, value, why in rows:
            ref = Ref(run, point, metric, evidence)
            found[ref] = Number(ref, None if value is None else float(value), why)
    return found


# Time series


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity over time: seconds since the run's start."""

    t_s: Numbers
    value: Numbers

    def highest(self, start_s: float, end_s: float) -> float | None:
        """Return the highest value within a stretch; ``None`` where there is none."""
        inside = self.value[(self.t_s >= start_s) & (self.t_s <= end_s)]
        return float(inside.max()) if len(inside) else None


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a run: seconds since its start."""

    phase: str
    load_point: int | None
    start_s: float
    end_s: float
    #: Highest sample of each quantity; of every sample, whatever a drawing leaves out.
    peaks: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Course:
    """What a run's samplers saw, thinned, and its phases."""

    run: Run
    lines: Mapping[str, Curve]
    spans: tuple[Span, ...]
    samples: int


#: Quantity -> SQL that gives (time, value) of every sample of a run.
_COURSES = {
    "kv_usage_ratio": "SELECT t_s, kv_usage_ratio FROM server_sample",
    "requests_running": "SELECT t_s, requests_running FROM server_sample",
    "requests_waiting": "SELECT t_s, requests_waiting FROM server_sample",
    # Of several GPUs the fullest one counts.
    "gpu_used_bytes": "SELECT min(t_s), max(used_bytes)::DOUBLE FROM gpu_sample",
    "process_rss_bytes": "SELECT min(t_s), sum(rss_bytes)::DOUBLE FROM process_sample",
}
BUCKETS = 240


def course(connection: duckdb.DuckDBPyConnection, run: Run, *, buckets: int = BUCKETS) -> Course:
    """Return what the samplers saw of a run, at most two samples for each of ``buckets``."""
    spans = [
        (row["phase"], row["load_point"], row["start_s"], row["end_s"])
        for row in records(
            connection,
            "SELECT phase, load_point, start_s, end_s FROM phase WHERE run_uuid = $run::UUID "
            "AND start_s IS NOT NULL ORDER BY ordinal",
            {"run": run.run_uuid},
        )
    ]
    raw: dict[str, Curve] = {}
    for name, sql in _COURSES.items():
        grouped = " GROUP BY tick" if "(" in sql else ""
        found = connection.execute(
            f"SELECT * FROM ({sql} WHERE run_uuid = $run::UUID{grouped}) AS s(t_s, value) "
            "WHERE t_s IS NOT NULL AND value IS NOT NULL ORDER BY t_s",
            {"run": run.run_uuid},
        ).fetchnumpy()
        if len(found["t_s"]):
            raw[name] = Curve(np.asarray(found["t_s"], float), np.asarray(found["value"], float))
    starts = [line.t_s[0] for line in raw.values()] + [start for _, _, start, _ in spans]
    zero = float(min(starts, default=0.0))
    last = max(
        [float(line.t_s[-1]) for line in raw.values()] + [s for _, _, s, _ in spans] + [zero]
    )
    return Course(
        run=run,
        lines={
            name: Curve(*thinned(line.t_s - zero, line.value, buckets))
            for name, line in raw.items()
        },
        spans=tuple(
            _span(raw, zero, phase, point, start, last if end is None else end)
            for phase, point, start, end in spans
        ),
        samples=max((len(line.t_s) for line in raw.values()), default=0),
    )


def _span(
    raw: Mapping[str, Curve], zero: float, phase: str, point: int | None, start: float, end: float
) -> Span:
    found = {name: line.highest(start, end) for name, line in raw.items()}
    peaks = {name: top for name, top in found.items() if top is not None}
    return Span(phase, point, start - zero, end - zero, peaks)


def thinned(t_s: Numbers, value: Numbers, buckets: int) -> tuple[Numbers, Numbers]:
    """Return of each of ``buckets`` equal stretches the lowest and the highest sample, in order.

    The first and the last sample are kept too, and every peak is: a thinned line never shows less
    than the sampler saw. What is short already stays as it is.
    """
    if len(t_s) <= 2 * buckets:
        return t_s, value
    edges = np.linspace(t_s[0], t_s[-1], buckets + 1)[1:-1]
    starts = np.unique(np.concatenate(([0], np.searchsorted(t_s, edges))))
    keep = {0, len(t_s) - 1}
    for first, end in zip(starts, [*starts[1:], len(t_s)], strict=True):
        if first < end:
            part = value[first:end]
            keep |= {int(first + np.argmin(part)), int(first + np.argmax(part))}
    chosen = np.array(sorted(keep))
    return t_s[chosen], value[chosen]
