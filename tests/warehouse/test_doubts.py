"""Evidence about a load point from its samples and requests: what is known, and what is not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tasks import doubts, requests, samples
from tasks.series import Window

WINDOW = Window(10.0, 20.0, "requests")


def asked(*spans: tuple[float, float | None]) -> pa.Table:
    """Return requests with these starts and ends."""
    rows = [{"load_point": 0, "start_s": start, "end_s": end} for start, end in spans]
    return pa.Table.from_pylist(rows, schema=requests.SCHEMA)


def test_a_client_that_keeps_up_has_as_many_in_flight_as_asked() -> None:
    """Two at a time, each followed by the next at once; the tail does not count against it."""
    spans = [(0.0, 1.0), (0.0, 2.0), (1.0, 3.0), (2.0, 9.0)]
    assert doubts.in_flight(asked(*spans), 2) == pytest.approx(2.0)


def test_a_client_that_lags_has_fewer() -> None:
    """One second of work, one second of nothing: half of what was asked."""
    spans = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert doubts.in_flight(asked(*spans), 1) == pytest.approx(0.5)


def test_all_at_once_counts_the_most_that_ever_were() -> None:
    """Nothing is left to send: a mean over the tail would blame the client for the server."""
    assert doubts.in_flight(asked((0.0, 5.0), (0.1, 1.0), (0.2, 9.0)), 3) == 3.0
    assert doubts.in_flight(asked((0.0, 1.0), (2.0, 3.0), (4.0, 5.0)), 3) == 1.0


def test_requests_without_an_end_say_nothing_about_the_client() -> None:
    """Streams that an engine's death cut: a real crash would count 17 in flight of 4 asked."""
    assert doubts.in_flight(asked((0.0, 1.0), (1.0, None)), 2) is None
    assert doubts.in_flight(asked(), 2) is None


def server(*ticks: tuple[float, float | None]) -> pa.Table:
    """Return server samples with these times and usages."""
    rows = [
        {"tick": number, "due_s": t_s, "t_s": t_s, "kv_usage_ratio": usage}
        for number, (t_s, usage) in enumerate(ticks)
    ]
    return pa.Table.from_pylist(rows, schema=samples.SERVER)


def test_coverage_counts_what_the_window_should_hold() -> None:
    """A missed tick is a gap; nothing sampled at all is no coverage, no window is unknown."""
    seen = doubts._coverage(
        server(*((t / 2, None if 25 <= t <= 28 else 0.1) for t in range(60))), WINDOW
    )
    assert seen == {
        "ticks_expected": 20,
        "ticks_kept": 17,
        "largest_gap_s": 2.5,
        "sample_interval_s": 0.5,
    }
    assert doubts._coverage(None, WINDOW) == {"ticks_expected": None, "ticks_kept": 0}
    assert doubts._coverage(server((1.0, 0.1)), None) == {}


def gpu(t_s: float, **said: Any) -> dict[str, Any]:
    return {"tick": int(t_s), "t_s": t_s, "gpu_uuid": "GPU-1"} | said


def test_what_a_gpu_said_counts_within_the_window_only() -> None:
    """Old memory errors are not this load point's; a foreign process before it is not either."""
    rows = [
        gpu(5.0, foreign_pids="[7]", throttle_reasons=0x40, ecc_uncorrected=3),
        gpu(11.0, foreign_pids="[]", throttle_reasons=0x4, ecc_uncorrected=3),
        gpu(12.0, foreign_pids="[8, 9]", throttle_reasons=0x1, ecc_uncorrected=4),
        gpu(12.0, gpu_uuid="GPU-2", foreign_pids=None, throttle_reasons=0, ecc_uncorrected=90),
    ]
    table = pa.Table.from_pylist(rows, schema=samples.GPU)
    found = doubts._gpu(doubts._inside(table, WINDOW))
    assert found == {
        "gpu_foreign_pids": [8, 9],
        "throttle_reasons": [0x4, 0x1, 0],
        "ecc_errors": 1,
    }


def test_what_nvml_does_not_report_is_unknown_not_fine() -> None:
    """In a container the processes of a GPU cannot be told; without ECC no error can be."""
    table = pa.Table.from_pylist([gpu(11.0)], schema=samples.GPU)
    assert doubts._gpu(doubts._inside(table, WINDOW)) == {
        "gpu_foreign_pids": None,
        "throttle_reasons": [],
        "ecc_errors": None,
    }
    assert doubts._gpu(None) == {}
