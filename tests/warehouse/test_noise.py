"""The noise floor of a round from its sentinel, and what it keeps from being called a change."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import record
from tasks.plan.cell import LoadPoint
from tests.support.bundle_maker import Ask, Lab, sentinel
from warehouse.compare import choose
from warehouse.connection import open_snapshot
from warehouse.difference import compare, parse_rule
from warehouse.errors import BadInput
from warehouse.lookup import records
from warehouse.query import run_named, run_sql
from warehouse.registry import Outcome
from warehouse.statistics import WITHIN_NOISE, effect

OTHER: dict[str, Any] = {
    "label": "other",
    "load": (LoadPoint(parallel=4, number=4, warmup=2),),
}


def load(window_s: float) -> tuple[tuple[Ask, ...]]:
    """Return four requests that take ``window_s`` together."""
    short, long = Ask(1010.0, 1011.0), Ask(1010.0, 1010.0 + window_s, prompt=520)
    return ((short, short, short, long),)


def night(lab: Lab, label: str, windows: list[float], others: list[float], **more: Any) -> None:
    """Ingest a round: a sentinel with these windows and another cell with those."""
    paths = [
        lab.seal(
            round=label,
            repeat=repeat,
            requests=load(window_s),
            started_s=1001.0 + repeat,
            change=sentinel,
            **more,
        )
        for repeat, window_s in enumerate(windows, start=1)
    ]
    paths += [
        lab.seal(round=label, repeat=repeat, requests=load(window_s), **OTHER)
        for repeat, window_s in enumerate(others, start=1)
    ]
    record.ingest(lab.home, paths)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, new_lab: Callable[[Path], Lab]) -> Lab:
    """Return three nights: one drifts by 18 %, one hardly, one has no sentinel."""
    lab = new_lab(tmp_path_factory.mktemp("nights"))
    night(lab, "1", [2.0, 2.1, 2.4], [3.0, 3.01])
    night(lab, "2", [2.0, 2.0, 2.02], [3.2, 3.21])
    night(lab, "3", [], [3.9, 3.91])
    return lab


def differences(lab: Lab, a: str, b: str, *rules: str) -> dict[str, Any]:
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        return compare(
            connection,
            choose(connection, f"demo@{a}"),
            choose(connection, f"demo@{b}"),
            unlike=True,
            rules=[parse_rule(rule) for rule in rules],
        )


def window(found: dict[str, Any], label: str) -> dict[str, Any]:
    (cell,) = (cell for cell in found["cells"] if cell["label"] == label)
    (row,) = (row for row in cell["metrics"] if row["metric"] == "window_s")
    assert isinstance(row, dict)
    return row


def test_the_floor_is_the_sentinels_spread_with_its_drift(nights: Lab) -> None:
    with open_snapshot(nights.home.warehouse_snapshot) as connection:
        rows = records(connection, "FROM noise_floor WHERE metric = 'window_s' ORDER BY round")
    first = rows[0]
    values = [2.0, 2.1, 2.4]
    assert [row["round"] for row in rows] == ["1", "2"]
    assert (first["runs"], first["load_point"]) == (3, 0)
    assert first["mean"] == pytest.approx(statistics.mean(values))
    assert first["spread"] == pytest.approx(0.4)
    assert first["spread_ratio"] == pytest.approx(0.4 / statistics.mean(values))
    assert first["sd"] == pytest.approx(statistics.stdev(values))
    assert first["drift"] == pytest.approx(0.4)


def test_a_difference_within_either_nights_noise_is_none(nights: Lab) -> None:
    """3.0 to 3.2 s with repeats 0.01 s apart: Welch calls it different, the drifting night not."""
    found = differences(nights, "1", "2", "window_s>1%")
    row = window(found, "other")
    assert row["verdict"] == WITHIN_NOISE
    assert row["p_value"] < 0.05
    assert row["noise_floor"] == pytest.approx(0.4 / 2.1667 * 3.005, rel=1e-3)
    assert found["broken_rules"] == []
    assert window(differences(nights, "2", "1", "window_s<-1%"), "other")["verdict"] == WITHIN_NOISE


def test_a_larger_difference_still_breaks_a_rule(nights: Lab) -> None:
    found = differences(nights, "2", "3", "window_s>1%")
    row = window(found, "other")
    assert row["verdict"] == "different"
    assert row["noise_floor"] < row["difference"]
    assert len(found["broken_rules"]) == 1


def test_which_sentinel_told_the_noise_is_named(nights: Lab) -> None:
    found = differences(nights, "2", "3")
    assert found["sentinels_a"] == [
        {"sweep": "demo", "round": "2", "label": "context-limit/max_model_len=32768", "runs": 3}
    ]
    assert found["sentinels_b"] == []


def test_without_a_sentinel_nothing_changes(lab: Lab) -> None:
    night(lab, "1", [], [3.0, 3.01])
    night(lab, "2", [], [3.2, 3.21])
    row = window(differences(lab, "1", "2"), "other")
    assert (row["verdict"], row["noise_floor"]) == ("different", None)


def test_one_run_of_a_sentinel_is_no_floor_and_a_failed_one_counts_nothing(lab: Lab) -> None:
    night(lab, "1", [2.0], [3.0, 3.01])
    night(lab, "2", [2.0], [3.2, 3.21])
    failed = lab.seal(
        round="1", repeat=2, requests=load(3.0), change=sentinel, outcome=Outcome.LOST
    )
    record.ingest(lab.home, [failed])
    assert window(differences(lab, "1", "2"), "other")["noise_floor"] is None


def test_exact_figures_of_another_cell_get_no_floor(nights: Lab) -> None:
    """A pool set in bytes does not vary because another cell's profiled pool does."""
    found = differences(nights, "1", "2")
    (cell,) = (cell for cell in found["cells"] if cell["label"] == "other")
    exact = {row["metric"]: row["noise_floor"] for row in cell["metrics"]}
    assert exact["kv_cache_size_tokens"] is None
    (own,) = (cell for cell in found["cells"] if cell["label"] != "other")
    floors = {row["metric"]: row["noise_floor"] for row in own["metrics"]}
    assert floors["kv_cache_size_tokens"] == 0.0


def test_an_exact_difference_beside_a_quiet_sentinel_is_one() -> None:
    assert effect([10.0], [11.0], exact=True, noise_floor=0.0).verdict == "different"
    assert effect([10.0], [11.0], exact=False, noise_floor=1.5).verdict == WITHIN_NOISE
    assert effect([10.0], [12.0], exact=False, noise_floor=1.5).verdict == "unknown"
    assert effect([10.0], [10.0], exact=False, noise_floor=1.5).verdict == "equal"


def test_three_values_make_a_floor_that_noise_alone_seldom_passes() -> None:
    """Two nights of one normal cell: with the floor of three, under 3 % false alarms, where the
    interval over two repeats alone gives about 5 %."""
    import random

    source, alarms, rounds = random.Random(7), 0, 4000
    for _ in range(rounds):
        values = [source.gauss(100, 1) for _ in range(7)]
        floor = max(values[:3]) - min(values[:3])
        change = effect(values[3:5], values[5:], exact=False, noise_floor=floor)
        alarms += change.verdict == "different"
    assert alarms / rounds < 0.03


def test_the_named_query_shows_the_worst_first(nights: Lab) -> None:
    result = run_named(nights.home.warehouse_snapshot, "sentinel", {"round": "1"})
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    ratios = [row["spread_ratio"] for row in rows if row["spread_ratio"] is not None]
    assert ratios == sorted(ratios, reverse=True)
    assert {row["round"] for row in rows} == {"1"}
    everything = run_named(nights.home.warehouse_snapshot, "sentinel", {})
    assert {row[0] for row in everything.rows} == {"1", "2"}


def test_a_bundle_of_before_says_nothing_of_sentinels(nights: Lab) -> None:
    rows = run_sql(
        nights.home.warehouse_snapshot, "SELECT DISTINCT sentinel FROM run WHERE label = 'other'"
    ).rows
    assert rows == [(None,)]


def test_a_rule_on_an_unknown_number_is_still_refused(nights: Lab) -> None:
    with pytest.raises(BadInput, match="not among the numbers"):
        differences(nights, "1", "2", "no_such_metric>1%")
