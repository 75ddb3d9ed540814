"""Phases on one clock, and what samples say within each: peaks, counter growth, gaps.

A peak of a whole run mixes warm-up, measurement and drain; a counter read without looking for a
reset turns a restarted server into a negative or a tiny number. Pure: lists in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of CLOCK_MONOTONIC; ``end_s`` None where it never ended."""

    name: str
    start_s: float
    end_s: float | None
    load_point: int | None = None

    def holds(self, t_s: float) -> bool:
        """Return True when ``t_s`` lies in the window, its ends included."""
        return t_s >= self.start_s and (self.end_s is None or t_s <= self.end_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """One tick of one series: when, and what; None where the tick was missed."""

    t_s: float
    value: float | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest sample of a window, when it was first seen, and of how many samples."""

    value: float
    t_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a counter grew; ``resets`` counts how often it fell, after which it began anew."""

    value: float
    resets: int
    samples: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well a window was sampled: ``largest_gap_s`` is the longest stretch without a value."""

    expected: int
    kept: int
    missed: int
    largest_gap_s: float

    @property
    def kept_ratio(self) -> float:
        """Share of the expected ticks that gave a value; 1 where none was expected."""
        return min(1.0, self.kept / self.expected) if self.expected else 1.0


def phases(document: Mapping[str, object]) -> list[Window]:
    """Return the windows of a run's ``phases.json``; entries without a start are left out."""
    listed = document.get("phases")
    found: list[Window] = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, Mapping):
            continue
        start, end, point = entry.get("start_s"), entry.get("end_s"), entry.get("load_point")
        if not isinstance(start, int | float):
            continue
        found.append(
            Window(
                name=str(entry.get("name")),
                start_s=float(start),
                end_s=float(end) if isinstance(end, int | float) else None,
                load_point=point if isinstance(point, int) else None,
            )
        )
    return found


def peak(samples: Iterable[Sample], window: Window) -> Peak | None:
    """Return the highest sample within ``window``, or None where no tick gave a value."""
    best: Peak | None = None
    count = 0
    for sample in samples:
        if sample.value is None or not window.holds(sample.t_s):
            continue
        count += 1
        if best is None or sample.value > best.value:
            best = Peak(sample.value, sample.t_s, count)
    return None if best is None else Peak(best.value, best.t_s, count)


def growth(samples: Sequence[Sample], window: Window) -> Growth | None:
    """Return a counter's growth over ``window``, or None with fewer than two values.

    It is taken from the last value at or before the start (else the first within) to the first at
    or after the end (else the last within). A counter that falls has begun anew at 0: what it shows
    then is growth.
    """
    known = [(sample.t_s, sample.value) for sample in samples if sample.value is not None]
    before = [index for index, (t_s, _) in enumerate(known) if t_s <= window.start_s]
    after = [
        index
        for index, (t_s, _) in enumerate(known)
        if window.end_s is not None and t_s >= window.end_s
    ]
    first = before[-1] if before else 0
    last = after[0] if after else len(known) - 1
    chosen = [value for _, value in known[first : last + 1]]
    if len(chosen) < 2:
        return None
    total, resets = 0.0, 0
    for old, new in pairwise(chosen):
        if new < old:
            resets += 1
            total += new
        else:
            total += new - old
    return Growth(total, resets, len(chosen))


def coverage(samples: Iterable[Sample], window: Window, interval_s: float) -> Coverage:
    """Return how many of the ticks due in ``window`` gave a value.

    Raises:
        ValueError: the window never ended or the interval is not positive.
    """
    if window.end_s is None or interval_s <= 0:
        raise ValueError(
            f"coverage of window {window.name!r}: wanted an end and a positive interval, got "
            f"end {window.end_s} and interval {interval_s}"
        )
    inside = [sample for sample in samples if window.holds(sample.t_s)]
    times = sorted(sample.t_s for sample in inside if sample.value is not None)
    edges = [window.start_s, *times, window.end_s]
    return Coverage(
        expected=int((window.end_s - window.start_s) / interval_s),
        kept=len(times),
        missed=len(inside) - len(times),
        largest_gap_s=max(later - earlier for earlier, later in pairwise(edges)),
    )
