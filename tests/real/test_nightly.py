"""A schedule with the real Prefect server, worker and Polyaxon server, on the doubles of engine and
bench: fires twice, overlaps, is late, is stopped and goes on. About 5 minutes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from testkit.doubles import make_home, sweep_text
from testkit.real import Memsweep, wait_for

from tasks import processes, schedules
from tasks.home import Home
from tasks.launch import services

pytestmark = pytest.mark.real

#: Two cells that start this slowly make a night of more than a minute.
BOOT_S = 30.0


class Morning:
    """Takes what webhooks post."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def morning() -> Iterator[Morning]:
    one = Morning()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Memsweep]:
    home = make_home(tmp_path / "home", engine={"boot_s": BOOT_S})
    one = Memsweep(home.root)
    yield one
    one.call("services", "down", timeout=300)
    assert services.live_nights(home) == []


def nights(here: Memsweep) -> dict[str, str]:
    """Return label -> verdict of the nights so far."""
    return {n["night"]: n["verdict"] for n in here.json("status")["nights"]}


def prefect(here: Memsweep, path: str, body: object = None) -> Any:
    ends = services.endpoints(Home(here.home))
    assert ends is not None
    request = urllib.request.Request(
        f"{ends.prefect_api_url}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def start_a_night(here: Memsweep, scheduled: datetime) -> str:
    """Have the deployment run once, scheduled for that time; return the flow run's id."""
    found = prefect(here, f"/deployments/name/{schedules.FLOW}/nightly")
    state = {
        "type": "SCHEDULED",
        "state_details": {"scheduled_time": scheduled.isoformat()},
    }
    made = prefect(here, f"/deployments/{found['id']}/create_flow_run", {"state": state})
    return str(made["id"])


def state_name(here: Memsweep, flow_run_id: str) -> str:
    return str(prefect(here, f"/flow_runs/{flow_run_id}")["state"]["name"])


def cancel_in_prefect(here: Memsweep) -> None:
    """Cancel a night whose runs take longer to stop than Prefect's worker waits."""
    home = Home(here.home)
    make_home(here.home, engine={"boot_s": 5 * BOOT_S})  # longer than the worker's patience
    flow_run_id = start_a_night(here, datetime.now(UTC))
    wait_for("a run", lambda: here.json("status")["running"], timeout=90, poll=1)
    night = schedules.find_night(home, flow_run_id)
    assert night is not None
    supervisor = next(s for s in here.json("status")["services"] if s["name"] == "supervisor")
    os.kill(supervisor["pid"], signal.SIGSTOP)
    try:
        prefect(here, f"/flow_runs/{flow_run_id}/set_state", {"state": {"type": "CANCELLING"}})
        # The worker has killed what it takes for the night.
        wait_for(
            "Cancelled", lambda: state_name(here, flow_run_id) == "Cancelled", timeout=120, poll=1
        )
        assert processes.alive(night.pid, night.start_ticks)
    finally:
        os.kill(supervisor["pid"], signal.SIGCONT)
    label = str(night.night)
    wait_for("its end", lambda: nights(here)[label] == "stopped", timeout=120, poll=1)
    wait_for(
        "its process's end", lambda: not processes.alive(night.pid, night.start_ticks), timeout=60
    )
    assert here.json("status")["running"] == []
    stored = [r["outcome"] for r in here.json("runs")["runs"] if r["round"].endswith(label)]
    assert "stopped" in stored
    assert state_name(here, flow_run_id) == "Cancelled"


def test_nights_fire_overlap_are_missed_and_survive_a_restart(
    here: Memsweep, morning: Morning, tmp_path: Path
) -> None:
    sweep = tmp_path / "nightly.yaml"
    sweep.write_text(sweep_text("nightly", 2))

    def schedule(cron: str) -> None:
        done = here.call(
            "schedule", str(sweep), "--cron", cron, "--webhook", morning.address, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout + done.stderr

    schedule("* * * * *")
    # The first night is measured for more than a minute; the second finds it going.
    wait_for("an overlap", lambda: "skipped" in nights(here).values(), timeout=200, poll=1)
    going = next(n for n in schedules.nights(Home(here.home)) if n.goes_on)
    assert nights(here)[str(going.night)] == "going"
    told = here.json("status")
    assert {row["round"] for row in told["running"]} <= {row["round"] for row in told["rounds"]}
    skipped = next(post for post in morning.posts if post["verdict"] == "skipped")
    assert f"(process {going.pid})" in skipped["message"]

    # Everything ends while a night goes on. What exists is collected, and nothing is unscheduled.
    down = here.call("services", "down", timeout=300)
    assert down.returncode == 0, down.stderr
    assert not processes.alive(going.pid, going.start_ticks)
    assert nights(here)[str(going.night)] == "stopped"
    told = here.json("status")
    assert told["needs"][0]["command"] == "memsweep services up"
    assert told["schedules"][0]["next_times"]

    make_home(here.home, engine={"boot_s": 0.2})
    up = here.call("services", "up", timeout=240)
    assert up.returncode == 0, up.stderr
    assert here.json("status")["schedules"][0]["paused"] is False
    late = start_a_night(here, datetime.now(UTC) - timedelta(hours=7))
    wait_for("a night by cron", lambda: "ok" in nights(here).values(), timeout=120, poll=1)
    wait_for("a missed night", lambda: state_name(here, late) == "Missed", timeout=60, poll=1)
    assert "missed" in [post["verdict"] for post in morning.posts]

    # The interrupted night is started again and goes on in its round: as of the same time.
    schedule("0 0 1 1 *")
    prefect(
        here,
        f"/flow_runs/{going.flow_run_id}/set_state",
        {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True},
    )
    wait_for("the retry", lambda: nights(here)[str(going.night)] == "ok", timeout=90, poll=1)
    rounds = {row["round"]: row for row in here.json("status")["rounds"]}
    (again,) = (row for name, row in rounds.items() if name.endswith(str(going.night)))
    assert again["runs"] == again["finished"] >= 2
    assert again["unexpected"] == 0

    cancel_in_prefect(here)

    artifacts = [one for one in prefect(here, "/artifacts/filter", {}) if one["key"]]
    assert {one["type"] for one in artifacts} == {"table", "markdown"}
    (link, *_) = [one["data"] for one in artifacts if one["key"].endswith("-report")]
    page = Path(unquote(link.partition("(file://")[2].partition(")")[0]))
    assert "<html" in page.read_text()[:200]
    assert (page.parent / "index.html").is_file()
    assert "ok" not in [post["verdict"] for post in morning.posts]

    removed = here.call("schedule", "--remove", "nightly", timeout=120)
    assert removed.returncode == 0, removed.stderr
    told = here.json("status")
    assert told["schedules"] == []
    assert "scheduler" not in [one["name"] for one in told["services"]]
    assert prefect(here, "/deployments/filter", {}) == []
