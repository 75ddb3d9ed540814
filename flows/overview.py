"""What is going on in a state folder, and what needs a hand: the data of `status`.

Read from files and asked of the servers over HTTP, without importing Prefect or Polyaxon, so that
the answer is there at once; with the services down it is what the files say. Starts nothing.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from flows.shipped import shipped
from tasks import notify, schedules
from tasks.clock import Clock
from tasks.files import read_json
from tasks.glance import glance
from tasks.home import Home
from tasks.launch import services
from tasks.launch.port import is_final
from tasks.launch.settings import run_outputs
from tasks.plan.plan import Plan, make_plan
from tasks.rounds import DEFAULT_TARGET, RepeatState, Round, damaged_rounds, rounds_of
from tasks.schedules import Schedule
from warehouse import ledger
from warehouse.errors import MemsweepError
from warehouse.registry import Outcome

#: How long a server may take to answer `status`, seconds.
ANSWER_S = 2.0
#: A night that has not begun so long after its time is late: the worker looks every 10 s, and
#: starting a flow takes about as long on a busy machine.
LATE_S = 60.0
NEXT_TIMES = 3
#: Nights and rounds that are told; all of them stand in their folders.
NIGHTS_TOLD = 20
ROUNDS_TOLD = 30
#: Free disk below which a night may end early.
LOW_DISK_BYTES = 2_000_000_000


def overview(home: Home) -> dict[str, Any]:
    """Return everything `status` tells, as JSON values."""
    states = services.status(home)
    ends = services.endpoints(home)
    every = rounds_of(home)
    rounds = _rounds(home, every)
    running, uncollected = _open_runs(home, every, ends)
    found: dict[str, Any] = {
        "services": [
            {"name": s.name, "state": s.state, "pid": s.pid, "url": s.url} for s in states
        ],
        "schedules": scheduled(home),
        "nights": _nights(home),
        "running": running,
        "uncollected": uncollected,
        "rounds": rounds,
        "disk": _disk(home),
        "quarantined": _quarantined(home),
    }
    found["needs"] = [asdict(need) for need in needs(home, found)]
    return found


# -- rounds ---------------------------------------------------------------------------------


def _rounds(home: Home, every: Sequence[Round]) -> list[dict[str, Any]]:
    """Return the progress of the latest rounds, and of the newest of each sweep."""
    # `run` goes on with the newest round of a sweep as its file now is; older ones stay.
    newest = set({(r.sweep_name, r.target): r.id for r in every}.values())
    told = {r.id for r in every[-ROUNDS_TOLD:]} | newest
    pruned = ledger.read(home.bundles).pruned
    found = []
    for round_ in (one for one in every if one.id in told):
        row = progress(home, round_) | {"newest": round_.id in newest}
        if any(state.run_uuid in pruned for state in round_.states()):
            row["left"] = 0  # what left by policy is not to be measured again
        found.append(row)
    return found


def progress(home: Home, round_: Round) -> dict[str, Any]:
    """Return a round's progress, counting only the cells its sweep has with the pins of today.

    ``left`` is what is still to be measured of it: nothing where it was measured to its end with
    earlier pins, which made other cells of the same sweep.
    """
    found: dict[str, Any] = {
        "round": round_.id,
        "sweep": round_.sweep_name,
        "target": round_.target,
        "opened_at": round_.opened_at,
        "pid": round_.holder(),
        "runs": None,
        "finished": None,
        "unexpected": None,
        "problem": None,
        "left": None,
    }
    try:
        plan = plan_of(home, round_)
    except (MemsweepError, OSError) as error:
        return found | {"problem": f"cannot be read: {error}"}
    runs = {(run.cell.cell_key, run.repeat): run for run in (*plan.runs(), *plan.skipped())}
    begun = round_.states()
    measured = {(state.cell_key, state.repeat): state for state in begun if _ended(round_, state)}
    settled = measured.keys() | round_.left_out()
    unexpected = [
        run
        for key, run in runs.items()
        if key in measured and not run.planned.as_expected(str(measured[key].outcome))
    ]
    finished = len(runs.keys() & settled)
    # Cells of earlier pins stand for today's only where none of today's was begun.
    was_whole = finished == 0 and len(settled) >= len(runs)
    whole = len(begun) == len(measured) and (finished == len(runs) or was_whole)
    return found | {
        "runs": len(runs),
        "finished": finished,
        "unexpected": len(unexpected),
        "left": 0 if whole else len(runs) - finished,
    }


def _ended(round_: Round, state: RepeatState) -> bool:
    """Whether a repeat is sealed with an outcome after which it is not measured again.

    What another run settles is infeasible too: it is not measured unless that run goes.
    """
    again = state.to_be_repeated and state.outcome != Outcome.INFEASIBLE.value
    return not again and round_.sealed(state.cell_key, state.repeat) is not None


def plan_of(home: Home, round_: Round) -> Plan:
    """Return the plan of a round's sweep with the pins of today."""
    return make_plan(round_.sweep(), _surroundings(home, round_.target), night=round_.is_night)


@cache
def _surroundings(home: Home, target: str) -> Any:
    from flows.context import surroundings

    return surroundings(home, target)


# -- what runs now --------------------------------------------------------------------------


def _open_runs(
    home: Home, every: Sequence[Round], ends: services.Endpoints | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs that a living flow measures, and those that are only to be collected."""
    newest = set({(r.sweep_name, r.target): r.id for r in every}.values())
    # `run` goes on with the newest round of a sweep's content: an older copy can be given to it.
    resumable = set({(r.sweep_sha256, r.target): r.id for r in every}.values())
    running, uncollected = [], []
    for round_ in every:
        for row in _running(home, round_, ends):
            if row["pid"] is not None and not is_final(str(row["status"])):
                running.append(row)
            else:
                collects = _what_collects(home, round_, row, resumable=round_.id in resumable)
                uncollected.append(row | {"newest": round_.id in newest} | collects)
    return running, uncollected


def _what_collects(
    home: Home, round_: Round, row: Mapping[str, Any], *, resumable: bool
) -> dict[str, str | None]:
    """Return what collects a run that is measured no more, and what to type where that helps."""
    if row["pid"] is not None:
        return {"collected_by": f"process {row['pid']}", "command": None}
    if row["planned"]:
        sweep = _sweep_of(home, {"sweep": round_.sweep_name, "round": round_.id})
        newest = f"memsweep run {_call(sweep, round_.target)}"
        call = newest if resumable else f"memsweep run {round_.id}"
        return {"collected_by": call, "command": call}
    goes_on = row["status"] is not None and not is_final(row["status"])
    return {
        "collected_by": "nothing: its cell has other pins now; its outputs stay in Polyaxon",
        "command": f"memsweep stop {round_.id}" if goes_on else None,
    }


def _running(
    home: Home, round_: Round, ends: services.Endpoints | None
) -> Iterator[dict[str, Any]]:
    """Yield the runs of a round that are not collected yet, each with where it is."""
    pid = round_.holder()
    open_runs = [s for s in round_.states() if s.run_uuid and not s.manifest_sha256]
    if not open_runs:
        return
    labels: dict[str, str] = {}
    with contextlib.suppress(MemsweepError, OSError):
        labels = {run.cell.cell_key: run.cell.label for run in plan_of(home, round_).runs()}
    for state in open_runs:
        phase, point, since = _phase(home, state)
        yield {
            "round": round_.id,
            "label": labels.get(state.cell_key, state.cell_key[:12]),
            "repeat": state.repeat,
            "planned": state.cell_key in labels,  # with the pins of today
            "run_uuid": state.run_uuid,
            "phase": phase,
            "load_point": point,
            "since": since or state.at,
            "pid": pid,
            **_as_polyaxon_says(ends, str(state.run_uuid)),
        }


def _phase(home: Home, state: RepeatState) -> tuple[str, int | None, str | None]:
    """Return the phase the run marked itself, its load point, and since when."""
    outputs = run_outputs(home, str(state.run_uuid))
    seen = glance(outputs)
    if seen.phase is None:
        return "queue", None, None
    marks = (read_json(outputs / "phases.json") or {}).get("phases") or [{}]
    clock = Clock.read(outputs / "clock.json")
    since = clock.utc(marks[-1].get("start_s")) if clock else None
    return seen.phase, seen.load_point, since


def _as_polyaxon_says(ends: services.Endpoints | None, run_uuid: str) -> dict[str, Any]:
    """Return status and what the run waits for; its client would take seconds to import."""
    unknown = {"status": None, "pending": None}
    if ends is None:
        return unknown
    url = f"{ends.polyaxon_host}/api/v1/default/memsweep/runs/{run_uuid.replace('-', '')}"
    value = _ask("GET", url)
    return {key: value.get(key) for key in unknown} if isinstance(value, dict) else unknown


# -- schedules and nights -------------------------------------------------------------------


def scheduled(home: Home) -> list[dict[str, Any]]:
    """Return what is scheduled, with what Prefect says about it where it can be asked."""
    api_url = services.prefect_api_url(home)
    return [
        {
            "name": one.name,
            "sweep": one.sweep,
            "target": one.target,
            "cron": one.cron,
            "timezone": one.timezone,
            "next_times": [_utc(moment) for moment in one.next_times(NEXT_TIMES)],
            "max_late_hours": one.max_late_hours,
            "budget_minutes": one.budget_minutes,
            "webhook": notify.shown(one.webhook) if one.webhook else one.webhook_env,
            "directory": one.directory,
            **_as_prefect_says(one.name, api_url),
        }
        for one in schedules.schedules(home)
    ]


def _as_prefect_says(name: str, api_url: str | None) -> dict[str, Any]:
    """Return whether the deployment is there and active, and which of its nights are overdue."""
    unknown: dict[str, Any] = {"in_prefect": None, "paused": None, "late": []}
    if api_url is None:
        return unknown
    deployment = _ask("GET", f"{api_url}/deployments/name/{schedules.FLOW}/{name}")
    if not isinstance(deployment, dict):
        return unknown if deployment is None else unknown | {"in_prefect": False}
    wanted = {
        "deployments": {"id": {"any_": [deployment["id"]]}},
        "flow_runs": {
            "state": {"type": {"any_": ["SCHEDULED"]}},
            "expected_start_time": {
                "before_": (datetime.now(UTC) - timedelta(seconds=LATE_S)).isoformat()
            },
        },
        "sort": "EXPECTED_START_TIME_ASC",
    }
    late = _ask("POST", f"{api_url}/flow_runs/filter", wanted)
    active = [one for one in deployment.get("schedules", []) if one.get("active")]
    return {
        "in_prefect": True,
        "paused": bool(deployment.get("paused")) or not active,
        "late": [_utc(datetime.fromisoformat(one["expected_start_time"])) for one in late]
        if isinstance(late, list)
        else [],
    }


def _ask(method: str, url: str, body: object = None) -> object:
    """Return a server's JSON; ``None`` where it does not answer, ``False`` where it says no."""
    try:
        answer = httpx.request(method, url, json=body, timeout=ANSWER_S, trust_env=False)
        return answer.json() if answer.is_success else False
    except (httpx.HTTPError, ValueError):
        return None


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _nights(home: Home) -> list[dict[str, Any]]:
    """Return the latest nights, newest first."""
    return [
        {
            "night": one.night,
            "sweep": one.sweep,
            "target": one.target,
            "verdict": "going" if one.goes_on else "died" if one.died else one.verdict,
            "message": one.message,
            "began_at": one.began_at,
            "ended_at": one.ended_at,
            "round": one.round,
            "flow_run_id": one.flow_run_id,
            "pid": one.pid if one.goes_on else None,
            "webhook": one.webhook,
        }
        for one in schedules.nights(home)[:NIGHTS_TOLD]
    ]


# -- the rest -------------------------------------------------------------------------------


def _disk(home: Home) -> dict[str, Any]:
    place = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    return {"free_bytes": free, "low": free < LOW_DISK_BYTES}


def _quarantined(home: Home) -> list[dict[str, Any]]:
    """Return the refused bundles, the latest refusal of each."""
    latest: dict[str, dict[str, Any]] = {}
    for note in sorted(home.quarantine.glob("*/reason.json")):
        facts = read_json(note) or {}
        bundle = str(facts.get("path") or note.parent.name)
        latest[bundle] = {"bundle": bundle, "reason": str(facts.get("reason"))}
    return list(latest.values())


@dataclass(frozen=True, slots=True)
class Need:
    """Something that does not go on by itself, and the command for it."""

    what: str
    command: str


def needs(home: Home, found: Mapping[str, Any]) -> list[Need]:
    """Return what needs a hand, most urgent first, each with what to type."""
    return [
        *_needs_of_services(home, found),
        *_needs_of_schedules(home, found["schedules"]),
        *_needs_of_nights(home, found["nights"]),
        *_needs_of_rounds(home, found),
        *_needs_of_runs([*found["running"], *found["uncollected"]]),
        *_needs_of_uncollected(found["uncollected"]),
        *_needs_of_the_disk(home, found),
    ]


def _needs_of_services(home: Home, found: Mapping[str, Any]) -> Iterator[Need]:
    states = {one["name"]: one["state"] for one in found["services"]}
    up = [name for name, state in states.items() if state != "down"]
    down = [name for name, state in states.items() if state == "down"]
    if found["schedules"] and states.get("scheduler") == "down":
        yield Need("nights are scheduled, but the scheduler is down", "memsweep services up")
    elif up and down:
        yield Need(f"{', '.join(down)} died while {', '.join(up)} run", "memsweep services up")
    for sweep, names in services.lacking(home).items():
        yield Need(
            f"nights of {sweep} need {', '.join(names)}, without which the scheduler was started",
            " ".join([*(f"{name}=VALUE" for name in names), "memsweep services up"]),
        )


def _needs_of_schedules(home: Home, rows: Sequence[Mapping[str, Any]]) -> Iterator[Need]:
    for path in schedules.unreadable(home):
        yield Need(f"{path}: damaged, no night of it is measured", f"rm {shlex.quote(str(path))}")
    for row in rows:
        if row["in_prefect"] is False:
            yield Need(f"{row['name']}: Prefect has lost its schedule", "memsweep services up")
        elif row["paused"] and (schedule := schedules.find(home, row["name"])) is not None:
            yield Need(f"{row['name']}: its schedule was paused in Prefect", _again(schedule))
        if row["late"]:
            yield Need(
                f"{row['name']}: {len(row['late'])} nights are late, first {row['late'][0]}",
                "memsweep services status",
            )


def _again(schedule: Schedule) -> str:
    """Return the call that makes a schedule as it is; a webhook's address may be a secret."""
    call = ["memsweep", "schedule", schedule.sweep, "--cron", schedule.cron]
    for option, value, default in (
        ("--timezone", schedule.timezone, "UTC"),
        ("--target", schedule.target, DEFAULT_TARGET),
        ("--budget", schedule.budget_minutes, None),
        ("--max-late-hours", schedule.max_late_hours, schedules.MAX_LATE_HOURS),
        ("--webhook", schedule.webhook and "URL", None),
        ("--webhook-env", schedule.webhook_env, None),
    ):
        if value != default:
            call += [option, str(value)]
    return shlex.join([*call, *(["--webhook-always"] if schedule.webhook_always else [])])


def _needs_of_nights(home: Home, rows: Sequence[Mapping[str, Any]]) -> Iterator[Need]:
    """Yield the latest night of each sweep where it was not as it should be."""
    told: set[object] = set()
    for row in rows:
        if row["verdict"] == "skipped" or row["sweep"] in told:
            continue  # another night measured then
        told.add(row["sweep"])
        what = f"night {row['night'] or row['began_at']} of {row['sweep']}: {row['verdict']}"
        if row["message"]:
            what += f" - {row['message'][:200]}"
        schedule = schedules.find(home, str(row["sweep"]))
        match row["verdict"]:
            case "missed" if schedule is not None:
                yield Need(what, f"memsweep run {_call(schedule.sweep, schedule.target)} --fresh")
            case "failed" | "regression" if row["round"]:
                yield Need(what, f"memsweep compare {row['sweep']}@{row['round']}")
            case "failed" | "died":
                log = schedules.log_file(home, str(row["flow_run_id"]))
                yield Need(what, f"tail -n 40 {log}")
        if row["webhook"] not in (None, "sent"):
            yield Need(f"night {row['night']}: {row['webhook']}", "memsweep schedule --list")


def _needs_of_rounds(home: Home, found: Mapping[str, Any]) -> Iterator[Need]:
    for folder in damaged_rounds(home):
        yield Need(
            f"{folder / 'round.json'}: damaged, no flow goes on with this round or adopts its "
            "runs; what was sealed stays among the bundles",
            shlex.join(["mv", str(folder), str(home.root / f"damaged-{folder.name}")]),
        )
    # A night opens its round a moment before it holds it.
    going = {row["sweep"] for row in found["nights"] if row["verdict"] == "going"}
    for row in found["rounds"]:
        if row["problem"]:
            yield Need(f"{row['round']}: {row['problem']}", f"ls {home.rounds / row['round']}")
        elif row["sweep"] in going or row["pid"] is not None or not row["newest"]:
            continue
        elif row["left"]:
            ended = sum(
                one["round"] == row["round"] and one["planned"] and is_final(str(one["status"]))
                for one in found["uncollected"]
            )
            only = f", {ended} of them ended and only to be collected" if ended else ""
            missing = f"{row['left']} of {row['runs']} runs are missing"
            yield Need(
                f"{row['round']}: unfinished, {missing}{only}",
                f"memsweep run {_call(_sweep_of(home, row), row['target'])}",
            )


def _sweep_of(home: Home, row: Mapping[str, Any]) -> str:
    """Return what to call `run` with to go on with a round: its name, else the round's own copy."""
    name = str(row["sweep"])
    schedule = schedules.find(home, name)
    text = (home.rounds / row["round"] / "sweep.yaml").read_text(encoding="utf-8")
    candidates = {name: shipped().get(name)}
    if schedule is not None and schedule.sweep not in candidates:
        candidates[schedule.sweep] = Path(schedule.sweep)
    for call, path in candidates.items():
        with contextlib.suppress(OSError):
            if path is not None and path.read_text(encoding="utf-8") == text:
                return call
    return str(home.rounds / row["round"] / "sweep.yaml")


def _call(sweep: str, target: str) -> str:
    return shlex.join([sweep, *(() if target == DEFAULT_TARGET else ("--target", target))])


def _needs_of_runs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Need]:
    for row in rows:
        if row["pending"] == "approval":
            yield Need(
                f"{row['label']}: its run waits for approval in Polyaxon",
                f"polyaxon ops approve -uid {row['run_uuid'].replace('-', '')}",
            )


def _needs_of_uncollected(rows: Sequence[Mapping[str, Any]]) -> Iterator[Need]:
    """Yield what goes on with the runs that no flow waits for, a line for each round."""
    commands = Counter(
        (row["round"], row["command"])
        for row in rows
        # Those of a sweep's newest round are told where it is unfinished.
        if row["command"] and not (row["newest"] and row["planned"])
    )
    for (round_id, command), count in commands.items():
        yield Need(f"{round_id}: runs that no flow waits for and collects: {count}", command)


def _needs_of_the_disk(home: Home, found: Mapping[str, Any]) -> Iterator[Need]:
    if found["disk"]["low"]:
        free = found["disk"]["free_bytes"] / 1e6
        yield Need(f"{home.root}: only {free:,.0f} MB of disk are free", "memsweep prune")
    if found["quarantined"]:
        first = found["quarantined"][0]
        yield Need(
            f"{len(found['quarantined'])} bundles were refused by the warehouse, first "
            f"{first['bundle']}: {first['reason']}",
            "memsweep verify",
        )
