"""``lint``: what is wrong with sweeps, polyaxonfiles and profiles, before anything is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import polyaxonfiles
from flows.commands.planning import JsonOption, TargetOption
from flows.output import emit_json, emit_text, print_table, say
from flows.shipped import beside, find_sweep, shipped
from tasks.home import Home
from tasks.plan.plan import Plan
from tasks.plan.sweep import parse_sweep
from tasks.redact import Secrets
from warehouse.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    from tasks.launch.lint import Finding
    from tasks.launch.objects import Listing

_FOLDER = Path(polyaxonfiles.__file__).parent


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("lint", rich_help_panel="Plan")(lint)


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE…]",
            help="sweeps, polyaxonfiles, profiles, by name or file; nothing: all shipped ones",
        ),
    ] = None,
    target: TargetOption = "local",
    objects: Annotated[
        bool, typer.Option("--objects", help="list what a sweep would create on the target")
    ] = False,
    render: Annotated[
        Path | None,
        typer.Option(
            "--render", metavar="FOLDER", help="write each Kubernetes resource to this folder"
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-P", metavar="NAME=VALUE", help="an input of a component"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check sweeps, polyaxonfiles and profiles; exits 1 with one line per finding.

    Looks for what Polyaxon's own check lets pass: undefined names in templates (they render
    empty), quantities, images by tag, secrets written out, a cache that is on. Needs no server.

    A service is served where a profile says: with --target and its inputs as --param it is checked
    as the operation it becomes there, and --render writes that operation too, to be submitted with
    `polyaxon run -f`.

    Example: `memsweep lint demo`
    """
    from tasks.launch.target import load

    load(target)  # one that is not there is bad input, whether it is needed or not
    params = _params(param or [])
    named = [_place(one) for one in files] if files else _all_shipped()
    findings: list[Finding] = []
    services: dict[Path, dict[str, object]] = {}
    for name, path in named:
        is_placed = bool(files and (params or render is not None))
        component = _service(path) if is_placed else None
        if component is None:
            findings += _of_file(name, path, params)
        else:
            services[path], wrong = _of_service(name, path, component, params, target)
            findings += wrong
    sweeps = [name for name, path in named if files and _is_sweep(name, path)]
    listings: dict[str, Listing] = {}
    if not findings:
        for name in sweeps if objects or render is not None else []:
            listing, wrong = _listing(name, target)
            findings += wrong
            if listing is not None:
                listings[name] = listing
        if any(finding.is_secret for finding in findings):
            say("nothing is rendered: a secret is written out, and the resources would hold it")
        elif render is not None:
            others = [p for n, p in named if n not in sweeps and p not in services]
            _write(render, listings, others, params, services, target)
    _show(findings, listings, [name for name, _ in named], objects=objects, json=json)
    if findings:
        raise CheckFailed(f"{len(findings)} findings in {len({f.file for f in findings})} files")


def _of_file(name: str, path: Path, params: dict[str, str]) -> list[Finding]:
    from tasks.launch import lint as checks

    return checks.file(path, name=name, params=params or None)


def _service(path: Path) -> dict[str, Any] | None:
    """Return a component that serves a model as a profile places it; ``None`` where it is none."""
    from tasks.plan.sweep import parse_yaml

    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), where=str(path))
    except (BadInput, OSError, UnicodeDecodeError):
        return None  # which is told as a finding
    component: dict[str, Any] = document if isinstance(document, dict) else {}
    run, inputs = component.get("run"), component.get("inputs") or []
    serves = isinstance(run, dict) and run.get("kind") == "service"
    return component if serves and _takes_a_folder(inputs) else None


def _takes_a_folder(inputs: object) -> bool:
    listed = inputs if isinstance(inputs, list) else []
    return any(isinstance(one, dict) and one.get("name") == "model_path" for one in listed)


def _of_service(
    name: str, path: Path, component: dict[str, Any], params: dict[str, str], target: str
) -> tuple[dict[str, object], list[Finding]]:
    """Return the operation a service becomes on a target, and what is wrong with either."""
    from tasks.launch import lint as checks
    from tasks.launch import target as targets

    if found := _of_file(name, path, {}):
        return {}, found
    built = targets.service(Home.find(), targets.load(target), component, params, is_dry=True)
    return built, checks.operation(built, name=name, is_cluster=True)


def _params(given: list[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise BadInput(f"--param {name!r}: wanted NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _all_shipped() -> list[tuple[str, Path]]:
    places = [*sorted(_FOLDER.glob("*.yaml")), *sorted((_FOLDER / "profiles").glob("*.yaml"))]
    return [*shipped().items(), *((str(p.relative_to(_FOLDER.parent)), p) for p in places)]


def _place(name: str) -> tuple[str, Path]:
    """Return a file by its path, or by the name under which it is shipped."""
    for path in (
        shipped().get(name),
        Path(name),
        _FOLDER / name,
        _FOLDER / "profiles" / f"{name}.yaml",
    ):
        if path is not None and path.is_file():
            return name, path
    raise BadInput(f"lint {name!r}: neither a file nor shipped; see: memsweep sweeps")


def _is_sweep(name: str, path: Path) -> bool:
    from tasks.plan.sweep import parse_yaml

    document = parse_yaml(path.read_text(encoding="utf-8"), where=name)
    return isinstance(document, dict) and "experiments" in document


def _plan(name: str, target: str) -> Plan:
    from flows.context import surroundings
    from tasks.plan.plan import make_plan

    where, text = find_sweep(name)
    return make_plan(
        parse_sweep(text, where=where, read=beside(name)), surroundings(Home.find(), target)
    )


def _listing(name: str, target: str) -> tuple[Listing | None, list[Finding]]:
    """Return what a sweep would create, and what is wrong with its operations, each thing once.

    Of operations that hold a secret nothing is made.
    """
    from tasks.launch import lint as checks
    from tasks.launch import objects as dry
    from tasks.launch import target as targets

    home, profile, plan = Home.find(), targets.load(target), _plan(name, target)
    found: dict[Finding, None] = {}
    for planned in plan.cells:
        if not planned.skipped:
            built = targets.operation(home, profile, planned.cell, is_dry=True)
            found |= dict.fromkeys(
                checks.operation(
                    built, name=name, is_cluster=not profile.is_embedded, asks_polyaxon=False
                )
            )
    if any(finding.is_secret for finding in found):
        return None, list(found)
    return dry.listing(home, profile, plan), list(found)


def _show(
    findings: list[Finding],
    listings: dict[str, Listing],
    checked: list[str],
    *,
    objects: bool,
    json: bool,
) -> None:
    if json:
        emit_json(
            {
                "checked": checked,
                "findings": [finding.document() for finding in findings],
                "objects": [
                    {"sweep": name, **one.document()}
                    for name, found in listings.items()
                    for one in found.created
                ],
                "needs": {name: found.needs for name, found in listings.items()},
                "at_once": {name: found.at_once for name, found in listings.items()},
            }
        )
        return
    for finding in findings:
        emit_text(finding.line)
    if not findings:
        say(f"{len(checked)} files checked, nothing found")
    if objects:
        for name, found in listings.items():
            _print(name, found)


def _print(name: str, found: Listing) -> None:
    from tasks.launch import labels

    if not found.created:
        say(f"{name}: creates nothing on a cluster; its runs are processes on this machine")
        return
    print_table(
        f"Objects of {name}",
        ["cell", "runs", "kind", "namespace", "requests", "timeout", "kept", "labels"],
        [
            [
                one.cell,
                one.runs,
                one.kind,
                one.namespace,
                " ".join(f"{k}={v}" for k, v in one.requests.items()),
                f"{one.timeout_s} s",
                f"{one.ttl_s} s",
                " ".join(f"{k}={v}" for k, v in one.labels.items() if k.startswith("memsweep/")),
            ]
            for one in found.created
        ],
    )
    first = found.created[0]
    say(f"each is named {first.name}, makes one pod of {first.image} and goes with it")
    say("at the same time at most: " + " ".join(f"{k}={v}" for k, v in found.at_once.items()))
    for kind, names in found.needs.items():
        say(f"must be there: {kind} {', '.join(names)}")
    say(
        f"find them: kubectl -n {first.namespace} get jobs.polyaxon.com,pods -l {labels.SELECTOR}; "
        f"remove them: kubectl -n {first.namespace} delete jobs.polyaxon.com -l {labels.SELECTOR}"
    )


def _write(
    folder: Path,
    listings: dict[str, Listing],
    others: list[Path],
    params: dict[str, str],
    services: dict[Path, dict[str, object]],
    target: str,
) -> None:
    """Write the rendered resources: of a sweep's cells, and of components with their params.

    Of a service also its operation, which a user submits.
    """
    import yaml

    from tasks.launch import objects as dry
    from tasks.launch import render
    from tasks.launch import target as targets

    profile = targets.load(target)
    made = {
        f"{name.replace('/', '-')}-{number:03d}": one.resource
        for name, found in listings.items()
        for number, one in enumerate(found.created, start=1)
    }
    read = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in others}
    components = {
        path: document
        for path, document in read.items()
        if isinstance(document, dict) and document.get("kind") == "component"
    }
    for path, document in {**components, **services}.items():
        made[path.stem] = render.resource(
            document,
            namespace=profile.namespace or dry.AGENTS_NAMESPACE,
            owner=profile.owner,
            project=profile.project,
            name=path.stem,
            params=params if path in components else None,
            host=profile.host,
        )
    operations = {f"{path.stem}.operation": built for path, built in services.items()}
    texts = {
        folder / f"{stem}.yaml": yaml.safe_dump(document, sort_keys=False, width=100)
        for stem, document in {**made, **operations}.items()
    }
    _refuse_secrets(texts)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    say(f"{len(made)} Kubernetes resources in {folder}")
    for stem in operations:
        where = f"{profile.owner}/{profile.project}"
        say(f"submit it with: polyaxon run -p {where} -f {folder / stem}.yaml")


def _refuse_secrets(texts: dict[Path, str]) -> None:
    """Refuse to write a resource that holds a secret, such as one given with --param."""
    secrets = Secrets.here()
    for path, text in texts.items():
        if (line := secrets.first(text)) is not None:
            raise BadInput(
                f"{path}: not written: its line {line} would hold what looks like a secret; give "
                "secrets to a cluster by reference"
            )
