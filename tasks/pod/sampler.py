"""Samplers on an absolute schedule, with every tick accounted for.

A sampler that sleeps "interval" between samples drifts, and one that only writes what it got
hides its gaps: a peak between two samples would then look like a peak that was not there.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from tasks.pod.client import HTTP_ERRORS, Client
from tasks.pod.families import scan
from tasks.pod.outputs import Lines

#: A scrape that takes longer is given up; the ticks it overran are missed.
SCRAPE_TIMEOUT_S = 5.0
#: A tick that starts later than this after its due time is late (or a tenth of the interval).
LATE_S = 0.010

#: Takes one sample: the fields to add to its row. Raises :class:`Missed` when there is none.
Take = Callable[[], dict[str, object]]


class Missed(Exception):
    """There is no sample for this tick; the text says why."""


class Sampler(threading.Thread):
    """A thread that writes one row per tick: value, late, or missed with a reason.

    Tick ``n`` is due at ``origin + n * interval`` on CLOCK_MONOTONIC. A tick whose whole interval
    passed while the one before was still being taken is missed, not taken late.
    """

    def __init__(self, name: str, interval_s: float, lines: Lines, take: Take) -> None:
        super().__init__(name=name, daemon=True)
        self.counts: Counter[str] = Counter()
        self._interval_s = interval_s
        self._late_s = max(LATE_S, interval_s / 10)
        self._lines = lines
        self._take = take
        self._stopping = threading.Event()

    def run(self) -> None:
        """Take samples until :meth:`stop`."""
        origin = time.monotonic()
        tick, overran = 0, ""
        while True:
            due = origin + tick * self._interval_s
            delay = due - time.monotonic()
            if self._stopping.wait(delay) if delay > 0 else self._stopping.is_set():
                return
            started = time.monotonic()
            if started - due >= self._interval_s:
                reason = overran or f"woke {started - due:.3f} s late"
                self._write(tick, due, {"t_s": None, "took_s": None}, "missed", reason)
            else:
                took = self._sample(tick, due, started)
                overran = f"tick {tick} took {took:.3f} s" if took >= self._interval_s else ""
            tick += 1

    def stop(self, timeout_s: float = 2.0) -> dict[str, int]:
        """End the thread and return how many ticks were ok, late and missed; never raises."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)
        self._lines.close()
        return {state: self.counts[state] for state in ("ok", "late", "missed")}

    def _sample(self, tick: int, due: float, started: float) -> float:
        state, reason = ("late" if started - due > self._late_s else "ok"), None
        fields: dict[str, object]
        try:
            fields = self._take()
        except Missed as missed:
            state, reason, fields = "missed", str(missed), {}
        except Exception as error:  # noqa: BLE001 - one bad tick must not end the sampler
            state, reason, fields = "missed", f"{type(error).__name__}: {error}", {}
        took = time.monotonic() - started
        fields = {"t_s": started, "took_s": took, **fields}
        given = fields.pop("reason", None)
        self._write(tick, due, fields, state, reason or (str(given) if given else None))
        return took

    def _write(
        self, tick: int, due: float, fields: dict[str, object], state: str, reason: str | None
    ) -> None:
        self.counts[state] += 1
        self._lines.write({"tick": tick, "due_s": due, **fields, "state": state, "reason": reason})


class MetricsTake:
    """Scrapes /metrics: the wanted families only, counter resets noticed."""

    def __init__(self, port: int) -> None:
        self._client = Client(port)
        self._last: dict[str, float] = {}

    def __call__(self) -> dict[str, object]:
        """Return ``values`` and, where something is odd, ``reason``."""
        try:
            reply = self._client.get("/metrics", timeout_s=SCRAPE_TIMEOUT_S)
        except HTTP_ERRORS as error:
            raise Missed(f"{type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise Missed(f"HTTP {reply.status}")
        values, problems = scan(reply.body)
        if all(value is None for value in values.values()):
            why = "; ".join(problems) or "no wanted family"
            raise Missed(f"unreadable page of {len(reply.body)} bytes: {why}")
        problems += self._resets(values)
        return {"values": values, "reason": "; ".join(problems) or None}

    def close(self) -> None:
        """Close the connection, once the sampler's thread has ended."""
        self._client.close()

    def _resets(self, values: dict[str, float | None]) -> list[str]:
        found: list[str] = []
        for name, value in values.items():
            if value is None or not name.endswith("_total"):
                continue
            last = self._last.get(name, value)
            if value < last:
                found.append(f"counter reset: {name} {last:g} -> {value:g}")
            self._last[name] = value
        return found
