"""What got worse between two nights: only that, only beyond noise, only in what both measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks import record
from tests.support.bundle_maker import Lab
from warehouse import regression
from warehouse.compare import Selection
from warehouse.connection import open_snapshot
from warehouse.registry import Outcome
from warehouse.regression import WORSE, regressions, selection

LOG = (Path(__file__).parents[1] / "data/vllm-logs/cpu-0.27.0-qwen3.5-hybrid-ok.log").read_text()


def found(lab: Lab) -> list[dict[str, Any]]:
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        before, after = (selection(connection, "demo", name) for name in ("1", "2"))
        return regressions(connection, before, after)


def nights(lab: Lab, first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    paths = [lab.seal(repeat=i, round="1", **first) for i in (1, 2)]
    paths += [lab.seal(repeat=i, round="2", started_s=1500.0, **second) for i in (1, 2)]
    record.ingest(lab.home, paths)
    return found(lab)


def fewer_tokens(folder: Path) -> None:
    text = LOG.replace("975,890", "838,656")
    assert text != LOG
    (folder / "server.log").write_text(text)


def test_equal_nights_have_no_regression(lab: Lab) -> None:
    assert nights(lab, {}, {}) == []


def test_fewer_tokens_are_one_and_more_are_none(lab: Lab) -> None:
    worse = nights(lab, {}, {"change": fewer_tokens})
    assert {"kv_cache_size_tokens", "alarm"} >= {row["what"] for row in worse}
    tokens = next(row for row in worse if row["what"] == "kv_cache_size_tokens")
    assert (tokens["before"], tokens["after"]) == (975_890, 838_656)
    assert "kv_cache_size_tokens 975890 became 838656" in tokens["message"]


def a_block_less(folder: Path) -> None:
    (folder / "server.log").write_text(LOG.replace("975,890", "974,000"))


@pytest.mark.parametrize(("pool", "counts"), [(2**30, True), (None, False)])
def test_a_block_less_counts_only_where_the_pool_was_given(
    lab: Lab, pool: int | None, counts: bool
) -> None:
    worse = nights(
        lab,
        {"kv_cache_memory_bytes": pool},
        {"kv_cache_memory_bytes": pool, "change": a_block_less},
    )
    assert ("kv_cache_size_tokens" in {row["what"] for row in worse}) == counts


def test_more_tokens_are_no_regression(lab: Lab) -> None:
    better = nights(lab, {"change": fewer_tokens}, {})
    assert [row for row in better if row["what"] != "alarm"] == []


def test_an_alarm_counts_when_it_is_new(lab: Lab) -> None:
    worse = nights(lab, {}, {"change": fewer_tokens})
    assert ("alarm", "kv_cache_size_tokens") in [(row["what"], row["after"]) for row in worse]
    again = Selection("b", [], "round")
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        second = selection(connection, "demo", "2")
        assert regressions(connection, second, second) == []
        assert regressions(connection, again, second) == [], "nothing is shared"


def test_an_alarm_of_a_setting_that_is_new_is_none(lab: Lab) -> None:
    label, length = "context-limit/max_model_len=16384", 16384
    new = lab.seal(round="2", label=label, max_model_len=length, change=fewer_tokens)
    record.ingest(lab.home, [new])
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        alone = selection(connection, "demo", "2")
        assert regression._alarms(connection, alone), "it has one"
    assert nights(lab, {}, {}) == []


def test_another_outcome_counts_unless_it_is_now_as_expected(lab: Lab) -> None:
    broken = {"outcome": Outcome.CRASHED, "observed": "crashed"}
    worse = nights(lab, {}, broken)
    assert [row["message"].split(": ", 1)[1] for row in worse if row["what"] == "outcome"] == [
        "outcome ok became crashed"
    ]


def test_a_cell_that_is_newly_ruled_out_counts(lab: Lab) -> None:
    def refused(folder: Path) -> None:
        path = folder / "prediction.json"
        prediction = json.loads(path.read_text()) | {"refused": {"type": "x", "message": "y"}}
        path.write_text(json.dumps(prediction))

    worse = nights(lab, {}, {"outcome": Outcome.INFEASIBLE, "observed": None, "change": refused})
    assert "outcome ok became infeasible" in [r["message"].split(": ", 1)[1] for r in worse]


def test_a_night_that_is_well_again_has_no_regression(lab: Lab) -> None:
    broken = {"outcome": Outcome.CRASHED, "observed": "crashed"}
    assert [r for r in nights(lab, broken, {}) if r["what"] == "outcome"] == []


def test_only_the_last_attempt_counts(lab: Lab) -> None:
    stopped = lab.seal(round="1", outcome=Outcome.STOPPED, observed="interrupted")
    whole = lab.seal(round="1", attempt=2, started_s=1100.0)
    record.ingest(lab.home, [stopped, whole])
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        assert selection(connection, "demo", "1").runs == [whole.name]


def test_every_watched_metric_exists() -> None:
    from warehouse.registry import STARTUP

    assert set(WORSE) <= set(STARTUP)
