"""From a planned cell through the run's own code (against the doubles) to the warehouse and back.

Everything but vLLM, EvalScope and Polyaxon is the real thing; about 10 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from testkit.planning import surroundings
from testkit.polyaxon import FakePolyaxon

from flows.context import Context
from flows.sweep import measure_one, record_infeasible
from tasks import bundle
from tasks.collect import Origin
from tasks.home import Home
from tasks.launch.port import RunView
from tasks.measure import Measuring, write_prediction
from tasks.plan.plan import PlannedRun, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import open_round
from tests.double.engine import MODEL_REVISION
from tests.double.runs import PodRun

SWEEP = """
name: pipeline
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
sampling: {server_interval_s: 0.05, process_interval_s: 0.2}
load: {output_tokens: 16, warmup: 1}
experiments:
  - name: fits
    points: [{parallel: 2, number: 4}]
  - name: does-not-fit
    server: {max_model_len: 32768}
    points: [{parallel: 2, number: 4}]
"""


@pytest.fixture
def context(home: Home) -> Context:
    sweep = parse_sweep(SWEEP, where="x")
    plan = make_plan(sweep, surroundings(revision=lambda name: MODEL_REVISION))
    round_, _ = open_round(home, sweep, SWEEP, target="local", fresh=False)
    flow = "00000000-0000-4000-8000-0000000000ff"
    origin = Origin(flow, "0" * 64, "local", lambda run: "1" * 64)
    measuring = Measuring(
        home=home,
        round=round_,
        plan=plan,
        port=FakePolyaxon(script={"*": ["running", "succeeded"]}),
        operation=lambda run: {"cell": run.cell.cell_key},
        keep_alive=lambda: None,
        queue_s=60.0,
        flow_run_id=flow,
        origin=origin.document,
        tell=lambda text: None,
    )
    return Context(plan, round_, measuring, origin)


@pytest.fixture
def pod_of(tmp_path: Path) -> Callable[[PlannedRun], Path]:
    """Run the pod for a cell against the doubles and return its outputs."""

    def run(planned: PlannedRun, **parts: Any) -> Path:
        folder = tmp_path / "pod"
        folder.mkdir()
        pod = PodRun(folder, text=planned.cell.canonical(), **parts)
        assert pod.run() == 0
        return pod.outputs

    return run


def rows(home: Home, query: str) -> list[dict[str, Any]]:
    with duckdb.connect(str(home.warehouse_snapshot), read_only=True) as connection:
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def measured(context: Context, run: PlannedRun, outputs: Path) -> str:
    """Measure a repeat whose Polyaxon run leaves ``outputs``; return its UUID."""
    port = context.measuring.port
    assert isinstance(port, FakePolyaxon)
    create = port.create

    def creating(**given: Any) -> RunView:
        view = create(**given)
        port.outputs[view.uuid] = outputs
        return view

    port.create = creating  # type: ignore[method-assign]
    return measure_one(context, run, lambda: None).run_uuid


def test_a_cell_reaches_the_warehouse_with_its_prediction(
    context: Context, pod_of: Callable[..., Path]
) -> None:
    home = context.measuring.home
    run = next(iter(context.plan.runs()))
    uuid = measured(context, run, pod_of(run))
    assert bundle.verify(home.bundles / uuid) == []
    (stored,) = rows(home, "select outcome, cell_key, round from run")
    assert stored == {
        "outcome": "ok",
        "cell_key": run.cell.cell_key,
        "round": context.round.id,
    }
    residuals = {r["metric"]: r["residual"] for r in rows(home, "select * from residual")}
    for name in ("kv_cache_size_tokens", "num_gpu_blocks", "max_concurrency"):
        assert residuals[name] == 0, name


def test_a_run_of_the_sentinel_is_one_in_the_warehouse(
    context: Context, pod_of: Callable[..., Path]
) -> None:
    home = context.measuring.home
    run = next(iter(context.plan.runs()))
    uuid = measured(context, replace(run, sentinel=True), pod_of(run))
    (stored,) = rows(home, "select sentinel, run_uuid::varchar as run_uuid from run")
    assert stored == {"sentinel": True, "run_uuid": uuid}


def test_a_wrong_prediction_is_a_residual_and_is_never_corrected(
    context: Context, pod_of: Callable[..., Path]
) -> None:
    home = context.measuring.home
    run = next(iter(context.plan.runs()))
    values = dict(run.planned.prediction.values) | {"kv_cache_size_tokens": 8000}
    wrong = replace(run.planned, prediction=replace(run.planned.prediction, values=values))
    run = PlannedRun(wrong, 1)
    uuid = measured(context, run, pod_of(run))
    kept = json.loads((home.bundles / uuid / "prediction.json").read_text())
    assert kept["values"]["kv_cache_size_tokens"] == 8000
    (row,) = rows(
        home,
        "select predicted, measured, residual from residual where metric = 'kv_cache_size_tokens'",
    )
    assert row == {"predicted": 8000, "measured": 8192, "residual": 192}
    again = write_prediction(context.measuring, next(iter(context.plan.runs())))
    state = context.round.state(run.cell.cell_key, 1)
    assert state is not None
    assert state.prediction_sha256 == again


def test_what_the_prediction_refuses_is_recorded_and_never_started(context: Context) -> None:
    home = context.measuring.home
    (run,) = context.plan.skipped()
    result = record_infeasible(context, run)
    assert (result.outcome, result.as_expected) == ("infeasible", True)
    (stored,) = rows(home, "select outcome, phase, message from run")
    assert stored["outcome"] == "infeasible"
    assert "32,768" in stored["message"] or "32768" in stored["message"]
    port = context.measuring.port
    assert isinstance(port, FakePolyaxon)
    assert not port.runs
    assert record_infeasible(context, run).reused


def test_a_lost_run_is_sealed_with_what_there_is(context: Context, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    (left / "server.log").write_text("INFO the beginning of a log\n")
    port = context.measuring.port
    assert isinstance(port, FakePolyaxon)
    port.script["*"] = ["running", "failed"]
    run = next(iter(context.plan.runs()))
    uuid = measured(context, run, left)
    (stored,) = rows(context.measuring.home, "select outcome from run")
    assert stored["outcome"] == "lost"
    kept = context.measuring.home.bundles / uuid / "server.log"
    assert kept.read_text() == "INFO the beginning of a log\n"
