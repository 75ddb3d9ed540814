"""When not to believe a load point: one table of reasons, each a pure judgement of plain numbers.

A number without its doubts travels further than it should. Every reason here has a weight:
``fails`` ends the run's claim to have measured what was asked, ``invalidates`` keeps the load point
out of comparisons, ``notes`` only tells (preemption and queueing are often the purpose). What
cannot be judged, because an input is missing, is not judged: no reason is made of an absence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Weight(StrEnum):
    """What a reason does to a load point."""

    FAILS = "fails"
    INVALIDATES = "invalidates"
    NOTES = "notes"


#: Share of queried tokens that hit the prefix cache where no hits were wanted.
PREFIX_HITS_RATIO = 0.01
#: Share of ticks that must have given a value, and the longest stretch without one.
KEPT_RATIO = 0.95
GAP_INTERVALS = 8
#: Achieved concurrency below this share of what was asked: the client was the limit.
ACHIEVED_RATIO = 0.9
#: Lag of the client's event loop.
CLIENT_LAG_S = 0.1
#: Memory still held after stop above what was held before start.
BASELINE_BYTES = 256 * 2**20
#: Logged and stated numbers agree when they differ by less than this.
_EQUAL = 1e-9
#: NVML's clocks_event_reasons that lower clocks against the user's wish; idle (1), application
#: clocks (2) and display (0x100) do not. The power cap is apart: a loaded GPU is often there.
POWER_CAP = 0x4
THROTTLING = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One doubt: its name in the table, its weight, and what was found against what was wanted."""

    name: str
    weight: Weight
    message: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a load point and its server. None or empty: not known.

    ``requested`` and ``effective`` are settings by name; only names in both are compared.
    ``stated`` holds, per quantity (``num_gpu_blocks``, ``kv_cache_size_tokens``,
    ``max_concurrency``), what each source says: ``log``, ``cache_config_info``, ``prediction``,
    each as its lowest and highest possible value. ``gpu_pids`` are foreign processes seen on the
    GPU, ``throttle_reasons`` NVML's bits of every sample. Times are seconds.
    """

    requested: Mapping[str, object] = field(default_factory=dict)
    effective: Mapping[str, object] = field(default_factory=dict)
    stated: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    requests_asked: int | None = None
    requests_sent: int | None = None
    requests_succeeded: int | None = None
    parallel_asked: int | None = None
    parallel_achieved: float | None = None
    client_lag_s: float | None = None
    prefix_caching_wanted: bool | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    ticks_expected: int | None = None
    ticks_kept: int | None = None
    largest_gap_s: float | None = None
    sample_interval_s: float | None = None
    counter_resets: int | None = None
    server_restarts: int | None = None
    gpu_foreign_pids: Sequence[int] = ()
    throttle_reasons: Sequence[int] = ()
    ecc_errors: int | None = None
    memory_before_start_bytes: int | None = None
    memory_after_stop_bytes: int | None = None
    processes_left: int | None = None
    preemptions: float | None = None
    peak_requests_waiting: float | None = None
    samples_outside_curves: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table: ``judge`` returns what was found, or None where nothing is wrong."""

    name: str
    weight: Weight
    meaning: str
    judge: Callable[[Evidence], str | None]


def _settings(evidence: Evidence) -> str | None:
    wrong = [
        f"{name}: wanted {evidence.requested[name]!r}, in force {evidence.effective[name]!r}"
        for name in sorted(set(evidence.requested) & set(evidence.effective))
        if not _same(evidence.requested[name], evidence.effective[name])
    ]
    return "; ".join(wrong) or None


def _same(wanted: object, found: object) -> bool:
    """Return True when two settings mean the same: numbers by value, the rest by their text."""
    if isinstance(wanted, bool) or isinstance(found, bool):
        return str(wanted).lower() == str(found).lower()
    try:
        return math.isclose(float(str(wanted)), float(str(found)), rel_tol=_EQUAL)
    except ValueError:
        return str(wanted) == str(found)


def _disagreement(evidence: Evidence) -> str | None:
    wrong = []
    for quantity, sources in sorted(evidence.stated.items()):
        low = max((span[0] for span in sources.values()), default=0.0)
        high = min((span[1] for span in sources.values()), default=0.0)
        if len(sources) > 1 and low > high + _EQUAL * max(1.0, abs(high)):
            told = ", ".join(f"{name} {_span(span)}" for name, span in sorted(sources.items()))
            wrong.append(f"{quantity}: {told}")
    return "; ".join(wrong) or None


def _span(span: tuple[float, float]) -> str:
    return f"{span[0]:g}" if span[0] == span[1] else f"{span[0]:g}..{span[1]:g}"


def _requests(evidence: Evidence) -> str | None:
    asked, sent, good = (
        evidence.requests_asked,
        evidence.requests_sent,
        evidence.requests_succeeded,
    )
    if asked is None or good is None or (asked == good and sent in (None, asked)):
        return None
    return f"asked {asked}, sent {sent if sent is not None else 'unknown'}, succeeded {good}"


def _client(evidence: Evidence) -> str | None:
    asked, achieved = evidence.parallel_asked, evidence.parallel_achieved
    if asked is None or achieved is None or achieved >= ACHIEVED_RATIO * asked:
        return None
    return f"asked for {asked} requests at once, had {achieved:.1f} on average"


def _lag(evidence: Evidence) -> str | None:
    lag = evidence.client_lag_s
    return None if lag is None or lag <= CLIENT_LAG_S else f"event loop late by {lag:.3f} s"


def _prefix(evidence: Evidence) -> str | None:
    queries, hits = evidence.prefix_queries, evidence.prefix_hits
    if evidence.prefix_caching_wanted is not False or not queries or hits is None:
        return None
    share = hits / queries
    if share <= PREFIX_HITS_RATIO:
        return None
    return f"{share:.1%} of {queries:g} tokens hit the prefix cache, none were wanted"


def _gaps(evidence: Evidence) -> str | None:
    found = []
    expected, kept = evidence.ticks_expected, evidence.ticks_kept
    if expected and kept is not None and kept < KEPT_RATIO * expected:
        found.append(f"{kept} of {expected} samples")
    gap, interval = evidence.largest_gap_s, evidence.sample_interval_s
    if gap is not None and interval and gap > GAP_INTERVALS * interval:
        found.append(f"{gap:.2f} s without a sample (interval {interval:g} s)")
    return ", ".join(found) or None


def _restarted(evidence: Evidence) -> str | None:
    found = []
    if evidence.counter_resets:
        found.append(f"{evidence.counter_resets} counter resets")
    if evidence.server_restarts:
        found.append(f"{evidence.server_restarts} server starts too many")
    return ", ".join(found) or None


def _foreign(evidence: Evidence) -> str | None:
    pids = sorted(set(evidence.gpu_foreign_pids))
    return f"processes {', '.join(map(str, pids))} on the GPU" if pids else None


def _throttled(evidence: Evidence) -> str | None:
    seen = 0
    for bits in evidence.throttle_reasons:
        seen |= bits
    names = [name for bit, name in THROTTLING.items() if seen & bit]
    return ", ".join(names) or None


def _power_capped(evidence: Evidence) -> str | None:
    capped = sum(1 for bits in evidence.throttle_reasons if bits & POWER_CAP)
    return f"{capped} of {len(evidence.throttle_reasons)} samples" if capped else None


def _ecc(evidence: Evidence) -> str | None:
    return f"{evidence.ecc_errors} uncorrected" if evidence.ecc_errors else None


def _baseline(evidence: Evidence) -> str | None:
    found = []
    before, after = evidence.memory_before_start_bytes, evidence.memory_after_stop_bytes
    if before is not None and after is not None and after - before > BASELINE_BYTES:
        found.append(f"{(after - before) / 2**30:.2f} GiB more in use than before")
    if evidence.processes_left:
        found.append(f"{evidence.processes_left} processes left")
    return ", ".join(found) or None


def _preempted(evidence: Evidence) -> str | None:
    return f"{evidence.preemptions:g} preemptions" if evidence.preemptions else None


def _queued(evidence: Evidence) -> str | None:
    waiting = evidence.peak_requests_waiting
    return f"up to {waiting:g} requests waited" if waiting else None


def _curves(evidence: Evidence) -> str | None:
    count = evidence.samples_outside_curves
    return f"{count} samples outside the curves rebuilt from the requests" if count else None


F, I, N = Weight.FAILS, Weight.INVALIDATES, Weight.NOTES  # noqa: E741 - a table's columns

#: Every reason there is, in the order they are told.
CHECKS: tuple[Check, ...] = (
    Check("settings_in_force", F, "effective configuration differs from the requested", _settings),
    Check("sources_agree", I, "log, server and prediction disagree on the pool", _disagreement),
    Check("requests_complete", I, "not every asked request was sent and succeeded", _requests),
    Check("client_concurrency", I, "the client kept fewer requests in flight than asked", _client),
    Check("client_lag", I, "the client's own loop was late", _lag),
    Check("prefix_cache_unused", I, "prefix-cache hits where none were wanted", _prefix),
    Check("samples_complete", I, "gaps in the samples", _gaps),
    Check("server_uninterrupted", I, "the server restarted", _restarted),
    Check("gpu_exclusive", I, "another process used the GPU", _foreign),
    Check("gpu_unthrottled", I, "the GPU was throttled", _throttled),
    Check("gpu_memory_sound", I, "uncorrected memory errors", _ecc),
    Check("memory_returned", I, "memory did not return to its baseline after stop", _baseline),
    Check("samples_between_curves", N, "samples contradict the requests", _curves),
    Check("power_capped", N, "the GPU ran at its power limit", _power_capped),
    Check("preempted", N, "requests were preempted", _preempted),
    Check("queued", N, "requests waited", _queued),
)


def judge(evidence: Evidence) -> list[Reason]:
    """Return every reason to doubt, in the table's order; an empty list means none was found."""
    found = []
    for check in CHECKS:
        message = check.judge(evidence)
        if message is not None:
            found.append(Reason(check.name, check.weight, f"{check.meaning}: {message}"))
    return found


def is_valid(reasons: Sequence[Reason]) -> bool:
    """Return True when nothing fails or invalidates a load point."""
    return all(reason.weight is Weight.NOTES for reason in reasons)
