"""What every start begins with: settle what an earlier process left open.

A killed flow leaves a Prefect flow run that says Running for ever, half-built bundles, and sealed
bundles that were never ingested. Runs that ended unseen are adopted by the next flow on their
round; strays and dead runs of this machine are the supervisor's to end, when it starts.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx

from tasks import bundle, processes, record, schedules
from tasks.home import Home
from tasks.launch.settings import POOL
from tasks.rounds import now, rounds_of

DEADLINE_S = 20.0
STALE_S = 3600.0
#: A night is Pending for a second or two; one that stays so had a worker that died on it.
PENDING_S = 300.0


def crash_dead_flows(home: Home, api_url: str, tell: Callable[[str], None]) -> list[str]:
    """Set every flow run (and its task runs) whose process is gone to Crashed; return their ids.

    A server that does not answer is not our failure to measure: it is told, and tried next time.
    """
    settled = []
    with httpx.Client(base_url=api_url, timeout=DEADLINE_S, trust_env=False) as client:
        for round_ in rounds_of(home):
            for flow_run_id in round_.dead_flows():
                try:
                    if _crash(client, flow_run_id):
                        settled.append(flow_run_id)
                        tell(f"Prefect flow run {flow_run_id}: its process is gone, set to Crashed")
                    round_.note_settled(flow_run_id)
                except httpx.HTTPError as error:
                    tell(f"Prefect flow run {flow_run_id}: could not be settled ({error})")
    return settled


def crash_dead_nights(
    home: Home, api_url: str, tell: Callable[[str], None]
) -> list[schedules.Night]:
    """Settle every night whose process is gone, here and in Prefect; return those.

    Also those that Prefect alone takes for open: their worker died before it had started a process,
    or the process before it had told Prefect its end. A server that does not answer is told, and
    tried next time.
    """
    dead = []
    with httpx.Client(base_url=api_url, timeout=DEADLINE_S, trust_env=False) as client:
        try:
            for night in schedules.nights(home):
                if night.ended_at is None and night.died:
                    _crash(client, night.flow_run_id)
                    settled = replace(
                        night, ended_at=now(), verdict="died", message="its process is gone"
                    )
                    schedules.save_night(home, settled)
                    tell(f"night {night.night} of {night.sweep}: its process is gone")
                    dead.append(settled)
            for flow_run_id in _left_open(home, client):
                _crash(client, flow_run_id)
                tell(f"Prefect flow run {flow_run_id}: no process is at it, set to Crashed")
        except httpx.HTTPError as error:
            tell(f"nights could not be settled ({error})")
    return dead


def _left_open(home: Home, client: httpx.Client) -> list[str]:
    """Return the nights' flow runs that no process of this state folder works on."""
    before = (datetime.now(UTC) - timedelta(seconds=PENDING_S)).isoformat()
    answer = client.post(
        "/flow_runs/filter",
        json={
            "work_pools": {"name": {"any_": [POOL]}},
            "flow_runs": {
                "state": {"type": {"any_": ["PENDING", "RUNNING"]}},
                "expected_start_time": {"before_": before},
            },
        },
    )
    answer.raise_for_status()
    return [
        str(one["id"])
        for one in answer.json()
        if not _is_worked_on(home, str(one["id"]))
        and str(one["state"]["timestamp"]).replace("Z", "+00:00") < before
    ]


def _is_worked_on(home: Home, flow_run_id: str) -> bool:
    night = schedules.find_night(home, flow_run_id)
    return night is not None and processes.alive(night.pid, night.start_ticks)


def _crash(client: httpx.Client, flow_run_id: str) -> bool:
    answer = client.get(f"/flow_runs/{flow_run_id}")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return False
    answer.raise_for_status()
    state = answer.json().get("state") or {}
    if state.get("type") in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
        return False
    crashed = {
        "state": {"type": "CRASHED", "name": "Crashed", "message": "the flow's process is gone"},
        "force": True,
    }
    tasks = client.post(
        "/task_runs/filter",
        json={
            "flow_runs": {"id": {"any_": [flow_run_id]}},
            "task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED"]}}},
        },
    )
    tasks.raise_for_status()
    for task in tasks.json():
        client.post(f"/task_runs/{task['id']}/set_state", json=crashed).raise_for_status()
    # Last: a kill in between leaves the flow run to be found again.
    client.post(f"/flow_runs/{flow_run_id}/set_state", json=crashed).raise_for_status()
    return True


def ingest_all(home: Home, tell: Callable[[str], None]) -> None:
    """Take every sealed bundle that is not in the warehouse yet; cheap where there is none."""
    sealed = bundle.all_sealed(home)
    if not sealed:
        return
    report = record.ingest(home, sealed)
    for refused in report.quarantined:
        tell(f"bundle {refused.path}: {refused.reason}")


def drop_half_bundles(home: Home) -> None:
    """Remove staging folders that a killed collector left; the run's outputs are still there.

    One that is younger than :data:`STALE_S` may belong to a collector that is at work.
    """
    for folder in home.bundles.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder)
