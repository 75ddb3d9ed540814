"""Fan-out over slots, stop requests and faults, without a Prefect server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Completed, Crashed
from testkit.planning import surroundings
from testkit.polyaxon import FakePolyaxon

from flows import sweep
from flows.context import Context
from flows.sweep import CellResult, measure_round
from tasks.collect import Origin
from tasks.home import Home
from tasks.measure import Measuring
from tasks.plan.plan import PlannedRun, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import open_round
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

    def build(slots: int) -> Context:
        parsed = parse_sweep(SWEEP, where="x")
        plan = make_plan(parsed, surroundings(slots=slots))
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


@pytest.mark.parametrize("slots", [1, 2])
def test_never_more_runs_than_slots_and_in_the_plans_order(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def body(context: Context, run: PlannedRun) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    began = measuring_with(monkeypatch, body)
    context = make(slots)
    results = measure_round(context)
    assert len(results) == 5
    assert most[0] == slots
    assert began == [run.cell.label for run in context.plan.runs()]


def test_a_stop_request_starts_no_further_cell_and_the_verdict_says_so(
    make: Callable[[int], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: Context, run: PlannedRun) -> None:
        context.round.ask_stop(after_current=True)
        assert context.measuring.finish_only.wait(5)

    began = measuring_with(monkeypatch, body)
    context = make(1)
    results = measure_round(context)
    assert len(began) == 1
    state = sweep._verdict(context.plan, results)
    assert state.is_failed()
    assert "1 of 5 cells as expected; 4 not measured" in (state.message or "")


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

    def interrupted(started: list[Any], context: Context) -> bool:
        if first:
            first.clear()
            return True
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_wait_for_slot", interrupted)
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
    results = measure_round(Context(plan, round_, measuring, origin))
    assert {result.outcome for result in results} == {"infeasible"}
    assert sweep._verdict(plan, results).is_completed()
