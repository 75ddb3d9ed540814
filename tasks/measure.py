"""Measuring one repeat of one cell: reuse, adopt or create its Polyaxon run, then wait for its end.

The order is what makes a killed flow harmless: a finished repeat is reused, a run that goes on is
adopted under its UUID, and only then is one created, with the intent on disk before and the UUID
right after. Nothing here knows Prefect, a log line or a table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import filelock

from tasks.canonical import sha256_file
from tasks.files import read_json, write_json
from tasks.home import Home
from tasks.launch.port import PolyaxonPort, RunView
from tasks.plan.plan import Plan, PlannedRun
from tasks.rounds import RepeatState, Round, now
from warehouse.errors import CannotFindOut

POLL_S = 0.5
KEEP_ALIVE_S = 3.0
#: How long a stop may take before we go on: the run's own stop deadline plus the supervisor's.
STOP_GRACE_S = 180.0
#: The time from "nothing left to wait for" to Polyaxon's final status.
FINAL_GRACE_S = 300.0


@dataclass
class Measuring:
    """What one flow process holds while it measures a round."""

    home: Home
    round: Round
    plan: Plan
    port: PolyaxonPort
    operation: Callable[[PlannedRun], dict[str, object]]
    keep_alive: Callable[[], None]
    queue_s: float
    flow_run_id: str
    tell: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    finish_only: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._alive_at = time.monotonic()
        self._alive_lock = threading.Lock()

    def tick(self) -> None:
        """Restart dead local services and notice a stop request; cheap when called often."""
        with self._alive_lock:
            if time.monotonic() - self._alive_at < KEEP_ALIVE_S:
                return
            self._alive_at = time.monotonic()
            self.keep_alive()
            match self.round.stop_asked():
                case "now":
                    self.stop.set()
                case "after-current":
                    self.finish_only.set()


def meta_of(measuring: Measuring, run: PlannedRun, attempt: int) -> dict[str, str]:
    """Return the run's ``meta_info``: what it is found by (tags cannot be, on SQLite)."""
    return {
        "round": measuring.round.id,
        "cell_key": run.cell.cell_key,
        "repeat": str(run.repeat),
        "attempt": str(attempt),
    }


def write_prediction(measuring: Measuring, run: PlannedRun) -> str:
    """Write the cell's prediction if it is not there yet and return its sha256.

    It is made before the run is created and never changed after: a wrong prediction stays wrong.
    """
    path = measuring.round.prediction_path(run.cell.cell_key)
    if read_json(path) is None:
        write_json(path, run.planned.prediction.document(run.cell.cell_key, made_at=now()))
    return sha256_file(path)


def find_or_create(measuring: Measuring, run: PlannedRun) -> tuple[RunView, bool]:
    """Return ``(the repeat's run, whether it was adopted)``.

    Raises :class:`CannotFindOut` when Polyaxon cannot be asked: better no run than two.
    """
    round_, key = measuring.round, run.cell.cell_key
    lock = filelock.FileLock(round_.folder / "create.lock", timeout=120)
    with lock:
        state = round_.state(key, run.repeat) or RepeatState(
            cell_key=key, repeat=run.repeat, attempt=1, run_uuid=None, prediction_sha256=None
        )
        meta = meta_of(measuring, run, state.attempt)
        found = measuring.port.find(meta)
        if len(found) > 1:
            raise CannotFindOut(
                f"{run.cell.label}: Polyaxon knows {len(found)} runs of round {round_.id}, repeat "
                f"{run.repeat}: {', '.join(view.uuid for view in found)}; wanted at most one"
            )
        if found:
            view = found[0]
            if state.run_uuid != view.uuid:
                round_.save(replace(state, run_uuid=view.uuid))
            return view, True
        digest = write_prediction(measuring, run)
        state = replace(state, run_uuid=None, prediction_sha256=digest)
        round_.save(state)
        view = measuring.port.create(
            operation=measuring.operation(run),
            name=f"{measuring.plan.sweep.name}-{key[:12]}-r{run.repeat}",
            meta=meta | {"flow_run": measuring.flow_run_id, "label": run.cell.label},
        )
        round_.save(replace(state, run_uuid=view.uuid))
        return view, False


def wait_until_final(measuring: Measuring, run: PlannedRun, view: RunView) -> RunView:
    """Poll the run until Polyaxon calls it final, and return it as it then is.

    Every wait is bounded: queueing, running and stopping have deadlines of their own, after which
    the run is stopped; a stop that does not come to an end raises :class:`CannotFindOut`.
    """
    started: float | None = None
    stop_until: float | None = None
    since = time.monotonic()
    while not view.is_final:
        measuring.tick()
        moment = time.monotonic()
        if stop_until is None:
            if started is None and view.status in ("starting", "running"):
                started = moment
            reason = _why_stop(measuring, run, moment, since, started)
            if reason:
                measuring.tell(f"{run.cell.label}: stopping ({reason})")
                measuring.port.stop(view.uuid)
                stop_until = moment + run.cell.limits.stop_s + STOP_GRACE_S
        elif moment > stop_until:
            raise CannotFindOut(
                f"run {view.uuid} ({run.cell.label}) was stopped, but is still {view.status} after "
                f"{moment - since:.0f} s; look at: memsweep logs {view.uuid[:8]}"
            )
        # An Event's wait returns at once on stop; a set one must not turn this into a busy loop.
        if stop_until is None:
            measuring.stop.wait(POLL_S)
        else:
            time.sleep(POLL_S)
        view = measuring.port.view(view.uuid)
    return view


def _why_stop(
    measuring: Measuring, run: PlannedRun, moment: float, since: float, started: float | None
) -> str | None:
    if measuring.stop.is_set():
        return "stop was asked"
    if started is None and moment - since > measuring.queue_s:
        return f"queued for more than {measuring.queue_s:.0f} s"
    limit = run.cell.limits.run_s + FINAL_GRACE_S
    if started is not None and moment - started > limit:
        return f"running for more than {limit:.0f} s"
    return None
