"""A schedule as Prefect holds it: one deployment of the night's flow, fired by our work pool.

What a night's process needs beyond its parameters comes with the scheduler's environment, so that
nothing in Prefect's database goes stale when a port or a folder changes.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists
from prefect.utilities.callables import parameter_schema

from flows.nightly import night
from tasks.home import Home
from tasks.launch.settings import POOL, SERVICE_VARIABLE, service_mark
from tasks.schedules import FLOW, Schedule
from warehouse.errors import BadInput


def deploy(home: Home, schedule: Schedule) -> None:
    """Make the schedule's deployment, or bring it up to date in place; unpauses it.

    Raises:
        BadInput: Prefect takes the cron line or the time zone for no valid one.
    """
    try:
        cron = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    except ValueError as error:
        raise BadInput(
            f"--cron: Prefect refuses {schedule.cron!r} in {schedule.timezone}"
        ) from error
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        client.create_deployment(
            flow_id=client.create_flow_from_name(FLOW),
            name=schedule.name,
            description=f"memsweep: sweep {schedule.sweep} on {schedule.target}",
            schedules=[DeploymentScheduleCreate(schedule=cron, active=True)],
            paused=False,
            parameters=parameters(schedule),
            parameter_openapi_schema=parameter_schema(night).model_dump(exclude_unset=True),
            enforce_parameter_schema=True,
            entrypoint=f"{night.__module__}.{night.fn.__name__}",
            work_pool_name=POOL,
            job_variables=job_variables(home, schedule),
        )


def parameters(schedule: Schedule) -> dict[str, Any]:
    """Return what the night's flow is called with."""
    return {
        "sweep": schedule.sweep,
        "target": schedule.target,
        "max_late_hours": schedule.max_late_hours,
        "budget_minutes": schedule.budget_minutes,
        "webhook": schedule.webhook,
        "webhook_env": schedule.webhook_env,
        "webhook_always": schedule.webhook_always,
    }


def job_variables(home: Home, schedule: Schedule) -> dict[str, Any]:
    """Return how the worker starts a night: see tasks/launch/night.py."""
    command = [sys.executable, "-P", "-m", "tasks.launch.night", str(home.root), schedule.name]
    return {
        "command": shlex.join(command),
        "working_dir": schedule.directory,
        "stream_output": False,
        "env": {SERVICE_VARIABLE: service_mark(home, "night-start")},
    }
