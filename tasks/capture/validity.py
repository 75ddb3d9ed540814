"""When not to believe a load point: one table of checks, each a pure judgement of plain numbers.

A number without its doubts travels further than it should. Every reason here has a weight:
``fails`` ends the run's claim to have measured what was asked, ``invalidates`` keeps the load point
out of comparisons, ``notes`` only tells (preemption and queueing are often the purpose). What
cannot be judged, because an input is missing, is unknown and says what is missing: no reason is
made of an absence. Some checks are about the run, some about a load point; what the run itself has
judged (settings in force, memory given back) is taken as judged.
"""

from __future__ import annotations

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
#: How late the client's event loop may be (99th percentile over the measurement): a tenth of what a
#: request takes. A free slot is filled and an end is stamped that much later, and the requests in
#: flight that the client counts do not show it; :data:`ACHIEVED_RATIO` allows the same share. The
#: least value lies above what EvalScope with little to do showed (0.02 to 0.03 s, with ten busy
#: processes a core): a tenth of a very short request would blame the machine's clockwork.
CLIENT_LAG_RATIO = 0.1
CLIENT_LAG_S = 0.05
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


class Scope(StrEnum):
    """What a check is about."""

    RUN = "run"
    LOAD_POINT = "load_point"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Reason:
    """One doubt: its name in the table, its weight, and what was found against what was wanted."""

    name: str
    weight: Weight
    message: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """One check as made: it holds, is broken, or (None) cannot be told, and by which numbers."""

    name: str
    weight: Weight
    holds: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class Compared:
    """One thing that was asked for and found; ``equal`` None: cannot be told."""

    name: str
    wanted: object
    got: object
    equal: bool | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run or of one of its load points. None or empty: not known.

    ``settings`` are the run's own comparisons of asked and effective settings. ``stated`` holds,
    per quantity (``num_gpu_blocks``, ``kv_cache_size_tokens``, ``max_concurrency``), what each
    source says: ``log``, ``cache_config_info``, ``prediction``, each as its lowest and highest
    possible value. ``parallel_achieved`` counts while there was more to send. ``client_lag_s`` is a
    99th percentile, ``request_latency_s`` a median. ``gpu_foreign_pids`` are processes of others on
    the GPU, ``throttle_reasons`` NVML's bits of every sample; both None where no GPU was sampled.
    Times are seconds.
    """

    settings: Sequence[Compared] = ()
    model_revision: Compared | None = None
    stated: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    completion: Mapping[str, bool] = field(default_factory=dict)
    files_missing: Sequence[str] | None = None
    clock_mapped: bool | None = None
    requests_asked: int | None = None
    requests_sent: int | None = None
    requests_succeeded: int | None = None
    requests_recorded: int | None = None
    bench_state: str | None = None
    parallel_asked: int | None = None
    parallel_achieved: float | None = None
    client_lag_s: float | None = None
    request_latency_s: float | None = None
    prefix_caching_wanted: bool | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    ticks_expected: int | None = None
    ticks_kept: int | None = None
    largest_gap_s: float | None = None
    sample_interval_s: float | None = None
    counter_resets: int | None = None
    gpu_foreign_pids: Sequence[int] | None = None
    throttle_reasons: Sequence[int] | None = None
    ecc_errors: int | None = None
    memory_before_start_bytes: int | None = None
    memory_after_stop_bytes: int | None = None
    memory_back: bool | None = None
    gpu_memory_back: bool | None = None
    port_free: bool | None = None
    processes_left: int | None = None
    peak_kv_usage_ratio: float | None = None
    peak_kv_usage_ratio_bound: float | None = None
    preemptions: float | None = None
    peak_requests_waiting: float | None = None
    samples_outside_curves: int | None = None


#: Whether a check holds (None: cannot be told), and by which numbers or for want of which.
Finding = tuple[bool | None, str]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    weight: Weight
    scope: Scope
    meaning: str
    judge: Callable[[Evidence], Finding]


def _settings(evidence: Evidence) -> Finding:
    told = [one for one in evidence.settings if one.equal is not None]
    wrong = [_both(one) for one in told if not one.equal]
    if wrong:
        return False, "; ".join(wrong)
    names = ", ".join(one.name for one in told)
    return (True, f"equal: {names}") if told else (None, "the server told no setting")


def _both(one: Compared) -> str:
    return f"{one.name}: wanted {one.wanted!r}, in force {one.got!r}"


def _revision(evidence: Evidence) -> Finding:
    one = evidence.model_revision
    if one is None or one.equal is None:
        return None, "the model's files were not compared with the pin"
    return one.equal, _both(one)


def _disagreement(evidence: Evidence) -> Finding:
    wrong: list[str] = []
    right: list[str] = []
    for quantity, sources in sorted(evidence.stated.items()):
        if len(sources) < 2:
            continue
        low = max(span[0] for span in sources.values())
        high = min(span[1] for span in sources.values())
        told = ", ".join(f"{name} {_span(span)}" for name, span in sorted(sources.items()))
        apart = low > high + _EQUAL * max(1.0, abs(high))
        (wrong if apart else right).append(f"{quantity}: {told}")
    if wrong:
        return False, "; ".join(wrong)
    return (True, "; ".join(right)) if right else (None, "fewer than two sources say anything")


def _span(span: tuple[float, float]) -> str:
    return f"{span[0]:.12g}" if span[0] == span[1] else f"{span[0]:.12g}..{span[1]:.12g}"


def _completion(evidence: Evidence) -> Finding:
    if not evidence.completion:
        return None, "no completion was checked before the load"
    wrong = [name for name, good in evidence.completion.items() if not good]
    return not wrong, f"wrong: {', '.join(wrong)}" if wrong else ", ".join(evidence.completion)


def _files(evidence: Evidence) -> Finding:
    if evidence.files_missing is None:
        return None, "nothing says which files were due"
    missing = evidence.files_missing
    return not missing, "; ".join(missing) or "every file arrived"


def _clock(evidence: Evidence) -> Finding:
    if evidence.clock_mapped is None:
        return None, "the run left neither a log nor a clock"
    return evidence.clock_mapped, (
        "clock.json is there" if evidence.clock_mapped else "the run left no clock.json"
    )


def _requests(evidence: Evidence) -> Finding:
    asked, sent, good, recorded = (
        evidence.requests_asked,
        evidence.requests_sent,
        evidence.requests_succeeded,
        evidence.requests_recorded,
    )
    if asked is None or good is None:
        return None, "how many requests succeeded is not known"
    fine = asked == good and sent in (None, asked) and recorded in (None, asked)
    fine = fine and evidence.bench_state in (None, "ok")
    told = f"asked {asked}, sent {_or_unknown(sent)}, succeeded {good}"
    if recorded not in (None, sent):
        told += f", on record {recorded}"
    if evidence.bench_state not in (None, "ok"):
        told += f", the load ended {evidence.bench_state}"
    return fine, told


def _or_unknown(number: object) -> str:
    return "unknown" if number is None else str(number)


def _client(evidence: Evidence) -> Finding:
    asked, achieved = evidence.parallel_asked, evidence.parallel_achieved
    if asked is None or achieved is None:
        return None, "requests in flight are not known"
    return (
        achieved >= ACHIEVED_RATIO * asked,
        f"asked for {asked} requests at once, had {achieved:.1f}",
    )


def _lag(evidence: Evidence) -> Finding:
    lag = evidence.client_lag_s
    if lag is None:
        return None, "how late the client's event loop ran is not known"
    latency = evidence.request_latency_s
    allowed = max(CLIENT_LAG_S, CLIENT_LAG_RATIO * (latency or 0.0))
    told = f"event loop late by {lag:.3f} s, allowed {allowed:.3f} s"
    if latency is not None:
        told += f" where a request takes {latency:.3f} s"
    return lag <= allowed, told


def _prefix(evidence: Evidence) -> Finding:
    queries, hits = evidence.prefix_queries, evidence.prefix_hits
    if evidence.prefix_caching_wanted:
        return True, "prefix caching was asked for"
    if evidence.prefix_caching_wanted is None or hits is None or queries is None:
        return None, "prefix-cache hits were not counted"
    if not queries:
        return True, "no token was looked up"
    share = hits / queries
    told = f"{share:.1%} of {queries:g} tokens hit the prefix cache, none were wanted"
    return share <= PREFIX_HITS_RATIO, told


def _gaps(evidence: Evidence) -> Finding:
    expected, kept = evidence.ticks_expected, evidence.ticks_kept
    gap, interval = evidence.largest_gap_s, evidence.sample_interval_s
    found, wrong = [], kept == 0
    if kept is not None:
        found.append(f"{kept} of {_or_unknown(expected)} samples")
        wrong = wrong or (expected is not None and kept < KEPT_RATIO * expected)
    if gap is not None and interval:
        found.append(f"at most {gap:.2f} s without a sample (interval {interval:g} s)")
        wrong = wrong or gap > GAP_INTERVALS * interval
    return (not wrong, ", ".join(found)) if found else (None, "nothing was sampled, or no window")


def _restarted(evidence: Evidence) -> Finding:
    resets = evidence.counter_resets
    if resets is None:
        return None, "no counter was sampled twice"
    return not resets, f"{resets} counter resets"


def _foreign(evidence: Evidence) -> Finding:
    if evidence.gpu_foreign_pids is None:
        return None, _NO_GPU
    pids = sorted(set(evidence.gpu_foreign_pids))
    named = f"processes {', '.join(map(str, pids))} on the GPU"
    return not pids, named if pids else "no other process was seen"


def _throttled(evidence: Evidence) -> Finding:
    if not evidence.throttle_reasons:
        return None, _NO_GPU
    seen = 0
    for bits in evidence.throttle_reasons:
        seen |= bits
    names = [name for bit, name in THROTTLING.items() if seen & bit]
    return not names, ", ".join(names) or f"not in {len(evidence.throttle_reasons)} samples"


def _power_capped(evidence: Evidence) -> Finding:
    if not evidence.throttle_reasons:
        return None, _NO_GPU
    capped = sum(1 for bits in evidence.throttle_reasons if bits & POWER_CAP)
    return not capped, f"{capped} of {len(evidence.throttle_reasons)} samples"


def _ecc(evidence: Evidence) -> Finding:
    if evidence.ecc_errors is None:
        return None, "no GPU reported memory errors"
    return not evidence.ecc_errors, f"{evidence.ecc_errors} uncorrected"


def _baseline(evidence: Evidence) -> Finding:
    left, back = evidence.processes_left, evidence.gpu_memory_back
    if left is None and back is None:
        return None, "nothing says what was left after the stop"
    found = [] if left is None else [f"{left} processes left"]
    if back is not None:
        found.append(f"GPU memory {'back' if back else 'not back'}")
    return not left and back is not False, ", ".join(found)


def _machine(evidence: Evidence) -> Finding:
    before, after = evidence.memory_before_start_bytes, evidence.memory_after_stop_bytes
    if evidence.memory_back is None or before is None or after is None:
        return None, "available memory was not compared before and after"
    told = f"{before / 2**30:.2f} GiB available before start, {after / 2**30:.2f} GiB after stop"
    return evidence.memory_back, told


def _port(evidence: Evidence) -> Finding:
    free = evidence.port_free
    if free is None:
        return None, "nobody looked at the port after the stop"
    return free, "free after the stop" if free else "still listened on after the stop"


def _preempted(evidence: Evidence) -> Finding:
    if evidence.preemptions is None:
        return None, "preemptions are not known"
    return not evidence.preemptions, f"{evidence.preemptions:g} preemptions"


def _queued(evidence: Evidence) -> Finding:
    waiting = evidence.peak_requests_waiting
    if waiting is None:
        return None, "waiting requests were not sampled"
    return not waiting, f"up to {waiting:g} requests waited"


def _curves(evidence: Evidence) -> Finding:
    count = evidence.samples_outside_curves
    if count is None:
        return None, "there are no curves or no samples"
    return not count, f"{count} samples outside the curves rebuilt from the requests"


def _bound(evidence: Evidence) -> Finding:
    peak, bound = evidence.peak_kv_usage_ratio, evidence.peak_kv_usage_ratio_bound
    if peak is None or bound is None:
        return None, "the sampled peak or its bound is not known"
    return peak <= bound + _EQUAL, f"peak {peak:.6g}, bound {bound:.6g}"


_NO_GPU = "no GPU was sampled"
F, I, N = Weight.FAILS, Weight.INVALIDATES, Weight.NOTES  # noqa: E741 - a table's columns
R, L, B = Scope.RUN, Scope.LOAD_POINT, Scope.BOTH

#: Every check there is, in the order they are told; the text says what a broken one means.
CHECKS: tuple[Check, ...] = (
    Check("settings_in_force", F, R, "effective configuration is not the requested", _settings),
    Check("model_revision", F, R, "the model's files are not those pinned", _revision),
    Check("sources_agree", I, R, "log, server and prediction disagree on the pool", _disagreement),
    Check("first_completion", I, R, "the server answered wrongly before the load", _completion),
    Check("requests_complete", I, L, "not every asked request was sent and succeeded", _requests),
    Check("client_concurrency", I, L, "the client kept fewer requests in flight", _client),
    Check("client_lag", I, L, "the client's own loop was late", _lag),
    Check("prefix_cache_unused", I, L, "prefix-cache hits where none were wanted", _prefix),
    Check("samples_complete", I, L, "gaps in the samples", _gaps),
    Check("server_uninterrupted", I, B, "the server restarted", _restarted),
    Check("gpu_exclusive", I, L, "another process used the GPU", _foreign),
    Check("gpu_unthrottled", I, L, "the GPU was throttled", _throttled),
    Check("gpu_memory_sound", I, L, "uncorrected memory errors", _ecc),
    Check("memory_returned", I, R, "memory did not return to its baseline after stop", _baseline),
    Check("port_free", I, R, "something kept the server's port after stop", _port),
    Check("machine_memory_returned", N, R, "the machine has less memory than before", _machine),
    Check("bundle_complete", N, R, "files did not arrive", _files),
    Check("clock_mapped", N, R, "times cannot be told in UTC", _clock),
    Check("samples_between_curves", N, L, "samples contradict the requests", _curves),
    Check("peak_within_bound", N, L, "the sampled peak is above its bound", _bound),
    Check("power_capped", N, L, "the GPU ran at its power limit", _power_capped),
    Check("preempted", N, L, "requests were preempted", _preempted),
    Check("queued", N, L, "requests waited", _queued),
)


def judgements(evidence: Evidence, scope: Scope | None = None) -> list[Judgement]:
    """Return every check of ``scope`` (None: all) as made, in the table's order."""
    found = []
    for check in CHECKS:
        if scope is None or check.scope in (scope, Scope.BOTH):
            holds, told = check.judge(evidence)
            reason = f"{check.meaning}: {told}" if holds is False else told
            found.append(Judgement(check.name, check.weight, holds, reason))
    return found


def judge(evidence: Evidence) -> list[Reason]:
    """Return every reason to doubt, in the table's order; an empty list means none was found."""
    return [
        Reason(one.name, one.weight, one.reason)
        for one in judgements(evidence)
        if one.holds is False
    ]


def is_valid(reasons: Sequence[Reason]) -> bool:
    """Return True when nothing fails or invalidates a load point."""
    return all(reason.weight is Weight.NOTES for reason in reasons)
