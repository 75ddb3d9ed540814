"""Nights whose process is gone are settled here and in Prefect, and only those."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tasks import processes, reconcile, schedules
from tasks.home import Home
from tasks.processes import free_port
from tasks.schedules import Night


class Prefect:
    """As much of a Prefect server as is asked: flow runs by id, and their states."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        prefect = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = prefect.runs.get(self.path.rsplit("/", 1)[1])
                self.answer(404 if found is None else 200, found)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                parts = self.path.split("/")
                if parts[-1] == "set_state":
                    prefect.runs[parts[-2]]["state"] = body["state"]
                    self.answer(201, {})
                else:
                    going = ("PENDING", "RUNNING")
                    flows = [r for r in prefect.runs.values() if r["state"]["type"] in going]
                    self.answer(200, flows if "flow_runs" in self.path else [])

            def answer(self, status: int, value: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/api"

    def knows(self, flow_run_id: str, kind: str, *, minutes: float = 60) -> None:
        at = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")
        self.runs[flow_run_id] = {"id": flow_run_id, "state": {"type": kind, "timestamp": at}}

    def kinds(self) -> dict[str, str]:
        return {name: run["state"]["type"] for name, run in self.runs.items()}


@pytest.fixture
def prefect() -> Iterator[Prefect]:
    one = Prefect()
    threading.Thread(target=one.server.serve_forever, daemon=True).start()
    yield one
    one.server.shutdown()
    one.server.server_close()


def night(home: Home, flow_run_id: str, **changes: Any) -> Night:
    pid = os.getpid()
    alive = Night(flow_run_id, pid, processes.start_ticks(pid), "2026-11-29T02:00:05.000Z")
    schedules.save_night(home, made := replace(alive, **changes))
    return made


def test_only_nights_without_a_process_are_settled(home: Home, prefect: Prefect) -> None:
    night(home, "alive")
    night(home, "killed", start_ticks=1)
    night(home, "ended", start_ticks=1, ended_at="2026-11-29T03:00:00.000Z", verdict="ok")
    for name, kind in (("alive", "RUNNING"), ("killed", "RUNNING"), ("ended", "COMPLETED")):
        prefect.knows(name, kind)
    told: list[str] = []
    dead = reconcile.crash_dead_nights(home, prefect.url, told.append)
    assert [one.flow_run_id for one in dead] == ["killed"]
    assert prefect.kinds() == {"alive": "RUNNING", "killed": "CRASHED", "ended": "COMPLETED"}
    kept = schedules.find_night(home, "killed")
    assert kept is not None
    assert (kept.verdict, kept.message) == ("died", "its process is gone")
    assert reconcile.crash_dead_nights(home, prefect.url, told.append) == [], "told once"


def test_a_night_whose_worker_died_before_it_began_is_settled_after_a_while(
    home: Home, prefect: Prefect
) -> None:
    prefect.knows("long-pending", "PENDING", minutes=6)
    prefect.knows("just-pending", "PENDING", minutes=0)
    told: list[str] = []
    assert reconcile.crash_dead_nights(home, prefect.url, told.append) == []
    assert prefect.kinds() == {"long-pending": "CRASHED", "just-pending": "PENDING"}
    assert ["long-pending" in line for line in told] == [True]


def test_a_night_killed_before_it_told_prefect_its_end_is_settled(
    home: Home, prefect: Prefect
) -> None:
    night(home, "ended", start_ticks=1, ended_at="2026-11-29T03:00:00.000Z", verdict="failed")
    night(home, "going")
    prefect.knows("ended", "RUNNING")
    prefect.knows("going", "RUNNING")
    assert reconcile.crash_dead_nights(home, prefect.url, lambda _: None) == []
    assert prefect.kinds() == {"ended": "CRASHED", "going": "RUNNING"}
    kept = schedules.find_night(home, "ended")
    assert kept is not None
    assert kept.verdict == "failed"


def test_a_server_that_is_away_is_told_and_tried_next_time(home: Home, prefect: Prefect) -> None:
    night(home, "killed", start_ticks=1)
    prefect.knows("killed", "RUNNING")
    told: list[str] = []
    away = f"http://127.0.0.1:{free_port()}/api"
    assert reconcile.crash_dead_nights(home, away, told.append) == []
    assert "could not be settled" in told[0]
    assert len(reconcile.crash_dead_nights(home, prefect.url, told.append)) == 1
