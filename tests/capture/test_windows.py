"""Peaks, counter growth and gaps, each within its own window."""

from __future__ import annotations

import pytest

from tasks.capture import windows
from tasks.capture.windows import Sample, Window

MEASURE = Window("measure", 10.0, 20.0, 0)


def series(*pairs: tuple[float, float | None]) -> list[Sample]:
    return [Sample(t_s, value) for t_s, value in pairs]


def test_phases_of_a_run() -> None:
    document = {
        "phases": [
            {"name": "boot", "load_point": None, "start_s": 1.0, "end_s": 9.5},
            {"name": "measure", "load_point": 0, "start_s": 10.0, "end_s": 20.0},
            {"name": "drain", "load_point": None, "start_s": 20.0, "end_s": None},
            {"name": "broken"},
            "noise",
        ]
    }
    assert windows.phases(document) == [
        Window("boot", 1.0, 9.5, None),
        MEASURE,
        Window("drain", 20.0, None, None),
    ]
    assert windows.phases({}) == []


def test_peak_is_of_the_window_not_of_the_run() -> None:
    samples = series((9.9, 0.99), (10.0, 0.2), (12.0, 0.7), (13.0, 0.7), (15.0, None), (20.1, 0.9))
    peak = windows.peak(samples, MEASURE)
    assert peak == windows.Peak(0.7, 12.0, 3)
    assert windows.peak(series((1.0, 0.5), (11.0, None)), MEASURE) is None


def test_growth_spans_the_window_and_sees_resets() -> None:
    plain = series((5.0, 1), (9.0, 4), (12.0, 6), (21.0, 9), (30.0, 50))
    assert windows.growth(plain, MEASURE) == windows.Growth(5, 0, 3)
    restarted = series((9.0, 100), (12.0, 110), (13.0, 3), (20.0, 7))
    assert windows.growth(restarted, MEASURE) == windows.Growth(17, 1, 4)
    assert windows.growth(series((12.0, 1)), MEASURE) is None
    assert windows.growth([], MEASURE) is None
    still_open = Window("drain", 10.0, None)
    assert windows.growth(series((11.0, 1), (12.0, 5)), still_open) == windows.Growth(4, 0, 2)


def test_coverage_counts_gaps() -> None:
    samples = series((10.0, 1), (10.25, None), (10.5, 1), (19.75, 1), (25.0, 1))
    found = windows.coverage(samples, MEASURE, 0.25)
    assert (found.expected, found.kept, found.missed) == (40, 3, 1)
    assert found.largest_gap_s == pytest.approx(9.25)
    assert found.kept_ratio == pytest.approx(3 / 40)
    with pytest.raises(ValueError, match="positive interval"):
        windows.coverage(samples, Window("drain", 1.0, None), 0.25)
