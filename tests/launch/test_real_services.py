"""Real Polyaxon server, Prefect server and supervisor; small programs as runs (about 2 minutes)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tasks import files, processes
from tasks.home import Home
from tasks.launch import environments, services, supervisor
from tasks.launch.polyaxon import PolyaxonClient
from tasks.launch.port import RunView
from tests.double import programs

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Site:
    """The services of one state folder, and how a flow sees them."""

    def __init__(self, home: Home, ends: services.Endpoints) -> None:
        self.home = home
        self.ends = ends
        self.polyaxon = PolyaxonClient(ends.polyaxon_host)

    def submit(self, name: str, code: str, *, timeout: int = 60) -> str:
        meta = {"cell_key": f"k{time.time_ns()}", "round": "a:b", "repeat": "1", "attempt": "1"}
        operation = programs.operation(code, self.home, timeout=timeout)
        return self.polyaxon.create(operation=operation, name=name, meta=meta).uuid

    def until(self, run: str, *statuses: str, seconds: float = 40) -> RunView:
        deadline = time.monotonic() + seconds
        while True:
            view = self.polyaxon.view(run)
            if view.status in statuses or (view.is_final and not statuses):
                return view
            assert time.monotonic() < deadline, view
            time.sleep(0.1)

    def pid(self, name: str) -> int:
        (found,) = (one.pid for one in services.status(self.home) if one.name == name)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start real services once, in a state folder of their own."""
    shared = Home.find()
    environments.ensure(shared, ("polyaxon-server",), progress=print)
    home = Home(tmp_path_factory.mktemp("state"))
    home.envs.mkdir(parents=True)
    (home.envs / "polyaxon-server").symlink_to(shared.envs / "polyaxon-server")
    yield Site(home, services.up(home, progress=print))
    services.down(home)
    assert {one.state for one in services.status(home)} == {"down"}


def test_a_run_goes_through_with_its_log_outputs_and_files(site: Site, tmp_path: Path) -> None:
    run = site.submit("ok", programs.END)
    view = site.until(run)
    assert [one.type for one in view.conditions] == [
        "created", "compiled", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert view.outputs == {"observed": "ok", "phase": "collect", "message": "m"}
    assert sorted(site.polyaxon.logs(run).splitlines()) == ["run line", "server line"]
    assert site.polyaxon.fetch(run, tmp_path / "into") == ["end.json", "pod.log", "server.log"]
    assert (tmp_path / "into" / "server.log").read_text() == "server line\n"
    assert [one.uuid for one in site.polyaxon.find(view.meta_info)] == [run]
    assert json.loads(site.polyaxon.content(run))["kind"] == "compiled_operation"


def test_a_log_read_early_is_whole_later(site: Site) -> None:
    run = site.submit("log", "import time\nprint('a', flush=True); time.sleep(2); print('b')")
    site.until(run, "running")
    deadline = time.monotonic() + 10
    while site.polyaxon.logs(run) != "a\n":
        assert time.monotonic() < deadline
    site.until(run)
    assert site.polyaxon.logs(run) == "a\nb\n"


def test_a_run_that_left_nothing_has_no_outputs(site: Site, tmp_path: Path) -> None:
    run = site.submit("waits", programs.SLEEP)
    waiting = site.submit("never", programs.SLEEP)
    site.polyaxon.stop(waiting)
    site.polyaxon.stop(run)
    assert site.until(waiting).status == "stopped"
    assert site.polyaxon.fetch(waiting, tmp_path / "into") == []
    assert site.polyaxon.logs(waiting) == ""
    assert site.until(run).status == "stopped"


def test_a_deadline_and_a_stop_are_told_apart(site: Site) -> None:
    late = site.submit("late", programs.SLEEP, timeout=2)
    stopped = site.submit("stopped", programs.SLEEP)
    view = site.until(late)
    assert (view.status, view.reason) == ("failed", "Timeout")
    site.until(stopped, "running")
    site.polyaxon.stop(stopped)
    view = site.until(stopped)
    assert (view.status, view.reason) == ("stopped", "Stop")


def test_forty_runs_created_by_ten_writers_at_once_are_all_there(site: Site) -> None:
    key = f"many{time.time_ns()}x"
    operation = programs.operation("pass", site.home)

    def create(number: int) -> str:
        meta = {"cell_key": key, "round": "r", "repeat": str(number), "attempt": "1"}
        return site.polyaxon.create(operation=operation, name="many", meta=meta).uuid

    with ThreadPoolExecutor(10) as pool:
        made = set(pool.map(create, range(40)))
    found = site.polyaxon.find({"cell_key": key})
    assert {one.uuid for one in found} == made
    assert len(made) == len(found) == 40
    for one in site.polyaxon.active():
        site.polyaxon.stop(one.uuid)


def test_a_killed_supervisor_leaves_its_run_going_and_the_next_ends_it_well(site: Site) -> None:
    run = site.submit("adopted", "import time; time.sleep(4)\n" + programs.END)
    site.until(run, "running")
    record = files.read_json(supervisor.Folder(site.home).record(run))
    assert record is not None
    os.kill(site.pid("supervisor"), signal.SIGKILL)
    time.sleep(0.5)
    assert processes.session(record["sid"], record["start_ticks"]) != []
    assert services.keep_alive(site.home) == ["supervisor"]
    view = site.until(run)
    assert view.status == "succeeded"
    assert [one.type for one in view.conditions].count("running") == 1


def test_a_killed_polyaxon_server_costs_no_run_and_no_status(site: Site) -> None:
    run = site.submit("through", "import time; time.sleep(2)\n" + programs.END)
    site.until(run, "running")
    os.kill(site.pid("polyaxon"), signal.SIGKILL)
    time.sleep(3)
    assert services.keep_alive(site.home) == ["polyaxon"]
    assert site.until(run).status == "succeeded"
    assert site.polyaxon.logs(run).splitlines() == ["run line", "server line"]


def test_the_next_run_starts_soon_after_the_last(site: Site) -> None:
    runs = [site.submit(f"gap{number}", programs.END) for number in range(3)]
    for run in runs:
        site.until(run)
    times = []
    for run in runs:
        ended = files.read_json(supervisor.Folder(site.home).ended(run))
        view = site.polyaxon.view(run)
        started = next(one.at for one in view.conditions if one.type == "running")
        assert ended is not None
        times.append((str(started), str(ended["at"])))
    gaps = [
        (datetime.fromisoformat(start) - datetime.fromisoformat(end)).total_seconds()
        for (_, end), (start, _) in pairwise(times)
    ]
    assert max(gaps) < 2.0, gaps


def test_going_down_stops_runs_even_without_a_living_supervisor(site: Site) -> None:
    going = site.submit("going", programs.SLEEP)
    site.until(going, "running")
    record = files.read_json(supervisor.Folder(site.home).record(going))
    assert record is not None
    os.kill(site.pid("supervisor"), signal.SIGKILL)
    time.sleep(0.3)
    told = services.down(site.home)
    assert any(line.startswith(f"run {going}: ended") for line in told)
    assert processes.session(record["sid"], record["start_ticks"]) == []
    services.up(site.home, progress=print)
    assert site.until(going).status == "stopped"
