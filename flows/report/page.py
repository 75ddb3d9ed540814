"""One page: sections from data, drawings, evidence, one HTML file that needs nothing else.

The file opens in any browser without a network, today and in years: charts are static SVG, styles
and the small script are inside, and its own policy forbids every request and every foreign script.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.report import charts, memory, overview, proof, serving
from flows.report.content import Entry, Page, Panel, Section, Table
from flows.report.data import Data, course, gather
from flows.report.evidence import Evidence
from flows.report.overview import Missing
from flows.report.serving import Mark
from tasks.files import write_text
from tasks.home import Home
from warehouse.compare import Selection
from warehouse.errors import BadInput, CannotFindOut, MemsweepError

if TYPE_CHECKING:
    import duckdb

#: Time series of so many runs are drawn when runs are named one by one.
MOST_COURSES = 8


@dataclass(frozen=True, slots=True)
class Request:
    """What a page is to be about."""

    title: str
    selections: tuple[Selection, ...]
    #: Tokens of a user's context; ``None``: the 95th percentile of what was served.
    p95_tokens: int | None = None
    #: Differences to another set, as :func:`warehouse.difference.compare` returns them.
    differences: Mapping[str, Any] | None = None
    #: What got worse, as :func:`warehouse.regression.regressions` returns it.
    worse: tuple[Mapping[str, Any], ...] = ()

    @property
    def runs(self) -> list[str]:
        """The runs of all selections, each once."""
        return list(dict.fromkeys(run for one in self.selections for run in one.runs))


@dataclass(frozen=True, slots=True)
class Built:
    """A finished page: its text, what it shows, and what a caller may want to know of it."""

    html: str
    page: Page
    data: Data
    missing: int
    broken_links: int

    def summary(self) -> dict[str, Any]:
        """Return what the page says first, as JSON values."""
        outcomes: dict[str, int] = {}
        for run in self.data.runs:
            outcomes[run.outcome] = outcomes.get(run.outcome, 0) + 1
        figures = list(self.page.figures())
        return {
            "title": self.page.title,
            "runs": [run.run_uuid for run in self.data.runs],
            "outcomes": outcomes,
            "not_measured": self.missing,
            "load_points": len(self.data.points),
            "invalid_load_points": sum(point.valid is False for point in self.data.points),
            "alarms": sum(residual.alarm for residual in self.data.residuals),
            "broken_links": self.broken_links,
            "banner": [{"text": line.text, "state": line.state} for line in self.page.banner],
            "sections": [section.id for section in self.page.sections],
            "charts": sum(len(figure.panels) for figure in figures),
            "tables": sum(1 for _ in self.page.tables()),
            "numbers": sum(len(chain.proofs) for chain in self.page.chains),
            "bytes": len(self.html.encode()),
        }


def build(home: Home, connection: duckdb.DuckDBPyConnection, request: Request) -> Built:
    """Return the page of some runs; ``connection`` reads the published snapshot.

    Raises :class:`CannotFindOut` where the charting library is not installed.
    """
    data = gather(connection, request.title, request.runs)
    missing = [one for chosen in request.selections for one in _missing(home, chosen, data)]
    sections = _sections(home, connection, request, data, missing)
    page = Page(
        title=request.title,
        subtitle=_subtitle(data),
        banner=(),
        pins=overview.pins(data),
        sections=tuple(sections),
        footer=f"Made by memsweep {_version()} at {_now()} from its warehouse and sealed bundles. "
        "The page needs no network and sends nothing.",
    )
    evidence = Evidence(page.tables())
    chains = evidence.chains(connection, home.bundles, data)
    broken = sum(len(chain.broken) for chain in chains)
    banner = (*proof.worse_lines(request.worse), *overview.banner(data, missing, broken))
    page = replace(page, chains=chains, computed=evidence.computed, banner=banner)
    return Built(render(page, evidence), page, data, len(missing), broken)


def _sections(
    home: Home,
    connection: duckdb.DuckDBPyConnection,
    request: Request,
    data: Data,
    missing: Sequence[Missing],
) -> list[Section]:
    cells = serving.served(home, data)
    beside = _published(connection, request)
    tokens = request.p95_tokens or serving.p95_tokens(connection, request.runs)
    one_by_one = [run for one in request.selections if one.kind == "run" for run in one.runs]
    named = {run.run_uuid: run for run in data.runs}
    fullest = serving.fullest(data)
    drawn = [named[run] for run in one_by_one if run in named][:MOST_COURSES]
    chosen = not drawn and fullest is not None
    if chosen and fullest is not None:
        drawn = [fullest]
    found = (
        None
        if request.differences is None
        else proof.changes(request.differences, worse=request.worse),
        overview.cells(data, missing),
        overview.grid(data, missing),
        serving.against_concurrency(data, _marks(beside, data)),
        memory.allocation(data, _used_marks(beside)),
        serving.over_time(data, [course(connection, run) for run in drawn], chosen=chosen),
        serving.calculator(cells),
        serving.capacity(data, cells, tokens, given=request.p95_tokens is not None),
        proof.residuals(data),
        proof.true_peaks(data),
        memory.frontier(connection, data),
        memory.spread(connection, data),
        *(proof.beside_published(one) for one in beside),
        overview.doubts(data) if data.runs else None,
    )
    return [section for section in found if section is not None]


def _subtitle(data: Data) -> str:
    times = sorted(run.started_at for run in data.runs if run.started_at)
    span = "" if not times else f"begun {times[0]}"
    if len(times) > 1:
        span += f" to {times[-1]}"
    names = ", ".join(dict.fromkeys(f"{run.sweep}, round {run.round}" for run in data.runs))
    return "; ".join(part for part in (names, overview.counted(data), span) if part)


def _missing(home: Home, chosen: Selection, data: Data) -> list[Missing]:
    """Return what a round's plan holds and nothing was measured of yet.

    Only of rounds in this state folder; of one that cannot be planned any more, nothing is said.
    """
    from flows.context import surroundings
    from tasks.plan.plan import make_plan
    from tasks.rounds import rounds_of

    if chosen.kind != "round":
        return []
    own = [run for run in data.runs if run.run_uuid in set(chosen.runs)]
    known = {(run.sweep, run.sweep_sha256, run.round) for run in own}
    done = {(run.label, run.repeat) for run in own}
    found: list[Missing] = []
    for round_ in rounds_of(home):
        names = {(round_.sweep_name, round_.sweep_sha256, n) for n in (round_.id, round_.label)}
        if not names & known:
            continue
        try:
            plan = make_plan(
                round_.sweep(), surroundings(home, round_.target), night=round_.is_night
            )
        except (MemsweepError, OSError):
            continue
        for run in (*plan.runs(), *plan.skipped()):
            if (run.cell.label, run.repeat) not in done:
                setting = run.cell.setting
                server = setting.server.model_dump()
                found.append(Missing(run.cell.label, run.repeat, setting.model.name, server))
    return found


def _published(connection: duckdb.DuckDBPyConnection, request: Request) -> list[dict[str, Any]]:
    """Return what documents print of the shipped sweeps on the page, beside the runs.

    A sweep whose figures cannot be read costs only their section.
    """
    from flows.commands.published import Own, compared
    from flows.shipped import with_published
    from warehouse.published import measured

    found = []
    for chosen in request.selections:
        sweep = chosen.title.partition(",")[0]
        if chosen.kind == "round" and sweep in with_published():
            own = Own(chosen, measured(connection, chosen.runs))
            with suppress(BadInput):
                found.append(compared(sweep, own))
    return found


def _marks(beside: Sequence[Mapping[str, Any]], data: Data) -> list[Mark]:
    """Return the published values of load points, to be drawn beside ours."""
    points = {(point.run.label, point.index): point for point in data.points}
    found = []
    for one in beside:
        for cell in one["cells"]:
            for figure in cell["figures"]:
                point = points.get((cell["label"], figure["load_point"]))
                if point is not None:
                    mark = Mark(point, figure["metric"], figure["published"], figure["document"])
                    found.append(mark)
    return found


def _used_marks(beside: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return by cell the device memory in use that documents print of a ready server."""
    return {
        cell["label"]: (figure["published"], figure["printed"])
        for one in beside
        for cell in one["cells"]
        for figure in cell["figures"]
        if figure["metric"] == "gpu_used_after_start_bytes"
    }


def _version() -> str:
    from importlib.metadata import version

    return version("memsweep")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# HTML


def render(page: Page, evidence: Evidence) -> str:
    """Return a page as HTML; every text in it is escaped, every drawing is our own library's."""
    from markupsafe import Markup

    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    def drawing(panel: Panel) -> Markup:
        svg = charts.draw(panel.spec, prefix=f"{file_name(panel.id)}-")
        # vl-convert escapes what it draws: an SVG of ours holds no markup of a user.
        return Markup(charts.themed(svg))

    html: str = _template().render(
        page=page,
        link=evidence.link,
        drawing=drawing,
        style=Markup(_variables() + _resource("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
    return html


@cache
def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise CannotFindOut(f"jinja2 is not installed ({error}); call: uv sync") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_resource("page.html"))


def _resource(name: str) -> str:
    return (resources.files("flows.report") / "templates" / name).read_text(encoding="utf-8")


def _variables() -> str:
    """Return the palette as variables: light, dark where the machine or the reader wants it."""
    light, dark = (
        "".join(f"--{name}:{colours[side]};" for name, colours in charts.PALETTE.items())
        for side in (0, 1)
    )
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f":root[data-theme=light]{{color-scheme:light;{light}}}}}\n"
    )


def file_name(text: str) -> str:
    """Return a text as part of a file's name or an id."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:120] or "report"


# Files


def write(path: Path, html: str) -> None:
    """Write a page whole or not at all.

    Raises :class:`BadInput` where ``path`` is a folder, a pipe or a device: it would be replaced.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise BadInput(f"{path}: is {what}, wanted the file to write")
    write_text(path.resolve(), html)


def export(page: Page, folder: Path) -> list[Path]:
    """Write every chart as SVG and PNG and every table as CSV into ``folder``; return the files."""
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in page.figures():
            for panel in figure.panels:
                drawn, image = (folder / f"{file_name(panel.id)}.{kind}" for kind in ("svg", "png"))
                drawn.write_text(charts.draw(panel.spec), encoding="utf-8")
                image.write_bytes(charts.png(panel.spec))
                written += [drawn, image]
        for table in page.tables():
            path = folder / f"{file_name(table.id)}.csv"
            _write_csv(path, table)
            written.append(path)
    except OSError as error:
        raise CannotFindOut(f"{folder}: cannot be written: {error.strerror or error}") from error
    return written


def _write_csv(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([_csv(entry) for entry in row] for row in table.rows)


def _csv(entry: Entry) -> object:
    """Return a cell for a spreadsheet, which must not take a text for a formula."""
    if entry.value is not None:
        return entry.value
    return f"'{entry.text}" if entry.text[:1] in "=+-@\t\r" and entry.text else entry.text
