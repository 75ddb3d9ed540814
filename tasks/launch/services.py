"""The embedded services: Prefect server, Polyaxon server (haupt), our supervisor and scheduler.

Each is a process of its own in a session of its own, nobody's child, so that it outlives the
command that started it and is found again by what was written to ``services/<name>/state.json``.
Everything here may be called twice at once: one lock a state folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tasks import files, processes, schedules
from tasks.home import Home
from tasks.launch import environments, supervisor
from tasks.launch.settings import (
    LOOPBACK,
    POOL,
    SERVICE_VARIABLE,
    artifacts_root,
    night_variables,
    polyaxon_root,
    service_environment,
    service_mark,
    worker_name,
)
from tasks.rounds import Round, rounds_of
from warehouse.errors import BadInput, CannotFindOut, ServiceDown

Name = Literal["prefect", "polyaxon", "supervisor", "scheduler"]
Progress = Callable[[str], None]

#: In the order of starting; ended in the reverse one.
NAMES: tuple[Name, ...] = ("prefect", "polyaxon", "supervisor", "scheduler")
_HEALTH = {"prefect": "/api/health", "polyaxon": "/healthz/"}
#: A cold start runs the database migrations: 39 s were seen on a busy machine.
READY_S = 180.0
LOCK_S = 240.0
#: How long a server that the user configured may take to answer.
CONFIGURED_S = 10.0
#: The servers end in 0.2 to 2 s.
SERVER_GRACE_S = 15.0
#: The supervisor ends its runs first, each within its own stop limit.
SUPERVISOR_GRACE_S = 150.0
#: A night stops its runs and collects them first.
NIGHT_GRACE_S = 180.0
#: As long as a flow may take to stop a run and to collect it, from a cluster too.
FLOW_GRACE_S = 420.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports the user asks for; None takes the recorded one, else a free one."""

    prefect: int | None = None
    polyaxon: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the services answer."""

    prefect_api_url: str
    polyaxon_host: str


@dataclass(frozen=True, slots=True)
class ServiceState:
    """One service as it is now; ``port`` is None for those that listen on none."""

    name: str
    state: Literal["up", "starting", "down"]
    pid: int | None
    port: int | None
    url: str | None
    started_at: str | None
    log: str | None


@dataclass(frozen=True, slots=True)
class PortState:
    """The port a server is recorded with, and who listens on it now."""

    name: str
    port: int
    holder: Literal["ours", "others", "nobody"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is recorded of a started service, to find exactly it again."""

    name: str
    pid: int
    start_ticks: int
    sid: int
    port: int | None
    log: str
    boot_id: str
    started_at: str
    #: What it was told about the others: another value means it must be started anew.
    polyaxon_host: str

    def is_alive(self) -> bool:
        return self.boot_id == processes.boot_id() and processes.alive(self.pid, self.start_ticks)

    def members(self) -> list[processes.Process]:
        if self.boot_id != processes.boot_id():
            return []
        return processes.session(self.sid, self.start_ticks)


def up(
    home: Home,
    *,
    ports: Ports | None = None,
    prefect_api_url: str | None = None,
    polyaxon_host: str | None = None,
    slots: int = 1,
    progress: Progress,
) -> Endpoints:
    """Start what is not up and wait until all answer; what is up is left alone.

    With ``prefect_api_url`` that server is used (and has to answer), and none is started, unless
    something is scheduled: nights are fired by our own. Only then is there a scheduler to start.
    With ``polyaxon_host`` runs are that server's: neither Polyaxon nor supervisor is started.
    ``slots`` is how many runs may go at the same time; another number takes effect at once, but
    only while nothing runs.

    Raises:
        BadInput: a port that was asked for is busy, or the service runs on another one.
        ServiceDown: a service ended or did not answer within its time; names its log.
    """
    with _lock(home):
        chosen = _choose_ports(home, ports or Ports())
        host = f"http://{LOOPBACK}:{chosen['polyaxon']}"
        _record_ports(home, chosen)
        own = _own(home, prefect_api_url, polyaxon_host)
        if "supervisor" in own:
            _set_slots(home, slots, progress)
        if _would_know_more(home):
            _end_scheduler(home)  # its nights go on
        started = [name for name in own if _start_if_down(home, name, chosen, host, progress)]
        for name in own:
            try:
                _wait_ready(home, name)
            except ServiceDown:
                entry = _entry(home, name)
                if entry is not None and entry.is_alive():
                    raise
                # It was killed while it started; what is wrong with itself comes again.
                _start_if_down(home, name, chosen, host, progress)
                _wait_ready(home, name)
            if name in started:
                progress(f"{name}: up{_where(home, name)}")
        for sweep, names in lacking(home).items():
            progress(
                f"scheduler: nights of {sweep} need {', '.join(names)}, not set here; once it is: "
                "memsweep services up"
            )
        ends = _endpoints(chosen)
    if polyaxon_host is not None:
        ends = replace(ends, polyaxon_host=polyaxon_host)
    if prefect_api_url is None:
        return ends
    _check_configured(prefect_api_url)
    return replace(ends, prefect_api_url=prefect_api_url)


def _own(home: Home, prefect_api_url: str | None, polyaxon_host: str | None = None) -> list[Name]:
    """Return the services that are wanted here."""
    nights = bool(schedules.schedules(home))
    wanted = {
        "prefect": nights or prefect_api_url is None,
        "polyaxon": polyaxon_host is None,
        "supervisor": polyaxon_host is None,
        "scheduler": nights,
    }
    return [name for name in NAMES if wanted[name]]


def _check_configured(api_url: str) -> None:
    import httpx

    try:
        httpx.get(f"{api_url.rstrip('/')}/health", timeout=CONFIGURED_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceDown(
            f"PREFECT_API_URL is {api_url}, but it does not answer ({error}); start that server, "
            "or unset the variable to have one started here"
        ) from error


def endpoints(home: Home) -> Endpoints | None:
    """Return where the services of this state folder answer; None unless Polyaxon's is alive."""
    recorded = files.read_json(_ports_file(home))
    entry = _entry(home, "polyaxon")
    if recorded is None or entry is None or not entry.is_alive():
        return None
    return _endpoints(recorded)


def prefect_api_url(home: Home) -> str | None:
    """Return where the embedded Prefect server answers, ``None`` where it does not."""
    entry = _entry(home, "prefect")
    if entry is None or not entry.is_alive() or not _is_ready(home, "prefect", entry):
        return None
    return f"http://{LOOPBACK}:{entry.port}/api"


def keep_alive(home: Home) -> list[str]:
    """Restart, on the same port, every service that was started and has died; return their names.

    Does not wait until they answer, and does nothing while another process starts or ends them.
    """
    entries = {name: _entry(home, name) for name in NAMES}
    if all(entry is None or entry.is_alive() for entry in entries.values()):
        return []
    try:
        with files.exclusive(home.services / "lock", wait_s=0.0, what="services"):
            recorded = files.read_json(_ports_file(home))
            if recorded is None:
                return []
            host = f"http://{LOOPBACK}:{recorded['polyaxon']}"
            dead = [
                name
                for name in NAMES
                if (entry := _entry(home, name)) is not None and not entry.is_alive()
            ]
            for name in dead:
                _end_rest(home, name)
                _spawn(home, name, recorded.get(name), host)
            return list(dead)
    except CannotFindOut:
        return []


def down(home: Home) -> list[str]:
    """End scheduler, nights, flows, supervisor (with its runs), Polyaxon and Prefect.

    Nights and flows stop their runs and collect what exists first, while the services answer.

    Returns one line for each thing ended. What is scheduled stays so: the next :func:`up` fires it.

    Raises:
        CannotFindOut: something could not be ended; the message says what is left.
    """
    with _lock(home):
        told = _end_scheduler(home) + _end_nights(home) + _end_flows(home) + _end_supervisor(home)
        for name in ("polyaxon", "prefect"):
            entry = _entry(home, name)
            if entry is None:
                continue
            had = bool(entry.members())
            processes.end(entry.members, grace_s=SERVER_GRACE_S)
            if had:
                told.append(f"{name}: ended (pid {entry.pid}, port {entry.port})")
        _prove_nothing_left(home)
        for name in NAMES:
            _state_file(home, name).unlink(missing_ok=True)
        return told


def end_scheduler(home: Home) -> None:
    """End the scheduler alone: no further night begins, those that go on are left alone."""
    with _lock(home):
        _end_scheduler(home)
        _state_file(home, "scheduler").unlink(missing_ok=True)


def lacking(home: Home) -> dict[str, list[str]]:
    """Return, by sweep, the variables that its nights need and the scheduler was started without.

    Nothing that is secret is written down, so whoever starts the scheduler has to have them:
    cron and systemd after a reboot too.
    """
    entry = _entry(home, "scheduler")
    if entry is None or not entry.is_alive():
        return {}
    given = processes.environment(entry.pid)
    if given is None:
        return {}
    needed = night_variables(home).items()
    return {sweep: sorted(names - given) for sweep, names in needed if names - given}


def _would_know_more(home: Home) -> bool:
    """Whether a scheduler started here would have a variable more for its nights, and none less."""
    from tasks.launch.access import TOKEN_VARIABLE

    entry = _entry(home, "scheduler")
    given = None if entry is None else processes.environment(entry.pid)
    needed = set[str]().union(*night_variables(home).values())
    if not given:
        return False
    lost = (given & {*needed, TOKEN_VARIABLE}) - os.environ.keys()
    return not lost and bool((needed - given) & os.environ.keys())


def status(home: Home) -> list[ServiceState]:
    """Return the state of each service that is wanted or was started; starts nothing."""
    states = []
    wanted = _own(home, None)
    for name in NAMES:
        entry = _entry(home, name)
        if entry is None:
            if name in wanted:
                states.append(ServiceState(name, "down", None, None, None, None, None))
            continue
        alive = entry.is_alive()
        ready = alive and _is_ready(home, name, entry)
        states.append(
            ServiceState(
                name,
                "up" if ready else "starting" if alive else "down",
                entry.pid if alive else None,
                entry.port,
                f"http://{LOOPBACK}:{entry.port}" if entry.port else None,
                entry.started_at,
                entry.log,
            )
        )
    return states


def ports(home: Home) -> list[PortState]:
    """Return who holds the ports that the servers are recorded with; none before the first start.

    A service that starts holds its port although it does not listen yet.
    """
    recorded = files.read_json(_ports_file(home)) or {}
    states = []
    for name in NAMES:
        entry = _entry(home, name)
        is_ours = entry is not None and bool(entry.members())
        port = entry.port if entry is not None and is_ours else recorded.get(name)
        if isinstance(port, int):
            others: Literal["others", "nobody"] = (
                "others" if processes.listening(port) else "nobody"
            )
            states.append(PortState(name, port, "ours" if is_ours else others))
    return states


def live_runs(home: Home) -> list[supervisor.Record]:
    """Return the records of local runs that still have processes."""
    return [
        record
        for record in supervisor.Folder(home).records()
        if record.boot_id == processes.boot_id()
        and processes.session(record.sid, record.start_ticks)
    ]


def live_nights(home: Home) -> list[processes.Process]:
    """Return the processes of nights that go on; each is in a session of its own."""
    return processes.marked(SERVICE_VARIABLE, service_mark(home, "night"))


def live_flows(home: Home) -> list[tuple[Round, int]]:
    """Return the rounds that are being measured through these services, and by which process.

    A cluster's sweep under another Prefect server needs none of them.
    """
    from tasks.launch import target

    def is_here(round_: Round) -> bool:
        if (url := round_.prefect_of_holder()) is not None and url == prefect:
            return True
        try:
            return target.load(round_.target).is_embedded
        except BadInput:  # a profile that is gone
            return False

    entry = _entry(home, "prefect")
    prefect = None if entry is None else f"http://{LOOPBACK}:{entry.port}/api"
    held = ((round_, round_.holder()) for round_ in rounds_of(home))
    return [(round_, pid) for round_, pid in held if pid is not None and is_here(round_)]


def _lock(home: Home) -> AbstractContextManager[int]:
    return files.exclusive(home.services / "lock", wait_s=LOCK_S, what="services")


def _state_file(home: Home, name: str) -> Path:
    return home.services / name / "state.json"


def _ports_file(home: Home) -> Path:
    return home.services / "ports.json"


def _entry(home: Home, name: str) -> _Entry | None:
    """Return what is recorded of a service; where the record is lost, what is found running."""
    value = files.read_json(_state_file(home, name)) or {}
    try:
        return _Entry(**value)
    except TypeError:  # no record, or not a whole one
        return _found_running(home, name)


def _found_running(home: Home, name: str) -> _Entry | None:
    """Return the entry of a running service without a record, by the mark it was started with.

    Without it a lost file would leave a server behind that nothing ends, and a second one would be
    started on the same database.
    """
    marked = processes.marked(SERVICE_VARIABLE, service_mark(home, name))
    if not marked:
        return None
    leader = min(marked, key=lambda process: process.start_ticks)
    recorded = files.read_json(_ports_file(home)) or {}
    port = recorded.get(name)
    return _Entry(
        name=name,
        pid=leader.pid,
        start_ticks=leader.start_ticks,
        sid=leader.session,
        port=port if isinstance(port, int) else None,
        log=str(home.services / name / "service.log"),
        boot_id=processes.boot_id(),
        started_at=datetime.fromtimestamp(0, UTC).isoformat(),
        polyaxon_host=f"http://{LOOPBACK}:{recorded.get('polyaxon')}",
    )


def _endpoints(ports: dict[str, int]) -> Endpoints:
    return Endpoints(
        prefect_api_url=f"http://{LOOPBACK}:{ports['prefect']}/api",
        polyaxon_host=f"http://{LOOPBACK}:{ports['polyaxon']}",
    )


def _choose_ports(home: Home, asked: Ports) -> dict[str, int]:
    """Return a port for each server: that of the running one, as asked, as recorded, or free."""
    recorded = files.read_json(_ports_file(home)) or {}
    chosen: dict[str, int] = {}
    for name, wanted in (("prefect", asked.prefect), ("polyaxon", asked.polyaxon)):
        entry = _entry(home, name)
        if entry is not None and entry.is_alive() and entry.port is not None:
            if wanted not in {None, entry.port}:
                raise BadInput(
                    f"services: {name} already runs on port {entry.port}, asked for {wanted}; "
                    "end it with 'memsweep services down' first"
                )
            chosen[name] = entry.port
        elif wanted is not None:
            if not 1 <= wanted <= 65535:
                raise BadInput(f"services: port {wanted} for {name} is not within 1 to 65535")
            if processes.listening(wanted):
                raise BadInput(
                    f"services: port {wanted} asked for {name} is busy; give another one, or none "
                    "to take a free one"
                )
            chosen[name] = wanted
        else:
            before = recorded.get(name)
            taken = set(chosen.values())
            if isinstance(before, int) and not processes.listening(before):
                chosen[name] = before if before not in taken else _free_port(taken)
            else:
                chosen[name] = _free_port(taken)
    return chosen


def _free_port(taken: set[int]) -> int:
    try:
        return processes.free_port(but=taken)
    except OSError as error:
        raise CannotFindOut(f"services: {error.strerror}; end what holds them") from error


def _record_ports(home: Home, chosen: dict[str, int]) -> None:
    if files.read_json(_ports_file(home)) != chosen:
        files.write_json(_ports_file(home), chosen)


def _set_slots(home: Home, slots: int, progress: Progress) -> None:
    """Have the supervisor work with so many slots; it reads them again before every start."""
    if slots < 1:
        raise BadInput(f"services: got {slots} slots, wanted at least 1")
    folder = supervisor.Folder(home)
    if folder.slots == slots:
        return
    if live_runs(home):
        progress(f"supervisor: keeps {folder.slots} slot(s) while runs go on, asked for {slots}")
        return
    files.write_json(folder.settings, {"slots": slots})


def _start_if_down(
    home: Home, name: Name, ports: dict[str, int], host: str, progress: Progress
) -> bool:
    entry = _entry(home, name)
    if entry is not None and entry.is_alive():
        if name != "supervisor" or entry.polyaxon_host == host:
            return False
        processes.end(entry.members, grace_s=SUPERVISOR_GRACE_S)
    if entry is not None:
        _end_rest(home, name)
    progress(f"{name}: starting")
    _spawn(home, name, ports.get(name), host)
    return True


def _end_rest(home: Home, name: Name) -> None:
    """End what a dead service's session left, so that two never share one database."""
    if name == "scheduler":
        _end_scheduler(home)
    elif (entry := _entry(home, name)) is not None:
        processes.end(entry.members, grace_s=2.0)


def _command(home: Home, name: Name, port: int | None) -> list[str]:
    if name == "prefect":
        return [
            sys.executable, "-m", "prefect", "server", "start",
            "--host", LOOPBACK, "--port", str(port),
        ]  # fmt: skip
    if name == "polyaxon":
        program = environments.python(home, "polyaxon-server").with_name("haupt")
        if not program.exists():
            raise BadInput(
                f"services: the environment of the Polyaxon server is missing ({program}); "
                "make it with 'memsweep setup'"
            )
        return [
            str(program), "sandbox", "start", "--host", LOOPBACK, "--port", str(port),
            "--workers", "1", "--path", str(artifacts_root(home)),
        ]  # fmt: skip
    return [sys.executable, "-m", f"tasks.launch.{name}", "--home", str(home.root)]


#: Started through a process in between, which ends at once: the service is nobody's child then, and
#: a caller that lives on keeps no zombie of it. The one in between writes the record too, and has a
#: session of its own, so that neither Ctrl-C nor a kill of the caller leaves a service unrecorded.
#: Signals are set back because a shell's background job has SIGINT ignored, and that is inherited.
_STARTER = """
import json, os, signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
given = json.load(sys.stdin)
with open(given["entry"]["log"], "ab") as log:
    started = subprocess.Popen(
        given["command"], env=given["env"], cwd=given["cwd"], stdin=subprocess.DEVNULL,
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )
fields = open(f"/proc/{started.pid}/stat").read().rpartition(")")[2].split()
entry = given["entry"] | {
    "pid": started.pid, "sid": started.pid, "start_ticks": int(fields[19])
}
with open(given["state"] + ".tmp", "w") as file:
    json.dump(entry, file)
    file.flush()
    os.fsync(file.fileno())
os.replace(given["state"] + ".tmp", given["state"])
os._exit(0)
"""


def _spawn(home: Home, name: Name, port: int | None, host: str) -> None:
    """Start one service and have it recorded at once."""
    place = home.services / name
    (place / "home").mkdir(parents=True, exist_ok=True)
    if name == "polyaxon":
        for folder in ("artifacts", "archives", "offline"):
            (polyaxon_root(home) / folder).mkdir(parents=True, exist_ok=True)
    if name == "supervisor":
        supervisor.Folder(home).ready.unlink(missing_ok=True)
    log = place / "service.log"
    given = {
        "command": _command(home, name, port),
        "env": service_environment(home, name, polyaxon_host=host),
        "cwd": str(place),
        "state": str(_state_file(home, name)),
        "entry": {
            "name": name,
            "port": port,
            "log": str(log),
            "boot_id": processes.boot_id(),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "polyaxon_host": host,
        },
    }
    started = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTER],
        input=json.dumps(given), capture_output=True, text=True, check=False,
        start_new_session=True,
    )  # fmt: skip
    if started.returncode != 0:
        raise ServiceDown(
            f"services: {name} could not be started: {started.stderr.strip()[-300:]}; see {log}"
        )


def _is_ready(home: Home, name: str, entry: _Entry) -> bool:
    if name == "supervisor":
        ready = files.read_json(supervisor.Folder(home).ready)
        return ready is not None and ready.get("pid") == entry.pid
    if name == "scheduler":
        return _worker_polls(home, entry)
    import httpx

    try:
        answer = httpx.get(
            f"http://{LOOPBACK}:{entry.port}{_HEALTH[name]}", timeout=5, trust_env=False
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def _worker_polls(home: Home, entry: _Entry) -> bool:
    """Tell whether Prefect has heard of this scheduler's worker.

    By its name, not by its time: a clock that was set back must not hold up every start.
    """
    import httpx

    port = (files.read_json(_ports_file(home)) or {}).get("prefect")
    url = f"http://{LOOPBACK}:{port}/api/work_pools/{POOL}/workers/filter"
    try:
        answer = httpx.post(url, json={}, timeout=5, trust_env=False)
        workers = answer.json() if answer.is_success else []
        name = worker_name(entry.pid)
        return any(one["name"] == name and one["status"] == "ONLINE" for one in workers)
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def _wait_ready(home: Home, name: Name) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        entry = _entry(home, name)
        if entry is None or not entry.is_alive():
            raise ServiceDown(f"services: {name} ended while starting: {_last_lines(home, name)}")
        if _is_ready(home, name, entry):
            return
        if time.monotonic() >= deadline:
            raise ServiceDown(
                f"services: {name} did not answer within {READY_S:.0f} s: {_last_lines(home, name)}"
            )
        time.sleep(0.2)


def _last_lines(home: Home, name: Name) -> str:
    log = home.services / name / "service.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"{' / '.join(line.strip() for line in lines[-3:])[-400:]}; full log: {log}"


def _where(home: Home, name: Name) -> str:
    entry = _entry(home, name)
    return f" at http://{LOOPBACK}:{entry.port}" if entry is not None and entry.port else ""


def _end_scheduler(home: Home) -> list[str]:
    """Kill the scheduler and its worker, so that no further night begins.

    Asked to end, the worker would end its nights itself, and kill them after 30 s; they need longer
    to stop their runs and to collect them. It keeps nothing that could be lost.
    """
    entry = _entry(home, "scheduler")
    if entry is None or not (members := entry.members()):
        return []
    processes.send(members, signal.SIGKILL)
    processes.wait_gone(entry.members, 10.0)
    return [f"scheduler: ended (pid {entry.pid})"]


def _end_nights(home: Home) -> list[str]:
    # With the worker gone these have nothing to do but to hand a second SIGTERM on.
    starters = processes.marked(SERVICE_VARIABLE, service_mark(home, "night-start"))
    processes.send(starters, signal.SIGKILL)
    going = live_nights(home)
    processes.end(lambda: live_nights(home), grace_s=NIGHT_GRACE_S)
    return [f"night: ended (pid {one.pid})" for one in going]


def _end_flows(home: Home) -> list[str]:
    """Have every `run` that needs these services stop as `stop` does."""
    held = live_flows(home)
    for round_, _ in held:
        round_.ask_stop(after_current=False)
    deadline = time.monotonic() + FLOW_GRACE_S
    while live_flows(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = {pid for _, pid in live_flows(home)}
    return [
        f"round {round_.id}: {'still going' if pid in left else 'stopped'} (process {pid})"
        for round_, pid in held
    ]


def _end_supervisor(home: Home) -> list[str]:
    """End the supervisor, which ends its runs; without one alive, another ends what is recorded."""
    told = [f"run {record.uuid}: ended (session {record.sid})" for record in live_runs(home)]
    entry = _entry(home, "supervisor")
    if entry is not None and entry.is_alive():
        leader = processes.read(entry.pid)
        processes.send([leader] if leader else [], signal.SIGTERM)
        if not processes.wait_gone(entry.members, SUPERVISOR_GRACE_S):
            processes.end(entry.members, grace_s=0.0)
        told.append(f"supervisor: ended (pid {entry.pid})")
    if supervisor.Folder(home).records() and entry is not None:
        _drain(home, entry)
    for record in live_runs(home):
        members = processes.session(record.sid, record.start_ticks)
        processes.send(members, signal.SIGKILL)
    return told


def _drain(home: Home, entry: _Entry) -> None:
    """Let a supervisor that starts nothing end and settle what a dead one left."""
    log = Path(entry.log)
    with log.open("ab") as output:
        try:
            subprocess.run(
                [*_command(home, "supervisor", None), "--drain"],
                env=service_environment(home, "supervisor", polyaxon_host=entry.polyaxon_host),
                cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                timeout=SUPERVISOR_GRACE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return


def _prove_nothing_left(home: Home) -> None:
    """Look once more for processes and ports, a moment later if need be.

    Raises:
        CannotFindOut: something is left.
    """
    entries = [entry for name in NAMES if (entry := _entry(home, name)) is not None]
    deadline = time.monotonic() + 5
    while True:
        left = [f"process {one.pid} {one.name}" for entry in entries for one in entry.members()]
        left += [
            f"port {entry.port} of {entry.name}"
            for entry in entries
            if entry.port is not None and processes.listening(entry.port)
        ]
        left += [f"run {record.uuid} (session {record.sid})" for record in live_runs(home)]
        left += [f"night (process {one.pid})" for one in live_nights(home)]
        left += [f"round {round_.id} (process {pid})" for round_, pid in live_flows(home)]
        if not left:
            return
        if time.monotonic() >= deadline:
            raise CannotFindOut(f"services: still there after the end: {', '.join(left)}")
        time.sleep(0.1)
