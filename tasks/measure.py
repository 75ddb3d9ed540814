"""Measuring one repeat of one cell: reuse, adopt or create its Polyaxon run, then wait for its end.

The order is what makes a killed flow harmless: a finished repeat is reused, a run that goes on is
adopted under its UUID, and only then is one created, with the intent on disk before and the UUID
right after. Nothing here knows Prefect, a log line or a table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import filelock

from tasks.canonical import sha256_file
from tasks.files import read_json, write_json
from tasks.home import Home
from tasks.launch.port import PolyaxonPort, RunUnknown, RunView
from tasks.plan.plan import Plan, PlannedRun
from tasks.rounds import RepeatState, Round, now
from warehouse.errors import CannotFindOut, ServiceDown

KEEP_ALIVE_S = 1.0
#: How long a stop may take before we go on: the run's own stop deadline plus the supervisor's.
STOP_GRACE_S = 180.0
#: The time from "nothing left to wait for" to Polyaxon's final status.
FINAL_GRACE_S = 300.0
#: How long Polyaxon may be away before the flow gives up, and how often it is asked meanwhile.
OUTAGE_S = 600.0
OUTAGE_POLL_S = 2.0
#: One cell at a time creates; as long as a server that is away lets one of them wait.
CREATE_LOCK_S = 120.0

T = TypeVar("T")


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
    origin: Callable[[PlannedRun], dict[str, object]]
    tell: Callable[[str], None]
    approval_s: float = 8 * 3600.0  # longest wait for a person who has to approve a run
    poll_s: float = 0.5  # how often a run's status is asked for
    is_cancelled: Callable[[], bool] = lambda: False
    stop: threading.Event = field(default_factory=threading.Event)
    finish_only: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False  # in Prefect's UI or by its command
    asked_to_stop: bool = False  # by `memsweep stop`, now or after the current cells
    ended_early: str | None = None  # why no further cell was started
    budget_spent: bool = False  # what was left out did not fit into the budget

    @property
    def ended_by_budget(self) -> bool:
        """Whether everything that the budget bought was measured."""
        return self.budget_spent and not (self.stop.is_set() or self.finish_only.is_set())

    def tick(self) -> None:
        """Notice a stop request and restart dead local services; called every second."""
        match self.round.stop_asked():
            case "now":
                self.asked_to_stop = True
                self.stop.set()
            case "after-current":
                self.asked_to_stop = True
                self.finish_only.set()
        if not self.cancelled and self.is_cancelled():
            self.cancelled = True
            self.ended_early = "cancelled in Prefect"
            self.tell("cancelled in Prefect: stopping the runs and collecting what exists")
            self.stop.set()
        # Last: a service that cannot be restarted must not keep a stop from being noticed.
        self.keep_alive()

    def end_early(self, reason: str) -> None:
        """Let the current cells end and start no further one."""
        self.ended_early = reason
        self.tell(f"no further cell is started: {reason}")
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


def patiently(measuring: Measuring, ask: Callable[[], T]) -> T:
    """Ask Polyaxon, and go on asking while it does not answer, up to :data:`OUTAGE_S`.

    The port has repeated the request already when it gives up; an outage of a few minutes (a
    server that is started anew) must not cost a run of an hour. A stop request ends the patience.
    """
    until = time.monotonic() + OUTAGE_S
    while True:
        try:
            return ask()
        except ServiceDown as error:
            if time.monotonic() > until or measuring.stop.is_set():
                raise
            measuring.tell(f"Polyaxon does not answer, asking again: {error}")
            measuring.stop.wait(OUTAGE_POLL_S)


def find_or_create(measuring: Measuring, run: PlannedRun) -> tuple[RunView, bool]:
    """Return ``(the repeat's run, whether it was adopted)``.

    While Polyaxon is away it is looked for again before it is created again, and the other cells
    have their turn. Raises :class:`CannotFindOut` when Polyaxon cannot be asked: better no run than
    two.
    """

    def turn() -> tuple[RunView, bool]:
        lock = filelock.FileLock(measuring.round.folder / "create.lock", timeout=CREATE_LOCK_S)
        try:
            with lock:
                return _find_or_create(measuring, run)
        except filelock.Timeout as error:
            raise ServiceDown(
                f"{lock.lock_file}: held for {CREATE_LOCK_S:.0f} s by another cell's creation"
            ) from error

    return patiently(measuring, turn)


def _find_or_create(measuring: Measuring, run: PlannedRun) -> tuple[RunView, bool]:
    round_, key = measuring.round, run.cell.cell_key
    state = attempt_of(round_, run)
    meta = meta_of(measuring, run, state.attempt)
    view = _the_one(measuring, state, measuring.port.find(meta)) or _recorded(measuring, state)
    if view is not None:
        if state.run_uuid != view.uuid:
            round_.save(replace(state, run_uuid=view.uuid))
        return view, True
    digest = write_prediction(measuring, run)
    write_json(round_.origin_path(key, run.repeat, state.attempt), measuring.origin(run))
    state = replace(state, run_uuid=None, prediction_sha256=digest)
    round_.save(state)
    operation = measuring.operation(run)
    name = f"{measuring.plan.sweep.name}-{key[:12]}-r{run.repeat}"
    more = {
        "flow_run": measuring.flow_run_id,
        "label": run.cell.label,
        "prediction_sha256": digest,
    }
    view = measuring.port.create(operation=operation, name=name, meta=meta | more)
    # A create whose answer was lost may have been carried out twice.
    view = (
        _the_one(measuring, replace(state, run_uuid=view.uuid), measuring.port.find(meta)) or view
    )
    round_.save(replace(state, run_uuid=view.uuid))
    return view, False


def attempt_of(round_: Round, run: PlannedRun) -> RepeatState:
    """Return the state to go on from: the recorded one, or a further attempt's.

    A repeat whose sealed bundle is gone or changed is measured again: collecting the old run a
    second time would give another bundle than the one in the ledger.
    """
    key = run.cell.cell_key
    state = round_.state(key, run.repeat)
    if state is None:
        return RepeatState(key, run.repeat, attempt=1, run_uuid=None, prediction_sha256=None)
    if state.manifest_sha256 is None:
        return state
    if state.to_be_repeated or round_.sealed(key, run.repeat) is None:
        return RepeatState(
            key, run.repeat, attempt=state.attempt + 1, run_uuid=None, prediction_sha256=None
        )
    return state


def _the_one(measuring: Measuring, state: RepeatState, found: list[RunView]) -> RunView | None:
    """Return the run to adopt: the recorded one, else the oldest; any other is stopped.

    A second one exists when the answer to a create was lost and the server was slow to show it.
    """
    chosen = next((view for view in found if view.uuid == state.run_uuid), None)
    chosen = chosen or (found[0] if found else None)
    for view in found:
        if chosen is not None and view.uuid != chosen.uuid and not view.is_final:
            measuring.tell(f"run {view.uuid} is a double of {chosen.uuid}: stopping it")
            measuring.port.stop(view.uuid)
    return chosen


def _recorded(measuring: Measuring, state: RepeatState) -> RunView | None:
    """Return the recorded run as it is, though no list shows it: Polyaxon lists no archived one."""
    if state.run_uuid is None:
        return None
    try:
        return measuring.port.view(state.run_uuid)
    except RunUnknown:
        return None  # deleted


@dataclass
class _Wait:
    """Since when a run waits for what; each sort of waiting has its own deadline."""

    measuring: Measuring
    run: PlannedRun
    since: float  # when it began to wait for its turn, or for what it waits for now
    started: float | None = None
    pending: str | None = None  # approval and the like: nothing happens until a person acts

    def look(self, view: RunView, moment: float) -> None:
        """Take notice of where the run is now."""
        if view.pending != self.pending:
            if view.pending:
                label, port = self.run.cell.label, self.measuring.port
                self.measuring.tell(
                    f"{label}: run {view.uuid} waits for {view.pending} in Polyaxon ({port.host})"
                )
            self.pending, self.since = view.pending, moment
        # Not "starting": a cluster says so of a pod that still waits for a card or for its model.
        if self.started is None and view.status == "running":
            self.started = moment

    def too_long(self, moment: float) -> str | None:
        """Return why the run is to be stopped now; ``None`` while it may go on."""
        if self.measuring.stop.is_set():
            return "stop was asked"
        waited = moment - (self.started if self.started is not None else self.since)
        if self.started is not None:
            limit = self.run.cell.limits.run_s + FINAL_GRACE_S
            return f"running for more than {limit:.0f} s" if waited > limit else None
        limit = self.measuring.approval_s if self.pending else self.measuring.queue_s
        what = f"waiting for {self.pending}" if self.pending else "queued"
        return f"{what} for more than {limit:.0f} s" if waited > limit else None


def wait_until_final(measuring: Measuring, run: PlannedRun, view: RunView) -> RunView:
    """Poll the run until Polyaxon calls it final, and return it as it then is.

    Every wait is bounded: queueing, waiting for an approval, running and stopping have deadlines of
    their own, after which the run is stopped; a stop that does not come to an end raises
    :class:`CannotFindOut`.
    """
    stop_until: float | None = None
    begun = time.monotonic()
    wait = _Wait(measuring, run, since=begun)
    while not view.is_final:
        moment = time.monotonic()
        if stop_until is None:
            wait.look(view, moment)
            reason = wait.too_long(moment)
            if reason:
                measuring.tell(f"{run.cell.label}: stopping ({reason})")
                if not measuring.stop.is_set():
                    measuring.round.note_deadline(view.uuid, reason, began=wait.started is not None)
                uuid = view.uuid
                with contextlib.suppress(RunUnknown):  # deleted: seen below
                    patiently(measuring, lambda: measuring.port.stop(uuid))  # noqa: B023
                stop_until = moment + run.cell.limits.stop_s + STOP_GRACE_S
        elif moment > stop_until:
            raise CannotFindOut(
                f"run {view.uuid} ({run.cell.label}) was stopped, but is still {view.status} after "
                f"{moment - begun:.0f} s; look at: memsweep logs {view.uuid[:8]}"
            )
        # An Event's wait returns at once on stop; a set one must not turn this into a busy loop.
        if stop_until is None:
            measuring.stop.wait(measuring.poll_s)
        else:
            time.sleep(measuring.poll_s)
        view = _seen_again(measuring, view)
    _stop_doubles(measuring, run, view)
    return view


def _seen_again(measuring: Measuring, view: RunView) -> RunView:
    """Return the run as it now is; one that was deleted in Polyaxon has failed, not its sweep."""
    try:
        return patiently(measuring, lambda: measuring.port.view(view.uuid))
    except RunUnknown:
        words = "the run was deleted in Polyaxon"
        return replace(view, status="failed", is_final=True, reason="Deleted", message=words)


def _stop_doubles(measuring: Measuring, run: PlannedRun, view: RunView) -> None:
    """Stop what a create carried out twice left in the queue, had it shown only later."""
    state = measuring.round.state(run.cell.cell_key, run.repeat)
    if state is not None and state.run_uuid == view.uuid:
        meta = meta_of(measuring, run, state.attempt)
        patiently(measuring, lambda: _the_one(measuring, state, measuring.port.find(meta)))
