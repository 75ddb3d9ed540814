"""The sampler's figures as a soak test, and a check of the benchmark itself that takes seconds."""

from __future__ import annotations

import gc
import math

import pytest

from tests.bench import sampler


def test_the_benchmark_sees_a_wrong_value_and_a_lost_tick() -> None:
    row = {"tick": 0, "due_s": 1.0, "t_s": 1.002, "took_s": 0.01, "state": "ok"}
    good = row | {"values": {"kv_usage_ratio": sampler.gauge(1.005)}}
    bad = row | {"values": {"kv_usage_ratio": sampler.gauge(1.5)}}
    lost = {"tick": 1, "due_s": 2.0, "t_s": None, "took_s": None, "state": "missed"}
    figures = sampler.judge([good, bad, lost], cpu_s=0.01, wall_s=1.0)
    assert figures["values_off_the_function"] == 1
    assert figures["kept_percent"] == pytest.approx(200 / 3)
    assert figures["lateness_p99_ms"] == pytest.approx(2.0)
    assert figures["cpu_percent_of_a_core"] == pytest.approx(1.0)


def test_the_interval_holds_the_difference() -> None:
    found = sampler.interval_of([-1.0, 0.0, 1.0, 0.5, -0.5])
    assert found["low_percent"] < 0 < found["high_percent"]
    # 2.776 is the 97.5 % point of t with 4 degrees of freedom.
    assert found["high_percent"] == pytest.approx(2.776 * math.sqrt(0.625 / 5), rel=1e-3)


def test_what_misses_its_mark_is_named() -> None:
    good = {
        "lateness_p99_ms": 10.0,
        "kept_percent": 99.5,
        "cpu_percent_of_a_core": 2.0,
        "values_off_the_function": 0,
    }
    assert sampler.missed(good) == []
    assert sampler.missed(good | {"lateness_p99_ms": 10.5, "kept_percent": 99.0}) == [
        "lateness_p99_ms: got 10.5, wanted <= 10",
        "kept_percent: got 99, wanted >= 99.5",
    ]


def test_the_benchmark_runs_and_leaves_nothing_open() -> None:
    figures = sampler.lateness(0.5, 0.05, 0)
    assert figures["ticks"] >= 5
    gc.collect()  # an open socket would be told now


@pytest.mark.soak
@pytest.mark.parametrize(("interval_s", "busy"), [(0.25, 1), (0.05, 1)])
def test_ten_minutes_beside_a_busy_core(interval_s: float, busy: int) -> None:
    """10 minutes each."""
    figures = sampler.lateness(600, interval_s, busy)
    print(figures)
    assert figures["values_off_the_function"] == 0
    assert figures["kept_percent"] >= 99.5
    assert figures["lateness_p99_ms"] <= 10
    if interval_s == 0.25:
        assert figures["cpu_percent_of_a_core"] <= 2
