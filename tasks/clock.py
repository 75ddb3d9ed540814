"""One monotonic clock per run, mapped once to UTC.

Every stamp in a bundle that ends in ``_s`` is CLOCK_MONOTONIC of the run's host, which all
processes of that host share; wall clocks jump.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tasks.files import read_json


@dataclass(frozen=True, slots=True)
class Clock:
    """A pair of readings taken at the same instant."""

    monotonic_s: float
    at: datetime

    @classmethod
    def read(cls, path: Path) -> Clock | None:
        """Read ``clock.json``; ``None`` where the run left none."""
        value = read_json(path)
        if value is None:
            return None
        stamp = datetime.fromisoformat(str(value["utc"]).replace("Z", "+00:00"))
        return cls(float(str(value["monotonic_s"])), stamp)

    def datetime(self, stamp_s: float) -> datetime:
        """Return a monotonic stamp as UTC."""
        return self.at + timedelta(seconds=stamp_s - self.monotonic_s)

    def utc(self, stamp_s: object) -> str | None:
        """Return a monotonic stamp as ISO 8601 UTC, ``None`` for an absent one."""
        if not isinstance(stamp_s, int | float):
            return None
        text = self.datetime(float(stamp_s)).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")
