"""The environment of every process the project starts, from one place.

The Polyaxon server compiles the paths of a run from its *own* environment, so server, supervisor
and client must be told the same roots; and what is inherited by default carries secrets, a foreign
PYTHONPATH and PYTHONDONTWRITEBYTECODE (which doubles the engine's start). Only names on a list are
passed on.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import tasks
from tasks.home import VARIABLE, Home
from tasks.schedules import schedules
from warehouse.errors import BadInput

LOOPBACK = "127.0.0.1"
#: Prefect's work pool that nights are fired through, and the worker in it.
POOL = "memsweep"

#: Inherited as they are: where programs and libraries are found, language, time zone, certificates,
#: which devices are visible, and what numeric libraries need on some processors. No secrets.
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
)  # fmt: skip

#: SQLite's defaults lose concurrent writes of the embedded server, shown as 405 on POST.
_DATABASE_OPTIONS = json.dumps(
    {
        "timeout": 30,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
)


def inherited() -> dict[str, str]:
    """Return the part of our own environment that is passed on to whatever we start."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def polyaxon_root(home: Home) -> Path:
    """Return the folder that holds everything of the embedded Polyaxon server."""
    return home.services / "polyaxon"


def artifacts_root(home: Home) -> Path:
    """Return the store with one folder a run, named by its UUID without dashes."""
    return polyaxon_root(home) / "artifacts"


def run_outputs(home: Home, run_uuid: str) -> Path:
    """Return the outputs folder of a run on this machine."""
    return artifacts_root(home) / run_uuid.replace("-", "") / "outputs"


def polyaxon_environment(home: Home, host: str | None = None) -> dict[str, str]:
    """Return the variables that server, supervisor and client of Polyaxon share."""
    root = polyaxon_root(home)
    return {
        "POLYAXON_CONTEXT_ROOT": str(root),
        "POLYAXON_HOME": str(root / "home" / ".polyaxon"),
        "POLYAXON_ARTIFACTS_ROOT": str(artifacts_root(home)),
        # Must differ from the store: downloads answer 404 otherwise.
        "POLYAXON_ARCHIVES_ROOT": str(root / "archives"),
        "POLYAXON_OFFLINE_ROOT": str(root / "offline"),
        "POLYAXON_DISABLE_ERRORS_REPORTING": "true",
        "POLYAXON_INTERVALS_COMPATIBILITY_CHECK": "-1",
        **({"POLYAXON_HOST": host} if host else {}),
    }


def prefect_environment(home: Home, api_url: str | None = None) -> dict[str, str]:
    """Return the variables that Prefect's server and its clients share; nothing is sent home."""
    return {
        "PREFECT_HOME": str(home.services / "prefect" / "home"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        # With the default store, slots held when the server dies leak for good.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        **({"PREFECT_API_URL": api_url} if api_url else {}),
    }


#: What a service is found by when its record is lost.
SERVICE_VARIABLE = "MEMSWEEP_SERVICE"


def worker_name(scheduler_pid: int) -> str:
    """Return the name of the worker that the scheduler of this PID starts."""
    return f"{POOL}-{scheduler_pid}"


def service_mark(home: Home, name: str) -> str:
    """Return the value of :data:`SERVICE_VARIABLE` that belongs to this service alone."""
    return f"{home.root}:{name}"


def service_environment(home: Home, name: str, *, polyaxon_host: str) -> dict[str, str]:
    """Return the whole environment of one service: ``prefect``, ``polyaxon``, ``supervisor`` or
    ``scheduler``; what the scheduler has, the processes of its nights have too."""
    common = {
        **inherited(),
        "HOME": str(home.services / name / "home"),
        "PYTHONUNBUFFERED": "1",
        SERVICE_VARIABLE: service_mark(home, name),
    }
    if name == "prefect":
        return common | prefect_environment(home)
    if name == "polyaxon":
        own = {"POLYAXON_DB_OPTIONS": _DATABASE_OPTIONS}
        return common | polyaxon_environment(home) | own
    # The packages may come from a checkout that is not installed.
    own = {"PYTHONPATH": str(Path(tasks.__file__).parents[1])}
    if name == "scheduler":
        own |= {VARIABLE: str(home.root)} | _webhook_addresses(home) | _cluster_access(home)
        return common | prefect_environment(home) | own
    return common | polyaxon_environment(home, polyaxon_host) | own


def night_variables(home: Home) -> dict[str, set[str]]:
    """Return, by sweep, the variables that a schedule names: a webhook's address, a token."""
    from tasks.launch import target

    found: dict[str, set[str]] = {}
    for schedule in schedules(home):
        names = {schedule.webhook_env}
        with contextlib.suppress(BadInput):  # a profile that is gone: the night will tell
            profile = target.load(schedule.target)
            names |= {None if profile.is_embedded else profile.token_env}
        found[schedule.name] = {name for name in names if name}
    return found


def _webhook_addresses(home: Home) -> dict[str, str]:
    """Return the variables that hold the webhooks of what is scheduled, where they are set here."""
    names = [schedule.webhook_env for schedule in schedules(home)]
    return {name: os.environ[name] for name in names if name and name in os.environ}


def _cluster_access(home: Home) -> dict[str, str]:
    """Return the variables by which nights on a cluster find their token, where set here."""
    from tasks.launch import access, target

    found: dict[str, str] = {}
    for schedule in schedules(home):
        with contextlib.suppress(BadInput):  # a profile that is gone: the night will tell
            profile = target.load(schedule.target)
            found |= {} if profile.is_embedded else access.token_environment(profile)
    return found


def client_environment(home: Home, *, prefect_api_url: str, polyaxon_host: str) -> dict[str, str]:
    """Return what a flow's process sets before it imports Prefect or Polyaxon."""
    return polyaxon_environment(home, polyaxon_host) | prefect_environment(home, prefect_api_url)


def run_environment(home: Home) -> dict[str, str]:
    """Return what every local run inherits, before the operation's own variables."""
    return inherited() | {
        "HOME": str(home.cache / "run-home"),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
