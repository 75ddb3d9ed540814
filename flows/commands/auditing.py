"""Commands that prove numbers: ``audit``, ``verify``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from flows.commands.looking import MOST_ROWS, JsonOption, pair
from flows.output import emit_json, emit_text, print_table, say
from tasks.home import Home
from warehouse.errors import BadInput, CheckFailed


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("audit", rich_help_panel="Audit")(audit)
    app.command("verify", rich_help_panel="Audit")(verify)


def audit(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="a UUID, a unique prefix of one, or latest"),
    ] = None,
    metric: Annotated[
        str | None, typer.Argument(metavar="[METRIC]", help="none: every number of the run")
    ] = None,
    load_point: Annotated[
        int | None,
        typer.Option("--load-point", min=0, max=MOST_ROWS, help="only of this load point"),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", metavar="NAME=VALUE", help="instead of RUN: what was measured under this"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Follow a number back: raw line, file and hash, manifest, run, operation, pins, code, person.

    Every link is checked; a broken one is named and the command exits with 1. With --config it
    goes the other way: from a setting or a pin to the runs measured under it.

    Example: `memsweep audit latest kv_cache_size_tokens`
    """
    if (run is None) == (not config):
        raise BadInput("wanted either RUN or --config NAME=VALUE")
    if run is None:
        _audit_config(config or [], json=json)
    else:
        _audit_run(run, metric, load_point, json=json)


def _audit_config(config: list[str], *, json: bool) -> None:
    from warehouse.connection import open_snapshot
    from warehouse.lookup import under

    wanted = dict(pair("--config", text) for text in config)
    with open_snapshot(Home.find().warehouse_snapshot) as connection:
        found = under(connection, wanted)
    if json:
        emit_json({"runs": found})
        return
    columns = ("run_uuid", "sweep", "round", "label", "outcome", "started_at", "measurements")
    title = f"{len(found)} runs with {' '.join(config)}"
    print_table(title, columns, [[run[name] for name in columns] for run in found])


def _audit_run(run: str, metric: str | None, load_point: int | None, *, json: bool) -> None:
    from warehouse.audit import audit as follow
    from warehouse.connection import open_snapshot
    from warehouse.lookup import resolve_run

    home = Home.find()
    with open_snapshot(home.warehouse_snapshot) as connection:
        chain = follow(
            connection,
            home.bundles,
            resolve_run(connection, run),
            metric,
            load_point=load_point,
        )
    if json:
        emit_json(chain.document())
    else:
        _print_chain(chain.document())
    if chain.broken:
        more = f" (and {len(chain.broken) - 1} more)" if len(chain.broken) > 1 else ""
        raise CheckFailed(f"run {chain.run_uuid}: broken link: {chain.broken[0]}{more}")


def _print_chain(chain: Mapping[str, Any]) -> None:
    for value in chain["values"]:
        for line in value_lines(value):
            emit_text(line)
    print_table("", ("link", "value"), chain_rows(chain))


def chain_rows(chain: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return what all numbers of a run have in common, from the manifest to the person."""
    operation, environment = chain["operation"], chain["environment"]
    sweep, code = chain["sweep"], chain["code"]
    dirty = {True: "dirty", False: "clean", None: "not from a checkout"}[code["git_dirty"]]
    rows: list[tuple[str, object]] = [
        ("manifest", f"{chain['manifest']['file']} sha256 {chain['manifest']['sha256']}"),
        ("run", chain["run_uuid"]),
        ("outcome", chain["outcome"]),
        ("operation", f"{operation['file']} sha256 {operation['sha256']}"),
        ("polyaxon", " / ".join(str(part) for part in operation["polyaxon"].values())),
        *((name, environment[name]) for name in environment),
        ("cell", chain["cell"]["cell_key"]),
        ("setting", chain["cell"]["setting_key"]),
        ("label", chain["cell"]["label"]),
        ("sweep", f"{sweep['sweep']} sha256 {sweep['sha256']}, round {sweep['round']}"),
        ("sweep file", f"{sweep['file']} sha256 {sweep['file_sha256']}"),
        ("git commit", f"{code['git_commit'] or '–'} ({dirty})"),
        ("memsweep", code["memsweep_version"]),
        ("who", chain["started_by"]),
        ("when", f"{chain['started_at']} to {chain['ended_at']}"),
        ("prefect flow run", chain["prefect_flow_run_id"]),
    ]
    return [row for row in rows if row[1] is not None]


def value_lines(value: Mapping[str, Any]) -> list[str]:
    """Return a number with its evidence as lines of text: the number, then where it is from."""
    point = "" if value["load_point"] is None else f", load point {value['load_point']}"
    number = value["value"]
    shown = "absent" if number is None else f"{number:,.10g} {value['unit']}".rstrip()
    lines = [f"{value['metric']}{point}: {shown} ({value['evidence']})"]
    if value.get("reason"):
        lines.append(f"  because  {value['reason']}")
    if value.get("formula"):
        lines.append(f"  formula  {value['formula']}")
        inputs = {name: part for name, part in value["inputs"].items() if name != "file"}
        lines.append(f"  from     {inputs}")
    if number is not None and value.get("source"):
        lines.append(f"  {_place(value)}")
        lines.append(f"  reads    {value['text']}")
    for line in value.get("raw", []):
        lines.append(f"  sample   {line}")
    if value.get("made_at"):
        lines.append(f"  made at  {value['made_at']}, before the run ({value['kind']})")
    if value.get("file_sha256"):
        lines.append(f"  file     {value['file']} sha256 {value['file_sha256']}")
    return lines


def _place(value: Mapping[str, Any]) -> str:
    kind = {"samples": "tick", "requests": "row"}.get(value["source"], "line")
    line, end = value["line"], value["line_end"]
    where = "" if line is None else f" {kind} {line}"
    if end is not None and end != line:
        where += f" to {end}"
    return f"{value['source']:<8} {value['file']}{where}"


def verify(json: JsonOption = False) -> None:
    """Re-hash every file, re-parse every raw text, and list every number that differs.

    Changes and moves nothing; exits with 1 when anything differs.

    Example: `memsweep verify`
    """
    from tasks import record

    report = record.verify(Home.find())
    found = [difference.document() for difference in report.differences]
    if json:
        emit_json(
            {
                "differences": found,
                "bundles": report.bundles,
                "files": report.files,
                "numbers": report.numbers,
            }
        )
    elif found:
        print_table(
            "Differences", ("run", "where", "what"), [list(entry.values()) for entry in found]
        )
    if found:
        first = report.differences[0]
        raise CheckFailed(
            f"{len(found)} differences, the first: {first.run_uuid or ''} {first.where}: "
            f"{first.what}"
        )
    say(f"{report.bundles} bundles, {report.files} files, {report.numbers} values: all agree")
