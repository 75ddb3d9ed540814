"""Where the memory goes after a start, where its edge is, and how much boots differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flows.report import charts
from flows.report.content import Entry, Figure, Panel, Section, Table, table
from flows.report.data import Data, Number, Run
from flows.report.words import GIB, made, percent, shown, size, told_apart, worded
from warehouse.lookup import records
from warehouse.query import named_queries
from warehouse.registry import Outcome

if TYPE_CHECKING:
    import duckdb


# Allocation


def allocation(data: Data, published: Mapping[str, tuple[float, str]]) -> Section | None:
    """Return the bars of device memory: what each start's log says it is used for.

    ``published`` holds by cell what documents print of the device memory in use.
    """
    runs = [run for run in data.runs if run.outcome == Outcome.OK.value]
    if not runs:
        return None
    parts = {run.run_uuid: _Parts(data, run) for run in runs}
    if not any(part.known for part in parts.values()):
        return Section(
            "memory",
            "Where the memory goes",
            "Not measured: the engine's CPU build logs no weights, activations or CUDA graphs, "
            "and there is no device memory to sample. What it does log, the KV pool, stands with "
            "the cells."
            if all(run.device == "cpu" for run in runs)
            else "Not measured: no start logged where its memory goes.",
            tables=(_pools(data, runs),),
        )
    known = sorted((run for run in runs if parts[run.run_uuid].known), key=_by_budget)
    return Section(
        "memory",
        "Where the memory goes",
        "Device memory after start, one bar a run, from what the engine logged. The sum stands at "
        "the bar's end; what no line explains is named so. The black tick is the highest device "
        "memory in use that NVML saw under load, a hollow diamond what a document prints.",
        figures=(_bars(data, known, parts, published),),
    )


def _pools(data: Data, runs: Sequence[Run]) -> Table:
    rows = [
        [
            run.name,
            shown(data.number(run, "requested_kv_cache_bytes")),
            shown(data.number(run, "available_kv_cache_bytes")),
            _pool(data, run) or Entry("–", why="blocks or bytes a block were not logged"),
            Entry("–", why="not measured on the CPU"),
            Entry("–", why="not measured on the CPU"),
        ]
        for run in runs
    ]
    columns = ("cell", "pool asked for", "pool budget", "pool allocated", "weights", "CUDA graphs")
    return table("memory", "What is known of memory after start", columns, rows)


def _pool(data: Data, run: Run) -> Entry | None:
    """Return the allocated pool: whole blocks; a little less than its budget."""
    blocks, each = data.value(run, "num_gpu_blocks"), data.value(run, "bytes_per_block")
    predicted = each is None
    if predicted:
        each = data.number(run, "bytes_per_block", evidence="predicted").value
    if blocks is None or each is None:
        return None
    formula = f"{blocks:,.0f} blocks × {each:,.0f} bytes" + (" as predicted" if predicted else "")
    return made(blocks * each, size(blocks * each), formula)


def _graphs(number: Number) -> Entry:
    estimated = number.value is not None and number.ref.metric == "graph_estimate_bytes"
    return shown(number, why="the engine's estimate before capture" if estimated else "")


class _Parts:
    """The terms of one start's memory budget; a term that was not logged is absent, not 0."""

    def __init__(self, data: Data, run: Run) -> None:
        def first(*metrics: str) -> Number:
            found = [data.number(run, metric) for metric in metrics]
            return next((n for n in found if n.value is not None), found[0])

        weights = first("weights_bytes", "model_loading_bytes")
        together = data.value(run, "weights_and_non_torch_bytes")
        outside: Entry = shown(data.number(run, "non_torch_bytes"))
        if outside.value is None and together is not None and weights.value is not None:
            rest = together - weights.value
            formula = f"{together:,.0f} (weights and non-torch) − {weights.value:,.0f} (weights)"
            outside = made(rest, size(rest), formula)
        pool = _pool(data, run) or shown(
            first("available_kv_cache_bytes", "requested_kv_cache_bytes")
        )
        self.entries: dict[str, Entry] = {
            "weights": shown(weights),
            "KV pool": pool,
            "CUDA graphs": _graphs(first("graph_capture_bytes", "graph_estimate_bytes")),
            "activations": shown(data.number(run, "peak_activation_bytes")),
            "other, outside torch": outside,
        }
        self.used = self._used(data, run)
        self.budget = self._budget(data, run)
        self.absent = [name for name, entry in self.entries.items() if entry.value is None]
        #: Without the weights a bar says nothing.
        self.known = self.entries["weights"].value is not None

    @property
    def total(self) -> float:
        """Sum of what was logged, bytes."""
        return math.fsum(float(e.value) for e in self.entries.values() if e.value is not None)

    @property
    def unexplained(self) -> Entry:
        """What no term explains: of the budget, or where terms are missing, of what is in use."""
        absent = ", ".join(self.absent)
        if self.absent and self.used.value is not None:
            rest = float(self.used.value) - self.total
            formula = f"{float(self.used.value):,.0f} (in use by NVML) − {self.total:,.0f} (sum of "
            formula += f"what was logged; not logged: {absent})"
            return made(rest, size(rest), formula, why=f"of what is in use; not logged: {absent}")
        if self.absent:
            return Entry("–", why=f"not logged: {absent}")
        if self.budget.value is None:
            return Entry("–", why="the budget is not known")
        rest = float(self.budget.value) - self.total
        formula = f"{float(self.budget.value):,.0f} (budget) − {self.total:,.0f} (sum of the terms)"
        return made(rest, size(rest), formula)

    def _used(self, data: Data, run: Run) -> Entry:
        points = data.points_by_run.get(run.run_uuid, [])
        # What another process held is no memory of this run's.
        own = [point for point in points if "gpu_exclusive" not in (point.broken or "").split(", ")]
        if points and not own:
            return Entry("–", why="another process used the GPU")
        found = [data.number(run, "peak_gpu_used_bytes", point.index) for point in own]
        seen = [number for number in found if number.value is not None]
        if not seen:
            return Entry("–", why=found[0].reason or "" if found else "no load point was reached")
        return shown(max(seen, key=lambda number: number.value or 0.0))

    def _budget(self, data: Data, run: Run) -> Entry:
        asked = shown(data.number(run, "requested_memory_bytes"))
        total = data.value(run, "total_memory_bytes")
        share = data.value(run, "gpu_memory_utilization_ratio")
        share = share if share is not None else run.server.get("gpu_memory_utilization")
        if asked.value is not None or total is None or share is None:
            return asked
        budget = math.ceil(total * share)
        return made(budget, size(budget), f"ceil({total:,.0f} bytes × {share:g})")


def _bars(
    data: Data,
    runs: Sequence[Run],
    parts: Mapping[str, _Parts],
    published: Mapping[str, tuple[float, str]],
) -> Figure:
    told = told_apart(
        [_bar_name(data, run) for run in runs],
        [run.name for run in runs],
        [f"vLLM {run.engine_version}" for run in runs],
        [run.run_uuid[:8] for run in runs],
    )
    names = {run.run_uuid: name for run, name in zip(runs, told, strict=True)}
    bars, totals, marks, rows = [], [], [], []
    for run in runs:
        part, name = parts[run.run_uuid], names[run.run_uuid]
        unexplained = part.unexplained
        for order, kind in enumerate(charts.PARTS):
            entry = part.entries.get(kind, unexplained)
            if entry.value is not None and float(entry.value) > 0:
                words = f"{name}: {kind} {entry.text}"
                gib = float(entry.value) / GIB
                bars.append(
                    {"name": name, "part": kind, "gib": gib, "order": order, "words": words}
                )
        used = []
        if part.used.value is not None:
            words = f"{name}: {part.used.text} in use by NVML"
            used.append((float(part.used.value), "measured", words))
        if run.label in published:
            value, printed = published[run.label]
            used.append((value, "published", f"{name}: {printed} in use, published"))
        total = part.total + max(0.0, float(unexplained.value or 0.0))
        end = max([total, *(value for value, _, _ in used)])
        totals.append({"name": name, "gib": end / GIB, "text": f"{total / GIB:.2f} GiB"})
        marks += [
            {"name": name, "gib": value / GIB, "source": source, "words": words}
            for value, source, words in used
        ]
        terms = ", ".join(n for n in part.entries if n not in part.absent)
        rows.append(
            [
                name,
                *part.entries.values(),
                made(part.total, size(part.total), f"sum of {terms} of run {run.run_uuid}"),
                part.budget,
                unexplained,
                part.used,
            ]
        )
    shown_names = list(dict.fromkeys(names.values()))
    spec = charts.allocation(bars, totals, marks, order=shown_names)
    columns = (
        "run",
        *(name for name in charts.PARTS if name != "unexplained"),
        "sum",
        "budget",
        "unexplained",
        "in use (NVML)",
    )
    return Figure(
        "memory",
        "Device memory after start",
        "By memory utilization and context limit, in GiB.",
        (Panel("memory", "Device memory after start", spec, "Device memory by what takes it."),),
        table("memory", "Device memory after start", columns, rows),
    )


def _by_budget(run: Run) -> tuple[str, float, int, int]:
    """Return a key that puts bars in the order of their memory and context."""
    server = run.server
    utilization = float(server.get("gpu_memory_utilization") or 0.0)
    return (run.model, utilization, int(server.get("max_model_len") or 0), run.repeat)


def _bar_name(data: Data, run: Run) -> str:
    share = run.server.get("gpu_memory_utilization")
    utilization = "" if share is None else f"{share:.0%}, "
    several = len({one.model for one in data.runs}) > 1
    model = f"{run.model}, " if several else ""
    repeat = "" if run.repeat == 1 else f" #{run.repeat}"
    return f"{model}{utilization}{run.server.get('max_model_len', 0):,} tokens{repeat}"


# The edge of memory


def frontier(connection: duckdb.DuckDBPyConnection, data: Data) -> Section | None:
    """Return the longest context that worked and the shortest that did not, over the warehouse."""
    sql = named_queries()["oom_frontier"].sql
    found = [
        row
        for model in dict.fromkeys(run.model for run in data.runs)
        for row in records(connection, sql, {"model": model})
    ]
    failed = [row for row in found if row["shortest_context_failed_tokens"] is not None]
    if not failed:
        return None
    explicit = any(row["kv_cache_memory_bytes"] is not None for row in found)
    several = len({row["model"] for row in found}) > 1
    points, rows = [], []
    for row in found:
        place = _memory(row, explicit=explicit)
        name = f"{row['model']}, {place}" if several else place
        for verdict, key in (
            ("worked", "longest_context_ok_tokens"),
            ("did not", "shortest_context_failed_tokens"),
        ):
            tokens = row[key]
            if tokens is not None:
                words = f"{row['model']}, {place}: {tokens:,} tokens {verdict}"
                points.append(
                    {"memory": name, "tokens": tokens, "verdict": verdict, "words": words}
                )
        rows.append(
            [
                row["model"],
                row["hardware"],
                row["engine_version"],
                place,
                _tokens(row["longest_context_ok_tokens"]),
                _tokens(row["shortest_context_failed_tokens"]),
                row["ok_runs"],
                row["oom_runs"],
                row["refused_runs"],
            ]
        )
    axis = "KV pool" if explicit else "memory utilization"
    ends = ("longest that worked", "shortest that did not", "ok", "out of memory", "refused")
    columns = ("model", "hardware", "engine", axis, *ends)
    names = list(dict.fromkeys(str(point["memory"]) for point in points))
    return Section(
        "frontier",
        "The edge of memory",
        "Over every run in the warehouse of these models: the edge lies between the triangle and "
        "the cross. Refused and out of memory count as not worked.",
        figures=(
            Figure(
                "frontier",
                "Longest context that worked, shortest that did not",
                f"{len(failed)} of {len(found)} configurations have a failure on record.",
                (
                    Panel(
                        "frontier",
                        "The edge of memory",
                        charts.frontier(points, x=axis, order=names),
                        "Context limits that worked and that did not, by memory.",
                    ),
                ),
                table("frontier", "The edge of memory", columns, rows),
            ),
        ),
    )


def _tokens(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _memory(row: dict[str, Any], *, explicit: bool) -> str:
    if explicit:
        asked = row["kv_cache_memory_bytes"]
        return "by utilization" if asked is None else size(asked)
    return f"{row['gpu_memory_utilization_ratio']:.0%}"


# How much boots differ


def spread(connection: duckdb.DuckDBPyConnection, data: Data) -> Section | None:
    """Return how much boots of one cell differ, over the warehouse, and what sentinels say."""
    keys = list(dict.fromkeys(run.cell_key for run in data.runs))
    boots = records(
        connection,
        "SELECT r.run_uuid, r.cell_key, r.label, r.hardware, r.engine_version, r.round, r.repeat, "
        "m.value, e.compile_cache FROM run r JOIN measurement m ON m.run_uuid = r.run_uuid "
        "AND m.load_point IS NULL AND m.metric = 'kv_cache_size_tokens' "
        "LEFT JOIN environment e ON e.run_uuid = r.run_uuid "
        "WHERE m.value IS NOT NULL AND r.cell_key IN (SELECT unnest($keys)) "
        "ORDER BY r.started_at NULLS LAST, r.run_uuid",
        {"keys": keys},
    )
    cells: dict[tuple[str, str, str | None], list[dict[str, Any]]] = {}
    for boot in boots:
        cells.setdefault((boot["label"], boot["cell_key"], boot["hardware"]), []).append(boot)
    several = {key: found for key, found in cells.items() if len(found) > 1}
    tables = noise(connection, data)
    if not boots:
        return None
    if not several:
        return Section(
            "spread",
            "Do boots agree?",
            "Every cell here was booted once: its spread is not known. Repeats in the sweep or "
            "further nights make it known.",
            tables=tables,
        )
    points, rows = [], []
    names = told_apart(
        [label for label, _, _ in several],
        [str(hardware) for _, _, hardware in several],
        [f"vLLM {found[0]['engine_version']}" for found in several.values()],
        [key[:8] for _, key, _ in several],
    )
    for name, ((label, _, hardware), found) in zip(names, several.items(), strict=True):
        values = [float(boot["value"]) for boot in found]
        low, high = min(values), max(values)
        for boot in found:
            words = (
                f"{label}, round {boot['round']} repeat {boot['repeat']}: "
                f"{boot['value']:,.0f} KV tokens, compile cache "
                f"{boot['compile_cache'] or 'unknown'}"
            )
            share = float(boot["value"]) / high * 100 if high else 100.0
            points.append({"name": name, "percent": share, "words": words})
        share = (high - low) / high if high else 0.0
        rows.append(
            [
                name,
                hardware,
                len(found),
                f"{low:,.0f}",
                f"{high:,.0f}",
                made(share, percent(share), f"({high:,.0f} − {low:,.0f}) / {high:,.0f}"),
            ]
        )
    worst = max(float(str(row[5].value)) for row in rows if isinstance(row[5], Entry))
    order = list(dict.fromkeys(str(point["name"]) for point in points))
    told = f"{len(boots)} boots of {len(several)} cells; the widest spread is {percent(worst)}."
    return Section(
        "spread",
        "Do boots agree?",
        "Size of the KV pool in tokens over every boot of these cells in the warehouse, in percent "
        "of the cell's largest. A first boot of a shape can give less.",
        figures=(
            Figure(
                "spread",
                "Boot to boot",
                told,
                (
                    Panel(
                        "spread",
                        "Boot to boot",
                        charts.spread(points, order=order, title="KV tokens, % of the largest"),
                        told,
                    ),
                ),
                table(
                    "spread",
                    "Boot to boot",
                    ("cell", "hardware", "boots", "smallest", "largest", "spread"),
                    rows,
                ),
            ),
        ),
        tables=tables,
    )


#: Exact start-up figures and what is compared of load: the rest of a sentinel's numbers is in SQL.
_DRIFTING: tuple[str, ...] = (
    "kv_cache_size_tokens",
    "available_kv_cache_bytes",
    "model_loading_bytes",
)
_DRIFTING += ("peak_kv_usage_ratio", "peak_gpu_used_bytes", "output_tokens_per_s", "ttft_p50_ms")


def noise(connection: duckdb.DuckDBPyConnection, data: Data) -> tuple[Table, ...]:
    """Return how far each round's sentinel, an unchanged cell, differed from itself."""
    if not has_view(connection, "noise_floor"):
        return ()
    rounds = {(run.sweep, run.round) for run in data.runs}
    rows = [
        [
            row["label"],
            row["round"],
            row["metric"],
            "start" if row["load_point"] is None else row["load_point"],
            row["runs"],
            worded(row["metric"], row["lowest"]),
            worded(row["metric"], row["highest"]),
            None if row["spread_ratio"] is None else percent(row["spread_ratio"]),
            Entry(f"{row['drift']:+,.6g}", row["drift"]),
        ]
        for row in records(
            connection,
            "SELECT * FROM noise_floor WHERE runs > 1 "
            "AND metric IN (SELECT unnest($metrics::VARCHAR[])) "
            "ORDER BY sweep, round, metric, load_point NULLS FIRST",
            {"metrics": list(_DRIFTING)},
        )
        if (row["sweep"], row["round"]) in rounds
    ]
    if not rows:
        return ()
    columns = ("sentinel", "round", "metric", "load point", "runs", "lowest", "highest")
    note = (
        "The sentinel is one unchanged cell, measured at start, middle and end of a round: what it "
        "differs by is the round's own noise. Drift is its last value minus its first."
    )
    title = "Drift of the sentinel"
    return (table("noise", title, (*columns, "spread", "drift"), rows, note=note),)


def has_view(connection: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Whether the snapshot has a table or view of this name: older ones may not."""
    row = connection.execute(
        "SELECT count(*) FROM information_schema.tables WHERE table_name = $name", {"name": name}
    ).fetchone()
    return bool(row and row[0])
