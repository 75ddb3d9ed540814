"""Comparing two sets: like with like, noise stated, gates that neither flake nor sleep."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tasks import record
from tests.support.bundle_maker import Ask, Lab
from warehouse.compare import choose
from warehouse.connection import open_snapshot
from warehouse.difference import compare, parse_rule
from warehouse.errors import BadInput
from warehouse.statistics import effect

VALUES = st.lists(st.floats(1, 1000), min_size=2, max_size=8)


@settings(deadline=None, max_examples=50)
@given(VALUES, VALUES)
def test_interval_and_p_value_are_welchs(a: list[float], b: list[float]) -> None:
    """The same numbers as SciPy's own test gives, where it does not cancel."""
    if len(set(a)) < 2 or len(set(b)) < 2 or min(stats.tstd(a), stats.tstd(b)) < 1e-3:
        return
    ours = effect(a, b, exact=False)
    theirs = stats.ttest_ind(b, a, equal_var=False)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    assert ours.low == pytest.approx(theirs.confidence_interval(0.95).low, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(VALUES, VALUES)
def test_verdict_interval_and_effect_agree(a: list[float], b: list[float]) -> None:
    """Different means that the interval leaves out zero; the detectable effect lies beyond it."""
    found = effect(a, b, exact=False)
    assert found.difference == pytest.approx(-effect(b, a, exact=False).difference)
    if found.low is None or found.high is None:
        return
    assert found.low <= found.difference <= found.high or math.isclose(found.low, found.high)
    if found.verdict == "different":
        assert found.low > 0 or found.high < 0
    if found.verdict == "not significant":
        assert found.detectable is not None
        assert abs(found.difference) < found.detectable


def test_single_repeats_say_nothing_about_noise() -> None:
    """One value a side: unknown, unless the metric is the engine's own integer arithmetic."""
    assert effect([10.0], [11.0], exact=False).verdict == "unknown"
    assert effect([10.0], [11.0], exact=True).verdict == "different"
    assert effect([10.0], [10.0], exact=False).verdict == "equal"


def test_noise_is_not_called_a_change() -> None:
    """Overlapping repeats: not significant, with the effect that would have shown."""
    found = effect([100.0, 110.0, 90.0], [104.0, 95.0, 108.0], exact=False)
    assert found.verdict == "not significant"
    assert found.detectable is not None
    assert 15 < found.detectable < 60


def slower(by: float) -> tuple[tuple[Ask, ...]]:
    """Return requests that take longer."""
    short, long = Ask(1010.0, 1012.0 + by), Ask(1010.0, 1013.0 + by, prompt=520)
    return ((short, short, short, long),)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, new_lab: Callable[[Path], Lab]) -> Lab:
    """Return two rounds of three repeats, the second slower and on another engine."""
    lab = new_lab(tmp_path_factory.mktemp("rounds"))
    paths = [lab.seal(repeat=i, requests=slower(0.01 * i)) for i in (1, 2, 3)]
    paths += [
        lab.seal(
            repeat=i,
            round="2",
            requests=slower(1 + 0.01 * i),
            engine_version="0.28.0",
            started_s=1500.0,
        )
        for i in (1, 2, 3)
    ]
    record.ingest(lab.home, paths)
    return lab


def differences(lab: Lab, a: str, b: str, *rules: str, unlike: bool = False) -> dict[str, Any]:
    """Compare two selections of the published snapshot."""
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        return compare(
            connection,
            choose(connection, a),
            choose(connection, b),
            unlike=unlike,
            rules=[parse_rule(rule) for rule in rules],
        )


def test_configuration_comes_first_and_cells_align_by_setting(rounds: Lab) -> None:
    """The pin that differs is named; cells join although their cell keys differ."""
    found = differences(rounds, "demo@1", "demo@2")
    assert found["configuration"] == [
        {"name": "pin.engine_version", "a": ["0.27.0"], "b": ["0.28.0"]}
    ]
    (cell,) = found["cells"]
    assert len(cell["runs_a"]) == len(cell["runs_b"]) == 3
    metrics = {(m["load_point"], m["metric"]): m for m in cell["metrics"]}
    assert metrics[(None, "kv_cache_size_tokens")]["verdict"] == "equal"
    window = metrics[(0, "window_s")]
    assert window["verdict"] == "different"
    assert window["low"] < 1.0 < window["high"]


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        ("window_s>10%", True),
        ("window_s>0.5", True),
        ("window_s>90%", False),
        ("window_s<-1%", False),
        ("kv_cache_size_tokens!=0", False),
        ("output_tokens_per_s<-5%", True),
        ("outcome", False),
        ("alarms", False),
    ],
)
def test_rules(rounds: Lab, rule: str, breaks: bool) -> None:
    """A gate goes off on a real change beyond its limit and on nothing else."""
    assert bool(differences(rounds, "demo@1", "demo@2", rule)["broken_rules"]) is breaks


def test_rule_on_a_number_that_is_nowhere_is_refused(rounds: Lab) -> None:
    """A misspelt gate would be green for ever."""
    with pytest.raises(BadInput, match="'windows_s' is not among the numbers"):
        differences(rounds, "demo@1", "demo@2", "windows_s>1%")


@pytest.mark.parametrize("text", ["", "window_s", "window_s>", "window_s=1", "a>1; drop", "A>1%"])
def test_rules_that_are_none(text: str) -> None:
    """Only the stated forms are rules."""
    with pytest.raises(BadInput, match="--fail-on: got"):
        parse_rule(text)


def test_unlike_sets_are_refused_unless_told(rounds: Lab) -> None:
    """Another context limit is another setting; the one that stands alone is named."""
    other = rounds.seal(round="3", max_model_len=8192, label="other", started_s=1900.0)
    record.ingest(rounds.home, [other])
    with pytest.raises(
        BadInput, match=r"do not hold the same settings \(only on one side: .*other"
    ):
        differences(rounds, "demo@1", "demo@3")
    found = differences(rounds, "demo@1", "demo@3", unlike=True)
    names = [entry["name"] for entry in found["configuration"]]
    assert "setting.server.max_model_len" in names
    assert len(found["cells"]) == 1


def test_invalid_load_points_are_left_out_and_counted(new_lab: Any, tmp_path: Path) -> None:
    """A run whose load was cut must not move a mean; its start-up numbers still count."""
    lab = new_lab(tmp_path)
    cut = ((*slower(0.3)[0][:3], Ask(1010.0)),)
    paths = [lab.seal(repeat=i, requests=slower(0.01 * i)) for i in (1, 2)]
    paths += [lab.seal(repeat=3, requests=cut)]
    paths += [lab.seal(repeat=i, round="2", requests=slower(0.01 * i)) for i in (1, 2)]
    record.ingest(lab.home, paths)
    found = differences(lab, "demo@1", "demo@2")
    (left,) = found["invalid_load_points_a"]
    assert (left["run_uuid"], left["load_point"]) == (paths[2].name, 0)
    assert left["broken_checks"] == "requests_complete"
    assert found["invalid_load_points_b"] == []
    metrics = {(m["load_point"], m["metric"]): m for m in found["cells"][0]["metrics"]}
    assert metrics[(0, "window_s")]["n_a"] == 2
    assert metrics[(None, "kv_cache_size_tokens")]["n_a"] == 3


def test_a_gate_on_left_out_numbers_is_not_green(lab: Lab) -> None:
    """Every load point of one side is invalid: the rule cannot be judged, and says why."""
    cut = ((*slower(0.3)[0][:3], Ask(1010.0)),)
    record.ingest(lab.home, [lab.seal(), lab.seal(round="2", requests=cut)])
    with pytest.raises(BadInput, match="1 invalid load points were left out"):
        differences(lab, "demo@1", "demo@2", "window_s>1%")
