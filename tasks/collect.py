"""From a run that ended to a sealed bundle: fetch its outputs, add what only this side knows."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tasks import bundle
from tasks.bundle import Bundle, Identity
from tasks.canonical import sha256_file
from tasks.capture import startup_log, text
from tasks.capture.failures import Failure
from tasks.causes import transient_cause
from tasks.clock import Clock
from tasks.files import read_json
from tasks.home import Home
from tasks.launch.port import PolyaxonPort, RunUnknown, RunView, is_final
from tasks.outcome import decide_outcome
from tasks.plan.plan import PlannedRun
from tasks.redact import Secrets, clean_folder
from tasks.rounds import RepeatState, Round, now
from warehouse.errors import CannotFindOut, ServiceDown
from warehouse.registry import Outcome, Phase

READ_BYTES = 1 << 20
#: Pause before outputs that have not all arrived are fetched again: twice as long each time, until
#: the longest.
SYNC_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
#: What Polyaxon collected of a run whose own log did not arrive.
POLYAXON_LOG = "polyaxon.log"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who measures, with which code, on which flow run."""

    flow_run_id: str
    flow_lock_sha256: str
    target: str
    template_key: Callable[[PlannedRun], str]  # of component and typed inputs

    def document(self, run: PlannedRun) -> dict[str, object]:
        """Return what is written down before a run is created: whose doing it is."""
        return {
            **code_state(),
            "who": _user(),
            "host": platform.node(),
            "python": platform.python_version(),
            "target": self.target,
            "flow_lock_sha256": self.flow_lock_sha256,
            "prefect_flow_run_id": self.flow_run_id,
            "operation_template_sha256": self.template_key(run),
            "packages": {name: version(name) for name in ("prefect", "polyaxon", "duckdb")},
            "at": now(),
        }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return f"uid {os.getuid()}"


@cache
def code_state() -> dict[str, object]:
    """Return commit and dirtiness of the project's own checkout; both ``None`` where it is none.

    Dirty means changed or untracked files that git does not ignore.
    """
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else None
    status = git("status", "--porcelain") if commit else None
    return {
        "memsweep_version": version("memsweep"),
        "git_commit": commit.strip() if commit else None,
        "git_dirty": None if status is None else bool(status.strip()),
    }


def collect(
    home: Home,
    port: PolyaxonPort,
    round_: Round,
    run: PlannedRun,
    view: RunView,
    state: RepeatState,
    origin: Origin,
) -> Bundle:
    """Seal the bundle of a run that Polyaxon calls final; idempotent.

    Outputs that go on arriving (a cluster syncs them to its store) are waited for, not longer than
    the port says; a run without ``end.json`` is then sealed with what there is, as ``partial``,
    ``lost``, ``stopped`` or ``crashed``. Secrets are taken out of what came from outside, which the
    manifest tells as ``redacted``.
    """
    existing = bundle.sealed(home, view.uuid)
    if existing is not None:
        return existing
    _need_space(home)
    folder = bundle.staging(home, view.uuid)
    end, problems = _fetch(port, view, folder)
    problems += _add_plan(folder, round_, run, state, origin)
    _add_polyaxon(folder, port, view)
    # After the comparison with the run's own hashes: what is changed here arrived whole.
    redacted = clean_folder(folder, Secrets.here())
    end = read_json(folder / "end.json") if end else None
    problems += [f"{name}: left out: it holds a secret" for name, n in redacted.items() if n < 0]
    failure = failure_in(_log(folder))
    outcome, phase, message = decide_outcome(
        end=end,
        polyaxon_status=view.status,
        polyaxon_reason=view.reason,
        failure=failure,
        problems=problems,
        started=any(one.type in ("starting", "running") for one in view.conditions),
    )
    deadline = round_.deadline_of(view.uuid) if outcome is Outcome.STOPPED else None
    cause = None if outcome is Outcome.STOPPED else _cause(view, end, failure)
    if deadline is not None:
        reason, began = deadline
        message = f"stopped by the flow: {reason}"
        # What never had its turn says nothing about the cell.
        outcome, phase = (Outcome.TIMED_OUT, phase) if began else (Outcome.LOST, Phase.QUEUE)
    if cause is not None:
        # Whatever it looked like, it says nothing about the cell.
        outcome, message = Outcome.LOST, f"{cause}: {message}"
    observed = None if end is None else end.get("observed")
    _tell_polyaxon(port, view, end)
    started, ended = _times(folder, end, view)
    return bundle.seal(
        home,
        folder,
        _identity(round_, run, state, view.uuid),
        outcome=outcome,
        phase=phase,
        facts={
            "observed": observed,
            "message": message,
            "transient_cause": cause,
            "reason": None if end is None else end.get("reason"),
            "started_at": started,
            "ended_at": ended,
            "incomplete": problems,
            **({"redacted": redacted} if redacted else {}),
        },
    )


def _fetch(
    port: PolyaxonPort, view: RunView, folder: Path
) -> tuple[dict[str, object] | None, list[str]]:
    """Fetch a run's outputs until all it lists are there, for as long as they may be on their way.

    Returns its ``end.json`` and what did not arrive whole.
    """
    until = time.monotonic() + port.sync_s
    pause = SYNC_PAUSE_S
    while True:
        left = until - time.monotonic()
        try:
            port.fetch(view.uuid, folder)
        except ServiceDown:
            raise
        except RunUnknown as error:
            return None, [f"its outputs went with it: {error}"]
        except CannotFindOut:
            if left <= 0:
                raise
        end = read_json(folder / "end.json")
        problems = _differences(folder, end)
        if left <= 0 or not _is_on_its_way(view, end, problems):
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)
    if not (folder / "server.log").is_file() and (log := _polyaxon_log(port, view)):
        (folder / POLYAXON_LOG).write_text(log, encoding="utf-8")
    return end, problems


def _is_on_its_way(view: RunView, end: dict[str, object] | None, problems: list[str]) -> bool:
    """Whether more of a run's outputs can be expected: it ran, and not all it lists is here."""
    ran = any(one.type in ("starting", "running") for one in view.conditions)
    return ran and (end is None or bool(problems))


def _polyaxon_log(port: PolyaxonPort, view: RunView) -> str:
    """Return the log that Polyaxon collected; empty where there is none to be had."""
    try:
        return port.logs(view.uuid)
    except CannotFindOut:
        return ""


def _tell_polyaxon(port: PolyaxonPort, view: RunView, end: dict[str, object] | None) -> None:
    """Put what the run saw beside it in Polyaxon, where its executor did not: a cluster's agent.

    Only for people who look there: nothing reads it back.
    """
    if end is None or "observed" in view.outputs:
        return
    told = {key: end.get(key) for key in ("observed", "phase", "message")}
    with contextlib.suppress(CannotFindOut):
        port.log_outputs(view.uuid, told)


def _cause(view: RunView, end: dict[str, object] | None, failure: Failure | None) -> str | None:
    if failure is None:
        return transient_cause(view, end, None)
    return transient_cause(view, end, failure.type, failure.text)


def _need_space(home: Home) -> None:
    home.bundles.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home.bundles).free
    if free < 200_000_000:
        raise CannotFindOut(
            f"{home.bundles}: {free / 1e6:.0f} MB free, wanted 200 MB to seal a bundle; free some "
            "and run again: the run's outputs are kept"
        )


def _differences(folder: Path, end: dict[str, object] | None) -> list[str]:
    """Return what of the run's own list of files did not arrive whole."""
    listed = end.get("files") if end else None
    if not isinstance(listed, dict):
        return []
    problems = []
    for name, facts in sorted(listed.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: the run left it, it did not arrive")
        elif sha256_file(path) != facts["sha256"]:
            problems.append(f"{name}: arrived with another content than the run left")
    return problems


def _log(folder: Path) -> Path:
    """Return the log that tells most: the engine's own, else what Polyaxon collected."""
    own = folder / "server.log"
    return own if own.is_file() else folder / POLYAXON_LOG


def failure_in(log: Path) -> Failure | None:
    """Return why the server whose log this is failed; ``None`` where nothing says that it did."""
    if not log.is_file():
        return None
    with log.open("rb") as file:
        return startup_log.parse(text.lines(iter(lambda: file.read(READ_BYTES), b""))).failure


def seal_infeasible(
    home: Home, round_: Round, run: PlannedRun, state: RepeatState, origin: Origin, reason: str
) -> Bundle:
    """Seal the bundle of a repeat that nobody started, and why not; idempotent.

    It has no Polyaxon run, so its UUID is derived from what it is (``state.run_uuid``).
    """
    if state.run_uuid is None:
        raise CannotFindOut(f"{run.cell.label}: no UUID was given to the refused repeat")
    existing = bundle.sealed(home, state.run_uuid)
    if existing is not None:
        return existing
    _need_space(home)
    folder = bundle.staging(home, state.run_uuid)
    _add_plan(folder, round_, run, state, origin)
    at = now()
    return bundle.seal(
        home,
        folder,
        _identity(round_, run, state, state.run_uuid),
        outcome=Outcome.INFEASIBLE,
        phase=Phase.QUEUE,
        facts={
            "observed": None,
            "message": reason,
            "reason": None,
            "started_at": at,
            "ended_at": at,
            "incomplete": [],
        },
    )


def infeasible_uuid(round_: Round, run: PlannedRun, attempt: int) -> str:
    """Return the UUID of an attempt that is never started: always the same for the same one."""
    name = f"memsweep:{round_.id}:{run.cell.cell_key}:{run.repeat}:{attempt}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def _identity(round_: Round, run: PlannedRun, state: RepeatState, run_uuid: str) -> Identity:
    return Identity(
        run_uuid=run_uuid,
        cell_key=run.cell.cell_key,
        setting_key=run.cell.setting_key,
        sweep=round_.sweep_name,
        sweep_sha256=round_.sweep_sha256,
        round=round_.id,
        repeat=run.repeat,
        attempt=state.attempt,
    )


def _add_plan(
    folder: Path, round_: Round, run: PlannedRun, state: RepeatState, origin: Origin
) -> list[str]:
    """Write what was submitted, what was predicted and whose doing it is; return what is wrong.

    The origin is the one of the run's creation; a flow that adopted the run only collected it.
    """
    key = run.cell.cell_key
    (folder / "sweep.yaml").write_text(round_.sweep_text, encoding="utf-8")
    (folder / "cell.json").write_text(run.cell.canonical() + "\n", encoding="utf-8")
    created = read_json(round_.origin_path(key, run.repeat, state.attempt))
    collecting = origin.document(run)
    _write(
        folder / "orchestration.json",
        {
            **(created or collecting),
            "collected": {
                name: collecting[name]
                for name in ("git_commit", "git_dirty", "who", "host", "prefect_flow_run_id", "at")
            },
            "sweep": round_.sweep_name,
            "sweep_sha256": round_.sweep_sha256,
            "round": round_.id,
            "repeat": run.repeat,
            "attempt": state.attempt,
            "sentinel": run.sentinel,
            "prediction_sha256": state.prediction_sha256,
        },
    )
    prediction = round_.prediction_path(key)
    if not prediction.is_file():
        return ["prediction.json: what was predicted before the run is gone"]
    shutil.copyfile(prediction, folder / "prediction.json")
    if sha256_file(folder / "prediction.json") != state.prediction_sha256:
        return ["prediction.json: changed since it was hashed before the run"]
    return []


def _add_polyaxon(folder: Path, port: PolyaxonPort, view: RunView) -> None:
    """Write the compiled operation and the run's history as Polyaxon holds them."""
    try:
        content = port.content(view.uuid)
    except RunUnknown:
        content = ""
    try:
        operation: object = json.loads(content)
    except ValueError:
        operation = content
    _write(folder / "operation.json", operation)
    _write(
        folder / "polyaxon.json",
        {
            "host": port.host,
            "owner": port.owner,
            "project": port.project,
            "run_uuid": view.uuid,
            "status": view.status,
            "reason": view.reason,
            "message": view.message,
            "created_at": view.created_at,
            "meta_info": view.meta_info,
            "conditions": [one.to_json() for one in view.conditions],
        },
    )


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, default=str) + "\n", "utf-8")


def _times(
    folder: Path, end: dict[str, object] | None, view: RunView
) -> tuple[str | None, str | None]:
    """Return start and end as ISO 8601 UTC: the run's own clock, else Polyaxon's."""
    clock = Clock.read(folder / "clock.json")
    if end and clock:
        return clock.utc(end.get("started_s")), clock.utc(end.get("ended_s"))
    stamped = [one for one in view.conditions if one.at]
    if not stamped:
        return None, None
    # The last one is no end where the run was deleted while it went on.
    return stamped[0].at, stamped[-1].at if is_final(stamped[-1].type) else None
