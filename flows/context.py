"""What a command has to gather before it can measure: the target, its services, the round.

The only place where planning, launching and orchestration meet; everything below gets what it
needs handed in.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flows.output import say
from flows.shipped import beside, find_sweep
from tasks.boots import PastBoots
from tasks.collect import Origin
from tasks.home import Home
from tasks.launch import environments, models, services, target
from tasks.launch.operation import template_key
from tasks.launch.port import PolyaxonPort
from tasks.launch.settings import client_environment, polyaxon_environment
from tasks.measure import Measuring
from tasks.pins import BENCH_VERSION, ENGINE_VERSION
from tasks.plan import hub, model, weights
from tasks.plan.plan import Plan, PlannedRun, Surroundings, make_plan
from tasks.plan.sweep import Sweep, machine_memory_bytes, parse_sweep
from tasks.rounds import Round, open_round
from warehouse.errors import BadInput, CannotFindOut


@dataclass(frozen=True, slots=True)
class Context:
    """Everything one measuring of a round holds."""

    plan: Plan
    round: Round
    measuring: Measuring
    origin: Origin


def surroundings(home: Home, target_name: str, *, fetch: bool = False) -> Surroundings:
    """Return what a plan has to know about a target; starts and changes nothing.

    With ``fetch`` the config of a model pinned to a commit is got from its hub, once.
    """
    profile = target.load(target_name)
    gpu = target.gpu(profile)
    if profile.device == "cuda":
        memory = None if gpu is None else gpu.total_bytes
    else:
        memory = machine_memory_bytes()
    return Surroundings(
        target=profile.name,
        device=profile.device,
        slots=profile.slots,
        memory_total_bytes=memory,
        engine_version=ENGINE_VERSION,
        engine_lock_sha256=(
            environments.lock_sha256("engine", profile.device) if profile.is_embedded else None
        ),
        image_digest=profile.image_digest,
        bench_version=BENCH_VERSION,
        bench_lock_sha256=environments.lock_sha256("bench"),
        revision=lambda name: models.revision(home, name),
        config=cache(lambda name, revision: _config(home, profile, name, revision, fetch=fetch)),
        gpu=gpu,
        checkpoint=cache(lambda name: _checkpoint(target.model_folder(home, profile, name))),
        boots=PastBoots(home.warehouse_snapshot, gpu),
    )


def _config(
    home: Home, profile: target.Profile, name: str, revision: str, *, fetch: bool
) -> dict[str, object] | None:
    """Return a model's config: as generated, from its folder, or from its hub by revision."""
    if models.is_generated(name):
        return models.config(name)
    file = target.model_folder(home, profile, name) / "config.json"
    if file.is_file():
        return model.load(file)
    reference = f"{name}@{revision}"
    if not hub.is_reference(reference) or not (fetch or hub.is_cached(reference, home.cache)):
        return None
    try:
        return hub.config(reference, home.cache)
    except (BadInput, CannotFindOut) as error:  # a gated model can be planned all the same
        say(f"no prediction for {name}: {error}")
        return None


def _checkpoint(folder: Path) -> weights.Stored | None:
    try:
        return weights.stored(folder)
    except BadInput:
        return None


def _embedded(target_name: str) -> target.Profile:
    """Return a target's profile.

    Raises :class:`BadInput` for a cluster's: measuring there is not built yet, and a cell must
    never be submitted to another server than the profile names.
    """
    profile = target.load(target_name)
    if not profile.is_embedded:
        raise BadInput(
            f"target {target_name!r} names the host {profile.host}: measuring on a cluster is not "
            "built yet, only planning; use --target local or local-gpu"
        )
    return profile


def announce(home: Home) -> None:
    """Say what is going to be made and how much time and disk that takes."""
    plans = environments.missing(home)
    for plan in plans:
        say(f"  makes environment {plan.name}: {plan.megabytes} MB, about {plan.minutes:g} min")
    free = shutil.disk_usage(_existing(home)).free
    say(
        f"  needs about {sum(p.megabytes for p in plans) + 200} MB of disk, {free / 1e6:,.0f} MB "
        "are free; the five cells take about 9 minutes more"
    )


def need_disk(home: Home, plan: Plan) -> None:
    """Refuse a plan whose bundles would not fit on the disk; nothing was started yet."""
    free, need = shutil.disk_usage(_existing(home)).free, 2 * plan.disk_bytes + 300_000_000
    if free < need:
        raise BadInput(
            f"{home.root}: {free / 1e6:,.0f} MB free, wanted {need / 1e6:,.0f} MB for the bundles "
            f"of sweep {plan.sweep.name}, their copies in Polyaxon and the warehouse"
        )


def _existing(home: Home) -> str:
    path = home.root
    while not path.exists():
        path = path.parent
    return str(path)


def prepare(home: Home, sweep: Sweep, target_name: str) -> services.Endpoints:
    """Make what is missing on this machine and start its services; safe to interrupt."""
    profile = _embedded(target_name)
    environments.ensure(home, device=profile.device, progress=say)
    for name in _model_names(sweep):
        if models.is_generated(name):
            models.ensure(home, name, progress=say)
    return services.up(
        home,
        slots=profile.slots,
        prefect_api_url=os.environ.get("PREFECT_API_URL") or None,
        progress=say,
    )


def _model_names(sweep: Sweep) -> list[str]:
    names = {sweep.model, *(e.model for e in sweep.experiments if e.model)}
    return sorted(names)


def open_context(
    sweep_name: str, target_name: str, *, fresh: bool, keep_infeasible: bool, flow_run_id: str
) -> Context:
    """Plan the sweep and open its round; services have to be up."""
    home = Home.find()
    where, text = find_sweep(sweep_name)
    sweep = parse_sweep(text, where=where, read=beside(sweep_name))
    profile = _embedded(target_name)
    where_runs = surroundings(home, target_name, fetch=True)
    plan = make_plan(sweep, where_runs, keep_infeasible=keep_infeasible)
    if plan.unresolved:
        raise BadInput(f"sweep {sweep.name}: unresolved pin {plan.unresolved[0]}")
    round_, new = open_round(home, sweep, text, target=target_name, fresh=fresh)
    say(f"round {round_.id} ({'opened' if new else 'goes on'})")
    port = port_of(home)
    port.ensure_project()

    def operation(run: PlannedRun) -> dict[str, object]:
        return target.operation(home, profile, run.cell)

    def keep_alive() -> None:
        services.keep_alive(home)

    origin = Origin(
        flow_run_id=flow_run_id,
        flow_lock_sha256=environments.lock_sha256("flow"),
        target=profile.name,
        template_key=lambda run: template_key(operation(run)),
    )
    measuring = Measuring(
        home=home,
        round=round_,
        plan=plan,
        port=port,
        operation=operation,
        keep_alive=keep_alive,
        queue_s=profile.queue_s,
        flow_run_id=flow_run_id,
        origin=origin.document,
        tell=lambda text: say(f"  {text}"),
    )
    return Context(plan, round_, measuring, origin)


def port_of(home: Home) -> PolyaxonPort:
    """Return the port to the Polyaxon server in use.

    Raises :class:`CannotFindOut` when no server is up.
    """
    ends = services.endpoints(home)
    if ends is None:
        raise CannotFindOut("no Polyaxon server is up; start it with: memsweep services up")
    os.environ.update(polyaxon_environment(home, ends.polyaxon_host))
    from tasks.launch.polyaxon import PolyaxonClient

    return PolyaxonClient(ends.polyaxon_host)


def use(home: Home, ends: services.Endpoints) -> None:
    """Point this process at the services; before Prefect or Polyaxon is imported."""
    os.environ.update(
        client_environment(
            home, prefect_api_url=ends.prefect_api_url, polyaxon_host=ends.polyaxon_host
        )
    )
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    # The services are on loopback: no proxy is to be asked for them.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))


def find_run(home: Home, text: str) -> str:
    """Return the UUID of a run named by UUID, unique prefix or ``latest``.

    Looks at what rounds have recorded, so that a run is found while it goes on.
    """
    from tasks.rounds import rounds_of

    states = [state for round_ in rounds_of(home) for state in round_.states()]
    states.sort(key=lambda state: state.at or "")
    known = [state.run_uuid for state in states if state.run_uuid]
    if text == "latest" and known:
        return known[-1]
    wanted = text.lower().replace("-", "")
    found = [uuid for uuid in known if uuid.replace("-", "").startswith(wanted)] if wanted else []
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(f"run {text!r} is not unique: {', '.join(sorted(found)[:5])}")
    raise BadInput(f"unknown run {text!r}; see: memsweep runs")
