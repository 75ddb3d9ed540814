"""The numbers of a load point, each with the samples or requests it comes from.

A window is the time from the first measured request's start to the last one's end: warm-up requests
and the summary's time are outside. A peak that no sample saw is NULL with the reason, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks import answers, doubts, usage
from tasks.canonical import canonical_json
from tasks.capture import curves, evalscope
from tasks.capture.curves import UsageRequest
from tasks.capture.validity import Scope
from tasks.capture.windows import Sample
from tasks.requests import databases
from tasks.series import Series, Window, series
from warehouse.errors import CannotFindOut
from warehouse.registry import EXTREME_OF, GROWTH_OF, PEAK_OF

if TYPE_CHECKING:
    from tasks.derived import Arithmetic
    from tasks.rows import Source

Row = dict[str, Any]
SERVER_FILE = "raw/server_samples.jsonl.gz"
PROCESS_FILE = "raw/process_samples.jsonl.gz"
GPU_FILE = "raw/gpu_samples.jsonl.gz"
REPORTS_FILE = "bench/load_points.json"

#: Derived metric -> (column of the requests in seconds, quantile).
_QUANTILES = {
    "ttft_p50_ms": ("ttft_s", 0.50),
    "ttft_p99_ms": ("ttft_s", 0.99),
    "itl_p50_ms": ("itl_mean_s", 0.50),
    "itl_p99_ms": ("itl_mean_s", 0.99),
    "latency_p50_ms": ("latency_s", 0.50),
    "latency_p99_ms": ("latency_s", 0.99),
}
#: Measured metric -> its name in the report's ``client_lag`` (tasks/pod/bench_driver.py: LoopLag).
_CLIENT_LAG = {
    "client_lag_p50_s": "p50_s",
    "client_lag_p99_s": "p99_s",
    "client_lag_max_s": "max_s",
}


def load_point_rows(
    source: Source,
    asked: pa.Table,
    tables: Mapping[str, pa.Table],
    *,
    arithmetic: Arithmetic,
    blocks: float | None,
) -> tuple[list[Row], list[Row], list[Row], list[Row]]:
    """Return rows for ``load_point``, ``measurement``, ``derivation`` and ``validity``.

    ``asked`` are the requests, ``tables`` the samples already made into rows, ``blocks`` the size
    of the pool as measured.
    """
    points: list[Row] = []
    measured: list[Row] = []
    derived: list[Row] = []
    checks: list[Row] = []
    reports = _reports(source)
    for index, load in enumerate(source.cell["setting"]["load"]):
        requests = asked.filter(pc.equal(asked["load_point"], index))
        window = _window(source, index, requests)
        report = reports.get(index, {})
        points.append(_point(source, index, load, report, window))
        database = _where(source, index)
        figures = _measured(window, requests, tables, database, report)
        base: Row = {"run_uuid": source.run_uuid, "load_point": index}
        measured += [base | {"metric": metric} | row for metric, row in figures.items()]
        statistics = _derived(window, requests, database)
        statistics["peak_kv_usage_ratio_bound"] = _bound(load, figures, arithmetic, blocks)
        known = _usage(source, index, load, report, window, tables, figures, blocks)
        statistics |= usage.rows(known, arithmetic)
        derived += [base | {"metric": metric} | row for metric, row in statistics.items()]
        numbers = {name: row.get("value") for name, row in (figures | statistics).items()}
        looked_up = _growth(window, tables.get("server_sample"), "prefix_cache_queries_total")
        numbers["prefix_cache_queries"] = looked_up.get("value")
        evidence = doubts.of_point(source, load, report, window, requests, tables, numbers)
        checks += [base | row for row in doubts.rows(evidence, Scope.LOAD_POINT)]
    return points, measured, derived, checks


def _reports(source: Source) -> dict[int, Row]:
    """Return what the run says of each of its load points."""
    path = source.folder / REPORTS_FILE
    if not path.is_file():
        return {}
    return {int(report["index"]): report for report in json.loads(path.read_text(encoding="utf-8"))}


def _window(source: Source, index: int, requests: pa.Table) -> Window | None:
    done = requests.filter(pc.is_valid(requests["end_s"]))
    if done.num_rows:
        start, end = pc.min(requests["start_s"]).as_py(), pc.max(done["end_s"]).as_py()
        if start is not None:
            return Window(start, end, "requests")
    for phase in source.json("phases.json").get("phases") or []:
        measured = phase["name"] == "measure" and phase.get("load_point") == index
        if measured and phase.get("end_s") is not None:
            return Window(phase["start_s"], phase["end_s"], "phases")
    return None


def _where(source: Source, index: int) -> str:
    """Return the file of the bundle that holds a load point's requests."""
    path = databases(source.folder).get(index)
    return path.relative_to(source.folder).as_posix() if path else ""


def _point(source: Source, index: int, load: Row, report: Row, window: Window | None) -> Row:
    return {
        "run_uuid": source.run_uuid,
        "load_point": index,
        "asked_prompt_tokens": load["prompt_tokens"],
        "asked_output_tokens": load["output_tokens"],
        "parallel": load["parallel"],
        "asked_requests": load["number"],
        "warmup_requests": load.get("warmup"),
        "prefix_tokens": load.get("prefix_tokens"),
        "temperature": load.get("temperature"),
        "seed": report.get("seed", load.get("seed")),
        "ignore_eos": load.get("ignore_eos"),
        "enable_thinking": load.get("enable_thinking"),
        "dataset": load.get("dataset"),
        "dataset_offset": report.get("dataset_offset"),
        "state": report.get("state"),
        "error": report.get("error"),
        "sent_requests": report.get("sent"),
        "succeeded_requests": report.get("succeeded"),
        "failed_requests": report.get("failed"),
        "window_start_s": window.start_s if window else None,
        "window_end_s": window.end_s if window else None,
        "window_source": window.source if window else None,
        "requests_sha256": report.get("requests_sha256"),
        "prompt_tokens_differ": report.get("prompt_tokens_differ"),
    }


def _usage(
    source: Source,
    index: int,
    load: Row,
    report: Row,
    window: Window | None,
    tables: Mapping[str, pa.Table],
    figures: Mapping[str, Row],
    blocks: float | None,
) -> usage.Known:
    """Return what the usage curves of a load point are drawn from."""
    seen = series(tables.get("server_sample"), "kv_usage_ratio")
    inside = None if seen is None or window is None else seen.within(window)
    waiting = figures["peak_requests_waiting"].get("value")
    return usage.Known(
        requests=_usage_requests(source, index, load),
        sent=report.get("sent"),
        samples=(
            []
            if inside is None
            else [Sample(float(t), float(v)) for t, v in zip(inside.t_s, inside.value, strict=True)]
        ),
        blocks=None if blocks is None else int(blocks),
        preemptions=figures["preemptions"].get("value"),
        waited=None if waiting is None else waiting > 0,
        prefix_caching=bool(source.cell["setting"]["server"].get("enable_prefix_caching")),
        prefix_hits=figures["prefix_cache_hits"].get("value"),
        file=_where(source, index),
    )


def _usage_requests(source: Source, index: int, load: Row) -> Sequence[UsageRequest]:
    """Return a load point's requests with the time of every chunk, which only EvalScope keeps."""
    path = databases(source.folder).get(index)
    if path is None:
        return []
    least = answers.answer_tokens(
        output_tokens=load["output_tokens"], ignore_eos=load["ignore_eos"]
    )
    with suppress(CannotFindOut):
        return curves.from_requests(evalscope.requests(path.read_bytes(), answer_tokens=least))
    return []


# Measured: a sample or a request says so


def _measured(
    window: Window | None,
    requests: pa.Table,
    tables: Mapping[str, pa.Table],
    database: str,
    report: Row,
) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    server = tables.get("server_sample")
    for metric, family in PEAK_OF.items():
        rows[metric] = _peak(window, server, family, SERVER_FILE)
    for metric, family in GROWTH_OF.items():
        rows[metric] = _growth(window, server, family)
    processes = _summed(tables.get("process_sample"), "rss_bytes")
    rows["peak_process_rss_bytes"] = _highest(
        window, processes, PROCESS_FILE, "resident memory of all processes"
    )
    gpus = tables.get("gpu_sample")
    rows["peak_gpu_used_bytes"] = (
        _peak(window, gpus, "used_bytes", GPU_FILE)
        if gpus is not None
        else {"reason": "no GPU was sampled"}
    )
    good = requests.filter(requests["success"])
    for metric, (column, which) in EXTREME_OF.items():
        rows[metric] = _extreme(good, column, which, database)
    rows["window_s"] = (
        _number(
            window.end_s - window.start_s,
            "requests",
            database,
            1,
            requests.num_rows,
            "last request's end minus first request's start",
        )
        if window and window.source == "requests"
        else {"reason": "no request of this load point ended"}
    )
    # A load point that was skipped did not have zero successes: it was not measured.
    succeeded = None if report.get("state") == "skipped" else report.get("succeeded")
    rows["requests_succeeded"] = (
        _number(
            good.num_rows, "requests", database, 1, requests.num_rows, "requests answered whole"
        )
        if requests.num_rows
        else _number(succeeded, "bench", REPORTS_FILE, None, None, "succeeded")
        if succeeded is not None
        else {"reason": "the load point was never reached"}
    )
    return rows | _client_lag(report)


def _client_lag(report: Row) -> dict[str, Row]:
    """Return how late the client's event loop ran while the load point was measured."""
    lag = report.get("client_lag")
    if not isinstance(lag, Mapping):
        reason = report.get("client_lag_reason") or "the run did not watch the client's event loop"
        return {metric: {"reason": reason} for metric in _CLIENT_LAG}
    return {
        metric: _number(
            lag[name],
            "bench",
            REPORTS_FILE,
            None,
            None,
            f"client_lag.{name} of {lag['wakeups']} wake-ups, one every {lag['interval_s']:g} s",
        )
        for metric, name in _CLIENT_LAG.items()
    }


def _number(
    value: float, source: str, file: str, line: int | None, line_end: int | None, text: str
) -> Row:
    return {
        "value": float(value),
        "low": float(value),
        "high": float(value),
        "source": source,
        "file": file,
        "line": line,
        "line_end": line_end,
        "text": text,
    }


def _summed(samples: pa.Table | None, column: str) -> Series | None:
    """Return the sum over all rows of a tick; rows of one tick follow each other."""
    if samples is None or not samples.num_rows:
        return None
    ticks = samples["tick"].to_numpy()
    first = np.concatenate(([0], np.flatnonzero(np.diff(ticks)) + 1))
    value = samples[column].cast(pa.float64()).to_numpy(zero_copy_only=False)
    t_s = samples["t_s"].to_numpy(zero_copy_only=False)[first]
    keep = ~np.isnan(t_s)
    return Series(ticks[first][keep], t_s[keep], np.add.reduceat(np.nan_to_num(value), first)[keep])


def _peak(window: Window | None, samples: pa.Table | None, column: str, file: str) -> Row:
    return _highest(window, series(samples, column), file, column)


def _highest(window: Window | None, seen: Series | None, file: str, text: str) -> Row:
    if window is None:
        return {"reason": "the load point was never measured: it has no window"}
    if seen is None:
        return {"reason": f"no samples in {file}"}
    inside = seen.within(window)
    if not len(inside):
        return {"reason": f"no sample of {text} within the window of {_span(window)}"}
    at = int(np.argmax(inside.value))
    tick = int(inside.tick[at])
    return _number(
        float(inside.value[at]),
        "samples",
        file,
        tick,
        tick,
        f"{text} at tick {tick}, highest of {len(inside)} samples in the window",
    )


def _growth(window: Window | None, samples: pa.Table | None, column: str) -> Row:
    """Return a counter's growth from the last sample before to the first one after a window."""
    if window is None:
        return {"reason": "the load point was never measured: it has no window"}
    seen = series(samples, column)
    if seen is None or not len(seen):
        return {"reason": f"{column} was not sampled"}
    seen = seen.around(window)
    if len(seen) < 2:
        return {"reason": f"fewer than two samples of {column} around the window"}
    fall = np.flatnonzero(np.diff(seen.value) < 0)
    if len(fall):
        old, new = seen.value[fall[0]], seen.value[fall[0] + 1]
        return {"reason": f"{column} fell from {old:g} to {new:g}: the server restarted"}
    start, end = float(seen.value[0]), float(seen.value[-1])
    first, last = int(seen.tick[0]), int(seen.tick[-1])
    return _number(
        end - start,
        "samples",
        SERVER_FILE,
        first,
        last,
        f"{column} from {start:g} at tick {first} to {end:g} at tick {last}",
    )


def _extreme(requests: pa.Table, column: str, which: str, database: str) -> Row:
    values = requests[column]
    value = (pc.min(values) if which == "min" else pc.max(values)).as_py()
    if value is None:
        return {"reason": "no request of this load point succeeded"}
    row = int(requests["request"][pc.index(values, value).as_py()].as_py())
    return _number(value, "requests", database, row, row, f"{column} of request {row}")


def _span(window: Window) -> str:
    return f"{window.end_s - window.start_s:.3f} s"


# Derived: follows from the above


def _derived(window: Window | None, requests: pa.Table, database: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    good = requests.filter(requests["success"])
    for metric, (column, quantile) in _QUANTILES.items():
        values = pc.drop_null(good[column])
        inputs: Row = {"requests": len(values), "file": database}
        formula = f"{quantile:g} quantile of {column} over successful requests, linear, x 1000"
        if len(values):
            value = pc.quantile(values, q=quantile, interpolation="linear")[0].as_py() * 1000
            rows[metric] = _follows(value, formula, inputs)
        else:
            rows[metric] = _follows(None, formula, inputs, "no successful request")
    tokens = pc.sum(good["completion_tokens"]).as_py()
    formula = "sum of completion_tokens / window_s"
    if tokens is not None and window is not None and window.end_s > window.start_s:
        seconds = window.end_s - window.start_s
        rows["output_tokens_per_s"] = _follows(
            tokens / seconds,
            formula,
            {"output_tokens": tokens, "window_s": seconds, "file": database},
        )
    else:
        rows["output_tokens_per_s"] = _follows(None, formula, {}, "no successful request")
    return rows


def _follows(value: float | None, formula: str, inputs: Row, reason: str | None = None) -> Row:
    return {"value": value, "formula": formula, "inputs": canonical_json(inputs), "reason": reason}


def _bound(
    load: Row, measured: Mapping[str, Row], arithmetic: Arithmetic, blocks: float | None
) -> Row:
    """Return the bound of the peak for what was really served.

    The longest prompt and answer served take the place of those asked for: EvalScope's 512 tokens
    reach the server as 518 to 520. The pool is the predicted one; where nothing could be predicted
    before the first boot, it is the measured one.
    """
    predicted = arithmetic.predicted_blocks
    pool = predicted if predicted is not None else blocks
    which = "predicted" if predicted is not None else "measured"
    formula = f"blocks of the longest requests served at once / ({which} blocks - 1)"
    prompt = measured["prompt_tokens_max"].get("value")
    output = measured["output_tokens_max"].get("value")
    if prompt is None or output is None or pool is None:
        missing = "served tokens" if pool is not None else "the number of blocks"
        return _follows(None, formula, {}, f"{missing}: not known")
    asked = {
        "prompt_tokens": int(prompt),
        "output_tokens": int(output),
        "parallel": min(load["parallel"], load["number"]),
    }
    value = arithmetic.peak_bound(int(pool), **asked)
    inputs: Row = asked | {"num_gpu_blocks": int(pool), "file": "prediction.json"}
    reason = None if value is not None else "the model's block arithmetic is not known"
    return _follows(value, formula, inputs, reason)
