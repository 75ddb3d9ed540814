"""The page of a night, and the index over nights on which a regression is seen at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.report import charts
from flows.report.content import Entry, Figure, Line, Page, Panel, Section, Table, table
from flows.report.evidence import Evidence
from flows.report.page import Built, Request, build, render, write
from flows.report.words import joined, several
from tasks.home import Home
from warehouse.compare import Selection
from warehouse.errors import BadInput
from warehouse.lookup import records
from warehouse.regression import regressions, selection

if TYPE_CHECKING:
    import duckdb

INDEX = "index.html"
#: Nights on a trend, the newest ones.
MOST_NIGHTS = 30
#: A fall of more than this share since the night before is marked.
FALL_RATIO = 0.005


@dataclass(frozen=True, slots=True)
class Night:
    """One measuring of a sweep, by its label, as the warehouse has it."""

    sweep: str
    label: str
    started_at: str | None
    runs: int
    unexpected: int
    alarms: int
    invalid: int

    @property
    def file(self) -> str:
        """Name of the night's page."""
        return f"{_plain(self.sweep)}@{_plain(self.label)}.html"


def night_page(home: Home, round_id: str) -> Path:
    """Make the page of a round and the index over all of them; return the page's file.

    ``round_id`` names the round's folder in the state folder. The page stands beside the index in
    ``reports/``. Raises :class:`BadInput` for a round that is not there or has no run yet.
    """
    from tasks.rounds import rounds_of
    from warehouse.connection import open_snapshot

    found = next((one for one in rounds_of(home) if one.id == round_id), None)
    if found is None:
        raise BadInput(f"round {round_id!r}: there is none in {home.rounds}")
    with open_snapshot(home.warehouse_snapshot) as connection:
        known = {night.label for night in nights(connection, found.sweep_name)}
        label = found.id if found.id in known else found.label
        built, night = of_round(home, connection, found.sweep_name, label)
        path = home.reports / night.file
        write(path, built.html)
        write_index(home, connection)
    return path


def of_round(
    home: Home,
    connection: duckdb.DuckDBPyConnection,
    sweep: str,
    label: str,
    *,
    p95_tokens: int | None = None,
) -> tuple[Built, Night]:
    """Return the page of one round, with what changed since the round before it."""
    rounds = nights(connection, sweep)
    at = next((number for number, one in enumerate(rounds) if one.label == label), None)
    if at is None:
        raise BadInput(f"sweep {sweep}: round {label!r} has no run in the warehouse yet")
    chosen = selection(connection, sweep, label)
    request = Request(f"{sweep}, {label}", (chosen,), p95_tokens=p95_tokens)
    if at > 0:
        before = selection(connection, sweep, rounds[at - 1].label)
        request = replace(
            request,
            differences=_differences(connection, before, chosen),
            worse=tuple(regressions(connection, before, chosen)),
        )
    return build(home, connection, request), rounds[at]


def _differences(
    connection: duckdb.DuckDBPyConnection, before: Selection, after: Selection
) -> Mapping[str, Any] | None:
    from warehouse.difference import compare

    return compare(connection, before, after, unlike=True)


def of_date(
    home: Home,
    connection: duckdb.DuckDBPyConnection,
    date: str,
    *,
    p95_tokens: int | None = None,
) -> Built:
    """Return the page of a night: of one round with what changed, of several without.

    Raises :class:`BadInput` for a date without a round.
    """
    rounds = on_date(connection, date)
    if len(rounds) == 1:
        built, _ = of_round(home, connection, *rounds[0], p95_tokens=p95_tokens)
        return built
    chosen = tuple(selection(connection, sweep, label) for sweep, label in rounds)
    return build(home, connection, Request(f"Night of {date}", chosen, p95_tokens=p95_tokens))


def on_date(connection: duckdb.DuckDBPyConnection, date: str) -> list[tuple[str, str]]:
    """Return ``(sweep, label)`` of every round of a night: labelled so, or begun on it.

    Raises :class:`BadInput` when there is none, naming the newest.
    """
    rows = records(
        connection,
        "SELECT sweep, round AS label, min(started_at) AS started_at FROM run "
        "GROUP BY sweep, round ORDER BY started_at DESC NULLS LAST",
    )
    found = [row for row in rows if _date(row) == date]
    if not found:
        newest = joined(dict.fromkeys(_date(row) for row in rows[:3])) or "no run at all"
        raise BadInput(f"--night {date!r}: no round of that date; the newest: {newest}")
    return [(str(row["sweep"]), str(row["label"])) for row in reversed(found)]


def _date(row: Mapping[str, Any]) -> str:
    """Return the date that a round's label names, else the one on which it began."""
    named = re.search(r"\d{4}-\d{2}-\d{2}", str(row["label"]))
    return named[0] if named else str(row["started_at"])[:10]


def nights(connection: duckdb.DuckDBPyConnection, sweep: str | None = None) -> list[Night]:
    """Return the rounds of one sweep or of all, oldest first.

    Of every repeat the last attempt counts, as on the round's own page.
    """
    return [
        Night(**row)
        for row in records(
            connection,
            """
            SELECT r.sweep, r.round AS label, min(r.started_at) AS started_at,
                count(DISTINCT r.run_uuid) AS runs,
                count(DISTINCT r.run_uuid) FILTER (r.outcome <> coalesce(r.expect, 'ok'))
                    AS unexpected,
                coalesce(sum(a.alarms), 0)::BIGINT AS alarms,
                coalesce(sum(v.invalid), 0)::BIGINT AS invalid
            FROM (FROM run QUALIFY row_number() OVER (
                PARTITION BY sweep, round, cell_key, repeat ORDER BY attempt DESC) = 1) r
            LEFT JOIN (SELECT run_uuid, count(*) AS alarms FROM residual WHERE alarm
                GROUP BY run_uuid) a USING (run_uuid)
            LEFT JOIN (SELECT run_uuid, count(*) FILTER (NOT valid) AS invalid
                FROM load_point_validity GROUP BY run_uuid) v USING (run_uuid)
            WHERE $sweep::VARCHAR IS NULL OR r.sweep = $sweep
            GROUP BY r.sweep, r.round ORDER BY started_at NULLS FIRST, r.sweep, r.round
            """,
            {"sweep": sweep},
        )
    ]


def write_index(home: Home, connection: duckdb.DuckDBPyConnection) -> Path:
    """Write the index over every round in the warehouse; return its file."""
    path = home.reports / INDEX
    page = index(home, connection)
    write(path, render(page, Evidence(page.tables())))
    return path


def index(home: Home, connection: duckdb.DuckDBPyConnection) -> Page:
    """Return the index: per sweep its nights, what got worse, and a trend per cell."""
    sections, banner = [], []
    for sweep in dict.fromkeys(night.sweep for night in nights(connection)):
        rounds = nights(connection, sweep)[-MOST_NIGHTS:]
        worse = _worse(connection, rounds)
        latest = worse.get(rounds[-1].label, [])
        banner += [
            Line(f"{sweep}, {rounds[-1].label}: worse: {one['message']}", "bad", f"#{_key(sweep)}")
            for one in latest
        ]
        sections.append(_sweep_section(home, connection, sweep, rounds, worse))
    if sections and not banner:
        banner.append(Line("nothing got worse in the newest round of any sweep", "good"))
    if not sections:
        banner.append(Line("no run is in the warehouse yet", "warn"))
    return Page(
        title="Nights",
        subtitle=several(len(sections), "sweep"),
        banner=tuple(banner),
        pins=table("pins", "Pins", ("pin", "value"), []),
        sections=tuple(sections),
        footer="Made by memsweep from its warehouse. The page needs no network and sends nothing.",
    )


def _worse(
    connection: duckdb.DuckDBPyConnection, rounds: Sequence[Night]
) -> dict[str, list[dict[str, Any]]]:
    """Return by night what got worse since the one before."""
    chosen = [selection(connection, night.sweep, night.label) for night in rounds]
    return {
        night.label: regressions(connection, before, after)
        for night, before, after in zip(rounds[1:], chosen, chosen[1:], strict=False)
    }


def _sweep_section(
    home: Home,
    connection: duckdb.DuckDBPyConnection,
    sweep: str,
    rounds: Sequence[Night],
    worse: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Section:
    points = list(_trend(connection, sweep, rounds))
    labels = [night.label for night in rounds]
    links = tuple(
        Line(f"{night.label}: the whole page", "dim", night.file)
        for night in reversed(rounds)
        if (home.reports / night.file).is_file()
    )
    panel = Panel(
        f"trend-{_key(sweep)}",
        f"KV tokens of {sweep} by night",
        charts.trend(points, nights=labels, title="KV tokens, % of the first night"),
        f"KV tokens of every cell of {sweep} by night, in percent of its first night.",
    )
    figure = Figure(
        f"trend-{_key(sweep)}",
        "Size of the KV pool, cell by cell",
        "One line a cell, in percent of its first night here; a fall since the night before is a "
        "red triangle.",
        (panel,) if points else (),
        _trend_table(sweep, points),
    )
    return Section(
        _key(sweep),
        sweep,
        f"{several(len(rounds), 'round')}, the newest first.",
        figures=(figure,),
        tables=(_nights_table(sweep, rounds, worse),),
        links=links,
    )


def _trend(
    connection: duckdb.DuckDBPyConnection, sweep: str, rounds: Sequence[Night]
) -> list[dict[str, Any]]:
    rows = records(
        connection,
        "SELECT r.setting_key, min(r.label) AS label, r.round, avg(m.value) AS tokens "
        "FROM run r JOIN measurement m ON m.run_uuid = r.run_uuid AND m.load_point IS NULL "
        "AND m.metric = 'kv_cache_size_tokens' WHERE m.value IS NOT NULL AND r.sweep = $sweep "
        "GROUP BY r.setting_key, r.round",
        {"sweep": sweep},
    )
    order = {night.label: number for number, night in enumerate(rounds)}
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["round"] in order:
            cells.setdefault(row["setting_key"], []).append(row)
    points = []
    for found in cells.values():
        found.sort(key=lambda row: order[row["round"]])
        before = None
        for row in found:
            fell = before is not None and row["tokens"] < before * (1 - FALL_RATIO)
            words = f"{row['label']}, {row['round']}: {row['tokens']:,.0f} KV tokens"
            points.append(
                {
                    "night": row["round"],
                    "cell": row["label"],
                    "tokens": row["tokens"],
                    "percent": row["tokens"] / found[0]["tokens"] * 100,
                    "fell": fell,
                    "words": words + (", fell" if fell else ""),
                }
            )
            before = row["tokens"]
    return points


def _trend_table(sweep: str, points: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            point["cell"],
            point["night"],
            Entry(f"{point['tokens']:,.0f}", point["tokens"], state="bad" if point["fell"] else ""),
            f"{point['percent']:.2f} %",
        ]
        for point in points
    ]
    columns = ("cell", "night", "KV tokens", "of the first night")
    return table(f"trend-{_key(sweep)}", f"KV tokens of {sweep} by night", columns, rows)


def _nights_table(
    sweep: str, rounds: Sequence[Night], worse: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Table:
    rows = []
    for night in reversed(rounds):
        told = [str(one["message"]) for one in worse.get(night.label, [])]
        compared = night.label in worse
        text = f"{len(told)} worse" if told else "nothing worse" if compared else "first round"
        rows.append(
            [
                night.label,
                night.started_at,
                night.runs,
                Entry(str(night.unexpected), night.unexpected, state=_bad(night.unexpected)),
                Entry(str(night.alarms), night.alarms, state=_bad(night.alarms)),
                Entry(str(night.invalid), night.invalid, state="note" if night.invalid else ""),
                Entry(text, state="bad" if told else "good" if compared else "", why=joined(told)),
            ]
        )
    columns = ("night", "began", "runs", "not as expected", "alarms", "invalid load points")
    title = f"Nights of {sweep}"
    return table(f"nights-{_key(sweep)}", title, (*columns, "since the night before"), rows)


def _bad(count: int) -> str:
    return "bad" if count else ""


def _key(sweep: str) -> str:
    return f"sweep-{_plain(sweep)}"


def _plain(name: str) -> str:
    """Return a name as part of a file's name: two different ones stay different."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else f"_{ord(c):x}" for c in name
    )
