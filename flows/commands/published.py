"""``compare SWEEP --with published``: own runs and predictions beside what documents print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from flows.output import count, emit_json, print_table, say
from flows.shipped import find_sweep, published, with_published
from tasks.home import Home
from tasks.plan import gpus
from tasks.plan.calibration import GIB
from tasks.plan.plan import Plan, Surroundings, make_plan
from tasks.plan.published import (
    POOL_FREE,
    Arithmetic,
    Figure,
    Gathered,
    Given,
    Published,
    PublishedCell,
    document,
    gather,
    load_point,
)
from tasks.plan.sweep import parse_sweep
from warehouse.compare import Selection
from warehouse.errors import BadInput
from warehouse.published import Measured

_COLUMNS = (
    "cell",
    "prompt × parallel",
    "metric",
    "published",
    "predicted",
    "measured",
    "off",
    "verdict",
)
_SIZES = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


@dataclass(frozen=True, slots=True)
class Own:
    """The user's runs of a sweep: none where nothing was measured yet."""

    selection: Selection | None
    cells: Mapping[str, Measured]


def compare_published(text: str | None, *, json: bool) -> None:
    """Print the published figures of a sweep beside predictions and the runs that ``text`` names.

    Raises :class:`BadInput` where there are no published figures of that sweep.
    """
    sweep, own = _own(Home.find(), text)
    found = compared(sweep, own)
    if json:
        emit_json(found)
    else:
        _show(found)


def _own(home: Home, text: str | None) -> tuple[str, Own]:
    from warehouse.connection import open_snapshot
    from warehouse.published import has_runs, measured, sweeps_of

    nothing = Own(None, {})
    known = text in with_published()
    if not home.warehouse_snapshot.is_file():
        if text is None or not known:
            raise BadInput(
                f"--with published: got {text or 'no sweep'} and nothing is measured yet, wanted "
                f"one of {', '.join(with_published())}"
            )
        return text, nothing
    with ExitStack() as stack:
        connection = stack.enter_context(open_snapshot(home.warehouse_snapshot))
        if text is not None and known and not has_runs(connection, text):
            return text, nothing
        selection, sweep = sweeps_of(connection, text)
        return sweep, Own(selection, measured(connection, selection.runs))


def surroundings_of(figures: Published, home: Home) -> Surroundings:
    """Return the documents' own surroundings, for predictions: their GPU, their engine."""
    from flows.context import surroundings

    gpu = None if figures.gpu is None else gpus.find(figures.gpu)
    return replace(
        surroundings(home, "local"),
        target="published",
        device="cuda",
        gpu=gpu,
        memory_total_bytes=None if gpu is None else gpu.total_bytes,
        engine_version=figures.engine_version,
        engine_lock_sha256=None,
        image_digest=None,
        boots=None,
    )


def planned(name: str, where: Surroundings) -> Plan:
    """Return the plan of a shipped sweep."""
    # The documents' own sweep: pins found since then are of other runs, and move no figure of it.
    _, text = find_sweep(name, with_pins=False)
    return make_plan(parse_sweep(text, where=name), where)


def given(name: str, home: Home) -> tuple[Given, Surroundings]:
    """Return a shipped sweep's published figures with its planned cells, and where these are."""
    figures = published(name)
    if isinstance(figures, Published):
        where = surroundings_of(figures, home)
        return Given(figures, planned(name, where).cells), where
    return _gathered(name, figures, home)


def _gathered(name: str, figures: Gathered, home: Home) -> tuple[Given, Surroundings]:
    sources = []
    for source in figures.of:
        one, where = given(source, home)
        sources.append(one)
    cells = planned(name, where).cells
    return Given(gather(name, cells, sources), cells), where


def compared(name: str, own: Own) -> dict[str, Any]:
    """Return published figures, predictions, measurements and their differences as JSON values."""
    figures, where = given(name, Home.find())
    cells = [
        _cell(cell, figures, where, own.cells.get(cell.cell)) for cell in figures.published.cells
    ]
    labels = {cell.cell for cell in figures.published.cells}
    return {
        "sweep": name,
        "published": {
            "gpu": figures.published.gpu,
            "engine_version": figures.published.engine_version,
            "documents": figures.published.documents,
        },
        "selection": None if own.selection is None else own.selection.document(),
        "cells": cells,
        "without_figures": [
            one.cell.label for one in figures.cells if one.cell.label not in labels
        ],
    }


def _cell(
    cell: PublishedCell, figures: Given, where: Surroundings, measured: Measured | None
) -> dict[str, Any]:
    planned_cell = figures.planned(cell.cell)
    arithmetic = Arithmetic(planned_cell, cell.figures, where)
    unlike = _unlike(planned_cell.cell.setting_key, figures.published, measured)
    rows = []
    for figure in cell.figures:
        index = load_point(figure, planned_cell.cell.setting)
        row = document(figure, arithmetic, index)
        rows.append(row | _beside(figure, index, measured, unlike))
    return {
        "label": cell.cell,
        "setting_key": planned_cell.cell.setting_key,
        "published_outcome": cell.outcome.value if cell.outcome else None,
        "outcomes": [] if measured is None else [run["outcome"] for run in measured.runs],
        "runs": [] if measured is None else [run["run_uuid"] for run in measured.runs],
        "hardware": [] if measured is None else measured.told("hardware"),
        "engine_versions": [] if measured is None else measured.told("engine_version"),
        "unlike": [f"{what}: {how}" for what, how in unlike],
        "figures": rows,
    }


def _unlike(
    setting_key: str, figures: Published, measured: Measured | None
) -> list[tuple[str, str]]:
    """Return what of the runs is not as the documents had it: what, and how."""
    if measured is None:
        return []
    found = []
    if measured.told("setting_key") != [setting_key]:
        found.append(("settings", "the runs are of another version of the sweep"))
    versions = measured.told("engine_version")
    if versions != [figures.engine_version]:
        found.append(("engine", f"{', '.join(versions)}, published {figures.engine_version}"))
    if figures.gpu is not None and not all(_on(figures.gpu, run) for run in measured.runs):
        hardware = ", ".join(measured.told("hardware"))
        found.append(("hardware", f"{hardware}, published {figures.gpu}"))
    return found


def _on(gpu: str, run: Mapping[str, Any]) -> bool:
    name, total = run["gpu_name"], run["gpu_total_bytes"]
    if run["device"] != "cuda" or name is None or total is None:
        return False
    return gpus.find(gpu).is_device(name, total)


def _beside(
    figure: Figure,
    index: int | None,
    measured: Measured | None,
    unlike: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return what was measured of a figure, how far off it is, and whether that says anything."""
    value = None if measured is None else measured.mean(index, figure.metric)
    number = 0 if measured is None else len(measured.numbers.get((index, figure.metric), ()))
    # What model and settings decide alone is the same on every GPU.
    why = [
        f"other {what}: {how}"
        for what, how in unlike
        if not (what == "hardware" and figure.metric in POOL_FREE)
    ]
    if value is None:
        verdict = "not measured"
    elif why:
        verdict = "not comparable"
    else:
        verdict = "as printed" if figure.span.holds(value) else "differs"
    published_value = figure.span.value
    difference = None if value is None else value - published_value
    return {
        "measured": value,
        "measured_runs": number,
        "difference": difference,
        "relative": None if not difference or not published_value else difference / published_value,
        "comparable": None if value is None else not why,
        "why_not": why,
        "verdict": verdict,
    }


def _show(found: Mapping[str, Any]) -> None:
    told = found["published"]
    rows = [
        [
            cell["label"],
            _point(figure["point"]),
            figure["metric"],
            ("about " if figure["about"] else "") + figure["printed"],
            _predicted(figure),
            _number(figure["measured"], figure["unit"]),
            _difference(figure),
            figure["verdict"],
        ]
        for cell in found["cells"]
        for figure in cell["figures"]
    ]
    place = f"vLLM {told['engine_version']}, {told['gpu'] or 'no GPU'}"
    title = f"{found['sweep']}: published figures ({place})"
    print_table(title, _COLUMNS, rows)
    for cell in found["cells"]:
        _say_cell(cell)
    for name, text in told["documents"].items():
        say(f"{name}: {text}")
    if found["selection"] is None:
        say(f"nothing is measured yet; next: memsweep run {found['sweep']} --target PROFILE")


def _say_cell(cell: Mapping[str, Any]) -> None:
    wanted, outcomes = cell["published_outcome"], set(cell["outcomes"])
    if wanted and outcomes - {wanted}:
        say(f"{cell['label']}: published outcome {wanted}, measured {', '.join(sorted(outcomes))}")
    for reason in cell["unlike"]:
        say(f"{cell['label']}: not comparable - {reason}")
    for figure in cell["figures"]:
        if figure["predicted_agrees"] is False:
            say(
                f"{cell['label']}: {figure['metric']}: published {figure['printed']} is not what "
                "is predicted"
            )


def _point(point: Mapping[str, int] | None) -> str | None:
    return None if point is None else f"{point['prompt_tokens']:,} × {point['parallel']}"


def _predicted(figure: Mapping[str, Any]) -> str | None:
    ends = [_number(figure[end], figure["unit"]) for end in ("predicted_low", "predicted_high")]
    low, high = ends
    if low is None or high is None or low == high:
        return low
    return f"{low}–{high}"


def _difference(figure: Mapping[str, Any]) -> str | None:
    if figure["difference"] is None or figure["verdict"] == "as printed":
        return None
    relative = figure["relative"]
    return "0" if relative is None else f"{relative:+.2%}"


def _number(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "bytes":
        size, name = next((s, n) for s, n in _SIZES if abs(value) >= s or s == 1)
        return f"{value / size:,.6g} {name}" if size < GIB else f"{value / size:,.2f} {name}"
    if unit == "ratio":
        return f"{value:.4f}"
    if unit in ("tokens", "blocks", "requests", "count"):
        return count(value)
    return f"{value:.2f}"
