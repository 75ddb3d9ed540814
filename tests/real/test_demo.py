"""The demo, end to end, with every real part (about 10 minutes warm; five server starts)."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from testkit.real import Memsweep

pytestmark = pytest.mark.real

HYBRID = "context-limit/max_model_len=32768"
SHORT = "context-limit/max_model_len=8192"


@pytest.fixture(scope="module")
def demo(memsweep: Memsweep, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run the demo in a new round and return what it printed."""
    log = tmp_path_factory.mktemp("demo") / "demo.log"
    process = memsweep.start("demo", "--fresh", log=log)
    try:
        code = process.wait(timeout=1500)
    finally:
        print(log.read_text())
    assert code == 0
    return log.read_text()


def cells(memsweep: Memsweep) -> dict[str, dict[str, Any]]:
    return {cell["label"]: cell for cell in memsweep.json("compare", "demo")["cells"]}


def test_five_cells_come_out_as_expected(demo: str, memsweep: Memsweep) -> None:
    assert "5 of 5 cells as expected" in demo
    outcomes = {label: cell["outcome"] for label, cell in cells(memsweep).items()}
    assert outcomes == {
        HYBRID: "ok",
        SHORT: "ok",
        "pressure": "ok",
        "misconfiguration": "refused",
        "recovery": "ok",
    }
    assert len({cell["run_uuid"] for cell in cells(memsweep).values()}) == 5


@pytest.mark.parametrize(
    ("label", "tokens", "blocks", "concurrency"),
    [
        (HYBRID, 975_890, 1638, 29.78),
        (SHORT, 838_656, 1638, 102.38),
        ("pressure", 8_192, 64, 4.0),
        ("recovery", 975_890, 1638, 29.78),
    ],
)
def test_predicted_equals_measured(
    demo: str, memsweep: Memsweep, label: str, tokens: int, blocks: int, concurrency: float
) -> None:
    del demo
    values = cells(memsweep)[label]["metrics"]
    for name, wanted in (
        ("kv_cache_size_tokens", tokens),
        ("num_gpu_blocks", blocks),
        ("max_concurrency", concurrency),
    ):
        value = values[name]
        assert round(value["measured"], 2) == wanted, name
        assert round(value["predicted"], 2) == wanted, name
        assert value["residual"] == 0, name


def test_every_peak_is_within_its_bound(demo: str, memsweep: Memsweep) -> None:
    del demo
    points = [point for cell in cells(memsweep).values() for point in cell["load_points"]]
    measured = [p for p in points if p["peak_kv_usage_ratio"] is not None]
    assert len(measured) == 11
    for point in measured:
        assert 0 < point["peak_kv_usage_ratio"] <= point["served_peak_bound"] + 1e-9


def test_pressure_queues_fills_and_preempts(demo: str, memsweep: Memsweep) -> None:
    del demo
    points = cells(memsweep)["pressure"]["load_points"]
    assert max(p["peak_kv_usage_ratio"] for p in points) >= 0.9
    assert max(p["peak_requests_running"] for p in points) <= 12
    assert max(p["peak_requests_waiting"] for p in points) > 0
    assert sum(p["preemptions"] for p in points) > 0


def test_the_refusal_is_typed_with_its_bytes(demo: str, memsweep: Memsweep) -> None:
    del demo
    rows = memsweep.rows(
        "select metric, value from measurement m join run r using (run_uuid) "
        "where r.outcome = 'refused' and metric in "
        "('requested_kv_cache_bytes', 'available_memory_bytes') "
        "order by r.started_at desc limit 2"
    )
    values = {row["metric"]: row["value"] for row in rows}
    assert values["requested_kv_cache_bytes"] >= 25_769_803_776
    assert 0 < values["available_memory_bytes"] < values["requested_kv_cache_bytes"]


def test_served_tokens_are_recorded_not_asked_ones(demo: str, memsweep: Memsweep) -> None:
    del demo
    runs = ", ".join(f"'{cell['run_uuid']}'" for cell in cells(memsweep).values())
    rows = memsweep.rows(f"select distinct prompt_tokens from request where run_uuid in ({runs})")
    assert {row["prompt_tokens"] for row in rows} <= set(range(513, 530))


def test_audit_reaches_from_the_number_to_the_commit(demo: str, memsweep: Memsweep) -> None:
    run = cells(memsweep)[HYBRID]["run_uuid"]
    text = memsweep.call("audit", run, "kv_cache_size_tokens").stdout
    assert "975,890 tokens" in text
    for piece in ("server.log", run, "sha256", "manifest", "commit"):
        assert piece in text, piece
    assert "kv_cache_size_tokens" in demo


def test_the_gap_between_runs_is_short(demo: str, memsweep: Memsweep) -> None:
    """From the servers' own times: end of one run to the start of the next, median at most 5 s."""
    del demo
    rows = memsweep.rows(
        "select epoch(started_at) as began, epoch(ended_at) as ended from run "
        "where round = (select round from run where sweep = 'demo' "
        "order by started_at desc limit 1) order by 1"
    )
    gaps = [after["began"] - before["ended"] for before, after in pairwise(rows)]
    print(f"gaps between runs: {[round(gap, 2) for gap in gaps]} s")
    assert statistics.median(gaps) <= 5


def test_a_second_call_starts_nothing(demo: str, memsweep: Memsweep, tmp_path: Path) -> None:
    del demo
    before = memsweep.json("runs")["runs"]
    log = tmp_path / "again.log"
    assert memsweep.start("run", "demo", log=log).wait(timeout=120) == 0
    assert log.read_text().count("measured already") == 5
    assert memsweep.json("runs")["runs"] == before
