"""``memsweep report``: one HTML page of a sweep, runs, a night or a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.looking import JsonOption
from flows.output import emit_json, emit_text, say
from tasks.home import Home
from warehouse.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    import duckdb

    from flows.report.page import Built


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("report", rich_help_panel="Look")(report)


def report(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP|RUN]...",
            help="sweeps, SWEEP@ROUND, runs or engine versions; none: the newest round",
        ),
    ] = None,
    night: Annotated[
        str | None, typer.Option(metavar="DATE", help="the rounds of a night, as 2026-11-29")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="two sets of runs, and what differs between them"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="left out: reports/ in the state folder"
        ),
    ] = None,
    p95: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="tokens of a user's context; left out: as served"),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="also every chart as SVG and PNG, every table as CSV"),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    json: JsonOption = False,
) -> None:
    """Make one self-contained HTML page: charts, tables, doubts and every number's evidence.

    The page opens without a network, on any screen and on paper. It is written even where the chain
    of custody of a number is broken; the command then exits with 1.

    Example: `memsweep report demo --open`
    """
    if sum((bool(what), night is not None, compare is not None)) > 1:
        raise BadInput("wanted one of: sweeps or runs, --night DATE, --compare A B")
    from flows.report import page
    from warehouse.connection import open_snapshot

    home = Home.find()
    with open_snapshot(home.warehouse_snapshot) as connection:
        built = _built(home, connection, what or [], night, compare, p95)
    path = output or home.reports / f"{page.file_name(built.page.title)}.html"
    page.write(path, built.html)
    exported = [] if export is None else page.export(built.page, export)
    if json:
        files = [str(one) for one in exported]
        emit_json({"file": str(path), **built.summary(), "exported": files})
    else:
        emit_text(str(path))
        for line in built.page.banner:
            say(f"  {line.text}")
        if export is not None:
            say(f"  {len(exported)} files in {export}")
    if open_:
        _open(path)
    if built.broken_links:
        raise CheckFailed(
            f"{path}: {built.broken_links} links in the chain of custody are broken; the page "
            "names them, and so does: memsweep verify"
        )


def _built(
    home: Home,
    connection: duckdb.DuckDBPyConnection,
    what: list[str],
    night: str | None,
    compare: tuple[str, str] | None,
    p95: int | None,
) -> Built:
    from flows.report import nights
    from flows.report.page import Request, build
    from flows.report.words import joined
    from warehouse.compare import choose
    from warehouse.difference import compare as differ
    from warehouse.regression import regressions

    if night is not None:
        return nights.of_date(home, connection, night, p95_tokens=p95)
    if compare is not None:
        a, b = (choose(connection, name) for name in compare)
        found = differ(connection, a, b, unlike=True)
        worse = tuple(regressions(connection, a, b))
        title = f"{a.title} against {b.title}"
        request = Request(title, (a, b), p95_tokens=p95, differences=found, worse=worse)
        return build(home, connection, request)
    chosen = (
        tuple(choose(connection, name) for name in what) if what else (choose(connection, None),)
    )
    title = joined((one.title for one in chosen), most=3)
    return build(home, connection, Request(title, chosen, p95_tokens=p95))


def _open(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        say(f"no browser was found; open {path}")
