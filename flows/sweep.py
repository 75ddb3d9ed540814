"""The flow that measures a sweep: reads like a table of contents.

Prefect schedules, shows and cancels; what is true stands in bundles and in Polyaxon's runs. A
flow may die at any moment: the next one reuses what is finished and adopts what goes on.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.context import SPARE_BYTES, Context, Wishes, open_context
from flows.output import say
from flows.pending import CellResult, Key, Pending, all_alike, key_of, never_measured_first
from flows.progress import Going, Standing, shown
from tasks import reconcile, record
from tasks.collect import collect, infeasible_uuid, seal_infeasible
from tasks.glance import Glance
from tasks.measure import (
    KEEP_ALIVE_S,
    Measuring,
    attempt_of,
    find_or_create,
    patiently,
    wait_until_final,
    write_prediction,
)
from tasks.plan.knowledge import Finished, Knowledge, Known
from tasks.plan.plan import PlannedRun
from tasks.plan.spending import History, choose, cost_s, last_measured
from tasks.rounds import RepeatState
from tasks.steps import measure_cell
from tasks.witnesses import finished
from warehouse.errors import CannotFindOut, MemsweepError
from warehouse.registry import Outcome, Phase

#: Far above any number of slots: the slots, not the pool, limit what runs at a time.
#: (Prefect's runners are invariant in their future's type, hence the cast.)
RUNNER = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=64))
#: How long an interrupted flow waits for its runs to stop and to be collected.
WIND_UP_S = 300.0
SLOT_POLL_S = 0.1
#: In such steps a run that takes longer than estimated is charged to a budget, seconds.
OVERRUN_STEP_S = 5.0
#: So many cells that are measured already are told by name.
REUSED_TOLD = 20
#: Name of the flow run's state when everything was measured, but not all came out as expected.
NOT_AS_EXPECTED = "NotAsExpected"


@flow(
    name="measure-sweep",
    flow_run_name="{sweep}",
    task_runner=RUNNER,
    persist_result=False,
)
def measure_sweep(
    sweep: str,
    target: str = "local",
    *,
    fresh: bool = False,
    keep_infeasible: bool = False,
    keep_going: bool = False,
    budget_minutes: float | None = None,
    label: str | None = None,
) -> State[str]:
    """Measure what is missing of a sweep's newest round (or of a new one).

    ``sweep`` is a shipped sweep's name or a file; ``target`` a profile of polyaxonfiles/profiles;
    ``keep_infeasible`` runs even the cells that the prediction refuses; ``keep_going`` goes on
    where the first cells all fail alike; no run is started that by its estimate would exceed
    ``budget_minutes``, the GPU-minutes (slot-minutes on a CPU) this flow may spend; ``label`` takes
    the round of that label in place of the newest.
    """
    wishes = Wishes(
        fresh=fresh,
        keep_infeasible=keep_infeasible,
        keep_going=keep_going,
        budget_minutes=budget_minutes,
        label=label,
    )
    return measure_in_flow(sweep, target, wishes)


def measure_in_flow(sweep: str, target: str, wishes: Wishes) -> State[str]:
    """Measure a sweep inside the Prefect flow run that calls this; see :func:`measure_sweep`."""
    try:
        context = open_context(sweep, target, wishes, flow_run_id=str(flow_run.get_id()))
        with context.round.only_flow():
            return _measure(context)
    except MemsweepError as error:
        # A state, not an exception: Prefect would print a traceback for bad input.
        return Failed(name=type(error).__name__, message=str(error))


def _measure(context: Context) -> State[str]:
    home, round_ = context.measuring.home, context.round
    round_.note_flow(context.measuring.flow_run_id)
    reconcile.drop_half_bundles(home)
    reconcile.ingest_all(home, say)
    results = measure_round(context)
    # What could not be ingested when it was sealed; raises where it still cannot.
    reconcile.ingest_all(home, say)
    return _verdict(context, results)


def _verdict(context: Context, results: list[CellResult]) -> State[str]:
    """Return the flow's final state: what is measured, and what of it is not as expected.

    Somebody's stop is no fault of the sweep, but what came out wrong before it is named.
    """
    plan, measuring = context.plan, context.measuring
    total = sum(1 for _ in plan.runs()) + sum(1 for _ in plan.skipped())
    wrong = [result for result in results if not result.as_expected]
    # What was stopped tells least.
    wrong.sort(key=lambda result: result.outcome == Outcome.STOPPED.value)
    good = len(results) - len(wrong)
    text = f"{good} of {total} cells as expected"
    if wrong:
        text += "; " + ", ".join(f"{r.label}: {r.outcome}" for r in wrong[:5])
    if len(results) < total:
        why = measuring.ended_early or "stopped"
        text += f"; {total - len(results)} not measured ({why})"
    stopped = len(results) < total or any(r.outcome == Outcome.STOPPED.value for r in wrong)
    if measuring.cancelled or (measuring.asked_to_stop and stopped):
        return Cancelled(message=text)
    if good < len(results) or (good < total and not measuring.ended_by_budget):
        return Failed(name=NOT_AS_EXPECTED, message=text)
    return Completed(message=text)


@dataclass(slots=True)
class Started:
    """A cell's task, watched without asking the Prefect server, which may be away for a while."""

    run: PlannedRun
    future: PrefectConcurrentFuture[str]
    ended: threading.Event  # set when the run is over and its slot is free again
    since_s: float  # time.monotonic

    @property
    def holds_slot(self) -> bool:
        """Whether the run may still be using its slot."""
        return not self.ended.is_set() and not self.future.wrapped_future.done()

    def cost_s(self, history: History, moment: float) -> float:
        """Return what the run, which goes on, takes of a budget: as estimated, if not more yet."""
        gpus = max(1, self.run.planned.gpus)
        return max(cost_s(self.run, history), (moment - self.since_s) * gpus)

    @property
    def broke(self) -> bool:
        """Whether the task ended without a result."""
        wrapped = self.future.wrapped_future
        if not wrapped.done():
            return False
        if wrapped.exception() is not None:
            return True
        # Prefect's threads hand back the task run's state, not its value.
        return not cast("State[str]", wrapped.result()).is_completed()


#: All that decides what a budget buys: how often the waiting runs changed, how many results there
#: are (what they settle is known before), and the seconds that are left.
Grounds = tuple[int, int, float]


@dataclass(slots=True)
class Progress:
    """What the main thread and the cells' threads of one flow share."""

    pending: Pending
    knowledge: Knowledge
    results: list[CellResult]
    faults: list[BaseException] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    #: When cells were last measured, by key, as it was before this flow.
    last: Mapping[str, datetime] = field(default_factory=dict)
    #: What an earlier flow began and this one has not adopted yet.
    begun: set[Key] = field(default_factory=set)
    #: What ended runs took, every attempt: seconds times GPUs, or slot-seconds on a CPU.
    spent_s: float = 0.0
    #: What the budget buys and by what that was found (:func:`_affordable`), by one at a time.
    affordable: tuple[Grounds, dict[Key, PlannedRun]] | None = None
    choosing: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, result: CellResult, ended: Finished) -> None:
        """Take in how a run ended; of two threads at once neither may undo the other's."""
        with self._lock:
            self.knowledge.add(ended)
            self.results.append(result)

    def spend(self, run: PlannedRun, took_s: float) -> None:
        """Take in how long a run lasted, whatever came of it."""
        with self._lock:
            self.spent_s += took_s * max(1, run.planned.gpus)

    def forget_ended(self) -> None:
        """Keep of thousands of cells only those that may still end, and those that broke."""
        self.started = [
            one for one in self.started if one.broke or not one.future.wrapped_future.done()
        ]

    @property
    def goes_on(self) -> bool:
        """Whether a cell's thread may still end, and put its run back."""
        return any(not one.future.wrapped_future.done() for one in self.started)


def measure_round(context: Context) -> list[CellResult]:
    """Measure every missing run of the round, slot by slot, and return all results.

    Raises what kept a cell from being measured; no further cell is started then.
    """
    progress = _begin(context)
    with keeping_alive(context.measuring), shown(lambda: _standing(context, progress)):
        try:
            if progress.pending:
                patiently(context.measuring, context.measuring.port.ensure_project)
            while (run := _next(progress, context)) is not None:
                ended = threading.Event()
                work = _work(context, run, ended.set, progress)
                future = _submit(run, work)
                progress.started.append(Started(run, future, ended, time.monotonic()))
            for one in progress.started:
                one.future.wait()
        except BaseException:
            context.measuring.stop.set()
            until = time.monotonic() + WIND_UP_S
            for one in progress.started:
                one.future.wait(timeout=max(0.0, until - time.monotonic()))
            raise
    if progress.faults:
        raise progress.faults[0]
    if any(one.broke for one in progress.started):
        raise CannotFindOut("a cell's task ended without a result; see its run in Prefect")
    return progress.results


def _standing(context: Context, progress: Progress) -> Standing:
    """Return where the round stands, for whoever looks at a terminal."""
    going = [one for one in progress.started if not one.future.wrapped_future.done()]
    results = list(progress.results)
    moment = time.monotonic()
    affordable = _affordable(context, progress)
    waiting = progress.pending.runs() if affordable is None else affordable.values()
    left = sum(run.planned.estimate_s for run in waiting) + sum(
        max(0.0, one.run.planned.estimate_s - (moment - one.since_s)) for one in going
    )
    return Standing(
        done=len(results),
        total=len(results) + len(waiting) + len(going),
        unexpected=sum(not result.as_expected for result in results),
        left_s=left / context.plan.surroundings.slots,
        going=[_going(context, one) for one in going],
    )


def _going(context: Context, one: Started) -> Going:
    cell = one.run.cell
    state = context.round.state(cell.cell_key, one.run.repeat)
    uuid = state.run_uuid if state and state.manifest_sha256 is None else None
    return Going(
        label=cell.label,
        repeat=one.run.repeat,
        load_points=len(cell.setting.load),
        since_s=one.since_s,
        seen=Glance() if uuid is None else context.look(uuid),
    )


def _begin(context: Context) -> Progress:
    """Return what is to be measured, in order, and what is finished and settles.

    First those that an earlier flow began: they are adopted, whatever the plan or another run says
    of them now. Results hold what is finished, and what the plan refuses.
    """
    round_, home, plan = context.round, context.measuring.home, context.plan
    done, known, results = round_.all_finished(), Knowledge(), list[CellResult]()
    begun: list[PlannedRun] = []
    others: list[PlannedRun] = []
    every = [*plan.runs(round_.seed), *plan.skipped()]
    for run in every:
        if (state := done.get(key_of(run))) is not None:
            results.append(_reused(run, state))
            known.add(finished(home, run.cell, str(state.run_uuid), str(state.outcome)))
        else:
            (begun if round_.is_open(*key_of(run)) else others).append(run)
    for result in results[:REUSED_TOLD]:
        say(f"  {result.label}: measured already ({result.outcome}), run {result.run_uuid}")
    if len(results) > REUSED_TOLD:
        say(f"  ... and {len(results) - REUSED_TOLD} more measured already")
    refused = [run for run in others if run.planned.skipped]
    others = [run for run in others if not run.planned.skipped]
    last = {} if context.budget_minutes is None else last_measured(every, context.history)
    # An order that is meant stays; the budget then only says what is left out of it.
    if last and plan.sweep.order != "stated":
        others = never_measured_first(others, last)
    progress = Progress(Pending([*begun, *others]), known, results, last=last)
    progress.begun = {key_of(run) for run in begun}
    bought, missing = _affordable(context, progress), len(progress.pending)
    if bought is not None and len(bought) < missing:
        say(f"  by estimate, {_budget(context)} buys {len(bought)} of {missing} missing runs")
    results += [record_infeasible(context, run) for run in refused]
    return progress


def _budget(context: Context) -> str:
    unit = "GPU" if context.plan.surroundings.device == "cuda" else "slot"
    return f"the budget of {context.budget_minutes:g} {unit}-minutes"


def _affordable(context: Context, progress: Progress) -> dict[Key, PlannedRun] | None:
    """Return the waiting runs that may still be started; ``None`` without a budget: all may.

    By what ended runs took, and what those that go on and those that wait take by estimate. Asked
    many times a second of thousands of runs, hence found anew only on other grounds.
    """
    if context.budget_minutes is None:
        return None
    # Runs that take longer than estimated eat into the budget in steps, not all the time.
    moment = time.monotonic() // OVERRUN_STEP_S * OVERRUN_STEP_S
    with progress.choosing:
        going = [one for one in progress.started if not one.future.wrapped_future.done()]
        left = context.budget_minutes * 60 - progress.spent_s
        left -= sum(one.cost_s(context.history, moment) for one in going)
        # Looked at before what they stand for: what changes meanwhile makes others of them.
        grounds = (progress.pending.changes, len(progress.results), left)
        if progress.affordable is None or progress.affordable[0] != grounds:
            progress.affordable = (grounds, _bought(context, progress, left))
        return progress.affordable[1]


def _bought(context: Context, progress: Progress, left: float) -> dict[Key, PlannedRun]:
    """Return the waiting runs that ``left`` seconds of the budget buy.

    What an earlier flow began is adopted whatever it costs; what finished runs settle costs
    nothing.
    """
    waiting = {key_of(run): run for run in progress.pending.runs()}
    adopted = progress.begun & waiting.keys()
    left -= sum(cost_s(waiting[key], context.history) for key in adopted)
    known = progress.knowledge.known
    costly = [run for key, run in waiting.items() if key not in adopted and known(run) is None]
    out = {key_of(run) for run in choose(costly, context.history, left, progress.last).left_out}
    return {key: run for key, run in waiting.items() if key not in out}


def _next(progress: Progress, context: Context) -> PlannedRun | None:
    """Wait until a run may be started and return it; ``None`` when no further one is to be."""
    measuring = context.measuring
    while not (measuring.stop.is_set() or measuring.finish_only.is_set()):
        progress.forget_ended()
        if any(one.broke for one in progress.started):
            return None
        goes_on = progress.goes_on  # looked at first: a thread puts its run back before it ends
        if not progress.pending and not goes_on:
            return None
        slots = context.plan.surroundings.slots
        if sum(one.holds_slot for one in progress.started) < slots:
            if not context.keep_going and (alike := all_alike(progress.results)):
                measuring.end_early(
                    f"the first cells all ended alike - {alike}; to go on: --keep-going"
                )
                return None
            # What goes on may take less than its estimate: only then the budget is spent.
            affordable = _affordable(context, progress)
            if not goes_on and _is_spent(context, progress, affordable):
                return None
            if (run := progress.pending.take(affordable)) is not None:
                if not _is_to_be_started(context, progress, run):
                    continue
                if (full := _disk_is_full(context, run)) is not None:
                    progress.faults.append(full)
                    return None
                return run
        time.sleep(SLOT_POLL_S)
    return None


def _is_spent(
    context: Context, progress: Progress, affordable: Mapping[Key, PlannedRun] | None
) -> bool:
    """Whether runs wait and the budget buys none of them; notes that it ends the flow."""
    if affordable is None or affordable:
        return False
    context.measuring.budget_spent = True
    context.measuring.ended_early = (
        f"{_budget(context)}, of which {progress.spent_s / 60:.1f} are spent"
    )
    return True


def _is_to_be_started(context: Context, progress: Progress, run: PlannedRun) -> bool:
    """Whether a run is to be adopted or created; records it where another one settles it."""
    progress.begun.discard(key_of(run))
    if context.round.is_open(*key_of(run)):
        return True
    known = progress.knowledge.known(run)
    if known is not None:
        progress.results.append(record_known(context, run, known))
    return known is None


def _disk_is_full(context: Context, run: PlannedRun) -> CannotFindOut | None:
    """Return the fault where a run would not find the disk it needs."""
    root = context.measuring.home.root
    # A run's outputs and its bundle lie beside each other for a while.
    need = 2 * context.history.bundle_bytes(run) + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if free >= need:
        return None
    return CannotFindOut(
        f"{root}: {free / 1e6:,.0f} MB free, wanted {need / 1e6:,.0f} MB for the next run; no "
        "further cell was started; free some and run the sweep again"
    )


@contextlib.contextmanager
def keeping_alive(measuring: Measuring) -> Iterator[None]:
    """Restart dead local services and look for stop requests for as long as the body runs.

    A thread of its own: the main thread may be waiting for Prefect and the cells' threads for
    Polyaxon, just when these are what has to be started again.
    """
    over = threading.Event()

    def watch() -> None:
        said = ""
        while not over.wait(KEEP_ALIVE_S):
            try:
                measuring.tick()
            except Exception as error:  # noqa: BLE001 - were this thread dead, no stop was noticed
                if str(error) != said:
                    said = str(error)
                    measuring.tell(f"services could not be looked at: {said}")

    thread = threading.Thread(target=watch, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)


def _submit(run: PlannedRun, work: Callable[[], str]) -> PrefectConcurrentFuture[str]:
    """Submit a cell's task; quoted, so that Prefect does not look into what ``work`` holds."""
    parameters: dict[str, Any] = {
        "label": run.cell.label,
        "repeat": run.repeat,
        "work": quote(work),
    }
    future: PrefectConcurrentFuture[str] = measure_cell.submit(**parameters)
    return future


def _reused(run: PlannedRun, done: RepeatState) -> CellResult:
    outcome = done.outcome or "unknown"
    return CellResult(
        run.cell.label,
        run.repeat,
        done.run_uuid or "",
        outcome,
        run.planned.as_expected(outcome),
        reused=True,
    )


def _work(
    context: Context, run: PlannedRun, release: Callable[[], None], progress: Progress
) -> Callable[[], str]:
    def work() -> str:
        try:
            began = time.monotonic()
            result = measure_one(context, run, release)
            # Where nobody saw its end it counts for as long as it was waited for.
            waited = time.monotonic() - began
            progress.spend(run, waited if result.took_s is None else result.took_s)
            if not _tried_again(context, run, result, progress.pending):
                home = context.measuring.home
                ended = finished(home, run.cell, result.run_uuid, result.outcome)
                progress.settle(result, ended)
        except BaseException as error:
            progress.faults.append(error)
            raise
        return result.outcome

    return work


def _tried_again(context: Context, run: PlannedRun, result: CellResult, pending: Pending) -> bool:
    """Put a repeat back of which nothing was found out; the attempt's bundle is kept."""
    measuring = context.measuring
    if result.transient is None or measuring.stop.is_set() or measuring.finish_only.is_set():
        return False
    wait = pending.again(run)
    if wait is None:
        say(f"  {run.cell.label}: {result.transient} again; the next run of the sweep tries anew")
        return False
    say(f"  {run.cell.label}: {result.transient}; another attempt in {wait:.0f} s")
    return True


def measure_one(context: Context, run: PlannedRun, release: Callable[[], None]) -> CellResult:
    """Measure one repeat of one cell, collect it, and put it into the warehouse.

    The slot is given on as soon as the run has ended well, so that the next server starts while
    this one's bundle is still being sealed. What else its bundle tells may settle the next run.
    """
    measuring, round_ = context.measuring, context.round
    view, adopted = find_or_create(measuring, run)
    say(f"  {run.cell.label}: run {view.uuid} {'adopted' if adopted else 'created'}")
    view = wait_until_final(measuring, run, view)
    # Otherwise, and after a fault, the slot is free when the task has ended: what it settles is
    # known then, or it is seen to have broken, so that no further cell is started.
    if view.outputs.get("observed") == "ok" and run.planned.bisect is None:
        release()
    state = round_.state(run.cell.cell_key, run.repeat)
    if state is None:
        raise CannotFindOut(f"round {round_.id}: the record of {run.cell.label} is gone")
    bundle = patiently(
        measuring,
        lambda: collect(measuring.home, measuring.port, round_, run, view, state, context.origin),
    )
    outcome = str(bundle.manifest["outcome"])
    round_.save(replace(state, outcome=outcome, manifest_sha256=bundle.manifest_sha256))
    _publish(context, bundle.folder.name)
    expected = run.planned.as_expected(outcome)
    message = str(bundle.manifest.get("message") or "").splitlines()
    said = message[0][:200] if message and outcome != Outcome.OK.value else ""
    say(
        f"  {run.cell.label}: {outcome}"
        + (" as expected" if expected and outcome != Outcome.OK.value else "")
        + (f" - {said}" if said else "")
    )
    phase, cause = bundle.manifest.get("phase"), bundle.manifest.get("transient_cause")
    return CellResult(
        run.cell.label,
        run.repeat,
        view.uuid,
        outcome,
        expected,
        reused=False,
        failure="" if expected else f"{phase}: {said}",
        transient=None if cause is None else str(cause),
        took_s=_seconds(bundle.manifest),
    )


def _seconds(manifest: Mapping[str, object]) -> float | None:
    """Return how long a sealed run lasted: 0 if it never left the queue, ``None`` if unknown."""
    if manifest.get("phase") == Phase.QUEUE.value:
        return 0.0
    began, ended = manifest.get("started_at"), manifest.get("ended_at")
    if began is None or ended is None:
        return None
    length = datetime.fromisoformat(str(ended)) - datetime.fromisoformat(str(began))
    return max(0.0, length.total_seconds())


def record_infeasible(context: Context, run: PlannedRun) -> CellResult:
    """Record a repeat that the prediction refused."""
    return _record_unstarted(context, run, str(run.planned.infeasible), expected=True)


def record_known(context: Context, run: PlannedRun, known: Known) -> CellResult:
    """Record a repeat whose outcome follows from another run's.

    One that would fail is sealed as infeasible with its reason. One that would work has nothing to
    seal: its figures were not wanted, only the frontier, which its witness tells.
    """
    if known.outcome is not Outcome.OK:
        return _record_unstarted(context, run, known.reason, expected=False)
    context.round.note_left_out(run.cell.cell_key, run.repeat, known.run_uuid, known.reason)
    say(f"  {run.cell.label}: left out - {known.reason}")
    return CellResult(
        run.cell.label, run.repeat, known.run_uuid, known.outcome.value, True, reused=True
    )


def _record_unstarted(
    context: Context, run: PlannedRun, reason: str, *, expected: bool
) -> CellResult:
    """Seal and ingest a repeat that is not started, and why: it is a result, but no run."""
    round_, home = context.round, context.measuring.home
    done = round_.sealed(run.cell.cell_key, run.repeat)
    if done is not None and done.outcome == Outcome.INFEASIBLE.value:
        return replace(_reused(run, done), as_expected=expected)
    digest = write_prediction(context.measuring, run)
    state = attempt_of(round_, run)
    uuid = infeasible_uuid(round_, run, state.attempt)
    state = replace(state, run_uuid=uuid, prediction_sha256=digest)
    sealed = seal_infeasible(home, round_, run, state, context.origin, reason)
    outcome = Outcome.INFEASIBLE.value
    round_.save(replace(state, outcome=outcome, manifest_sha256=sealed.manifest_sha256))
    _publish(context, sealed.run_uuid)
    say(f"  {run.cell.label}: skipped as infeasible - {reason}")
    return CellResult(run.cell.label, run.repeat, sealed.run_uuid, outcome, expected, reused=False)


_one_ingest = threading.Lock()


def _publish(context: Context, run_uuid: str) -> None:
    """Ingest and publish one bundle.

    A warehouse that is busy or cannot be written loses nothing: the bundle is taken in later, at
    the latest when the flow ends. One that the warehouse refuses is a fault.
    """
    home = context.measuring.home
    with _one_ingest:
        try:
            report = record.ingest(home, [home.bundles / run_uuid])
        except MemsweepError as error:
            say(f"  run {run_uuid}: sealed, but not in the warehouse yet ({error})")
            return
    if report.quarantined:
        refused = report.quarantined[0]
        raise CannotFindOut(f"run {run_uuid}: refused by the warehouse: {refused.reason}")
