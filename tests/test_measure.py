"""A repeat is measured exactly once, whatever dies and whenever; every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import filelock
import pytest
from testkit.planning import surroundings
from testkit.polyaxon import FakePolyaxon

from flows.shipped import find_sweep
from tasks import measure
from tasks.home import Home
from tasks.launch.port import RunView
from tasks.measure import Measuring, find_or_create, wait_until_final
from tasks.plan.plan import PlannedRun, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import open_round
from warehouse.errors import CannotFindOut, ServiceDown

Make = Callable[[FakePolyaxon], tuple[Measuring, PlannedRun]]


@pytest.fixture
def make(home: Home) -> Make:
    where, text = find_sweep("demo")
    sweep = parse_sweep(text, where=where)
    plan = make_plan(sweep, surroundings())

    def build(port: FakePolyaxon) -> tuple[Measuring, PlannedRun]:
        round_, _ = open_round(home, sweep, text, target="local", fresh=False)
        measuring = Measuring(
            home=home,
            round=round_,
            plan=plan,
            port=port,
            operation=lambda run: {"cell": run.cell.cell_key},
            keep_alive=lambda: None,
            queue_s=60.0,
            flow_run_id="flow",
            origin=lambda run: {"who": "tester"},
            tell=lambda text: None,
            poll_s=0.001,
        )
        return measuring, next(iter(plan.runs()))

    return build


def test_the_intent_and_prediction_are_on_disk_before_the_run_is_created(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    seen: list[object] = []
    create = port.create

    def looking(**given: object) -> RunView:
        state = measuring.round.state(run.cell.cell_key, 1)
        assert state is not None
        seen.append((state.run_uuid, state.prediction_sha256))
        assert measuring.round.prediction_path(run.cell.cell_key).is_file()
        return create(**given)  # type: ignore[arg-type]

    port.create = looking  # type: ignore[method-assign]
    view, adopted = find_or_create(measuring, run)
    assert not adopted
    assert seen == [(None, measure.write_prediction(measuring, run))]
    state = measuring.round.state(run.cell.cell_key, 1)
    assert state is not None
    assert state.run_uuid == view.uuid


def test_a_flow_that_died_right_after_create_is_followed_by_an_adoption(make: Make) -> None:
    port = FakePolyaxon(die_after_create=True)
    measuring, run = make(port)
    with pytest.raises(KeyboardInterrupt):
        find_or_create(measuring, run)
    port.die_after_create = False
    view, adopted = find_or_create(measuring, run)
    assert adopted
    assert list(port.runs) == [view.uuid]
    state = measuring.round.state(run.cell.cell_key, 1)
    assert state is not None
    assert state.run_uuid == view.uuid


def test_repeats_do_not_adopt_each_other(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    first, _ = find_or_create(measuring, run)
    second, adopted = find_or_create(measuring, PlannedRun(run.planned, 2))
    assert not adopted
    assert second.uuid != first.uuid


def test_a_prediction_is_never_made_again(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    digest = measure.write_prediction(measuring, run)
    path = measuring.round.prediction_path(run.cell.cell_key)
    before = path.read_bytes()
    assert measure.write_prediction(measuring, run) == digest
    assert path.read_bytes() == before


def test_of_two_runs_for_one_repeat_the_recorded_or_oldest_stays(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    meta = measure.meta_of(measuring, run, 1)
    first = port.create(operation={}, name="a", meta=meta)
    second = port.create(operation={}, name="b", meta=meta)
    assert find_or_create(measuring, run)[0].uuid == first.uuid
    assert port.stopped == [second.uuid]


def test_what_a_repeated_create_left_twice_is_stopped_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    create = port.create

    def twice(**given: Any) -> RunView:
        first = create(**given)
        create(**given)
        return first

    monkeypatch.setattr(port, "create", twice)
    view, adopted = find_or_create(measuring, run)
    assert not adopted
    (double,) = set(port.runs) - {view.uuid}
    assert port.stopped == [double]
    state = measuring.round.state(run.cell.cell_key, 1)
    assert state is not None
    assert state.run_uuid == view.uuid


def test_a_double_that_shows_later_is_stopped_at_the_runs_end(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    double = port.create(operation={}, name="late", meta=view.meta_info)
    port.script[view.uuid] = ["running", "succeeded"]
    assert wait_until_final(measuring, run, view).status == "succeeded"
    assert port.stopped == [double.uuid]


def test_a_recorded_run_that_no_list_shows_is_adopted_unless_it_was_deleted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    with monkeypatch.context() as archived:
        archived.setattr(port, "find", lambda meta: [])
        assert find_or_create(measuring, run) == (view, True)
    del port.runs[view.uuid]
    another, adopted = find_or_create(measuring, run)
    assert not adopted
    assert list(port.runs) == [another.uuid]


@pytest.mark.parametrize("outcome", ["stopped", "lost", "infeasible"])
def test_what_was_not_found_out_is_measured_again_as_a_further_attempt(
    make: Make, outcome: str
) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    first, _ = find_or_create(measuring, run)
    state = measuring.round.state(run.cell.cell_key, 1)
    assert state is not None
    measuring.round.save(replace(state, outcome=outcome, manifest_sha256="0" * 64))
    second, adopted = find_or_create(measuring, run)
    assert not adopted
    assert second.uuid != first.uuid
    assert second.meta_info["attempt"] == "2"
    assert find_or_create(measuring, run) == (second, True)


def test_a_repeat_whose_bundle_is_gone_is_measured_again(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    first, _ = find_or_create(measuring, run)
    state = measuring.round.state(run.cell.cell_key, 1)
    assert state is not None
    measuring.round.save(replace(state, outcome="ok", manifest_sha256="0" * 64))
    second, adopted = find_or_create(measuring, run)
    assert not adopted
    assert (second.uuid != first.uuid, second.meta_info["attempt"]) == (True, "2")


def test_an_outage_is_waited_through(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "OUTAGE_POLL_S", 0.001)
    port = FakePolyaxon(script={"*": ["running", "succeeded"]})
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    look, down = port.view, [3]

    def flaky(run_uuid: str) -> RunView:
        if down[0]:
            down[0] -= 1
            raise ServiceDown("away")
        return look(run_uuid)

    port.view = flaky  # type: ignore[method-assign]
    assert wait_until_final(measuring, run, view).status == "succeeded"
    assert down == [0]


@pytest.mark.parametrize("carried_out", [False, True])
def test_an_outage_while_a_run_is_created_costs_neither_the_run_nor_a_second_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    monkeypatch.setattr(measure, "OUTAGE_POLL_S", 0.001)
    port = FakePolyaxon()
    measuring, run = make(port)
    create, down = port.create, [1]

    def flaky(**given: Any) -> RunView:
        if down[0]:
            down[0] -= 1
            if carried_out:
                create(**given)
            raise ServiceDown("away")
        return create(**given)

    port.create = flaky  # type: ignore[method-assign]
    view, adopted = find_or_create(measuring, run)
    assert adopted is carried_out
    assert list(port.runs) == [view.uuid]


def test_a_cell_whose_turn_to_create_is_late_waits_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "OUTAGE_POLL_S", 0.001)
    monkeypatch.setattr(measure, "CREATE_LOCK_S", 0.01)
    measuring, run = make(FakePolyaxon())
    other = filelock.FileLock(measuring.round.folder / "create.lock")
    other.acquire()
    measuring.tell = lambda text: other.release()
    assert not find_or_create(measuring, run)[1]


def test_a_service_that_cannot_be_restarted_hides_no_stop_request(make: Make) -> None:
    measuring, _ = make(FakePolyaxon())

    def failing() -> None:
        raise CannotFindOut("the port is taken")

    measuring.keep_alive = failing
    measuring.round.ask_stop(after_current=False)
    with pytest.raises(CannotFindOut):
        measuring.tick()
    assert measuring.stop.is_set()


def test_a_stop_request_ends_the_patience(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    measuring.stop.set()

    def down(meta: dict[str, str]) -> list[RunView]:
        raise ServiceDown("away")

    port.find = down  # type: ignore[method-assign]
    with pytest.raises(ServiceDown):
        find_or_create(measuring, run)


def test_a_server_that_is_down_creates_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)

    def down(meta: dict[str, str]) -> list[RunView]:
        raise ServiceDown("down")

    monkeypatch.setattr(measure, "OUTAGE_S", 0.0)
    port.find = down  # type: ignore[method-assign]
    with pytest.raises(ServiceDown):
        find_or_create(measuring, run)
    assert not port.runs


def test_waiting_ends_with_a_final_status(make: Make) -> None:
    port = FakePolyaxon(script={"*": ["compiled", "starting", "running", "running", "succeeded"]})
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    assert wait_until_final(measuring, run, view).status == "succeeded"
    assert not port.stopped


def test_a_status_is_asked_for_as_often_as_the_profile_says(make: Make) -> None:
    port = FakePolyaxon(script={"*": ["running", "succeeded"]})
    measuring, run = make(port)
    waited: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    measuring.stop, measuring.poll_s = Stop(), 7.0
    view, _ = find_or_create(measuring, run)
    wait_until_final(measuring, run, view)
    assert set(waited) == {7.0}


def test_a_run_deleted_in_polyaxon_has_failed(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    del port.runs[view.uuid]
    found = wait_until_final(measuring, run, view)
    assert (found.status, found.is_final, found.reason) == ("failed", True, "Deleted")
    measuring.stop.set()  # and a stop of it is none
    assert wait_until_final(measuring, run, view).reason == "Deleted"


def test_a_stop_request_stops_the_run_and_waits_for_its_end(make: Make) -> None:
    port = FakePolyaxon(script={"*": ["running"] * 5})
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    threading.Timer(0.02, measuring.stop.set).start()
    assert wait_until_final(measuring, run, view).status == "stopped"
    assert port.stopped == [view.uuid]
    assert measuring.round.deadline_of(view.uuid) is None


def test_queueing_has_a_deadline_of_its_own(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    measuring.queue_s = 0.02
    view, _ = find_or_create(measuring, run)
    # A cluster says "starting" of a pod that still waits for a card.
    port.script[view.uuid] = ["starting"] * 1000
    assert wait_until_final(measuring, run, view).status == "stopped"
    assert measuring.round.deadline_of(view.uuid) == ("queued for more than 0 s", False)


def test_a_run_that_outlives_its_time_is_stopped_with_the_reason_on_disk(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    monkeypatch.setattr(measure, "FINAL_GRACE_S", 0.02 - run.cell.limits.run_s)
    view, _ = find_or_create(measuring, run)
    port.script[view.uuid] = ["running"] * 1000
    assert wait_until_final(measuring, run, view).status == "stopped"
    assert measuring.round.deadline_of(view.uuid) == ("running for more than 0 s", True)


def test_a_run_that_waits_for_approval_is_told_and_has_its_own_deadline(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    told: list[str] = []
    measuring.tell = told.append
    measuring.queue_s, measuring.approval_s = 0.02, 0.2
    view, _ = find_or_create(measuring, run)
    port.runs[view.uuid] = (replace(view, status="created", pending="approval"), {})
    began = time.monotonic()
    waiting = replace(view, status="created", pending="approval")
    assert wait_until_final(measuring, run, waiting).status == "stopped"
    assert time.monotonic() - began > 0.15  # not the queue's deadline
    assert any("waits for approval in Polyaxon" in line for line in told)
    assert any("waiting for approval for more than" in line for line in told)


def test_a_stop_that_never_ends_is_an_error_and_not_a_hang(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    measuring.stop.set()
    monkeypatch.setattr(measure, "STOP_GRACE_S", -59.95)
    monkeypatch.setattr(port, "stop", lambda run_uuid: None)
    view, _ = find_or_create(measuring, run)
    with pytest.raises(CannotFindOut, match="was stopped, but is still compiled"):
        wait_until_final(measuring, run, view)


def test_a_flow_that_is_cancelled_in_prefect_stops_its_runs(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    measuring.is_cancelled = lambda: True
    measuring.tick()
    assert wait_until_final(measuring, run, view).status == "stopped"
    assert measuring.cancelled


def test_stop_files_are_noticed_by_the_ticks(make: Make) -> None:
    port = FakePolyaxon()
    measuring, run = make(port)
    view, _ = find_or_create(measuring, run)
    measuring.round.ask_stop(after_current=False)
    measuring.tick()
    assert wait_until_final(measuring, run, view).status == "stopped"
    measuring.round.ask_stop(after_current=True)
    measuring.tick()
    assert measuring.finish_only.is_set()
