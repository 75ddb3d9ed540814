"""The scheduler starts the worker when there is a server, again when it died; a night's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tasks import schedules
from tasks.home import Home
from tasks.launch import scheduler, services
from tasks.schedules import Schedule

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Server:
    """As much of a Prefect server as is asked: its deployments."""

    def __init__(self) -> None:
        self.deployments = ["kept", "removed"]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                found = [{"id": name, "name": name} for name in server.deployments]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def do_DELETE(self) -> None:
                server.deployments.remove(self.path.rsplit("/", 1)[1])
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


LAUNCH = """
import os, sys
from pathlib import Path
from tasks.home import Home
from tasks.launch import night
def become(program, arguments):
    print("becomes", arguments[1:], os.getsid(0) == os.getpid(), flush=True)
    os._exit(0)
os.execv = become
night.main(Home(Path(sys.argv[1])), "small")
"""


def test_a_nights_process_is_on_disk_in_its_own_session_and_prints_to_a_file(home: Home) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(home.root)],
        env=os.environ | {"PREFECT__FLOW_RUN_ID": "f1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    said = schedules.log_file(home, "f1").read_text()
    assert said == "becomes ['-P', '-m', 'prefect.engine'] True\n"
    night = schedules.find_night(home, "f1")
    assert night is not None
    assert (night.sweep, night.died) == ("small", True), "it has ended without a word"
