"""Starting, finding and ending services, with small programs in the servers' place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import files, processes, schedules
from tasks.home import Home
from tasks.launch import services, settings, supervisor, target
from tasks.plan.sweep import parse_sweep
from tasks.rounds import Round, open_round
from warehouse.errors import BadInput, CannotFindOut, ServiceDown

#: A server that answers 200 to everything, with a child as a real one may have.
SERVER = """
import http.server, json, pathlib, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.do_GET()
        pid = json.loads(pathlib.Path(sys.argv[2]).read_text())["pid"]
        # The clock was set back since: what counts is whose worker it is.
        worker = {"name": sys.argv[3] % pid, "status": "ONLINE",
                  "last_heartbeat_time": "1999-01-01T00:00:00Z"}
        self.wfile.write(json.dumps([worker]).encode())
    def log_message(self, *_): pass
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SUPERVISOR = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1]).write_text(json.dumps({"pid": os.getpid()}))
time.sleep(60)
"""
SLEEP = "import time; time.sleep(60)"
BROKEN = "import sys; sys.exit('no such database')"


@pytest.fixture
def programs(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Put small programs in the services' place; end what a failed test has left."""
    code = {"prefect": SERVER, "polyaxon": SERVER, "supervisor": SUPERVISOR, "scheduler": SLEEP}

    def command(home: Home, name: str, port: int | None) -> list[str]:
        ready = home.services / "supervisor" / "ready.json"
        argument = str(port) if port is not None else str(ready)
        scheduler = home.services / "scheduler" / "state.json"
        worker = code.get("worker", f"{settings.POOL}-%d")
        return [sys.executable, "-c", code[name], argument, str(scheduler), worker]

    monkeypatch.setattr(services, "_command", command)
    yield code
    for name in services.NAMES:
        entry = services._entry(home, name)
        if entry is not None:
            processes.end(entry.members, grace_s=0.1)


def quiet(_text: str) -> None:
    """Take progress and say nothing."""


def pids(home: Home) -> dict[str, int | None]:
    return {one.name: one.pid for one in services.status(home)}


@pytest.mark.usefixtures("programs")
def test_up_is_idempotent_and_down_leaves_nothing(home: Home) -> None:
    first = services.up(home, progress=quiet)
    before = pids(home)
    assert {one.state for one in services.status(home)} == {"up"}
    assert services.up(home, progress=quiet) == first == services.endpoints(home)
    assert pids(home) == before
    entries = [services._entry(home, name) for name in services.NAMES]
    assert len([e for e in entries if e and len(e.members()) == 2]) == 2, "servers have a child"
    told = services.down(home)
    assert [line.partition(":")[0] for line in told] == ["supervisor", "polyaxon", "prefect"]
    assert [entry.name for entry in entries if entry] == ["prefect", "polyaxon", "supervisor"]
    for entry in filter(None, entries):
        assert entry.members() == []
        assert entry.port is None or not processes.listening(entry.port)
    assert {one.state for one in services.status(home)} == {"down"}
    assert services.down(home) == []


@pytest.mark.usefixtures("programs")
def test_a_scheduler_without_a_variable_of_its_nights_is_told_and_started_with_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a reboot, when cron starts the services without the user's variables."""
    schedule(home, webhook_env="HOOK_OF_TEST")
    monkeypatch.delenv("HOOK_OF_TEST", raising=False)
    told: list[str] = []
    services.up(home, progress=told.append)
    assert any("nights of demo need HOOK_OF_TEST" in line for line in told)
    assert services.lacking(home) == {"demo": ["HOOK_OF_TEST"]}
    first = pids(home)
    services.up(home, progress=quiet)
    assert pids(home) == first, "it would be no better"
    monkeypatch.setenv("HOOK_OF_TEST", "http://127.0.0.1:9/")
    services.up(home, progress=quiet)
    second = pids(home)
    assert second["scheduler"] != first["scheduler"]
    # Another shell, which has one variable more and one less: it would be a bad exchange.
    schedule(home, webhook_env="HOOK_OF_TEST")
    schedule(home, name="other", webhook_env="OTHER_HOOK_OF_TEST")
    monkeypatch.setenv("OTHER_HOOK_OF_TEST", "http://127.0.0.1:9/")
    with monkeypatch.context() as shell:
        shell.delenv("HOOK_OF_TEST")
        services.up(home, progress=told.append)
        assert pids(home) == second
        assert services.lacking(home) == {"other": ["OTHER_HOOK_OF_TEST"]}
    services.up(home, progress=quiet)
    assert services.lacking(home) == {}
    second |= {"scheduler": pids(home)["scheduler"]}
    assert second | {"scheduler": 0} == first | {"scheduler": 0}
    assert services.lacking(home) == {}
    services.down(home)


CLUSTER = Path(target.PROFILES) / "cluster-a10.yaml"


def held_round(home: Home, where: str = "local") -> Round:
    """Open a round of a small sweep."""
    points = "[{parallel: 1, number: 1}]"
    text = f"name: held\nmodel: tiny-qwen3\nexperiments: [{{name: e, points: {points}}}]\n"
    return open_round(home, parse_sweep(text, where="x"), text, target=where, fresh=False)[0]


#: A flow that holds the round whose folder it is given until it is asked to stop.
FLOW = """
import sys, time
from pathlib import Path
from tasks.home import Home
from tasks.rounds import rounds_of
(round_,) = rounds_of(Home(Path(sys.argv[1])))
with round_.only_flow():
    print("on", flush=True)
    while round_.stop_asked() is None:
        time.sleep(0.02)
    # As collecting what exists does.
    time.sleep(0.5)
    (round_.folder / "collected").touch()
"""


@pytest.mark.usefixtures("programs")
def test_down_says_of_a_flow_that_does_not_end_that_it_goes_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "FLOW_GRACE_S", 0.3)
    round_ = held_round(home)
    services.up(home, progress=quiet)
    with round_.only_flow(), pytest.raises(CannotFindOut, match=f"round {round_.id} \\(process "):
        services.down(home)
    services.down(home)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("is_our_prefect", [True, False])
def test_down_stops_a_clusters_sweep_only_where_it_reports_to_this_prefect(
    home: Home, is_our_prefect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = held_round(home, str(CLUSTER))
    ends = services.up(home, progress=quiet)
    url = ends.prefect_api_url if is_our_prefect else "http://prefect.example.com/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setattr(services, "FLOW_GRACE_S", 0.3)
    with round_.only_flow():
        assert [one.id for one, _ in services.live_flows(home)] == [round_.id] * is_our_prefect
        if not is_our_prefect:
            services.down(home)
            assert round_.stop_asked() is None
    services.down(home)


@pytest.mark.usefixtures("programs")
def test_down_has_a_flow_collect_first_while_the_services_answer(home: Home) -> None:
    round_ = held_round(home)
    services.up(home, progress=quiet)
    with subprocess.Popen(
        [sys.executable, "-c", FLOW, str(home.root)], stdout=subprocess.PIPE, text=True
    ) as flow:
        assert flow.stdout is not None
        flow.stdout.readline()
        told = services.down(home)
        assert told[0] == f"round {round_.id}: stopped (process {flow.pid})"
        assert (round_.folder / "collected").exists()
    assert flow.returncode == 0


def test_the_worker_of_an_earlier_scheduler_is_not_taken_for_ours(
    home: Home, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(home)
    services.up(home, progress=quiet)
    services.down(home)
    programs["worker"] = f"{settings.POOL}-1%d"
    monkeypatch.setattr(services, "READY_S", 1.0)
    with pytest.raises(ServiceDown, match="scheduler did not answer"):
        services.up(home, progress=quiet)
    services.down(home)


@pytest.mark.usefixtures("programs")
def test_services_are_in_sessions_of_their_own_and_nobodys_children(home: Home) -> None:
    services.up(home, progress=quiet)
    for pid in pids(home).values():
        assert pid is not None
        process = processes.read(pid)
        assert process is not None
        assert process.session == pid != os.getsid(0)
        assert process.parent != os.getpid()
    services.down(home)


@pytest.mark.usefixtures("programs")
def test_two_at_once_start_each_service_once(home: Home) -> None:
    found: list[services.Endpoints] = []
    calls = [
        threading.Thread(target=lambda: found.append(services.up(home, progress=quiet)))
        for _ in range(3)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(30)
    assert len(found) == 3
    assert len(set(found)) == 1
    services.down(home)


@pytest.mark.usefixtures("programs")
def test_a_dead_service_comes_back_on_its_port(home: Home) -> None:
    ends = services.up(home, progress=quiet)
    before = pids(home)
    assert services.keep_alive(home) == []
    assert before["polyaxon"] is not None
    os.kill(before["polyaxon"], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while services.status(home)[1].state != "down":
        assert time.monotonic() < deadline
    assert services.keep_alive(home) == ["polyaxon"]
    assert services.up(home, progress=quiet) == ends
    after = pids(home)
    assert after["polyaxon"] != before["polyaxon"]
    assert after["prefect"] == before["prefect"]
    services.down(home)
    assert services.keep_alive(home) == [], "what was ended on purpose stays down"


@pytest.mark.usefixtures("programs")
def test_ports_stay_the_same_from_one_start_to_the_next(home: Home) -> None:
    first = services.up(home, progress=quiet)
    services.down(home)
    assert services.up(home, progress=quiet) == first
    services.down(home)


@pytest.mark.usefixtures("programs")
def test_a_busy_port_that_was_asked_for_is_bad_input_and_starts_nothing(home: Home) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} asked for prefect is busy"):
            services.up(home, ports=services.Ports(prefect=port), progress=quiet)
    assert {one.state for one in services.status(home)} == {"down"}
    ends = services.up(home, ports=services.Ports(prefect=port), progress=quiet)
    assert ends.prefect_api_url == f"http://127.0.0.1:{port}/api"
    with pytest.raises(BadInput, match=f"already runs on port {port}"):
        services.up(home, ports=services.Ports(prefect=processes.free_port()), progress=quiet)
    services.down(home)


def test_a_recorded_port_that_others_took_is_left_to_them(
    home: Home, programs: dict[str, str]
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        files.write_json(home.services / "ports.json", {"prefect": taken, "polyaxon": taken})
        assert {one.holder for one in services.ports(home)} == {"others"}
        ends = services.up(home, progress=quiet)
        assert {one.holder for one in services.ports(home)} == {"ours"}
        assert str(taken) not in ends.polyaxon_host + ends.prefect_api_url
        assert programs
        services.down(home)
    assert {one.holder for one in services.ports(home)} == {"nobody"}


def test_a_service_that_ends_while_starting_is_told_with_its_last_words(
    home: Home, programs: dict[str, str]
) -> None:
    programs["prefect"] = BROKEN
    with pytest.raises(ServiceDown, match=r"prefect ended while starting: no such database.*log"):
        services.up(home, progress=quiet)
    programs["prefect"] = SERVER
    services.up(home, progress=quiet)
    services.down(home)


def test_a_service_that_is_killed_while_starting_is_started_once_more(
    home: Home, programs: dict[str, str], tmp_path: Path
) -> None:
    mark = tmp_path / "killed"
    programs["prefect"] = (
        f"import os, pathlib; mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists(): mark.touch(); os.kill(os.getpid(), 9)\n" + SERVER
    )
    services.up(home, progress=quiet)
    assert mark.exists()
    assert pids(home)["prefect"] is not None
    services.down(home)


def test_without_its_environment_the_polyaxon_server_is_bad_input(home: Home) -> None:
    with pytest.raises(BadInput, match="memsweep setup"):
        services._command(home, "polyaxon", 1)


def test_a_state_of_another_boot_is_no_running_service(home: Home) -> None:
    mine = processes.read(os.getpid())
    assert mine is not None
    entry = {
        "name": "prefect", "pid": mine.pid, "start_ticks": mine.start_ticks, "sid": mine.session,
        "port": 1, "log": str(Path("log")), "boot_id": "another", "started_at": "",
        "polyaxon_host": "",
    }  # fmt: skip
    files.write_json(home.services / "prefect" / "state.json", entry)
    assert services.status(home)[0].state == "down"
    assert services.down(home) == [], "and nothing of this boot is ended"


@pytest.mark.usefixtures("programs")
def test_there_is_no_endpoint_where_nothing_answers(home: Home) -> None:
    assert services.endpoints(home) is None
    ends = services.up(home, progress=quiet)
    assert services.endpoints(home) == ends
    polyaxon = pids(home)["polyaxon"]
    assert polyaxon is not None
    os.kill(polyaxon, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while services.endpoints(home) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert services.keep_alive(home) == ["polyaxon"], "on the port that was recorded"
    assert services.endpoints(home) == ends
    services.down(home)
    assert services.endpoints(home) is None


@pytest.mark.usefixtures("programs")
def test_slots_are_changed_while_nothing_runs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = supervisor.Folder(home), list[str]()
    services.up(home, progress=quiet)
    assert folder.slots == 1
    before = pids(home)["supervisor"]
    services.up(home, slots=2, progress=quiet)
    assert folder.slots == 2
    monkeypatch.setattr(services, "live_runs", lambda _: ["a run"])
    services.up(home, slots=1, progress=told.append)
    assert folder.slots == 2
    assert "keeps 2 slot(s)" in told[0]
    assert pids(home)["supervisor"] == before, "a restart would stop what waits"
    with pytest.raises(BadInput, match="at least 1"):
        services.up(home, slots=0, progress=quiet)


def test_a_service_whose_record_is_lost_is_found_by_its_mark(home: Home) -> None:
    from tasks.launch.services import _entry
    from tasks.launch.settings import SERVICE_VARIABLE, service_mark

    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={SERVICE_VARIABLE: service_mark(home, "prefect")},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 10
        while (entry := _entry(home, "prefect")) is None:
            assert time.monotonic() < deadline
        assert (entry.pid, entry.sid) == (child.pid, child.pid)
        assert entry.is_alive()
        for damaged in ("", "{}", '{"pid": 1}'):
            state = home.services / "prefect" / "state.json"
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(damaged)
            again = _entry(home, "prefect")
            assert again is not None
            assert again.pid == child.pid
        assert _entry(home, "polyaxon") is None
    finally:
        child.kill()
        child.wait(timeout=10)
    assert _entry(home, "prefect") is None


def schedule(home: Home, **changes: str) -> None:
    """Have something scheduled."""
    one = schedules.Schedule("demo", "demo", "local", "0 2 * * *", "UTC", "/", "")
    schedules.save(home, replace(one, **changes))  # type: ignore[arg-type]


def names(home: Home) -> list[str]:
    return [one.name for one in services.status(home) if one.state == "up"]


@pytest.mark.usefixtures("programs")
def test_the_scheduler_is_a_service_where_something_is_scheduled(home: Home) -> None:
    services.up(home, progress=quiet)
    assert "scheduler" not in names(home)
    schedule(home)
    assert services.status(home)[-1].state == "down", "it is wanted, and told to be down"
    services.up(home, progress=quiet)
    assert names(home) == ["prefect", "polyaxon", "supervisor", "scheduler"]
    services.end_scheduler(home)
    assert names(home) == ["prefect", "polyaxon", "supervisor"]
    services.up(home, progress=quiet)
    assert services.down(home)[0].startswith("scheduler: ended")
    assert schedules.find(home, "demo") is not None, "what is scheduled stays so"


@pytest.mark.usefixtures("programs")
def test_nights_need_the_embedded_prefect_server_whatever_a_run_uses(home: Home) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{used.getsockname()[1]}/api"
        with pytest.raises(ServiceDown, match="does not answer"):
            services.up(home, prefect_api_url=url, progress=quiet)
        assert names(home) == ["polyaxon", "supervisor"]
        schedule(home)
        with pytest.raises(ServiceDown, match="does not answer"):
            services.up(home, prefect_api_url=url, progress=quiet)
    assert names(home) == ["prefect", "polyaxon", "supervisor", "scheduler"]
    services.down(home)


def test_a_night_outlives_the_scheduler_and_is_asked_to_end_by_down(
    home: Home, programs: dict[str, str], tmp_path: Path
) -> None:
    del programs
    schedule(home)
    services.up(home, progress=quiet)
    said = tmp_path / "said"
    code = (
        "import pathlib, signal, sys, time\n"
        f"said = pathlib.Path({str(said)!r})\n"
        # It takes a moment, as stopping and collecting runs does.
        "collect = lambda *_: (time.sleep(0.5), said.write_text('collected'), sys.exit(0))\n"
        "signal.signal(15, collect)\n"
        "print('on', flush=True); time.sleep(60)"
    )
    mark = {settings.SERVICE_VARIABLE: settings.service_mark(home, "night")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | mark, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as night:  # fmt: skip
        assert night.stdout is not None
        night.stdout.readline()
        scheduler = pids(home)["scheduler"]
        assert scheduler is not None
        os.kill(scheduler, signal.SIGKILL)
        while services.keep_alive(home) != ["scheduler"]:
            time.sleep(0.02)
        assert [one.pid for one in services.live_nights(home)] == [night.pid]
        told = services.down(home)
    assert f"night: ended (pid {night.pid})" in told
    assert said.read_text() == "collected"
    assert services.live_nights(home) == []
