"""Anything may be killed at any moment: a clean continuation or a typed outcome, nothing left.

About 6 minutes: six short server starts of the dense tiny model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from testkit.real import Memsweep, wait_for

from tasks import processes
from tasks.files import read_json
from tasks.home import Home
from tasks.launch.supervisor import Folder

pytestmark = pytest.mark.real

SWEEP = """
name: kills
model: tiny-qwen3
order: stated
repeats: 1
server:
  max_model_len: 2048
  kv_cache_memory_bytes: 16777216
  enforce_eager: true
load: {output_tokens: 128, warmup: 1}
experiments:
  - {name: first, points: [{parallel: 2, number: 2}]}
  - {name: second, points: [{parallel: 4, number: 40}]}
  - {name: third, points: [{parallel: 4, number: 48}]}
  - {name: fourth, points: [{parallel: 4, number: 64}]}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "kills.yaml"
    path.write_text(SWEEP)
    return path


def newest_round(memsweep: Memsweep) -> Path:
    rounds = [*(memsweep.home / "rounds").glob("kills-*/round.json")]
    if not rounds:
        return memsweep.home / "rounds" / "none-yet"
    return max(rounds, key=lambda path: json.loads(path.read_text())["opened_at"]).parent


def repeats(memsweep: Memsweep) -> list[dict[str, Any]]:
    found = []
    for path in (newest_round(memsweep) / "repeats").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda state: state["at"])


class Session(NamedTuple):
    """The session of a run's processes, as the supervisor recorded it."""

    sid: int
    start_ticks: int

    def members(self) -> list[processes.Process]:
        return processes.session(self.sid, self.start_ticks)


def session_of(memsweep: Memsweep, run_uuid: str) -> Session | None:
    record = read_json(Folder(Home(memsweep.home)).record(run_uuid))
    return None if record is None else Session(record["sid"], record["start_ticks"])


def under_load(
    memsweep: Memsweep, count: int, *, ignore: tuple[str, ...] = ()
) -> tuple[str, Session]:
    """Wait until the round's ``count``-th run is measuring; return its UUID and session."""

    def look() -> tuple[str, Session] | None:
        states = [s for s in repeats(memsweep) if s["run_uuid"] and not s["manifest_sha256"]]
        states = [s for s in states if s["run_uuid"] not in ignore]
        done = sum(bool(s["manifest_sha256"]) for s in repeats(memsweep))
        if done != count - 1 or not states:
            return None
        uuid = states[0]["run_uuid"]
        session = session_of(memsweep, uuid)
        stores = memsweep.home / "services/polyaxon/artifacts" / uuid.replace("-", "")
        events = stores / "outputs/bench/driver_0.jsonl"
        return (
            (uuid, session)
            if session and events.is_file() and "measure" in events.read_text()
            else None
        )

    found: tuple[str, Session] = wait_for(f"run {count} under load", look, timeout=240)
    return found


def services(memsweep: Memsweep) -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in memsweep.json("status")["services"]}


def prefect_state(memsweep: Memsweep, flow_run_id: str) -> str:
    url = services(memsweep)["prefect"]["url"]
    base = url.removesuffix("/api")
    with urllib.request.urlopen(f"{base}/api/flow_runs/{flow_run_id}", timeout=20) as answer:
        kind: str = json.load(answer)["state"]["type"]
    return kind


def test_kills_of_everything_lose_nothing(memsweep: Memsweep, sweep: Path, tmp_path: Path) -> None:
    first = memsweep.start("run", str(sweep), "--fresh", log=tmp_path / "first.log")
    second_run, session = under_load(memsweep, 2)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=30)
    assert session.members(), "the run must go on without its flow"
    flow_run = json.loads((newest_round(memsweep) / "flows.jsonl").read_text().splitlines()[0])

    log = tmp_path / "second.log"
    again = memsweep.start("run", str(sweep), log=log)
    wait_for("adoption", lambda: f"run {second_run} adopted" in log.read_text(), timeout=60)
    assert "first: measured already (ok)" in log.read_text()
    assert prefect_state(memsweep, flow_run["flow_run_id"]) == "CRASHED"

    under_load(memsweep, 3)
    for name in ("supervisor", "polyaxon", "prefect"):
        os.kill(services(memsweep)[name]["pid"], signal.SIGKILL)

    _, session = under_load(memsweep, 4)
    # In the last cell nothing but waiting is left for the flow to do.
    os.kill(services(memsweep)["polyaxon"]["pid"], signal.SIGKILL)
    engine = [one.pid for one in session.members() if "Engine" in one.name]
    assert len(engine) == 1
    os.kill(engine[0], signal.SIGKILL)
    code = again.wait(timeout=400)
    print(log.read_text())
    assert code == 1
    assert "Traceback" not in log.read_text()
    assert "3 of 4 cells as expected; fourth: crashed" in log.read_text()
    assert not session.members()

    states = repeats(memsweep)
    outcomes = [s["outcome"] for s in sorted(states, key=lambda s: s["at"])]
    assert sorted(outcomes) == ["crashed", "ok", "ok", "ok"]
    stored = [r for r in memsweep.json("runs")["runs"] if r["round"] == newest_round(memsweep).name]
    assert sorted(r["run_uuid"] for r in stored) == sorted(s["run_uuid"] for s in states)


def test_ctrl_c_stops_collects_and_exits_130(
    memsweep: Memsweep, sweep: Path, tmp_path: Path
) -> None:
    log = tmp_path / "ctrl-c.log"
    process = memsweep.start("run", str(sweep), "--fresh", log=log)
    run, session = under_load(memsweep, 1)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=120)
    print(log.read_text())
    assert code == 130
    assert "Traceback" not in log.read_text()
    assert not session.members()
    stored = {r["run_uuid"]: r["outcome"] for r in memsweep.json("runs")["runs"]}
    assert stored[run] == "stopped"
    proof = json.loads((memsweep.home / "bundles" / run / "stop.json").read_text())
    assert proof["left"] == []
    assert all(state["state"] == "up" for state in services(memsweep).values())

    # What was interrupted is measured again, as a further attempt.
    again = memsweep.start("run", str(sweep), log=tmp_path / "again.log")
    second, _ = under_load(memsweep, 1)
    assert second != run
    again.send_signal(signal.SIGINT)
    assert again.wait(timeout=120) == 130
    attempts = {r["run_uuid"]: r["attempt"] for r in memsweep.json("runs")["runs"]}
    assert (attempts[run], attempts[second]) == (1, 2)


def test_services_down_leaves_no_process_and_no_port(memsweep: Memsweep) -> None:
    before = services(memsweep)
    assert memsweep.call("services", "down", timeout=300).returncode == 0
    for state in before.values():
        assert not state["pid"] or not processes.alive(state["pid"], None), state
    assert {s["state"] for s in services(memsweep).values()} == {"down"}
    ports = {state["url"].split(":")[2].split("/")[0] for state in before.values() if state["url"]}
    assert not [port for port in ports if processes.listening(int(port))]
