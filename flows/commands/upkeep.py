"""Commands that keep the warehouse: ``ingest``, ``rebuild``, ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.looking import JsonOption
from flows.output import emit_json, emit_text, say
from tasks.home import Home
from warehouse.errors import BadInput, CheckFailed


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for name, function in (("ingest", ingest), ("rebuild", rebuild), ("export", export)):
        app.command(name, rich_help_panel="Upkeep")(function)


def ingest(
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[BUNDLE]...", help="bundle folders; none: every sealed one here"),
    ] = None,
    publish_every: Annotated[
        float,
        typer.Option("--publish-every", min=0, help="seconds between snapshots of a long ingest"),
    ] = 30.0,
    json: JsonOption = False,
) -> None:
    """Take bundles into the warehouse; what is stored already stays as it is.

    Example: `memsweep ingest /mnt/results/5f3c…`
    """
    from tasks import bundle, record

    home = Home.find()
    paths = list(bundles or []) or bundle.all_sealed(home)
    for path in paths:
        if not (path / bundle.MANIFEST).is_file():
            raise BadInput(f"{path}: no {bundle.MANIFEST} in it; wanted the folder of a bundle")
    report = record.ingest(home, paths, publish_every_s=publish_every)
    if json:
        emit_json(report.document())
    else:
        emit_text(
            f"{len(report.ingested)} ingested, {len(report.replaced)} replaced, "
            f"{len(report.unchanged)} unchanged, {len(report.quarantined)} quarantined "
            f"in {report.seconds:.1f} s"
        )
        if report.snapshot_bytes is not None:
            say(
                f"snapshot published: {report.snapshot_bytes / 1e6:.1f} MB in "
                f"{report.publish_s:.1f} s ({report.publications} times)"
            )
    if report.quarantined:
        first = report.quarantined[0]
        raise CheckFailed(
            f"{len(report.quarantined)} bundles quarantined in {home.quarantine}, the first: "
            f"{first.reason}"
        )


def rebuild(json: JsonOption = False) -> None:
    """Make the warehouse anew from every sealed bundle; the old one stays until the new is whole.

    Example: `memsweep rebuild`
    """
    from tasks import record

    report = record.rebuild(Home.find())
    if json:
        emit_json(
            {
                "runs": report.runs,
                "content_hash": report.content_hash,
                "refused": [
                    {"path": str(refused.path), "reason": refused.reason}
                    for refused in report.refused
                ],
                "seconds": round(report.seconds, 3),
            }
        )
    else:
        emit_text(
            f"{report.runs} runs in {report.seconds:.1f} s, content hash {report.content_hash}"
        )
    if report.refused:
        raise CheckFailed(
            f"{len(report.refused)} bundles left out, the first: {report.refused[0].reason}"
        )


def export(
    folder: Annotated[Path, typer.Argument(help="a folder that does not exist yet")],
    json: JsonOption = False,
) -> None:
    """Write every table as Parquet, with its comments in the files' metadata.

    Example: `memsweep export warehouse-2026-11-29`
    """
    from warehouse.connection import open_snapshot
    from warehouse.export import export_tables

    with open_snapshot(Home.find().warehouse_snapshot) as connection:
        written = export_tables(connection, folder)
    if json:
        emit_json({"files": [{"path": str(path), "rows": rows} for path, rows in written]})
    else:
        emit_text(f"{len(written)} files, {sum(rows for _, rows in written)} rows in {folder}")
