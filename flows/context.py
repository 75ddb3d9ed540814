"""What a command has to gather before it can measure: the target, its services, the round.

The only place where planning, launching and orchestration meet; everything below gets what it
needs handed in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flows.output import say
from flows.shipped import beside, find_sweep, shipped_model
from tasks import history
from tasks.boots import PastBoots
from tasks.collect import Origin
from tasks.glance import Glance, glance
from tasks.home import Home
from tasks.launch import access, environments, lint, models, services, target
from tasks.launch.operation import template_key
from tasks.launch.port import PolyaxonPort
from tasks.launch.settings import (
    client_environment,
    polyaxon_environment,
    prefect_environment,
    run_outputs,
)
from tasks.measure import Measuring
from tasks.pins import BENCH_VERSION, ENGINE_VERSION
from tasks.plan import hub, model, weights
from tasks.plan.cell import UNRESOLVED
from tasks.plan.plan import Plan, PlannedRun, Surroundings, make_plan
from tasks.plan.spending import NO_HISTORY, History, choose
from tasks.plan.sweep import Sweep, machine_memory_bytes, parse_sweep
from tasks.redact import Secrets
from tasks.rounds import Round, newest_round, open_round, rounds_of
from warehouse.errors import BadInput, CannotFindOut

#: Free disk that no run may touch: the warehouse and the services need some to end well.
SPARE_BYTES = 300_000_000
#: Longest wait for Prefect's answer to "was the flow cancelled?", seconds.
CANCEL_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a sweep is to be measured, beyond sweep and target."""

    fresh: bool = False  # open a new round
    keep_infeasible: bool = False  # run even what the prediction refuses
    keep_going: bool = False  # even where the first cells all fail alike
    label: str | None = None  # of the round to take; a night's is its scheduled time in UTC
    budget_minutes: float | None = None  # GPU-minutes (slot-minutes on a CPU) that may be spent


@dataclass(frozen=True, slots=True)
class Context:
    """Everything one measuring of a round holds."""

    plan: Plan
    round: Round
    measuring: Measuring
    origin: Origin
    history: History = NO_HISTORY
    budget_minutes: float | None = None
    keep_going: bool = False
    look: Callable[[str], Glance] = lambda _run_uuid: Glance()  # at a run that goes on


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
        checkpoint=cache(lambda name: _checkpoint(home, profile, name)),
        boots=PastBoots(home.warehouse_snapshot, gpu),
    )


def _config(
    home: Home, profile: target.Profile, name: str, revision: str, *, fetch: bool
) -> dict[str, object] | None:
    """Return a model's config: as generated, from its folder, as shipped for a shipped sweep's
    model, or from its hub by revision."""
    if models.is_generated(name):
        return models.config(name)
    file = target.model_folder(home, profile, name) / "config.json"
    if file.is_file():
        return model.load(file)
    known = shipped_model(name)
    if known is not None and known.is_of(revision):
        return known.config
    # Data whose source names no commit stands in where the commit's own cannot be had.
    stand_in = known.config if known is not None and known.revision is None else None
    reference = f"{name}@{revision}"
    if not hub.is_reference(reference) or not (fetch or hub.is_cached(reference, home.cache)):
        return stand_in
    try:
        return hub.config(reference, home.cache)
    except (BadInput, CannotFindOut) as error:  # a gated model can be planned all the same
        what = "no prediction" if stand_in is None else "prediction from its documents' figures"
        say(f"{what} for {name}: {error}")
        return stand_in


def _checkpoint(home: Home, profile: target.Profile, name: str) -> weights.Stored | None:
    try:
        return weights.stored(target.model_folder(home, profile, name))
    except BadInput:
        known = shipped_model(name)
        return None if known is None else known.stored


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


def need_disk(home: Home, plan: Plan, target_name: str, wishes: Wishes) -> None:
    """Refuse to measure where the bundles of the missing runs would not fit on the disk.

    Raises:
        BadInput: they would not; nothing was started yet. Where nothing is missing they always do.
        CannotFindOut: the published warehouse is there and cannot be read.
    """
    past = history.read(home.warehouse_snapshot, plan.surroundings.target)
    runs: Sequence[PlannedRun] = _missing(home, plan, target_name, wishes)
    if wishes.budget_minutes is not None:
        runs = choose(runs, past, wishes.budget_minutes * 60).chosen
    # A run's outputs and its bundle lie beside each other.
    need = 2 * sum(past.bundle_bytes(run) for run in runs) + SPARE_BYTES
    free = shutil.disk_usage(_existing(home)).free
    if runs and free < need:
        raise BadInput(
            f"{home.root}: {free / 1e6:,.0f} MB free, wanted {need / 1e6:,.0f} MB for the bundles "
            f"of {len(runs)} missing runs of sweep {plan.sweep.name}, their copies in Polyaxon and "
            "the warehouse; free some, or see: memsweep prune"
        )


def _missing(home: Home, plan: Plan, target_name: str, wishes: Wishes) -> list[PlannedRun]:
    """Return the runs that are not finished in the round which would be measured."""
    # By the target as it was given: a profile may be a file.
    taken = newest_round(home, plan.sweep, target_name, wishes.label)
    done = taken.all_finished() if taken is not None and not wishes.fresh else {}
    return [run for run in plan.runs() if (run.cell.cell_key, run.repeat) not in done]


def _existing(home: Home) -> str:
    path = home.root
    while not path.exists():
        path = path.parent
    return str(path)


def prepare(home: Home, sweep: Sweep, target_name: str) -> services.Endpoints:
    """Make what is missing on this machine and start its services; safe to interrupt.

    For a cluster nothing is made: its server is asked whether it has what the sweep needs, and of
    the services only Prefect is wanted here.
    """
    profile = target.load(target_name)
    prefect_api_url = os.environ.get("PREFECT_API_URL") or None
    if profile.host is not None:
        _require_cluster(home, sweep, target_name)
        return services.up(
            home, prefect_api_url=prefect_api_url, polyaxon_host=profile.host, progress=say
        )
    if sweep.pins.model_revision == UNRESOLVED:  # no environment and no service would change that
        raise BadInput(
            f"sweep {sweep.name}: model_revision of {sweep.model} is unresolved; resolve it with: "
            f"memsweep pin {sweep.name}"
        )
    environments.ensure(home, device=profile.device, progress=say)
    for name in _model_names(sweep):
        if models.is_generated(name):
            models.ensure(home, name, progress=say)
    return services.up(
        home,
        slots=profile.slots,
        prefect_api_url=prefect_api_url,
        progress=say,
    )


def _require_cluster(home: Home, sweep: Sweep, target_name: str) -> None:
    """Go on only where the cluster's server can take the sweep's first run.

    Raises:
        BadInput, CannotFindOut: a pin is unresolved, or something is missing there.
    """
    profile = target.load(target_name)
    plan = make_plan(sweep, surroundings(home, target_name, fetch=True))
    if plan.unresolved:
        raise BadInput(
            f"sweep {sweep.name}: unresolved pin {plan.unresolved[0]}; resolve it with: "
            f"memsweep pin {sweep.name} --target {target_name}"
        )
    refuse_secrets(f"target {profile.name}", profile.model_dump_json(indent=1))
    os.environ.update(_remote_environment(home))
    found = access.check(profile, lambda: lint.before_submit(home, profile, plan))
    access.require(found, profile.name, say)


def read_sweep(name: str) -> tuple[Sweep, str]:
    """Return a shipped sweep, or a file's, and its text; refused where one of its files holds a
    secret."""
    where, text = find_sweep(name)
    refuse_secrets(where, text)
    sweep = parse_sweep(text, where=where, read=beside(name))
    for file, prompts in sweep.prompt_files.items():
        refuse_secrets(f"{where}: prompts {file}", prompts)
    return sweep, text


def refuse_secrets(where: str, text: str) -> None:
    """Refuse a sweep or profile that holds a secret: it would go into every bundle.

    Raises:
        BadInput: it does; the message tells the line, not the secret.
    """
    line = Secrets.here().first(text)
    if line is not None:
        raise BadInput(
            f"{where}: line {line} holds what looks like a secret, and would be kept in every "
            "bundle: take it out, and give secrets to a cluster by reference"
        )


def _model_names(sweep: Sweep) -> list[str]:
    names = {sweep.model, *(e.model for e in sweep.experiments if e.model)}
    return sorted(names)


def open_context(sweep_name: str, target_name: str, wishes: Wishes, *, flow_run_id: str) -> Context:
    """Plan the sweep and open its round; services have to be up."""
    home = Home.find()
    sweep, text = read_sweep(sweep_name)
    profile = target.load(target_name)
    where_runs = surroundings(home, target_name, fetch=True)
    if unresolved := make_plan(sweep, where_runs).unresolved:
        raise BadInput(f"sweep {sweep.name}: unresolved pin {unresolved[0]}")
    round_, new = open_round(
        home, sweep, text, target=target_name, fresh=wishes.fresh, label=wishes.label
    )
    say(f"round {round_.id} ({'opened' if new else 'goes on'})")
    plan = make_plan(
        sweep, where_runs, keep_infeasible=wishes.keep_infeasible, night=round_.is_night
    )
    # One that was killed since the services were started; the flow's own watch begins later.
    services.keep_alive(home)
    port = port_of(home, target_name)

    def operation(run: PlannedRun) -> dict[str, object]:
        return target.operation(home, profile, run.cell, round_id=round_.id)

    def keep_alive() -> None:
        services.keep_alive(home)

    origin = Origin(
        flow_run_id=flow_run_id,
        flow_lock_sha256=environments.lock_sha256("flow"),
        target=profile.name,
        # Without the round: its label differs where nothing else does.
        template_key=lambda run: template_key(target.operation(home, profile, run.cell)),
    )
    measuring = Measuring(
        home=home,
        round=round_,
        plan=plan,
        port=port,
        operation=operation,
        keep_alive=keep_alive,
        # On a cluster the download of the model comes before the run, too.
        queue_s=profile.queue_s + (0 if profile.is_embedded else profile.fetch_s or 0),
        approval_s=profile.approval_s,
        poll_s=profile.poll_s,
        flow_run_id=flow_run_id,
        origin=origin.document,
        tell=lambda text: say(f"  {text}"),
        is_cancelled=lambda: _is_cancelled(flow_run_id),
    )
    return Context(
        plan,
        round_,
        measuring,
        origin,
        history=history.read(home.warehouse_snapshot, profile.name),
        budget_minutes=wishes.budget_minutes,
        keep_going=wishes.keep_going,
        look=lambda run_uuid: glance(run_outputs(home, run_uuid)),
    )


def _is_cancelled(flow_run_id: str) -> bool:
    """Whether someone cancelled the flow run in Prefect; a server that is away has not."""
    import httpx

    api = os.environ.get("PREFECT_API_URL", "")
    try:
        answer = httpx.get(f"{api}/flow_runs/{flow_run_id}", timeout=CANCEL_LOOK_S, trust_env=False)
        state = answer.json().get("state") or {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return state.get("type") in ("CANCELLING", "CANCELLED")


def port_of(home: Home, target_name: str = "local") -> PolyaxonPort:
    """Return the port to a target's Polyaxon server.

    Raises :class:`CannotFindOut` when it is the embedded one and not up.
    """
    profile = target.load(target_name)
    if not profile.is_embedded:
        os.environ.update(_remote_environment(home))
        return access.client(profile)
    ends = services.endpoints(home)
    if ends is None:
        raise CannotFindOut("no Polyaxon server is up; start it with: memsweep services up")
    _point_at_embedded(polyaxon_environment(home, ends.polyaxon_host))
    from tasks.launch.polyaxon import PolyaxonClient

    return PolyaxonClient(ends.polyaxon_host)


def _point_at_embedded(environment: Mapping[str, str]) -> None:
    """Point Polyaxon's client at the embedded server; where the user's own login is stays known."""
    os.environ.setdefault(access.LOGIN_VARIABLE, str(access.login_folder(os.environ)))
    os.environ.update(environment)


def given_target(name: str) -> str:
    """Return a target that means the same from any folder: a profile's file by its full path.

    A round is known by it, and `stop`, `logs` and `status` have to find the profile again.
    """
    is_file = name not in target.names() and Path(name).is_file()
    return str(Path(name).resolve()) if is_file else name


def target_of(home: Home, run_uuid: str) -> str:
    """Return the target of the round a run belongs to; ``local`` where no round knows it."""
    for round_ in rounds_of(home):
        if any(state.run_uuid == run_uuid for state in round_.states()):
            return round_.target
    return "local"


def _remote_environment(home: Home) -> dict[str, str]:
    """Return what a client of another server needs: folders of our own, and Polyaxon's own login.

    Its defaults are folders that every user of the machine shares.
    """
    ours = polyaxon_environment(home)
    del ours["POLYAXON_HOME"]
    return ours


def use(home: Home, ends: services.Endpoints) -> None:
    """Point this process at the services; before Prefect or Polyaxon is imported."""
    embedded = services.endpoints(home)
    if embedded is not None and embedded.polyaxon_host == ends.polyaxon_host:
        _point_at_embedded(
            client_environment(
                home, prefect_api_url=ends.prefect_api_url, polyaxon_host=ends.polyaxon_host
            )
        )
    else:
        os.environ.update(_remote_environment(home))
        os.environ.update(prefect_environment(home, ends.prefect_api_url))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    # The services are on loopback: no proxy is to be asked for them.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))


def find_run(home: Home, text: str) -> str:
    """Return the UUID of a run named by UUID, unique prefix or ``latest``.

    Looks at what rounds have recorded, so that a run is found while it goes on.
    """
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
