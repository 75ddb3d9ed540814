"""One clock for everything a run leaves: CLOCK_MONOTONIC, mapped once to UTC.

EvalScope stamps requests with ``time.perf_counter``, which on Linux is the same clock in every
process of a host. Wall-clock stamps would jump with NTP and could not be joined with them.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now_s() -> float:
    """Return seconds of CLOCK_MONOTONIC."""
    return time.monotonic()


def mapping() -> dict[str, object]:
    """Return one (monotonic seconds, UTC) pair, taken as close together as possible."""
    before = time.monotonic()
    utc = datetime.now(UTC)
    after = time.monotonic()
    return {"monotonic_s": (before + after) / 2, "utc": utc.isoformat(timespec="microseconds")}
