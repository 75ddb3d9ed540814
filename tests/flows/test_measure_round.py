"""Fan-out over slots, stop requests and faults, without a Prefect server."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Completed, Crashed
from testkit.planning import surroundings
from testkit.polyaxon import FakePolyaxon

from flows import pending, sweep
from flows.context import Context
from flows.pending import ALIKE, CellResult, Pending
from flows.sweep import Started, measure_one, measure_round, record_infeasible
from tasks import bundle
from tasks.canonical import sha256_file
from tasks.collect import Origin
from tasks.home import Home
from tasks.launch.port import RunView
from tasks.measure import Measuring
from tasks.plan.knowledge import Finished, Knowledge
from tasks.plan.plan import PlannedRun, make_plan
from tasks.plan.spending import Choice, History, Past, choose, last_measured
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, open_round
from warehouse.errors import CannotFindOut

SWEEP = """
name: fan-out
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
experiments:
  - name: e
    vary: {max_num_seqs: [1, 2, 3, 4, 5]}
    points: [{parallel: 1, number: 1}]
"""


class Submitted:
    """What Prefect's thread pool hands back: a future whose result is a state."""

    def __init__(self, future: Future[State[str]]) -> None:
        self.wrapped_future = future

    def wait(self, timeout: float | None = None) -> None:
        self.wrapped_future.exception(timeout)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def make(
    home: Home, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> Callable[[int], Context]:
    def submit(run: PlannedRun, work: Callable[[], str]) -> Any:
        del run

        def as_a_task() -> State[str]:
            try:
                return Completed(message=work())
            except Exception as error:  # noqa: BLE001 - any fault becomes a state, as in Prefect
                return Crashed(message=str(error))

        return Submitted(pool.submit(as_a_task))

    monkeypatch.setattr(sweep, "_submit", submit)
    monkeypatch.setattr(sweep, "SLOT_POLL_S", 0.002)
    monkeypatch.setattr(sweep, "KEEP_ALIVE_S", 0.005)

    def build(slots: int, text: str = SWEEP) -> Context:
        parsed = parse_sweep(text, where="x")
        plan = make_plan(parsed, surroundings(slots=slots))
        round_, _ = open_round(home, parsed, text, target="local", fresh=False)
        origin = Origin("flow", "0" * 64, "local", lambda run: "1" * 64)
        measuring = Measuring(
            home=home,
            round=round_,
            plan=plan,
            port=FakePolyaxon(),
            operation=lambda run: {},
            keep_alive=lambda: None,
            queue_s=60.0,
            flow_run_id="flow",
            origin=origin.document,
            tell=lambda text: None,
        )
        return Context(plan, round_, measuring, origin)

    return build


def measuring_with(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[Context, PlannedRun], None]
) -> list[str]:
    """Replace the measuring of one cell; returns the labels in the order they began."""
    began: list[str] = []

    def one(context: Context, run: PlannedRun, release: Callable[[], None]) -> CellResult:
        began.append(run.cell.label)
        body(context, run)
        release()
        return CellResult(run.cell.label, run.repeat, "u", "ok", as_expected=True, reused=False)

    monkeypatch.setattr(sweep, "measure_one", one)
    return began


class AtOnce:
    """Counts how many runs are measured at the same time at most."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def measure(self) -> None:
        """Be one of them for a moment."""
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.02)
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("slots", [1, 2])
def test_never_more_runs_than_slots_and_in_the_plans_order(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    at_once = AtOnce()

    def body(context: Context, run: PlannedRun) -> None:
        at_once.measure()

    began = measuring_with(monkeypatch, body)
    context = make(slots)
    results = measure_round(context)
    assert len(results) == 5
    assert at_once.most == slots
    assert began == [run.cell.label for run in context.plan.runs(context.round.seed)]


@pytest.mark.parametrize("after_current", [True, False])
def test_a_stop_request_starts_no_further_cell_and_the_round_is_stopped(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch, after_current: bool
) -> None:
    def body(context: Context, run: PlannedRun) -> None:
        context.round.ask_stop(after_current=after_current)
        measuring = context.measuring
        assert (measuring.finish_only if after_current else measuring.stop).wait(5)

    began = measuring_with(monkeypatch, body)
    context = make(1)
    results = measure_round(context)
    assert len(began) == 1
    state = sweep._verdict(context, results)
    assert state.is_cancelled()
    assert state.message == "1 of 5 cells as expected; 4 not measured (stopped)"


def test_a_stop_of_the_last_cells_is_told_too_and_names_what_was_wrong_before(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make(1)
    *_, last = context.plan.runs(context.round.seed)

    def outcome(run: PlannedRun, tried: int) -> str:
        if run != last:
            return "oom" if run.cell.label.endswith("3") else "ok"
        context.round.ask_stop(after_current=False)
        assert context.measuring.stop.wait(5)
        return "stopped"

    monkeypatch.setattr(sweep, "all_alike", lambda results: None)
    ending_with(monkeypatch, outcome)
    state = sweep._verdict(context, measure_round(context))
    assert state.is_cancelled()
    label = last.cell.label
    assert not label.endswith("3")
    assert state.message == f"3 of 5 cells as expected; e/max_num_seqs=3: oom, {label}: stopped"


@pytest.mark.parametrize("last", ["ok", "oom"])
def test_a_stop_that_stopped_nothing_changes_no_verdict(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    context = make(5)
    ended = threading.Barrier(5)

    def outcome(run: PlannedRun, tried: int) -> str:
        if ended.wait(5) == 0:
            context.round.ask_stop(after_current=True)
        assert context.measuring.finish_only.wait(5)
        return last if run.cell.label.endswith("3") else "ok"

    ending_with(monkeypatch, outcome)
    state = sweep._verdict(context, measure_round(context))
    assert (state.is_completed(), state.is_failed()) == (last == "ok", last != "ok")


def test_a_fault_is_raised_and_no_further_cell_is_started(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: Context, run: PlannedRun) -> None:
        raise CannotFindOut("Polyaxon is away")

    began = measuring_with(monkeypatch, body)
    with pytest.raises(CannotFindOut, match="Polyaxon is away"):
        measure_round(make(1))
    assert len(began) == 1


def test_a_task_that_prefect_never_ran_is_noticed(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    context = make(1)
    monkeypatch.setattr(
        sweep, "_submit", lambda run, work: Submitted(pool.submit(lambda: Crashed(message="x")))
    )
    with pytest.raises(CannotFindOut, match="without a result"):
        measure_round(context)


def test_an_interrupt_stops_what_goes_on_and_waits_for_it(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def body(context: Context, run: PlannedRun) -> None:
        assert context.measuring.stop.wait(5)
        ended.append(True)

    measuring_with(monkeypatch, body)
    context = make(1)
    first = [True]

    def interrupted(progress: sweep.Progress, context: Context) -> PlannedRun | None:
        if first:
            first.clear()
            return progress.pending.take()
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_round(context)
    assert ended == [True]


def test_dead_services_are_looked_after_while_the_main_thread_waits(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def body(context: Context, run: PlannedRun) -> None:
        assert looked.wait(5)

    measuring_with(monkeypatch, body)
    context = make(5)
    context.measuring.keep_alive = looked.set
    assert len(measure_round(context)) == 5


def test_results_of_infeasible_cells_need_no_prefect(home: Home, tmp_path: Path) -> None:
    del tmp_path
    parsed = parse_sweep(SWEEP.replace("16777216", "1000000000000"), where="x")
    plan = make_plan(parsed, surroundings())
    round_, _ = open_round(home, parsed, SWEEP, target="local", fresh=False)
    origin = Origin("flow", "0" * 64, "local", lambda run: "1" * 64)
    measuring = Measuring(
        home=home,
        round=round_,
        plan=plan,
        port=FakePolyaxon(),
        operation=lambda run: {},
        keep_alive=lambda: None,
        queue_s=60.0,
        flow_run_id="flow",
        origin=origin.document,
        tell=lambda text: None,
    )
    context = Context(plan, round_, measuring, origin)
    results = measure_round(context)
    assert {result.outcome for result in results} == {"infeasible"}
    assert sweep._verdict(context, results).is_completed()


def ending_with(
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[PlannedRun, int], str],
    *,
    took: float = 0.0,
) -> list[str]:
    """Let each run end as ``outcome(run, how often it was tried before)`` says; returns labels.

    ``took`` is how long each lasts, in its estimated lengths.
    """
    began: list[str] = []

    def one(context: Context, run: PlannedRun, release: Callable[[], None]) -> CellResult:
        how = outcome(run, began.count(run.cell.label))
        began.append(run.cell.label)
        if how == "ok" and run.planned.bisect is None:
            release()
        return CellResult(
            run.cell.label,
            run.repeat,
            "u",
            how,
            as_expected=how == "ok",
            reused=False,
            failure="" if how == "ok" else f"start: tried to allocate {len(began)} GiB",
            transient="lost (its node went)" if how == "lost" else None,
            took_s=took * run.planned.estimate_s,
        )

    monkeypatch.setattr(sweep, "measure_one", one)
    monkeypatch.setattr(pending, "RETRY_AFTER_S", (0.0, 0.0))
    return began


def test_a_lost_run_is_tried_again_and_a_refused_one_is_not(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "e/max_num_seqs=1", "e/max_num_seqs=2"

    def outcome(run: PlannedRun, tried: int) -> str:
        if run.cell.label == first:
            return "ok" if tried else "lost"
        return "refused" if run.cell.label == second else "ok"

    began = ending_with(monkeypatch, outcome)
    results = measure_round(make(1))
    assert began.count(first) == 2
    assert began.count(second) == 1
    assert {r.label: r.outcome for r in results}[first] == "ok"
    assert len(results) == 5


def test_a_run_that_is_lost_again_and_again_ends_the_flow_all_the_same(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(
        monkeypatch, lambda run, tried: "lost" if run.cell.label.endswith("5") else "ok"
    )
    results = measure_round(make(1))
    assert began.count("e/max_num_seqs=5") == 3
    assert [r.outcome for r in results].count("lost") == 1


def test_first_cells_that_all_fail_alike_stop_the_sweep(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "oom")
    context = make(1)
    results = measure_round(context)
    assert len(began) == ALIKE
    said = sweep._verdict(context, results).message or ""
    assert "2 not measured (the first cells all ended alike - oom: start:" in said
    assert "--keep-going" in said


def test_cells_that_fail_each_in_its_own_way_or_after_a_success_stop_nothing(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ending_with(
        monkeypatch, lambda run, tried: "oom" if run.cell.label.endswith(("1", "3")) else "refused"
    )
    measure_round(make(1))
    assert len(own) == 5


def test_whoever_asks_to_keep_going_gets_every_failure(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "oom")
    measure_round(replace(make(1), keep_going=True))
    assert len(began) == 5


def test_cancelling_in_prefect_stops_what_goes_on_and_is_told_as_cancelled(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: Context, run: PlannedRun) -> None:
        context.measuring.is_cancelled = lambda: True
        assert context.measuring.stop.wait(5)

    began = measuring_with(monkeypatch, body)
    context = make(1)
    results = measure_round(context)
    assert len(began) == 1
    state = sweep._verdict(context, results)
    assert state.is_cancelled()
    assert "4 not measured (cancelled in Prefect)" in (state.message or "")


def with_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_a_disk_that_gets_full_lets_the_current_cell_end_and_starts_no_other(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: Context, run: PlannedRun) -> None:
        with_disk(monkeypatch, 10**6)

    began = measuring_with(monkeypatch, body)
    with pytest.raises(CannotFindOut, match=r"1 MB free, wanted .* for the next run"):
        measure_round(make(1))
    assert len(began) == 1


REFUSALS = """
name: frontier
model: tiny-qwen3
repeats: 1
order: stated
server: {max_model_len: 2048, enforce_eager: true}
experiments:
  - name: e
    vary: {gpu_memory_utilization: [0.5, 0.4, 0.3, 0.6]}
    points: [{parallel: 1, number: 1}]
"""


def test_what_another_run_settles_is_not_started_and_says_by_which(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(run: PlannedRun, tried: int) -> str:
        return "ok" if run.cell.label.endswith("0.6") else "refused"

    began = ending_with(monkeypatch, outcome)
    settling(monkeypatch)
    context = make(1, REFUSALS)
    results = {r.label: r for r in measure_round(context)}
    assert began == ["e/gpu_memory_utilization=0.5", "e/gpu_memory_utilization=0.6"]
    known = results["e/gpu_memory_utilization=0.3"]
    assert (known.outcome, known.as_expected) == ("infeasible", False)
    sealed = bundle.load(context.measuring.home.bundles / known.run_uuid)
    assert "refused at gpu_memory_utilization 0.5 already" in str(sealed.manifest["message"])


def on_budget(context: Context, runs: float, **changes: Any) -> Context:
    """Return a context with a budget for so many runs of estimated length."""
    first = next(context.plan.runs())
    return replace(context, budget_minutes=runs * first.planned.estimate_s / 60, **changes)


def test_a_budget_buys_whole_runs_and_ends_cleanly(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=1.0)
    context = on_budget(make(1), 2.5)
    results = measure_round(context)
    assert len(began) == 2
    state = sweep._verdict(context, results)
    assert state.is_completed()
    assert "3 not measured (the budget of 2.44133 slot-minutes, of which 2.0 are" in (
        state.message or ""
    )


@pytest.mark.parametrize(("took", "starts"), [(2.0, 2), (0.5, 5), (5.0, 1)])
def test_a_budget_is_of_what_runs_really_took(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch, took: float, starts: int
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=took)
    context = on_budget(make(1), 4.5)
    results = measure_round(context)
    assert len(began) == starts
    assert sweep._verdict(context, results).is_completed()


def test_every_attempt_is_paid_for_by_the_budget(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(
        monkeypatch, lambda run, tried: "lost" if run.cell.label.endswith("5") else "ok", took=1.0
    )
    context = on_budget(make(1), 5.5)
    measure_round(context)
    assert len(began) == 5
    assert began.count("e/max_num_seqs=5") == 1, "another attempt would have been the sixth run"


def test_adopted_runs_are_paid_for_by_the_budget(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=2.0)
    context = on_budget(make(1), 3.5)
    *_, last = context.plan.runs(context.round.seed)
    begin(context, last)
    ended = sweep.measure_one

    def one(context: Context, run: PlannedRun, release: Callable[[], None]) -> CellResult:
        if run == last:
            begin(context, run, outcome="ok", manifest_sha256="0" * 64)
        return ended(context, run, release)

    monkeypatch.setattr(sweep, "measure_one", one)
    measure_round(context)
    assert began[0] == last.cell.label
    assert len(began) == 2


def test_runs_that_go_on_are_paid_for_as_estimated_until_they_end(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = on_budget(make(3), 2.5)
    at_once = AtOnce()

    def outcome(run: PlannedRun, tried: int) -> str:
        at_once.measure()
        return "ok"

    began = ending_with(monkeypatch, outcome, took=0.1)
    results = measure_round(context)
    assert at_once.most == 2
    assert len(began) == 5, "they took less than that: what is left buys the others"
    assert sweep._verdict(context, results).is_completed()


@pytest.mark.parametrize(
    ("manifest", "seconds"),
    [
        ({"phase": "bench", "started_at": "2026-11-30T01:00:00.000Z",
          "ended_at": "2026-11-30T01:01:30.500Z"}, 90.5),
        ({"phase": "queue", "started_at": "2026-11-30T01:00:00.000Z",
          "ended_at": "2026-11-30T05:00:00.000Z"}, 0.0),
        ({"phase": "collect", "started_at": "2026-11-30T01:00:00.000Z", "ended_at": None}, None),
        ({"phase": "collect", "started_at": None, "ended_at": None}, None),
    ],
)  # fmt: skip
def test_how_long_a_run_took_is_unknown_where_nobody_saw_its_end(
    manifest: dict[str, object], seconds: float | None
) -> None:
    assert sweep._seconds(manifest) == seconds


def test_a_run_whose_end_nobody_saw_is_paid_for_as_long_as_it_was_waited_for(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = on_budget(make(1), 100)
    progress = sweep._begin(context)
    run = progress.pending.runs()[0]

    def lost(*_: object) -> CellResult:
        time.sleep(0.05)
        return CellResult("x", 1, "u", "lost", as_expected=False, reused=False)

    monkeypatch.setattr(sweep, "measure_one", lost)
    sweep._work(context, run, lambda: None, progress)()
    assert progress.spent_s >= 0.05


def test_a_budget_is_spent_on_what_was_never_measured_first(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=1.0)
    context = make(1)
    order = [*context.plan.runs(context.round.seed)]
    past = {
        order[index].cell.setting_key: Past(1, datetime(2026, 11, day, tzinfo=UTC), None, None)
        for index, day in ((0, 3), (1, 2), (3, 1))
    }
    measure_round(on_budget(context, 4.5, history=History(past)))
    wanted = [order[index].cell.label for index in (2, 4, 3, 1)]
    assert began == wanted


def test_the_sentinel_keeps_its_places_on_a_budget(make: Callable[..., Context]) -> None:
    first, *others = make(1).plan.runs()
    at = [replace(first, repeat=repeat, sentinel=True) for repeat in (1, 2, 3)]
    past = Past(1, datetime(2026, 11, 1, tzinfo=UTC), None, None)
    history = History({run.cell.setting_key: past for run in (first, others[0], others[2])})
    runs = [at[0], others[0], others[1], at[1], others[2], others[3], at[2]]
    assert pending.never_measured_first(runs, last_measured(runs, history)) == [
        at[0], others[1], others[3], at[1], others[0], others[2], at[2],
    ]  # fmt: skip


def test_a_budget_leaves_the_repeats_interleaved(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=1.0)
    context = make(1, SWEEP.replace("repeats: 1", "repeats: 2"))
    order = [*context.plan.runs(context.round.seed)]
    first, second = ([run.cell.label for run in order if run.repeat == n] for n in (1, 2))
    old = order[0]
    past = {old.cell.setting_key: Past(1, datetime(2026, 11, 1, tzinfo=UTC), None, None)}
    measure_round(on_budget(context, 10.5, history=History(past)))
    wanted = [[label for label in half if label != old.cell.label] for half in (first, second)]
    assert began == [*wanted[0], old.cell.label, *wanted[1], old.cell.label]


FRONTIER = """
name: frontier
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, enforce_eager: true}
experiments:
  - name: e
    bisect: gpu_memory_utilization
    vary: {gpu_memory_utilization: [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}
    points: [{parallel: 1, number: 1}]
"""


@pytest.mark.parametrize("budget", [2.5, 7.5])
def test_a_budget_starts_the_ends_of_a_bisected_line_before_what_they_settle(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=1.0)
    settling(monkeypatch)
    context = make(1, FRONTIER)
    ends = [*context.plan.runs(context.round.seed)][:2]
    # The night before it was the same: what the ends settled was never measured.
    past = Past(1, datetime(2026, 11, 1, tzinfo=UTC), None, None)
    history = History({run.cell.setting_key: past for run in ends})
    results = measure_round(on_budget(context, budget, history=history))
    assert sorted(began) == ["e/gpu_memory_utilization=0.2", "e/gpu_memory_utilization=0.8"]
    assert len(results) == 7


def test_what_a_budget_buys_is_found_anew_only_on_other_grounds(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = [0.0], list[float]()

    def counted(*arguments: Any) -> Choice:
        asked.append(clock[0])
        return choose(*arguments)

    monkeypatch.setattr(sweep, "choose", counted)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    context = on_budget(make(1), 2.5)
    progress = sweep._begin(context)

    def found_anew() -> bool:
        asked.clear()
        sweep._affordable(context, progress)
        return bool(asked)

    assert not found_anew()
    run = progress.pending.take()
    assert run is not None
    assert found_anew()
    future: Future[State[str]] = Future()
    one: Any = Submitted(future)
    progress.started.append(Started(run, one, threading.Event(), since_s=0.0))
    assert found_anew()
    clock[0] = run.planned.estimate_s / 2  # takes what was estimated
    assert not found_anew()
    clock[0] = 200 * sweep.OVERRUN_STEP_S  # takes longer
    assert found_anew()
    clock[0] += sweep.OVERRUN_STEP_S / 2
    assert not found_anew()
    clock[0] += sweep.OVERRUN_STEP_S / 2
    assert found_anew()
    progress.spend(run, 10.0)
    assert found_anew()
    progress.pending.again(run)
    assert found_anew()
    result = CellResult(run.cell.label, 1, "u", "ok", as_expected=True, reused=False)
    progress.settle(result, Finished("u", run.cell, "ok"))
    assert found_anew()
    future.set_result(Completed())
    assert found_anew()
    assert not found_anew()


def test_without_a_budget_nothing_is_asked_of_it(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("choose", "last_measured", "never_measured_first", "_bought"):
        monkeypatch.delattr(sweep, name)
    began = ending_with(monkeypatch, lambda run, tried: "ok")
    measure_round(make(1))
    assert len(began) == 5


def test_a_stated_order_is_kept_on_a_budget(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok", took=1.0)
    context = make(1, SWEEP + "order: stated\n")
    first, second, *_ = context.plan.runs()
    past = {first.cell.setting_key: Past(1, datetime(2026, 11, 1, tzinfo=UTC), None, None)}
    measure_round(on_budget(context, 5.5, history=History(past)))
    assert began[:2] == [first.cell.label, second.cell.label]


def test_a_round_without_stated_order_is_shuffled_by_its_seed(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "ok")
    context = make(1)
    measure_round(context)
    assert began == [run.cell.label for run in context.plan.runs(context.round.seed)]
    assert context.round.seed is not None


@pytest.mark.parametrize(
    ("observed", "bisect", "free"),
    [
        ("ok", None, True),
        ("refused_or_crashed_at_start", None, False),
        (None, None, False),
        ("ok", "max_num_seqs", False),
    ],
)
def test_a_slot_is_given_on_before_the_bundle_is_sealed_unless_it_may_settle_the_next_run(
    make: Callable[..., Context],
    monkeypatch: pytest.MonkeyPatch,
    observed: str | None,
    bisect: str | None,
    free: bool,
) -> None:
    released = threading.Event()

    def ended(measuring: Measuring, run: PlannedRun, view: RunView) -> RunView:
        return replace(view, outputs={"observed": observed} if observed else {})

    def unsealed(*_: object) -> None:
        raise CannotFindOut("not yet")

    monkeypatch.setattr(sweep, "wait_until_final", ended)
    monkeypatch.setattr(sweep, "collect", unsealed)
    context = make(1)
    run = next(context.plan.runs())
    run = replace(run, planned=replace(run.planned, bisect=bisect))
    with pytest.raises(CannotFindOut, match="not yet"):
        measure_one(context, run, released.set)
    assert released.is_set() is free


def test_no_fault_of_the_services_keeps_a_later_stop_from_being_noticed(
    make: Callable[..., Context],
) -> None:
    context = make(1)
    looked: list[bool] = []
    told: list[str] = []

    def unforeseen() -> None:
        looked.append(True)
        if len(looked) == 3:
            context.round.ask_stop(after_current=False)
        raise KeyError("polyaxon")

    context.measuring.keep_alive = unforeseen
    context.measuring.tell = told.append
    with sweep.keeping_alive(context.measuring):
        assert context.measuring.stop.wait(10)
    assert len(told) == 1


def test_of_what_ended_only_what_broke_is_kept(pool: ThreadPoolExecutor) -> None:
    def started(state: State[str]) -> Started:
        future: Any = Submitted(pool.submit(lambda: state))
        future.wait()
        return Started(run=Any, future=future, ended=threading.Event(), since_s=0.0)  # type: ignore[arg-type]

    well, broken = started(Completed()), started(Crashed())
    progress = sweep.Progress(Pending([]), Knowledge(), [], started=[well, broken])
    progress.forget_ended()
    assert progress.started == [broken]


def begin(context: Context, run: PlannedRun, **facts: Any) -> None:
    """Record what an earlier flow left of a repeat: a run that goes on, or as ``facts`` say."""
    state = RepeatState(run.cell.cell_key, run.repeat, 1, "u", "0" * 64)
    context.round.save(replace(state, **facts))


def sealed(context: Context, run: PlannedRun, outcome: str, attempt: int = 1) -> None:
    """Record that an earlier flow measured a repeat."""
    uuid = f"00000000-0000-4000-8000-{attempt:012d}"
    folder = context.measuring.home.bundles / uuid
    folder.mkdir(parents=True)
    (folder / bundle.MANIFEST).write_text("{}")
    digest = sha256_file(folder / bundle.MANIFEST)
    begin(context, run, attempt=attempt, run_uuid=uuid, outcome=outcome, manifest_sha256=digest)


def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every refusal be for want of blocks, which settles what asks for less memory."""
    monkeypatch.setattr(
        sweep,
        "finished",
        lambda home, cell, uuid, how: Finished(uuid, cell, how, "no_memory_for_cache_blocks"),
    )


def test_what_an_earlier_flow_began_is_adopted_first_whatever_follows_from_others(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "refused")
    settling(monkeypatch)
    context = make(1, REFUSALS)
    first, _, going, _ = context.plan.runs()
    sealed(context, first, "refused")
    begin(context, going)
    results = measure_round(replace(context, budget_minutes=0.001))
    assert began == [going.cell.label]
    # What the finished run settles costs nothing of the budget.
    assert [r.outcome for r in results] == ["refused", "refused", "infeasible"]


REFUSED = SWEEP.replace("16777216", "1000000000000")


def test_a_refused_cell_that_was_measured_all_the_same_keeps_its_result(
    make: Callable[..., Context],
) -> None:
    context = make(1, REFUSED)
    confirmed, wrong, *_ = context.plan.skipped()
    sealed(context, confirmed, "refused")
    sealed(context, wrong, "ok", attempt=2)
    before = context.round.all_finished()
    results = {r.label: r for r in measure_round(context)}
    assert context.round.all_finished() == before
    assert results[confirmed.cell.label].as_expected
    assert not results[wrong.cell.label].as_expected
    assert [r.outcome for r in results.values()].count("infeasible") == 3


def test_a_refused_cell_whose_run_goes_on_is_adopted(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ending_with(monkeypatch, lambda run, tried: "refused")
    context = make(1, REFUSED)
    going = next(context.plan.skipped())
    begin(context, going)
    assert len(measure_round(context)) == 5
    assert began == [going.cell.label]


def test_an_attempt_that_is_not_started_gets_a_number_of_its_own(
    make: Callable[..., Context],
) -> None:
    context = make(1, REFUSED)
    run = next(context.plan.skipped())
    sealed(context, run, "lost", attempt=2)
    first = record_infeasible(context, run)
    state = context.round.state(run.cell.cell_key, run.repeat)
    assert state is not None
    assert (state.attempt, state.outcome) == (3, "infeasible")
    kept = bundle.load(context.measuring.home.bundles / first.run_uuid)
    assert kept.manifest["attempt"] == 3
    shutil.rmtree(kept.folder)  # as a pruned round's
    assert record_infeasible(context, run).run_uuid != first.run_uuid
