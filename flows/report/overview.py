"""What a page says first: how every cell came out, on a map and in a table, and what to doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.report import charts
from flows.report.content import Entry, Figure, Line, Panel, Section, Table, table
from flows.report.data import PINS, Data, Run
from flows.report.words import joined, one_line, several, shown, size
from warehouse.registry import Outcome

#: What makes numbers of two runs incomparable when it differs.
INCOMPARABLE = (
    "engine_version",
    "hardware",
    "image_digest",
    "engine_lock_sha256",
    "model_revision",
    "harness",
    "bench_version",
    "driver_version",
    "cuda_version",
    "host",
    "memory_total_bytes",
)


@dataclass(frozen=True, slots=True)
class Missing:
    """A planned repeat of a cell that has no run yet."""

    label: str
    repeat: int
    model: str
    server: Mapping[str, Any]


# The table of cells


def cells(data: Data, missing: Sequence[Missing]) -> Section:
    """Return the cells as a table: outcome, prediction beside measurement, alarms, validity."""
    alarms: dict[str, int] = {}
    for residual in data.residuals:
        alarms[residual.run_uuid] = alarms.get(residual.run_uuid, 0) + residual.alarm
    rows = [_cell_row(data, run, alarms.get(run.run_uuid, 0)) for run in data.runs]
    rows += [
        [one.label, one.repeat, Entry("not measured yet", state="note"), *["–"] * 7]
        for one in missing
    ]
    return Section(
        "cells",
        "Cells",
        several(len(data.runs), "run")
        + (f", {several(len(missing), 'planned one')} not measured yet" if missing else "")
        + ". Predicted figures were made and hashed before the run was created.",
        tables=(
            table(
                "cells",
                "Every run: predicted and measured at start",
                (
                    "cell",
                    "repeat",
                    "outcome",
                    "KV tokens predicted",
                    "measured",
                    "blocks predicted",
                    "measured",
                    "concurrency",
                    "alarms",
                    "valid load points",
                ),
                rows,
            ),
        ),
    )


def _cell_row(data: Data, run: Run, alarms: int) -> list[object]:
    points = data.points_by_run.get(run.run_uuid, [])
    valid = sum(point.valid is True for point in points)
    invalid = sorted({point.broken or "" for point in points if point.valid is False})
    return [
        run.label,
        run.repeat,
        outcome(run),
        shown(data.number(run, "kv_cache_size_tokens", evidence="predicted")),
        shown(data.number(run, "kv_cache_size_tokens")),
        shown(data.number(run, "num_gpu_blocks", evidence="predicted")),
        shown(data.number(run, "num_gpu_blocks")),
        shown(data.number(run, "max_concurrency")),
        Entry(f"ALARM: {alarms}", alarms, state="bad") if alarms else Entry("none", 0),
        Entry(
            f"{valid} of {len(points)}",
            valid,
            state="bad" if invalid else "",
            why="; ".join(invalid),
        )
        if points
        else Entry("–", why="no load point was reached"),
    ]


def outcome(run: Run) -> Entry:
    """Return how a run ended, with the line that says why where it failed."""
    why = ""
    if run.outcome != Outcome.OK.value:
        where = f"in phase {run.phase}: " if run.phase else ""
        told = run.failure[2] if run.failure else run.message
        why = where + one_line(told or "no word of why")
    text = run.outcome
    if run.expect and run.outcome == run.expect:
        text += " (as expected)"
    elif not run.as_expected:
        text += f" (expected {run.expect or 'ok'})"
    return Entry(text, state=_mark(run), why=why)


def _mark(run: Run) -> str:
    """Return how an outcome is marked; one that was expected but not measured is only a note."""
    if not run.as_expected:
        return "bad"
    return "note" if run.outcome == Outcome.INFEASIBLE.value else "good"


# The map

_STATE = {
    Outcome.OK.value: "ok",
    Outcome.REFUSED.value: "refused",
    Outcome.OOM.value: "out of memory",
    Outcome.INFEASIBLE.value: "infeasible",
}
#: From the worst to the best: a square that holds several runs shows the first that applies.
_WORST = (
    "out of memory",
    "failed",
    "refused",
    "infeasible",
    "ok, some invalid",
    "ok",
    "not measured yet",
    "derived",
)
CONTEXT = "max_model_len"


def grid(data: Data, missing: Sequence[Missing]) -> Section | None:
    """Return the map of the grid; ``None`` where there is nothing to place."""
    if not data.runs and not missing:
        return None
    axis = _Axes(data, missing)
    squares: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for run in data.runs:
        points = data.points_by_run.get(run.run_uuid, [])
        state = _STATE.get(run.outcome, "failed")
        if state == "ok" and any(point.valid is False for point in points):
            state = "ok, some invalid"
        tokens = data.value(run, "kv_cache_size_tokens")
        held = "" if tokens is None else f", {tokens:,.0f} KV tokens"
        place = axis.place(run.model, run.server)
        squares.setdefault(place, []).append((state, f"{run.name}: {run.outcome}{held}"))
    for one in missing:
        place = axis.place(one.model, one.server)
        squares.setdefault(place, []).append(("not measured yet", f"{one.label}: not measured yet"))
    for place, words in axis.derived(data):
        squares.setdefault(place, [("derived", words)])
    rows = []
    for (x, y), entries in squares.items():
        state = min((entry[0] for entry in entries), key=_WORST.index)
        words = joined(dict.fromkeys(entry[1] for entry in entries))
        sign = charts.STATES[state][1]
        rows.append({"x": x, "y": y, "state": state, "sign": sign, "words": f"{y} at {x}: {words}"})
    xs, ys = axis.order(squares)
    spec = charts.grid_map(rows, xs=xs, ys=ys, x=axis.title, y="")
    counted = ", ".join(
        f"{sum(r['state'] == s for r in rows)} {s}" for s in charts.STATES if _any(rows, s)
    )
    behind = table(
        "map",
        "The map as a table",
        (axis.title, "configuration", "state", "what"),
        [
            [r["x"], r["y"], r["state"], r["words"].partition(": ")[2]]
            for r in sorted(rows, key=lambda r: (ys.index(r["y"]), xs.index(r["x"])))
        ],
    )
    return Section(
        "map",
        "Map of the grid",
        "What fits, what the engine refused, what failed, what was ruled out, and what "
        "follows from a measured pool without another start.",
        figures=(
            Figure(
                "map",
                "How every cell came out",
                f"{counted}. ✓ served, ✓! served with load points to doubt, R refused by the "
                "engine's own check, OOM out of memory, ✗ failed otherwise, – not started: "
                "infeasible by the prediction or by what another run met, = derived from the "
                "measured pool, … not measured yet.",
                (Panel("map", "Map of the grid", spec, f"Map of the grid: {counted}."),),
                behind,
            ),
        ),
    )


def _any(rows: Iterable[Mapping[str, object]], state: str) -> bool:
    return any(row["state"] == state for row in rows)


class _Axes:
    """Which setting runs along the map, and how the others are told beside it."""

    def __init__(self, data: Data, missing: Sequence[Missing]) -> None:
        everything = [(run.model, run.server) for run in data.runs]
        everything += [(one.model, one.server) for one in missing]
        values: dict[str, set[str]] = {}
        for model, server in everything:
            for name, value in ({"model": model} | dict(server)).items():
                values.setdefault(name, set()).add(repr(value))
        self._varied = [name for name, found in values.items() if len(found) > 1 and name != "seed"]
        others = [name for name in self._varied if name != CONTEXT]
        self._x = CONTEXT if CONTEXT in self._varied or not others else others[0]
        self._ys = [name for name in others if name != self._x]
        self.title = _WORDS.get(self._x, self._x)

    def place(self, model: str, server: Mapping[str, Any]) -> tuple[str, str]:
        """Return the square of a configuration."""
        settings = {"model": model} | dict(server)
        names = self._ys or ["model"]
        beside = " · ".join(_told(name, settings.get(name)) for name in names)
        return _plain(self._x, settings.get(self._x)), beside

    def derived(self, data: Data) -> Iterable[tuple[tuple[str, str], str]]:
        """Yield squares that follow from a measured pool."""
        if self._x != CONTEXT:
            return
        runs = {run.run_uuid: run for run in data.runs}
        for cell in data.derived_cells:
            run = runs[cell.run_uuid]
            server = dict(run.server) | {CONTEXT: cell.max_model_len_tokens}
            words = (
                f"derived from {run.name}: {cell.kv_cache_size_tokens:,.0f} KV tokens, "
                f"{cell.max_concurrency:.2f}x"
            )
            yield self.place(run.model, server), words

    def order(self, squares: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
        """Return the labels along both axes, numbers by size."""
        places = list(squares)
        xs = sorted({x for x, _ in places}, key=_by_size)
        return xs, sorted({y for _, y in places}, key=_by_size)


_WORDS = {
    CONTEXT: "context limit, tokens",
    "gpu_memory_utilization": "memory utilization",
    "kv_cache_memory_bytes": "KV pool",
    "max_num_seqs": "sequences a step",
    "max_num_batched_tokens": "tokens a step",
}


def _plain(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return size(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _told(name: str, value: object) -> str:
    if name == "model":
        return str(value)
    if value is None:
        return f"{_WORDS.get(name, name)} by vLLM"
    return f"{_WORDS.get(name, name)} {_plain(name, value)}"


def _by_size(text: str) -> tuple[float, str]:
    """Return a key that sorts labels by the number they begin with, others by their letters."""
    number = text.replace(",", "").partition(" ")[0]
    try:
        return float(number), text
    except ValueError:
        return float("inf"), text


# Pins, and what is not comparable


def pins(data: Data) -> Table:
    """Return every pin with the values it has in these runs; more than one is marked."""
    names = ("model", "engine_version", "hardware", "device", *PINS)
    rows: list[list[object]] = []
    for name in (*names, "memsweep_version", "git_commit", "git_dirty", "started_by"):
        values = _pin_values(data, name)
        if values == ["–"] or not values:
            continue
        differs = name in differing(data)
        state, why = ("note", "differs: see what is not comparable") if differs else ("", "")
        rows.append([name, Entry(joined(values, most=4), state=state, why=why)])
    return table("pins", "Pins", ("pin", "value"), rows)


def _pin_values(data: Data, name: str) -> list[str]:
    values = []
    for run in data.runs:
        value = run.pins[name] if name in run.pins else getattr(run, name)
        if value is not None and name.endswith("_bytes"):
            value = size(float(value))
        values.append("–" if value is None else str(value))
    found = sorted(set(values))
    # A run that was never started has no machine: that is no difference.
    return [value for value in found if value != "–"] or found


def differing(data: Data) -> list[str]:
    """Return the pins in which runs differ so that their numbers do not compare.

    Two models have two revisions: only two of one model are a difference.
    """
    found = [name for name in INCOMPARABLE if len(_pin_values(data, name)) > 1]
    revisions = {(run.model, str(run.pins["model_revision"])) for run in data.runs}
    if len(revisions) == len({model for model, _ in revisions}):
        found = [name for name in found if name != "model_revision"]
    return found


def doubts(data: Data) -> Section:
    """Return every broken check, and in what the runs differ so that they do not compare."""
    named = {run.run_uuid: run for run in data.runs}
    points = {(p.run.run_uuid, p.index): p for p in data.points}
    rows = []
    for check in data.checks:
        point = points.get((check.run_uuid, check.load_point or 0))
        rows.append(
            [
                named[check.run_uuid].name,
                "the run" if check.load_point is None or point is None else point.name,
                check.name,
                Entry(_KINDS.get(check.kind, check.kind), state=_KIND_STATE.get(check.kind, "")),
                one_line(check.detail),
            ]
        )
    notes = [
        f"Not comparable across {name}: {joined(_pin_values(data, name))}. No line or mean joins "
        "them."
        for name in differing(data)
    ]
    if any(run.device == "cpu" for run in data.runs):
        notes.append(
            "Runs on the CPU: memory figures of the KV cache are exact; times and rates are those "
            "of a CPU build with a tiny model and say nothing about a GPU."
        )
    return Section(
        "doubts",
        "What to doubt",
        "Checks that do not hold. An invalid load point is a hollow cross in the charts and is no "
        "part of any line, mean or comparison."
        if rows
        else "Every check that could be made holds.",
        tables=(
            table(
                "checks",
                "Broken checks and notes",
                ("cell", "where", "check", "weight", "found"),
                rows,
            ),
        )
        if rows
        else (),
        notes=tuple(notes),
    )


_KINDS = {"fails": "fails the run", "invalidates": "invalidates", "notes": "only noted"}
_KIND_STATE = {"fails": "bad", "invalidates": "bad", "notes": "note"}


def banner(data: Data, missing: Sequence[Missing], broken_links: int) -> tuple[Line, ...]:
    """Return what has to be seen at once, the worst first."""
    lines = []
    unexpected = [run for run in data.runs if not run.as_expected]
    if unexpected:
        told = joined(f"{run.name} {run.outcome}" for run in unexpected)
        text = f"{several(len(unexpected), 'run')} did not end as expected: {told}"
        lines.append(Line(text, "bad", "#cells"))
    alarms = [residual for residual in data.residuals if residual.alarm]
    if alarms:
        metrics = joined(dict.fromkeys(residual.metric for residual in alarms))
        text = f"{several(len(alarms), 'alarm')}, predictions missed or bounds exceeded: {metrics}"
        lines.append(Line(text, "bad", "#residuals"))
    if broken_links:
        text = f"{several(broken_links, 'broken link')} in the chain of custody"
        lines.append(Line(text, "bad", "#evidence"))
    invalid = sum(point.valid is False for point in data.points)
    if invalid:
        lines.append(
            Line(f"{invalid} of {len(data.points)} load points are invalid", "warn", "#doubts")
        )
    if missing:
        lines.append(
            Line(f"{several(len(missing), 'planned run')} not measured yet: this is a part", "warn")
        )
    apart = differing(data)
    if apart:
        text = f"runs differ in {joined(apart)}: not comparable across these"
        lines.append(Line(text, "warn", "#doubts"))
    if not data.runs:
        lines.append(Line("no run is here yet: there is nothing to show", "warn"))
    elif not lines:
        lines.append(Line("every run ended as expected and every check holds", "good"))
    return tuple(lines)


def counted(data: Data) -> str:
    """Return how many runs ended how, in one line."""
    outcomes: dict[str, int] = {}
    for run in data.runs:
        outcomes[run.outcome] = outcomes.get(run.outcome, 0) + 1
    return ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items())) or "no runs"
