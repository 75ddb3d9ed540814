"""Every metric name, unit, evidence class, outcome and phase of the project, defined once.

Parsers, column comments, JSON keys and the reference take their names from here; a second list
elsewhere would drift and a misspelt metric never raises: its column is just empty. Standard
library only, because everything imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Evidence(StrEnum):
    """Where a number comes from. Classes never share a column."""

    MEASURED = "measured"  # a log line, a sample, a request
    PREDICTED = "predicted"  # arithmetic made, written and hashed before the run was created
    DERIVED = "derived"  # follows from other numbers


class Outcome(StrEnum):
    """How a run ended: a closed set; a cell that fails is a result, not an exception."""

    OK = "ok"
    PARTIAL = "partial"
    OOM = "oom"
    REFUSED = "refused"  # the engine's own check said no
    CONFIG_MISMATCH = "config_mismatch"
    CRASHED = "crashed"
    NOT_READY = "not_ready"
    BENCH_FAILED = "bench_failed"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    LOST = "lost"
    INFEASIBLE = "infeasible"  # refused by the plan, never started


class Phase(StrEnum):
    """Where in its life a run ended."""

    QUEUE = "queue"
    START = "start"
    LOAD = "load"
    PROFILE = "profile"
    KV_CACHE = "kv_cache"
    GRAPH = "graph"
    READY = "ready"
    BENCH = "bench"
    STOP = "stop"
    COLLECT = "collect"


@dataclass(frozen=True, slots=True)
class Metric:
    """One measurable quantity: its name ends in its unit (design decision 6)."""

    name: str
    unit: str  # bytes, tokens, blocks, ratio, s, ms, requests, count, percent
    meaning: str
    scope: str = "run"  # run or load_point


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


#: What a start-up log, /metrics' cache_config_info or the prediction says about one server start.
#: "x" is a ratio as vLLM prints it (requests of max_model_len that fit).
STARTUP: dict[str, Metric] = _table(
    Metric("kv_cache_size_tokens", "tokens", "tokens the KV pool holds, as vLLM logs it"),
    Metric("max_concurrency", "x", "requests of max_model_len tokens that fit, as vLLM logs it"),
    Metric("num_gpu_blocks", "blocks", "KV blocks, the null block included"),
    Metric("attention_block_size_tokens", "tokens", "tokens of one attention block"),
    Metric("mamba_padding_percent", "percent", "padding of the mamba page to the attention page"),
    Metric("bytes_per_block", "bytes", "bytes of one KV block over all layers of a group"),
    Metric("blocks_per_request", "blocks", "blocks of one request of max_model_len tokens"),
    Metric("kv_padding_layers", "count", "layers added so that KV groups are equal"),
    Metric("available_kv_cache_bytes", "bytes", "budget for the KV pool after profiling"),
    Metric("requested_kv_cache_bytes", "bytes", "explicitly asked size of the KV pool"),
    Metric("available_memory_bytes", "bytes", "memory that was free when the engine checked"),
    Metric("total_memory_bytes", "bytes", "memory of the device or node the engine checked"),
    Metric("model_loading_bytes", "bytes", "device memory taken while loading the model"),
    Metric("model_loading_s", "s", "time of loading the model"),
    Metric("weights_loading_s", "s", "time of reading the weights"),
    Metric("graph_capture_bytes", "bytes", "device memory taken by CUDA graphs; may be negative"),
    Metric("graph_capture_s", "s", "time of capturing CUDA graphs"),
    Metric("graph_estimate_bytes", "bytes", "CUDA graph memory as estimated before the pool"),
    Metric("initial_free_bytes", "bytes", "free device memory at start"),
    Metric("weights_and_non_torch_bytes", "bytes", "consumed memory: weights and non-torch"),
    Metric("peak_activation_bytes", "bytes", "peak activation memory of the profile run"),
    Metric("non_torch_bytes", "bytes", "memory outside torch, where logged apart"),
    Metric("init_engine_s", "s", "profile, KV cache creation and warm-up"),
    Metric("compilation_s", "s", "torch.compile's share of engine initialisation"),
    Metric("max_model_len_tokens", "tokens", "context limit in force"),
    Metric("kv_padding_waste_percent", "percent", "KV memory the padding layers may waste"),
    Metric("requested_memory_bytes", "bytes", "device memory the engine allows itself"),
    Metric("weights_bytes", "bytes", "memory of the weights, where logged apart"),
    Metric("graph_pool_bytes", "bytes", "CUDA graph pool as compared with its estimate"),
    Metric("model_init_s", "s", "time of building the model without its weights"),
    Metric("gpu_memory_utilization_ratio", "ratio", "share of the device the engine may use"),
    Metric("tensor_parallel_size", "count", "ranks a layer is split over"),
    Metric("pipeline_parallel_size", "count", "stages the layers are split over"),
)

#: What is measured per load point.
LOAD_POINT: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("peak_kv_usage_ratio", "ratio", "highest sampled KV usage", "load_point"),
        Metric(
            "peak_kv_usage_ratio_bound",
            "ratio",
            "highest KV usage that the requests served can reach",
            "load_point",
        ),
        Metric(
            "peak_kv_usage_lower_ratio",
            "ratio",
            "KV usage that the requests surely reached, between scrapes too",
            "load_point",
        ),
        Metric(
            "peak_kv_usage_upper_ratio",
            "ratio",
            "KV usage that the requests never exceeded, between scrapes too",
            "load_point",
        ),
        Metric(
            "peak_kv_usage_case",
            "-",
            "1: exact, lower and upper peak are equal; 0: bounded by them",
            "load_point",
        ),
        Metric(
            "samples_outside_curves",
            "count",
            "samples of KV usage that the requests do not allow",
            "load_point",
        ),
        Metric("peak_requests_running", "requests", "most requests running at once", "load_point"),
        Metric("peak_requests_waiting", "requests", "most requests waiting at once", "load_point"),
        Metric("preemptions", "count", "preemptions within the window", "load_point"),
        Metric("prefix_cache_hits", "tokens", "prefix-cache hits within the window", "load_point"),
        Metric("requests_asked", "requests", "requests asked for", "load_point"),
        Metric("requests_succeeded", "requests", "requests answered whole", "load_point"),
        Metric("prompt_tokens_min", "tokens", "shortest prompt as served", "load_point"),
        Metric("prompt_tokens_max", "tokens", "longest prompt as served", "load_point"),
        Metric("output_tokens_max", "tokens", "longest output as served", "load_point"),
        Metric("window_s", "s", "first request's start to last request's end", "load_point"),
        Metric("output_tokens_per_s", "tokens/s", "output tokens over the window", "load_point"),
        Metric("ttft_p50_ms", "ms", "median time to first token", "load_point"),
        Metric("ttft_p99_ms", "ms", "99th percentile of time to first token", "load_point"),
        Metric(
            "itl_p50_ms", "ms", "median over requests of the mean time between chunks", "load_point"
        ),
        Metric(
            "itl_p99_ms",
            "ms",
            "99th percentile over requests of the mean time between chunks",
            "load_point",
        ),
        Metric("latency_p50_ms", "ms", "median request latency", "load_point"),
        Metric("latency_p99_ms", "ms", "99th percentile of request latency", "load_point"),
        Metric(
            "peak_process_rss_bytes",
            "bytes",
            "peak resident memory of the server's processes",
            "load_point",
        ),
        Metric("peak_gpu_used_bytes", "bytes", "peak device memory used (NVML)", "load_point"),
        Metric("client_lag_p50_s", "s", "median lateness of the client's event loop", "load_point"),
        Metric(
            "client_lag_p99_s",
            "s",
            "99th percentile of the lateness of the client's event loop",
            "load_point",
        ),
        Metric(
            "client_lag_max_s", "s", "greatest lateness of the client's event loop", "load_point"
        ),
    )
}

#: Families sampled from /metrics: our name -> (vLLM's names over the versions, is a counter).
#: A counter's value is summed over engines; old names alias (facts: vLLM 0.9 ... 0.33).
SERVER_FAMILIES: dict[str, tuple[tuple[str, ...], bool]] = {
    "kv_usage_ratio": (("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), False),
    "requests_running": (("vllm:num_requests_running",), False),
    "requests_waiting": (("vllm:num_requests_waiting",), False),
    "preemptions_total": (("vllm:num_preemptions_total", "vllm:num_preemptions"), True),
    "prompt_tokens_total": (("vllm:prompt_tokens_total",), True),
    "generation_tokens_total": (("vllm:generation_tokens_total",), True),
    "requests_succeeded_total": (("vllm:request_success_total",), True),
    "prefix_cache_queries_total": (
        ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        True,
    ),
    "prefix_cache_hits_total": (
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        True,
    ),
}

#: Metrics of a load point that follow from others by statistics or arithmetic: stored as derived,
#: never beside measured ones. The rest of LOAD_POINT is measured.
DERIVED = frozenset(
    {
        "output_tokens_per_s",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "latency_p50_ms",
        "latency_p99_ms",
        "peak_kv_usage_ratio_bound",
        "peak_kv_usage_lower_ratio",
        "peak_kv_usage_upper_ratio",
        "peak_kv_usage_case",
        "samples_outside_curves",
    }
)

#: Start-up metrics whose prediction is integer arithmetic: a difference is an alarm. The others are
#: estimates, for which a difference is expected.
EXACT = frozenset(
    {
        "kv_cache_size_tokens",
        "max_concurrency",
        "num_gpu_blocks",
        "attention_block_size_tokens",
        "mamba_padding_percent",
        "bytes_per_block",
        "blocks_per_request",
        "kv_padding_layers",
        "max_model_len_tokens",
    }
)

#: Labels of vllm:cache_config_info that say a start-up metric (the effective configuration).
CACHE_CONFIG: dict[str, str] = {
    "kv_cache_size_tokens": "kv_cache_size_tokens",
    "kv_cache_max_concurrency": "max_concurrency",
    "num_gpu_blocks": "num_gpu_blocks",
    "block_size": "attention_block_size_tokens",
    "kv_cache_memory_bytes": "requested_kv_cache_bytes",
}

#: Peaks of a load point: metric -> sampled family (or column) whose highest sample it is.
PEAK_OF: dict[str, str] = {
    "peak_kv_usage_ratio": "kv_usage_ratio",
    "peak_requests_running": "requests_running",
    "peak_requests_waiting": "requests_waiting",
}
#: Growths over a load point's window: metric -> counter.
GROWTH_OF: dict[str, str] = {
    "preemptions": "preemptions_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
}
#: Extremes over a load point's requests: metric -> (column of request, min or max).
EXTREME_OF: dict[str, tuple[str, str]] = {
    "prompt_tokens_min": ("prompt_tokens", "min"),
    "prompt_tokens_max": ("prompt_tokens", "max"),
    "output_tokens_max": ("completion_tokens", "max"),
}
