"""The evidence for tasks/capture/validity.py from a bundle, and its judgements as rows.

Every check has one home, the table there; here only the numbers are gathered. What a bundle does
not say stays unknown: the row is there and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.capture import validity
from tasks.capture.validity import Compared, Evidence, Scope
from tasks.series import Series, Window, series
from warehouse.registry import SERVER_FAMILIES

if TYPE_CHECKING:
    from tasks.rows import Source

Row = dict[str, Any]
#: Quantities that log, server and prediction each say, in values that must be the same.
POOL = ("num_gpu_blocks", "kv_cache_size_tokens", "max_concurrency")
_COUNTERS = tuple(name for name, (_, counter) in SERVER_FAMILIES.items() if counter)
_STATES = {"equal": True, "differs": False}


def rows(evidence: Evidence, scope: Scope) -> list[Row]:
    """Return one row of table ``validity`` for each check of ``scope``."""
    return [
        {
            "check_name": one.name,
            "kind": one.weight.value,
            "passed": one.holds,
            "detail": one.reason,
        }
        for one in validity.judgements(evidence, scope)
    ]


# The run


def of_run(
    source: Source, values: Iterable[Row], samples: pa.Table | None, *, served: str | None
) -> Evidence:
    """Return the evidence about a whole run; ``served`` is the engine's version that ran."""
    told = [_compared(check) for check in _listed(source.json("server_info.json").get("checks"))]
    settings = [one for one in told if one.name != "model_revision"]
    if all(one.name != "engine_version" for one in settings):
        pinned = source.cell["pins"].get("engine_version")
        equal = None if served is None or pinned is None else served == pinned
        settings.append(Compared("engine_version", pinned, served, equal))
    stop = source.json("stop.json")
    before, after = _mapping(stop.get("before")), _mapping(stop.get("after_stop"))
    left = stop.get("left")
    completion = _mapping(_mapping(source.json("readiness.json").get("completion")).get("checks"))
    return Evidence(
        settings=settings,
        model_revision=next((one for one in told if one.name == "model_revision"), None),
        stated=_stated(values, _mapping(source.json("prediction.json").get("values"))),
        completion={name: bool(good) for name, good in completion.items()},
        files_missing=[str(one) for one in source.manifest.get("incomplete") or []],
        clock_mapped=(source.clock is not None) if source.log or source.clock else None,
        counter_resets=_resets(samples, None),
        memory_before_start_bytes=before.get("mem_available_bytes"),
        memory_after_stop_bytes=after.get("mem_available_bytes"),
        memory_back=stop.get("memory_back"),
        gpu_memory_back=stop.get("gpu_memory_back"),
        port_free=stop.get("port_free"),
        processes_left=len(left) if isinstance(left, list) else None,
    )


def _compared(check: Mapping[str, Any]) -> Compared:
    return Compared(
        str(check.get("name")),
        check.get("wanted"),
        check.get("got"),
        _STATES.get(str(check.get("state"))),
    )


def _stated(
    values: Iterable[Row], predicted: Mapping[str, Any]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return what each source says about the pool, kept apart."""
    stated: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in POOL}
    for value in values:
        ruling = value["source"] != "log" or value["chosen"]
        if value["metric"] in stated and ruling and value["value"] is not None:
            stated[value["metric"]][value["source"]] = (value["low"], value["high"])
    for name in POOL:
        number = predicted.get(name)
        if number is not None:
            stated[name]["prediction"] = (float(number), float(number))
    return stated


def _resets(samples: pa.Table | None, window: Window | None) -> int | None:
    """Return how often the counter that fell most often did; None where none was seen twice."""
    found = []
    for name in _COUNTERS:
        counted = series(samples, name)
        if counted is not None and window is not None:
            counted = counted.around(window)
        if counted is not None and len(counted) > 1:
            found.append(counted.falls())
    return max(found, default=None)


# A load point


def of_point(
    source: Source,
    load: Row,
    report: Row,
    window: Window | None,
    requests: pa.Table,
    tables: Mapping[str, pa.Table],
    numbers: Mapping[str, float | None],
) -> Evidence:
    """Return the evidence about a load point; ``numbers`` are its stored figures by metric."""
    reached = report.get("state") != "skipped"
    recorded = requests.num_rows if reached and "sent" in report else None
    succeeded, outside = numbers["requests_succeeded"], numbers["samples_outside_curves"]
    latency_ms = numbers["latency_p50_ms"]
    together = min(load["parallel"], load["number"])
    server, gpus = tables.get("server_sample"), _inside(tables.get("gpu_sample"), window)
    caching = source.cell["setting"]["server"].get("enable_prefix_caching")
    return Evidence(
        requests_asked=load["number"],
        requests_sent=report.get("sent"),
        requests_succeeded=None if succeeded is None else int(succeeded),
        requests_recorded=recorded,
        bench_state=report.get("state") if reached else None,
        parallel_asked=together,
        parallel_achieved=in_flight(requests, together),
        client_lag_s=numbers["client_lag_p99_s"],
        request_latency_s=None if latency_ms is None else latency_ms / 1000,
        prefix_caching_wanted=caching,
        prefix_queries=numbers["prefix_cache_queries"],
        prefix_hits=numbers["prefix_cache_hits"],
        **_coverage(server, window),
        counter_resets=None if window is None else _resets(server, window),
        **_gpu(gpus),
        peak_kv_usage_ratio=numbers["peak_kv_usage_ratio"],
        peak_kv_usage_ratio_bound=numbers["peak_kv_usage_ratio_bound"],
        preemptions=numbers["preemptions"],
        peak_requests_waiting=numbers["peak_requests_waiting"],
        samples_outside_curves=None if outside is None else int(outside),
    )


def in_flight(requests: pa.Table, together: int) -> float | None:
    """Return the mean number of requests in flight while there was more to send.

    That is from the first start to the last one. Where all were to start at once it is the most
    that ever were in flight. Unknown where a request has no end: it left at some time nobody saw.
    """
    if not requests.num_rows or requests["end_s"].null_count:
        return None
    start = np.sort(requests["start_s"].to_numpy(zero_copy_only=False))
    end = requests["end_s"].to_numpy(zero_copy_only=False)
    if len(start) > together and start[-1] > start[0]:
        begun = requests["start_s"].to_numpy(zero_copy_only=False)
        busy = np.minimum(end, start[-1]) - begun
        return float(np.sum(busy) / (start[-1] - start[0]))
    ends = np.sort(end)
    running = np.arange(1, len(start) + 1) - np.searchsorted(ends, start, "right")
    return float(np.max(running))


def _coverage(samples: pa.Table | None, window: Window | None) -> dict[str, Any]:
    """Return how well the server was sampled within the window."""
    if samples is None or window is None:
        return {} if window is None else {"ticks_expected": None, "ticks_kept": 0}
    seen = series(samples, "kv_usage_ratio")
    assert seen is not None
    inside = seen.within(window)
    due = np.unique(pc.drop_null(samples["due_s"]).to_numpy(zero_copy_only=False))
    interval = float(np.median(np.diff(due))) if len(due) > 1 else None
    length = window.end_s - window.start_s
    return {
        "ticks_expected": int(length / interval) if interval else None,
        "ticks_kept": len(inside),
        "largest_gap_s": _gap(inside, window),
        "sample_interval_s": interval,
    }


def _gap(inside: Series, window: Window) -> float:
    edges = np.concatenate(([window.start_s], inside.t_s, [window.end_s]))
    return float(np.max(np.diff(edges)))


def _inside(samples: pa.Table | None, window: Window | None) -> pa.Table | None:
    if samples is None or window is None:
        return None
    inside = pc.and_(
        pc.greater_equal(samples["t_s"], window.start_s),
        pc.less_equal(samples["t_s"], window.end_s),
    )
    return samples.filter(inside)


def _gpu(samples: pa.Table | None) -> dict[str, Any]:
    """Return what NVML said within the window; nothing where no GPU was sampled."""
    if samples is None or not samples.num_rows:
        return {}
    lists = pc.drop_null(samples["foreign_pids"]).to_pylist()
    errors = [
        pc.max(part).as_py() - pc.min(part).as_py()
        for part in _by_gpu(samples, "ecc_uncorrected")
        if len(part)
    ]
    return {
        "gpu_foreign_pids": [pid for text in lists for pid in _pids(text)] if lists else None,
        "throttle_reasons": pc.drop_null(samples["throttle_reasons"]).to_pylist(),
        "ecc_errors": sum(errors) if errors else None,
    }


def _by_gpu(samples: pa.Table, column: str) -> Iterable[pa.ChunkedArray]:
    for uuid in pc.unique(samples["gpu_uuid"]):
        yield pc.drop_null(samples.filter(pc.equal(samples["gpu_uuid"], uuid))[column])


def _pids(text: str) -> list[int]:
    listed = json.loads(text)
    return [int(one) for one in listed] if isinstance(listed, list) else []


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
