"""The service that fires nights: Prefect's worker, and what keeps everything up between them.

A worker ends at its start when the server does not answer, and nothing starts it again; and between
two nights no flow is there to look after dead services. So the service is this small process: it
restarts what has died, and starts the worker whenever there is a server to ask.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tasks import schedules
from tasks.home import Home
from tasks.launch import services
from tasks.launch.settings import POOL, prefect_environment, service_environment, worker_name
from warehouse.errors import MemsweepError

LOOK_S = 5.0
ANSWER_S = 10.0
#: A worker that ends again and again is not started more often than this.
RESTART_S = 10.0
#: Nights at the same time, of all sweeps: each is a process of its own.
MOST_NIGHTS = 8


class Scheduler:
    """One worker process, watched."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._worker: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._started = -RESTART_S

    def tick(self) -> None:
        """Restart dead services; start the worker where it is not there, or asks another server."""
        try:
            self._look()
        except (MemsweepError, OSError) as error:  # looks again; nothing would start it again
            print(f"services could not be looked at: {error}", flush=True)  # noqa: T201 - its log

    def _look(self) -> None:
        services.keep_alive(self._home)
        url = services.prefect_api_url(self._home)
        if url is None:
            return
        if self._worker is not None and self._worker.poll() is None:
            if url == self._url:
                return
            self._worker.kill()
            self._worker.wait()
        if time.monotonic() - self._started >= RESTART_S:
            drop_removed(self._home, url)
            self._start(url)

    def _start(self, url: str) -> None:
        environment = service_environment(self._home, "scheduler", polyaxon_host="")
        self._worker = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "prefect", "worker", "start",
                "--pool", POOL, "--type", "process", "--name", worker_name(os.getpid()),
                "--limit", str(MOST_NIGHTS), "--install-policy", "never",
            ],
            env=environment | prefect_environment(self._home, url),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._url, self._started = url, time.monotonic()


def drop_removed(home: Home, api_url: str) -> None:
    """Delete Prefect's deployments of schedules that are there no more, so that nothing fires them.

    Its rows of earlier schedulers' workers go too. A server that does not answer is asked again
    before the next worker starts.
    """
    kept = {schedule.name for schedule in schedules.schedules(home)}
    wanted = {"flows": {"name": {"any_": [schedules.FLOW]}}}
    try:
        with httpx.Client(base_url=api_url, timeout=ANSWER_S, trust_env=False) as client:
            answer = client.post("/deployments/filter", json=wanted).raise_for_status()
            for one in answer.json():
                if one["name"] not in kept:
                    client.delete(f"/deployments/{one['id']}").raise_for_status()
            workers = f"/work_pools/{POOL}/workers"
            answer = client.post(f"{workers}/filter", json={})
            for one in answer.json() if answer.is_success else []:  # 404: no pool yet
                if one["name"] != worker_name(os.getpid()):
                    client.delete(f"{workers}/{one['name']}")
    except (httpx.HTTPError, ValueError) as error:
        print(f"removed schedules could not be dropped: {error}", file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    scheduler = Scheduler(Home(parser.parse_args().home))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.is_set():
        scheduler.tick()
        ended.wait(LOOK_S)


if __name__ == "__main__":
    main()
