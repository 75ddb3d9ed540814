"""What serving does to memory: against concurrency, over time, and how many users fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flows.report import charts
from flows.report.content import Entry, Figure, Panel, Section, Table, table
from flows.report.data import Course, Data, Point, Run
from flows.report.words import GIB, MIB, joined, made, percent, several, shown, told_apart, worded
from tasks.files import read_json
from tasks.home import Home
from tasks.plan import sizing
from tasks.plan.cell import Cell
from tasks.plan.model import ModelDescription, describe
from tasks.plan.prediction import serving as serving_settings
from tasks.plan.settings import ServingSettings
from warehouse.errors import BadInput
from warehouse.registry import Outcome

if TYPE_CHECKING:
    import duckdb

#: So many cells' charts are open; the others are folded.
OPEN_CELLS = 4


@dataclass(frozen=True, slots=True)
class Quantity:
    """One of the four: what it is called, where it is stored, and how its axis reads."""

    name: str
    metric: str
    axis: str
    course: str
    colour: str
    unit: str
    scale: float = 1.0


USED = Quantity("cache used", "peak_kv_usage_ratio", "~%", "kv_usage_ratio", "s1", "of the cache")
RUNNING = Quantity(
    "running requests", "peak_requests_running", "~r", "requests_running", "s3", "requests"
)
WAITING = Quantity(
    "waiting requests", "peak_requests_waiting", "~r", "requests_waiting", "s2", "requests"
)
DEVICE = Quantity(
    "device memory", "peak_gpu_used_bytes", ",.3~r", "gpu_used_bytes", "s4", "GiB", GIB
)
#: Where there is no device memory, what stands in its place says so in its name.
PROCESS = Quantity(
    "process memory (no GPU)",
    "peak_process_rss_bytes",
    ",.3~r",
    "process_rss_bytes",
    "s4",
    "GiB",
    GIB,
)


def quantities(device: str) -> tuple[Quantity, ...]:
    """Return the four quantities of a run on this device."""
    return (USED, RUNNING, WAITING, DEVICE if device == "cuda" else PROCESS)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value that others published of a load point: drawn beside ours, never joined with it."""

    point: Point
    metric: str
    value: float
    source: str


# Against concurrency


def against_concurrency(data: Data, marks: Sequence[Mark] = ()) -> Section | None:
    """Return four charts a cell: peaks against requests in flight, one line per prompt length."""
    figures = []
    for number, (group, runs) in enumerate(data.groups.items()):
        points = [p for run in runs for p in data.points_by_run.get(run.run_uuid, [])]
        points = [p for p in points if p.state not in (None, "skipped")]
        if points:
            lengths = {p.lengths for p in points}
            own = [
                mark
                for mark in marks
                if mark.point.run.label == group[0] and mark.point.lengths in lengths
            ]
            figures.append(_cell_figure(data, number, runs, points, own))
    if not figures:
        return None
    figures = [
        Figure(f.id, f.title, f.caption, f.panels, f.table, folded=number >= OPEN_CELLS)
        for number, f in enumerate(figures)
    ]
    return Section(
        "load",
        "Cache, requests and memory against concurrency",
        "Peaks within each load point's window, one line per prompt length: the mean over "
        "repeats, with every repeat as a point. Each peak can be at another instant.",
        figures=tuple(figures),
    )


def _cell_figure(
    data: Data, number: int, runs: Sequence[Run], points: Sequence[Point], marks: Sequence[Mark]
) -> Figure:
    run = runs[0]
    key = f"load-{number}"
    names = _series_names(points)
    panels = []
    for place, quantity in enumerate(quantities(run.device)):
        rows = list(_point_rows(data, points, quantity, names))
        theirs = [_mark_row(m, quantity, names) for m in marks if m.metric == quantity.metric]
        if not rows and not theirs:
            continue
        spec = charts.against_concurrency(
            list(_means(rows)),
            rows,
            theirs,
            names=list(dict.fromkeys(names.values())),
            title=quantity.unit,
            axis=quantity.axis,
        )
        words = f"Peak {quantity.name} against requests in flight of {run.label}."
        panels.append(Panel(f"{key}-{place}", f"Peak {quantity.name}", spec, words))
    hardware = run.hardware or run.device
    return Figure(
        key,
        run.label,
        f"{run.model}, vLLM {run.engine_version}, {hardware}, {several(len(runs), 'boot')}"
        + (". Hollow diamonds: published values." if marks else "."),
        tuple(panels),
        _points_table(data, key, points),
    )


def _series_names(points: Iterable[Point]) -> dict[tuple[int, int, int], str]:
    """Return how each prompt length is called; answer and shared prefix too where they vary."""
    lengths = sorted({p.lengths for p in points})
    outputs, prefixes = ({length[place] for length in lengths} for place in (1, 2))
    return {
        (prompt, output, prefix): f"{prompt:,}"
        + (f" + {output:,}" if len(outputs) > 1 else "")
        + " tokens"
        + (f", {prefix:,} shared" if len(prefixes) > 1 else "")
        for prompt, output, prefix in lengths
    }


def _point_rows(
    data: Data,
    points: Iterable[Point],
    quantity: Quantity,
    names: Mapping[tuple[int, int, int], str],
) -> Iterator[dict[str, object]]:
    for point in points:
        value = data.value(point.run, quantity.metric, point.index)
        if value is None:
            continue
        flag = " (invalid)" if point.valid is False else ""
        series = names[point.lengths]
        yield {
            "parallel": point.parallel,
            "point": point.index,
            "value": value / quantity.scale,
            "series": series,
            "valid": point.valid is not False,
            "words": f"{series} × {point.parallel}, repeat {point.run.repeat}: "
            f"{worded(quantity.metric, value)}{flag}",
        }


def _mark_row(
    mark: Mark, quantity: Quantity, names: Mapping[tuple[int, int, int], str]
) -> dict[str, object]:
    point = mark.point
    series = names[point.lengths]
    return {
        "parallel": point.parallel,
        "value": mark.value / quantity.scale,
        "series": series,
        "words": f"published: {series} × {point.parallel}: "
        f"{worded(mark.metric, mark.value)} ({mark.source})",
    }


def _means(rows: Iterable[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the mean over repeats of what is valid; two load points of one run are no repeats."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for row in rows:
        if row["valid"]:
            key = (str(row["series"]), int(str(row["parallel"])), int(str(row["point"])))
            found.setdefault(key, []).append(float(str(row["value"])))
    for (series, parallel, _), values in sorted(found.items()):
        yield {"series": series, "parallel": parallel, "value": fmean(values)}


def _points_table(data: Data, key: str, points: Sequence[Point]) -> Table:
    rows = []
    memory = quantities(points[0].run.device)[3].metric
    for point in points:
        run, index = point.run, point.index
        rows.append(
            [
                point.prompt_tokens,
                point.output_tokens,
                point.parallel,
                run.repeat,
                shown(data.number(run, "requests_succeeded", index)),
                shown(data.number(run, "peak_kv_usage_ratio", index)),
                shown(data.derived(point, "peak_kv_usage_lower_ratio")),
                shown(data.derived(point, "peak_kv_usage_upper_ratio")),
                shown(data.derived(point, "peak_kv_usage_ratio_bound")),
                shown(data.number(run, "peak_requests_running", index)),
                shown(data.number(run, "peak_requests_waiting", index)),
                shown(data.number(run, "preemptions", index)),
                shown(data.number(run, memory, index)),
                validity(point),
            ]
        )
    return table(
        key,
        "Load points",
        (
            "prompt",
            "output",
            "in flight",
            "repeat",
            "succeeded",
            "cache used, sampled",
            "surely reached",
            "never exceeded",
            "bound",
            "running",
            "waiting",
            "preemptions",
            "device memory" if memory == DEVICE.metric else "process memory",
            "valid",
        ),
        rows,
    )


def validity(point: Point) -> Entry:
    """Return whether a load point may be used, and what speaks against it."""
    if point.valid is None:
        return Entry("–", why="no check of it could be made")
    if point.valid:
        return Entry("yes", state="good")
    return Entry("INVALID", state="bad", why=point.broken or "")


# Over time


def over_time(data: Data, courses: Sequence[Course], *, chosen: bool) -> Section | None:
    """Return the four quantities over time for the runs of ``courses``, phases shaded.

    ``chosen`` tells that the page took the run itself.
    """
    figures = tuple(
        _course_figure(data, number, course)
        for number, course in enumerate(courses)
        if course.lines
    )
    if not figures:
        return None
    lead = "What the samplers saw. Long series are thinned: of every stretch the lowest and the "
    lead += "highest sample stay, so that no peak is lost."
    if chosen:
        lead += (
            " Shown is the run whose cache filled most; any other one: memsweep report followed by "
            "its UUID."
        )
    return Section("time", "One run over time", lead, figures=figures)


def _course_figure(data: Data, number: int, course: Course) -> Figure:
    key = f"time-{number}"
    run = course.run
    spans = [
        {"phase": span.phase, "start": span.start_s, "end": span.end_s} for span in course.spans
    ]
    panels = []
    for place, quantity in enumerate(quantities(run.device)):
        line = course.lines.get(quantity.course)
        if line is None:
            continue
        rows = [
            {"t": round(float(t), 3), "value": float(v) / quantity.scale}
            for t, v in zip(line.t_s, line.value, strict=True)
        ]
        spec = charts.over_time(
            rows, spans, title=quantity.unit, axis=quantity.axis, colour=quantity.colour
        )
        words = f"{quantity.name} of {run.name} over {line.t_s[-1]:,.0f} seconds."
        title = quantity.name[0].upper() + quantity.name[1:]
        panels.append(Panel(f"{key}-{place}", title, spec, words))
    rows_ = [_span_row(data, course, number) for number in range(len(course.spans))]
    columns = ("phase", "load point", "from, s", "to, s", "highest cache used", "most running")
    behind = table(f"{key}-phases", "Phases", (*columns, "most waiting"), rows_)
    caption = (
        f"Run {run.run_uuid}, {course.samples:,} samples, began {run.started_at or 'unknown'}."
    )
    return Figure(key, run.name, caption, tuple(panels), behind)


def _span_row(data: Data, course: Course, number: int) -> list[object]:
    span = course.spans[number]
    point = next(
        (p for p in data.points_by_run.get(course.run.run_uuid, []) if p.index == span.load_point),
        None,
    )
    peaks: list[object] = []
    for name, metric in (
        ("kv_usage_ratio", "peak_kv_usage_ratio"),
        ("requests_running", "peak_requests_running"),
        ("requests_waiting", "peak_requests_waiting"),
    ):
        top = span.peaks.get(name)
        if top is not None:
            formula = f"highest sample of {name} of run {course.run.run_uuid} in this phase"
            peaks.append(made(top, worded(metric, top), formula))
        else:
            peaks.append(Entry("–", why="no sample in this phase"))
    return [
        span.phase,
        "–" if point is None else point.name,
        f"{span.start_s:,.1f}",
        f"{span.end_s:,.1f}",
        *peaks,
    ]


def fullest(data: Data) -> Run | None:
    """Return the run whose cache filled most; of equal ones the first."""
    best: tuple[float, Run] | None = None
    for point in data.points:
        value = data.value(point.run, "peak_kv_usage_ratio", point.index)
        if value is not None and (best is None or value > best[0]):
            best = (value, point.run)
    if best is not None:
        return best[1]
    return next((run for run in data.runs if run.outcome == Outcome.OK.value), None)


# The request-state calculator, and users


@dataclass(frozen=True, slots=True)
class Served:
    """A run's model and settings, as the capacity model takes them."""

    run: Run
    description: ModelDescription
    settings: ServingSettings
    blocks: int


def served(home: Home, data: Data) -> list[Served]:
    """Return one entry a cell whose pool was measured and whose model's config is in the bundle."""
    found = []
    for runs in data.groups.values():
        for run in runs:
            blocks = data.value(run, "num_gpu_blocks")
            # One block is the null block: there is none to give out.
            if run.outcome != Outcome.OK.value or blocks is None or blocks < 2:
                continue
            one = _served(home, run, int(blocks))
            if one is not None:
                found.append(one)
                break
    return found


def _served(home: Home, run: Run, blocks: int) -> Served | None:
    folder = home.bundles / run.run_uuid
    cell, prediction = read_json(folder / "cell.json"), read_json(folder / "prediction.json")
    config: Any = (prediction or {}).get("model_config")
    if cell is None or not isinstance(config, dict):
        return None
    parsed = Cell.parse(cell)
    settings = serving_settings(
        parsed.setting.server, version=parsed.pins.engine_version, device=parsed.pins.device
    )
    try:
        return Served(run, describe(config), settings, blocks)
    except BadInput:
        return None


LENGTHS = (640, 2_048, 8_192, 32_768)
ACTIVE = (1, 4, 16, 64)


def calculator(cells: Sequence[Served]) -> Section | None:
    """Return what a request's state takes, for each model of the page: raw and in whole blocks."""
    tables = []
    for one in {cell.run.model: cell for cell in reversed(cells)}.values():
        made_table = _calculator(one)
        if made_table is not None:
            tables.append(made_table)
    if not tables:
        return None
    return Section(
        "requests",
        "What a request's state takes",
        "Arithmetic from the model's config, by the engine's own rules. A token's keys and values "
        "grow with the request, the recurrent state does not; the scheduler gives whole blocks.",
        tables=tuple(tables),
    )


def _calculator(one: Served) -> Table | None:
    rows = []
    user = None
    for tokens in LENGTHS:
        try:
            user = sizing.per_user(one.description, one.settings, sizing.Workload(tokens))
        except BadInput:
            continue
        raw = tokens * user.kv_bytes_per_token + user.state_bytes + user.convolution_bytes
        source = f"config of {one.run.model}, vLLM {one.settings.vllm_version}"
        usable = (one.blocks - 1) * user.block_bytes
        cells = [
            made(
                count * user.reserved_bytes,
                f"{count * user.reserved_bytes / MIB:,.1f} MiB",
                f"{count} requests × {user.blocks} blocks × {user.block_bytes:,} bytes ({source})",
                state="note" if count * user.reserved_bytes > usable else "",
            )
            for count in ACTIVE
        ]
        rows.append(
            [
                f"{tokens:,}",
                made(
                    raw,
                    f"{raw / MIB:,.2f} MiB",
                    f"{tokens:,} tokens × {user.kv_bytes_per_token:,} bytes + "
                    f"{user.state_bytes + user.convolution_bytes:,} bytes of state ({source})",
                ),
                user.blocks,
                *cells,
            ]
        )
    if user is None:
        return None
    state = user.state_bytes + user.convolution_bytes
    note = (
        f"{user.kv_bytes_per_token / 1024:,.2f} KiB a token"
        + (f", {state / MIB:,.3f} MiB of state a request" if state else ", no recurrent state")
        + f", blocks of {user.block_bytes / MIB:,.3f} MiB; the pool of {one.run.label} has "
        f"{one.blocks - 1:,} blocks to give out; "
        "what is marked is more than that, so the rest waits."
    )
    columns = ("stored tokens", "raw, one request", "blocks", *(f"× {count}" for count in ACTIVE))
    title = f"{one.run.model}: stored state in whole blocks by active requests"
    return table(f"state-{one.run.model}", title, columns, rows, note=note)


def p95_tokens(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> int | None:
    """Return the 95th percentile of tokens a request had, prompt and answer, as served."""
    row = connection.execute(
        "SELECT quantile_cont(prompt_tokens + completion_tokens, 0.95) FROM request "
        "WHERE success AND run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)",
        {"runs": list(runs)},
    ).fetchone()
    return None if row is None or row[0] is None else int(-(-row[0] // 1))


def capacity(
    data: Data, cells: Sequence[Served], tokens: int | None, *, given: bool
) -> Section | None:
    """Return how many users fit at a P95 context, for every cell whose pool was measured."""
    if tokens is None or not cells:
        return None
    bars: list[dict[str, Any]] = []
    rows = []
    names = told_apart(
        [one.run.label for one in cells],
        [f"vLLM {one.run.engine_version}" for one in cells],
        [one.run.run_uuid[:8] for one in cells],
    )
    for name, one in zip(names, cells, strict=True):
        try:
            user = sizing.per_user(one.description, one.settings, sizing.Workload(tokens))
        except BadInput:
            continue
        fits = one.settings.max_model_len is None or tokens <= one.settings.max_model_len
        users = sizing.users_in_blocks(user, one.blocks * user.block_bytes) if fits else 0
        formula = f"({one.blocks:,} blocks − 1) // {user.blocks} blocks a user of {tokens:,} tokens"
        bars.append({"name": name, "value": users, "best": False, "text": f"{users:,}"})
        why = "" if fits else f"a request of {tokens:,} tokens is above the context limit"
        rows.append(
            [
                name,
                one.run.model,
                shown(data.number(one.run, "num_gpu_blocks")),
                user.blocks,
                made(users, f"{users:,}", formula, why=why),
                made(
                    user.reserved_bytes / ((one.blocks - 1) * user.block_bytes),
                    percent(user.reserved_bytes / ((one.blocks - 1) * user.block_bytes)),
                    f"{user.blocks} of {one.blocks - 1:,} blocks",
                ),
            ]
        )
    if not rows:
        return None
    most = max(int(bar["value"]) for bar in bars)
    best = [bar["name"] for bar in bars if bar["value"] == most]
    for bar in bars:
        bar["best"] = bar["value"] == most
        bar["words"] = f"{bar['name']}: {bar['value']:,} users of {tokens:,} tokens"
    source = "as given" if given else "as served on this page"
    columns = ("cell", "model", "blocks measured", "blocks a user", "users", "pool a user takes")
    return Section(
        "users",
        "Users at P95 context",
        f"How many users fit at once when each holds {tokens:,} tokens, the 95th percentile "
        f"{source} (--p95 states another). Whole blocks of the measured pool; the null block is "
        "left out.",
        figures=(
            Figure(
                "users",
                "Users at once by cell",
                f"Most fit with {best[0]}: {most:,} users."
                + (f" As many with {joined(best[1:])}." if len(best) > 1 else ""),
                (
                    Panel(
                        "users",
                        "Users at once by cell",
                        charts.bars(
                            bars,
                            order=list(dict.fromkeys(bar["name"] for bar in bars)),
                            title="users at once",
                        ),
                        f"Users at P95 context of {tokens:,} tokens by cell.",
                    ),
                ),
                table("users", "Users at P95 context", columns, rows),
            ),
        ),
    )
