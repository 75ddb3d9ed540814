"""The command that says whether everything is here and compatible: ``doctor``."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.planning import JsonOption, TargetOption
from flows.output import emit_json, print_table, say
from flows.shipped import beside, find_sweep
from tasks import doctor as checks
from tasks.doctor import Check, State
from tasks.files import read_json
from tasks.home import Home
from tasks.pins import ENGINE_VERSION
from tasks.plan.sweep import parse_sweep
from tasks.pod import doctor as pod
from tasks.redact import Secrets
from warehouse.errors import BadInput, CannotFindOut, CheckFailed, MemsweepError

if TYPE_CHECKING:
    from tasks.launch.port import PolyaxonPort, RunView
    from tasks.launch.target import Profile

#: The doctor's own deadline on a node, seconds; waiting for the node comes on top.
NODE_S = 300
POLL_S = 2.0


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("doctor", rich_help_panel="Upkeep")(doctor)


def doctor(
    target: TargetOption = "local",
    on_node: Annotated[
        bool, typer.Option("--on-node", help="as a run on the cluster: look where cells would run")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="SWEEP",
            help="the engine version and image wanted are those it is pinned to",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look whether everything is here and fits: GPU, versions, disk, ports, models, services.

    Of a cluster, what its server says; with --on-node also what a node with its image has: a run
    with the very image, mounts and variables of a cell, which only looks. Exits 1 when something is
    wrong; each such line says what to do.

    The engine wanted is this project's own version, with --sweep the one that sweep is pinned to.

    Example: `memsweep doctor`
    """
    from tasks.launch.target import load

    home = Home.find()
    profile, engine_version = _pinned(load(target), sweep)
    if on_node and profile.is_embedded:
        raise BadInput(
            f"--on-node: target {target} runs cells on this machine, so plain doctor looks at it"
        )
    found = [*_of_flow(home, profile)]
    found += (
        _of_this_machine(home, profile, engine_version)
        if profile.is_embedded
        else _of_cluster(home, profile)
    )
    if on_node:
        found += _on_node(home, profile, target, engine_version)
    # Servers' answers are among the texts, and what they repeat of a request with them.
    secrets = Secrets.here()
    found = [one.cleaned(secrets) for one in found]
    wrong = [one for one in found if one.state is State.WRONG]
    if json:
        lines = [one.document() for one in found]
        emit_json(
            {
                "target": target,
                "sweep": sweep,
                "on_node": on_node,
                "ok": not wrong,
                "checks": lines,
            }
        )
    else:
        print_table("", ("check", "state", "found"), [[c.name, c.state, c.text] for c in found])
        for one in wrong:
            say(f"{one.name}: {one.text}: {one.todo}")
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(found)} checks are wrong")


def _pinned(profile: Profile, sweep: str | None) -> tuple[Profile, str]:
    """Return the target with the image that a sweep is pinned to, and the engine's version."""
    if sweep is None:
        return profile, ENGINE_VERSION
    where, text = find_sweep(sweep)
    pins = parse_sweep(text, where=where, read=beside(sweep)).pins
    if pins.image_digest is not None and not profile.is_embedded:
        profile = profile.model_copy(update={"image_digest": pins.image_digest})
    return profile, pins.engine_version or ENGINE_VERSION


def _of_flow(home: Home, profile: Profile) -> list[Check]:
    from tasks.launch import environments

    site = environments.python(home, "polyaxon-server").parent.parent
    haupt = pod.installed(site, "haupt")
    return checks.of_flow(haupt=haupt, wants_haupt=profile.is_embedded)


def _of_this_machine(home: Home, profile: Profile, engine_version: str) -> list[Check]:
    from tasks.launch import environments, models, services

    places = environments.places(home)
    facts = pod.facts(
        engine_bin=Path(places["engine_bin"]),
        bench_python=Path(places["bench_python"]),
        models=home.models if profile.models is None else Path(profile.models),
        folders={"state": home.root},
    )
    found = checks.of_machine(facts, device=profile.device, engine_version=engine_version)
    found += checks.of_models(facts, generated=models.NAMES)
    ports = [(one.name, one.port, one.holder) for one in services.ports(home)]
    return [*found, checks.of_ports(ports), *_services(home)]


def _services(home: Home) -> Iterator[Check]:
    from tasks.launch import services

    for one in services.status(home):
        if one.state == "up":
            yield Check(one.name, State.OK, f"up, {one.url or f'PID {one.pid}'}")
        elif one.pid is not None:
            text = f"{one.state}, PID {one.pid}, port {one.port}"
            yield Check(one.name, State.WRONG, text, "memsweep services up waits until it answers")
        else:
            port = "a free port" if one.port is None else f"port {one.port}, or a free one"
            yield Check(one.name, State.NONE, f"down; started when it is needed, on {port}")


def _of_cluster(home: Home, profile: Profile) -> list[Check]:
    from tasks.launch import access

    def look_at_operation() -> None:
        _operation(home, profile)

    found = access.check(profile, look_at_operation)
    return [
        Check(one.name, State.OK, one.text)
        if one.error is None
        else Check(one.name, State.WRONG, one.text, "correct the profile, or have it set up there")
        for one in found
    ]


def _operation(home: Home, profile: Profile) -> dict[str, Any]:
    """Return the operation of a cell on this target with the doctor in the cell's place.

    Everything else is as for a cell: that is what is looked at. Nothing is downloaded for it.
    """
    from tasks.launch import target as targets

    built: dict[str, Any] = targets.build(
        home,
        profile.model_copy(update={"fetch_s": None}),
        {"doctor": None},
        model=".",
        run_limit_s=NODE_S + profile.queue_s,
    )
    run = dict(built["component"]["run"])
    run["container"] = {
        **run["container"],
        "command": ["python", "-P", "-m", "tasks.pod.doctor"],
    }
    component = {**built["component"], "name": "memsweep-doctor", "run": run}
    return {**built, "name": "memsweep-doctor", "component": component}


def _on_node(home: Home, profile: Profile, target: str, engine_version: str) -> list[Check]:
    try:
        facts = _facts_of_node(home, profile, target)
    except MemsweepError as error:
        return [Check("node", State.WRONG, str(error), "see the run in Polyaxon")]
    found = checks.of_machine(
        facts, device=profile.device, engine_version=engine_version, needs_torch_pin=False
    )
    host = Check("node", State.OK, f"{facts['host']}, {facts['platform']}")
    return [host, *found, *checks.of_models(facts)]


def _facts_of_node(home: Home, profile: Profile, target: str) -> Mapping[str, Any]:
    """Run the doctor on the target and return what it found.

    Raises:
        BadInput: the image is unresolved.
        CannotFindOut: the server failed, the run did not succeed, or left nothing.
    """
    from flows.context import port_of
    from tasks.launch.port import META_MARK

    operation = _operation(home, profile)
    port: PolyaxonPort = port_of(home, target)
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    mark = {META_MARK: "doctor", "doctor": name}
    try:
        view = port.create(operation=operation, name=name, meta=mark)
        say(f"run {view.uuid}: looks at a node of {profile.name}")
        view = _ended(port, view, deadline=time.monotonic() + profile.queue_s + NODE_S)
        if view.status != "succeeded":
            raise CannotFindOut(f"run {view.uuid}: {view.status}: {view.message or view.reason}")
        with tempfile.TemporaryDirectory() as folder:
            port.fetch(view.uuid, Path(folder))
            facts = read_json(Path(folder) / pod.FILE)
    except BaseException:
        # Ctrl-C too, and a run whose creation was cut short: nobody else would end it.
        _stop(port, mark)
        raise
    if facts is None or facts.get("format") != pod.FORMAT:
        raise CannotFindOut(f"run {view.uuid}: left no {pod.FILE} of this version")
    return facts


def _ended(port: PolyaxonPort, view: RunView, *, deadline: float) -> RunView:
    """Return the run once it has ended; raises :class:`CannotFindOut` at its deadline."""
    while not view.is_final:
        if time.monotonic() > deadline:
            raise CannotFindOut(f"run {view.uuid}: still {view.status} at its deadline")
        time.sleep(POLL_S)
        view = port.view(view.uuid)
    return view


def _stop(port: PolyaxonPort, mark: dict[str, str]) -> None:
    """Stop the doctor's run where it goes on; that it could not be is said, not raised."""
    try:
        for view in port.find(mark):
            if not view.is_final:
                port.stop(view.uuid)
                say(f"run {view.uuid}: stopped")
    except MemsweepError as error:
        say(f"run {mark['doctor']} could not be stopped: {error}; it ends at its own deadline")
