"""The scheduler starts the worker when there is a server, again when it died; a night's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from testkit.real import wait_for

from tasks import processes, schedules
from tasks.home import Home
from tasks.launch import night, scheduler, services
from tasks.launch.settings import SERVICE_VARIABLE, service_mark, worker_name
from tasks.schedules import Schedule

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Server:
    """As much of a Prefect server as is asked: its deployments and workers."""

    def __init__(self) -> None:
        self.deployments = ["kept", "removed"]
        self.workers = ["an-earlier-one", worker_name(os.getpid())]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                names = server.workers if "/workers/" in self.path else server.deployments
                found = [{"id": name, "name": name} for name in names]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def do_DELETE(self) -> None:
                names = server.workers if "/workers/" in self.path else server.deployments
                names.remove(self.path.rsplit("/", 1)[1])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    threading.Thread(target=one.http.serve_forever, daemon=True).start()
    yield one
    one.http.shutdown()
    one.http.server_close()


class Here:
    """A scheduler whose workers are small programs."""

    def __init__(self, home: Home) -> None:
        self.scheduler = scheduler.Scheduler(home)
        self.url: str | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.told: list[str] = []

    def tick(self) -> int:
        """Look once; return how many workers were started so far."""
        self.scheduler.tick()
        return len(self.workers)


@pytest.fixture
def here(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    one = Here(home)
    start = subprocess.Popen

    def popen(_command: list[str], *, env: dict[str, str], **more: object) -> object:
        one.told.append(env["PREFECT_API_URL"])
        one.workers.append(start(SLEEP, **more))  # type: ignore[call-overload]
        return one.workers[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(scheduler, "RESTART_S", 0.0)
    monkeypatch.setattr(services, "keep_alive", lambda _home: [])
    monkeypatch.setattr(services, "prefect_api_url", lambda _home: one.url)
    yield one
    for worker in one.workers:
        worker.kill()
        worker.wait(10)


def test_one_worker_lives_as_long_as_there_is_a_server_to_ask(here: Here, server: Server) -> None:
    assert here.tick() == 0, "it would only end at once"
    here.url = server.url
    assert here.tick() == 1
    assert here.tick() == 1
    here.url = None
    assert here.tick() == 1, "a server that is away for a while is the worker's to wait for"
    here.url = server.url
    here.workers[0].kill()
    here.workers[0].wait(10)
    assert here.tick() == 2
    here.url = server.url.replace("127.0.0.1", "localhost")
    assert here.tick() == 3
    assert here.workers[1].poll() is not None
    assert here.told[-1] == here.url


def test_a_worker_that_ends_again_and_again_is_not_started_all_the_time(
    here: Here, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.url = server.url
    here.tick()
    monkeypatch.setattr(scheduler, "RESTART_S", 60.0)
    here.workers[0].kill()
    here.workers[0].wait(10)
    assert here.tick() == 1


def test_a_worker_that_cannot_be_started_is_tried_again(
    here: Here, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    here.url = server.url
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        assert here.tick() == 0
    assert here.tick() == 1


def test_deployments_without_a_schedule_are_dropped_before_a_worker_could_fire_them(
    here: Here, home: Home, server: Server
) -> None:
    schedules.save(home, Schedule("kept", "kept", "local", "0 2 * * *", "UTC", "/", ""))
    here.url = server.url
    here.tick()
    assert server.deployments == ["kept"]
    assert server.workers == [worker_name(os.getpid())]


#: Stands for Prefect's engine: says who it is, and needs a while to end when it is told to.
ENGINE = """
import os, signal, sys, time
def told(*_):
    print("told to end", flush=True)
    time.sleep(0.3)
    print("ended whole", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, told)
leads = os.getsid(0) == os.getpid()
print("engine", os.getpid(), leads, os.environ["MEMSWEEP_SERVICE"], flush=True)
time.sleep(30)
"""


@pytest.fixture
def begin(home: Home, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start nights as the worker does, on an engine of the test's own."""
    package = tmp_path / "packages" / "prefect"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(ENGINE)
    paths = [str(package.parent), str(Path(night.__file__).parents[2])]
    started: list[subprocess.Popen[str]] = []

    def one() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.launch.night", str(home.root), "small"],
                env=os.environ
                | {"PREFECT__FLOW_RUN_ID": "f1", "PYTHONPATH": os.pathsep.join(paths)}
                | {SERVICE_VARIABLE: service_mark(home, "night-start")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        )
        return started[-1]

    yield one
    processes.end(lambda: services.live_nights(home), grace_s=0)
    for process in started:
        process.kill()
        process.communicate()


def said(home: Home) -> list[str]:
    """Return the lines that the night printed."""
    path = schedules.log_file(home, "f1")
    return path.read_text().splitlines() if path.is_file() else []


def test_a_night_is_on_disk_in_its_own_session_and_prints_to_a_file(
    home: Home, begin: Callable[[], subprocess.Popen[str]]
) -> None:
    process = begin()
    wait_for("the engine", lambda: said(home), timeout=30, poll=0.02)
    kept = schedules.find_night(home, "f1")
    assert kept is not None
    assert kept.pid != process.pid
    assert said(home) == [f"engine {kept.pid} True {service_mark(home, 'night')}"]
    assert (kept.sweep, kept.died) == ("small", False)
    assert [one.pid for one in services.live_nights(home)] == [kept.pid]
    process.send_signal(signal.SIGTERM)  # as the worker cancels
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 7
    assert said(home)[1:] == ["told to end", "ended whole"]
    kept = schedules.find_night(home, "f1")
    assert kept is not None
    assert kept.died, "it has ended without a word"


def test_a_night_that_takes_longer_to_stop_than_the_worker_waits_stops_whole(
    home: Home, begin: Callable[[], subprocess.Popen[str]]
) -> None:
    process = begin()
    wait_for("the engine", lambda: said(home), timeout=30, poll=0.02)
    process.send_signal(signal.SIGTERM)
    wait_for("the signal", lambda: len(said(home)) > 1, timeout=30, poll=0.02)
    os.killpg(process.pid, signal.SIGKILL)  # the worker's patience is over
    assert process.wait(timeout=30) == -signal.SIGKILL
    wait_for("its end", lambda: said(home)[-1] == "ended whole", timeout=30, poll=0.02)
    wait_for("nothing left", lambda: not services.live_nights(home), timeout=30, poll=0.02)


def test_a_night_that_is_killed_is_told_as_a_shell_does(
    home: Home, begin: Callable[[], subprocess.Popen[str]]
) -> None:
    process = begin()
    wait_for("the engine", lambda: said(home), timeout=30, poll=0.02)
    processes.send(services.live_nights(home), signal.SIGKILL)
    assert process.wait(timeout=30) == 128 + signal.SIGKILL
