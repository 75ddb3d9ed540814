"""Start-up logs to values: every form, prefix and rank layout that real logs were seen with."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.capture import startup_log, text
from tasks.capture.startup_log import StartupLog, parse
from warehouse.registry import STARTUP, Outcome, Phase

DATA = Path(__file__).parents[1] / "data"
GIB = 2**30

GOOD: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "good-logs.jsonl").read_text().splitlines()
]

#: The corpus' names (as printed, GiB) -> the registry's.
NAMES = {
    "max_model_len": "max_model_len_tokens",
    "kv_cache_size_tokens": "kv_cache_size_tokens",
    "max_concurrency": "max_concurrency",
    "max_concurrency_for_tokens": "max_model_len_tokens",
    "available_kv_cache_gib": "available_kv_cache_bytes",
    "model_loading_gib": "model_loading_bytes",
    "model_loading_seconds": "model_loading_s",
    "weights_loading_seconds": "weights_loading_s",
    "graph_capture_gib": "graph_capture_bytes",
    "graph_capture_seconds": "graph_capture_s",
    "estimated_cudagraph_gib": "graph_estimate_bytes",
    "cudagraph_pool_actual_gib": "graph_pool_bytes",
    "attention_block_size_tokens": "attention_block_size_tokens",
    "mamba_padding_percent": "mamba_padding_percent",
    "torch_compile_seconds": "compilation_s",
    "init_engine_seconds": "init_engine_s",
    "gpu_memory_utilization": "gpu_memory_utilization_ratio",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "gpu_blocks": "num_gpu_blocks",
    "total_gpu_memory_gib": "total_memory_bytes",
}
#: Values whose line was left out when the record was reduced: nothing to parse.
NOT_IN_THE_LINES = {
    ("good-0251-laguna-s-2-1-int4", "cudagraph_pool_actual_gib"),
    ("good-0112-qwen2-5-coder-14b-instruct", "weights_loading_seconds"),
}


def values_of(log: StartupLog) -> dict[str, int | float]:
    return {name: value.value for name, value in log.values.items()}


def read(name: str) -> StartupLog:
    return parse((DATA / "vllm-logs" / name).read_text(errors="replace").split("\n"))


@pytest.mark.parametrize("record", GOOD, ids=lambda record: record["id"])
def test_good_log_gives_every_labelled_value(record: dict[str, Any]) -> None:
    log = parse(record["lines"])
    for label, printed in record["values"].items():
        if label not in NAMES or (record["id"], label) in NOT_IN_THE_LINES:
            continue
        value = log.values[NAMES[label]]
        wanted = float(printed.replace(",", ""))
        assert value.value == (int(wanted * GIB) if label.endswith("_gib") else wanted), label
        assert value.low <= value.value <= value.high
        assert printed.replace(",", "").rstrip("0") in value.text.replace(",", "")
    expected = record["values"]
    assert log.vllm_version == expected.get("vllm_version")
    assert log.model == expected.get("model")
    assert log.failure is None
    assert log.outcome == ("ok" if "server_started" in expected else "incomplete")


def test_excerpts_with_known_arithmetic_are_read() -> None:
    """The capacity model's own evidence: what its lines state is what is parsed from them."""
    names = {
        "kv_cache_tokens": "kv_cache_size_tokens",
        "max_concurrency": "max_concurrency",
        "attention_block_size": "attention_block_size_tokens",
        "mamba_padding_pct": "mamba_padding_percent",
        "available_gib": "available_kv_cache_bytes",
    }
    compared = 0
    for line in (DATA / "startup-logs.jsonl").read_text().splitlines():
        record = json.loads(line)
        log = parse(record["raw_lines"])
        assert log.failure is None
        for label, stated in record["parsed"].items():
            if stated is None or label not in names:
                continue
            if label == "available_gib" and "ranks)" in record["raw_lines"][0]:
                continue  # summed up by hand: "11.51-11.55 GiB (8 ranks)"
            wanted = int(stated * GIB) if label == "available_gib" else stated
            assert log.values[names[label]].value == wanted, (record["id"], label)
            compared += 1
    assert compared >= 90


def test_every_value_has_a_name_of_the_registry() -> None:
    named = {name for form in startup_log.FORMS for _, name, _ in form.groups}
    assert named | set(startup_log.RULING) <= set(STARTUP)


def test_cpu_three_processes() -> None:
    log = read("cpu-0.27.0-qwen3-dense-three-processes-ok.log")
    assert (log.outcome, log.vllm_version, log.model) == ("ok", "0.27.0", "./models/tiny-qwen3")
    assert values_of(log) == {
        "gpu_memory_utilization_ratio": 0.9,
        "init_engine_s": 1.4,
        "kv_cache_size_tokens": 524_288,
        "max_concurrency": 16.0,
        "max_model_len_tokens": 32_768,
        "pipeline_parallel_size": 1,
        "requested_kv_cache_bytes": GIB,
        "tensor_parallel_size": 1,
        "total_memory_bytes": int(13.71 * GIB),
        "weights_loading_s": 0.04,
    }
    assert log.values["kv_cache_size_tokens"].line == 50
    assert log.values["kv_cache_size_tokens"].rank == "EngineCore"
    assert log.values["requested_kv_cache_bytes"].rank == "Worker pid=19015"
    assert log.arguments is not None
    assert log.arguments["enable_prefix_caching"] is False
    assert log.arguments["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0"])
def test_cpu_one_process_hybrid(version: str) -> None:
    """The two-line form of 0.27 and the one-line form of 0.32 give the same numbers."""
    log = read(f"cpu-{version}-qwen3.5-hybrid-ok.log")
    assert (log.outcome, log.vllm_version) == ("ok", version)
    assert log.failure is None
    held = values_of(log)
    assert held["kv_cache_size_tokens"] == 975_890
    assert held["max_concurrency"] == 29.78
    assert held["attention_block_size_tokens"] == 640
    assert held["mamba_padding_percent"] == 22.14
    assert held["requested_kv_cache_bytes"] == GIB
    assert "available_kv_cache_bytes" not in held  # not logged here: absent, not 0
    assert "model_loading_bytes" not in held


def test_cpu_explicit_pool_larger_than_memory_is_refused() -> None:
    log = read("cpu-0.27.0-kv-cache-larger-than-memory.log")
    assert log.outcome == "failed"
    assert log.failure is not None
    assert log.failure.type == "requested_kv_cache_exceeds_memory"
    assert log.failure.outcome is Outcome.REFUSED
    assert log.failure.phase is Phase.KV_CACHE
    assert log.failure.numbers == {
        "requested_kv_cache_bytes": 24 * GIB,
        "available_memory_bytes": int(7.87 * GIB),
        "total_memory_bytes": int(13.71 * GIB),
        "node": 0,
    }
    assert log.failure.line == 56
    assert log.values["requested_kv_cache_bytes"].value == 24 * GIB
    assert log.values["available_memory_bytes"].value == int(7.87 * GIB)


@pytest.mark.parametrize(
    ("name", "type_", "phase", "outcome", "line"),
    [
        ("max-model-len-does-not-fit", "kv_cache_smaller_than_one_request", "kv_cache",
         "refused", 65),
        ("utilization-above-free-memory", "free_memory_below_utilization", "start",
         "refused", 52),
        ("torchvision-missing", "binary_mismatch", "start", "crashed", 43),
        ("qwen3.5-engine-dies-on-first-request", "engine_dead", "bench", "crashed", 337),
    ],
)  # fmt: skip
def test_cpu_failures(name: str, type_: str, phase: str, outcome: str, line: int) -> None:
    """The cause is named, at its own line, not the wrappers around it."""
    log = read(f"cpu-0.27.0-{name}.log")
    assert log.outcome == "failed"
    assert log.failure is not None
    failure = log.failure
    assert (failure.type, failure.phase, failure.outcome, failure.line) == (
        type_,
        phase,
        outcome,
        line,
    )


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("INFO [gpu_worker.py:564] Available KV cache memory: 34.3 GiB",
         "available_kv_cache_bytes", int(34.3 * GIB)),
        ("Available KV cache memory: -0.13 GiB", "available_kv_cache_bytes", int(-0.13 * GIB)),
        ("Model loading took 7.6 GiB memory and 3.141590 seconds", "model_loading_bytes",
         int(7.6 * GIB)),
        ("Model loading took 7.6 GiB and 3.141590 seconds", "model_loading_s", 3.14159),
        ("Model loading took 0.0 GiB memory and 1.000000 seconds", "model_loading_bytes", 0),
        ("Loading model weights took 12.2926 GB", "model_loading_bytes", int(12.2926 * GIB)),
        ("Graph capturing finished in 3 secs, took -0.41 GiB", "graph_capture_bytes",
         int(-0.41 * GIB)),
        ("Graph capturing finished in 15 secs.", "graph_capture_s", 15.0),
        ("XPU KV cache size: 1,234 tokens, Maximum concurrency for 4,096 tokens per request: "
         "0.30x", "max_concurrency", 0.30),
        ("GPU + host KV cache size: 99,999 tokens, Maximum concurrency for 4,096 tokens per "
         "request: 24.41x", "kv_cache_size_tokens", 99_999),
        ("# CUDA blocks: 7191, # CPU blocks: 512", "num_gpu_blocks", 7191),
        ("Setting attention block size to 1568 tokens so the quantized primary KV page covers "
         "the mamba page", "attention_block_size_tokens", 1568),
        ("[XPU]Setting attention block size to 832 tokens to ensure multiple of 64, x",
         "attention_block_size_tokens", 832),
        ("Add 3 padding layers, may waste at most 6.25% KV cache memory", "kv_padding_layers", 3),
        ("Estimated CUDA graph memory: -0.02 GiB total", "graph_estimate_bytes",
         int(-0.02 * GIB)),
        ("Initial free memory 78.13 GiB, reserved 40.0 GiB memory for KV Cache as specified by "
         "kv_cache_memory_bytes config and skipped memory profiling. This does not",
         "requested_kv_cache_bytes", 40 * GIB),
        ("Auto set (8.12/13.71) GiB for KV cache on node 0, with 12.34 GiB requested memory for "
         "the worker. 0.61 GiB memory was consumed by non-kv usages.",
         "available_kv_cache_bytes", int(8.12 * GIB)),
        ("init engine (profile, create kv cache, warmup model) took 44.51 seconds",
         "init_engine_s", 44.51),
        ("init engine (profile, create kv cache, warmup model) took 13.70 s (compilation: 7.28 s "
         "— language_model: 6.00 s, encoder: 1.28 s)", "compilation_s", 7.28),
        ("Auto-fit max_model_len: reduced from 262144 to 34736 to fit in available GPU memory "
         "(3.37 GiB available for KV cache)", "max_model_len_tokens", 34_736),
    ],
)  # fmt: skip
def test_one_line_forms(line: str, name: str, value: float) -> None:
    found = parse([line]).values[name]
    assert found.value == value
    assert (found.line, found.text) == (1, line)


def test_rounding_interval_is_of_the_two_decimals_that_vllm_rounds_to() -> None:
    """`34.3` has lost a zero: it stands for 34.295 to 34.305 GiB, not for 34.25 to 34.35."""
    value = parse(["Available KV cache memory: 34.3 GiB"]).values["available_kv_cache_bytes"]
    assert value.low == math.floor(34.295 * GIB)
    assert value.high == math.ceil(34.305 * GIB)
    exact = parse(["Model loading took 0.8269 GiB and 1.412070 seconds"])
    assert exact.values["model_loading_bytes"].high - exact.values["model_loading_bytes"].low < (
        0.00011 * GIB
    )
    tokens = parse(["GPU KV cache size: 273,563 tokens"]).values["kv_cache_size_tokens"]
    assert (tokens.low, tokens.high) == (273_563, 273_563)


def test_actual_usage_breakdown_of_027_and_011() -> None:
    new = parse(
        [
            "(Worker_TP1 pid=1) INFO 07-20 07:39:21 [gpu_worker.py:789] Free memory on device "
            "(78.1/84.01 GiB) on startup. Desired GPU memory utilization is (0.92, 77.28 GiB). "
            "Actual usage is 27.41 GiB for consumed memory (weights + non-torch), 2.46 GiB for "
            "peak activation, and 1.07 GiB for CUDAGraph memory."
        ]
    )
    assert values_of(new) == {
        "initial_free_bytes": int(78.1 * GIB),
        "total_memory_bytes": int(84.01 * GIB),
        "requested_memory_bytes": int(77.28 * GIB),
        "weights_and_non_torch_bytes": int(27.41 * GIB),
        "peak_activation_bytes": int(2.46 * GIB),
    }
    assert new.failure is None
    old = parse(
        [
            "Free memory on device (23.21/22.23 GiB) on startup. Desired GPU memory utilization is "
            "(0.9, 20.00 GiB). Actual usage is 5.44 GiB for weight, 0.6 GiB for peak activation, "
            "0.02 GiB for non-torch memory, and 0.13 GiB for CUDAGraph memory."
        ]
    )
    assert values_of(old)["weights_bytes"] == int(5.44 * GIB)
    assert values_of(old)["non_torch_bytes"] == int(0.02 * GIB)


def test_ranks_are_all_kept_and_the_smallest_pool_rules() -> None:
    log = parse(
        [
            "(Worker_TP0 pid=1) INFO 08-18 23:51:27 [gpu_worker.py:375] Available KV cache memory: "
            "5.16 GiB",
            "(Worker_TP1 pid=2) INFO 08-18 23:51:27 [gpu_worker.py:375] Available KV cache memory: "
            "5.02 GiB",
            "(Worker_TP1 pid=2) INFO 08-18 23:51:27 [x.py:1] Model loading took 6.8 GiB and 2.0 s",
            "(Worker_TP0 pid=1) INFO 08-18 23:51:27 [x.py:1] Model loading took 6.9 GiB and 1.0 s",
        ]
    )
    assert [value.rank for value in log.every][:2] == ["Worker_TP0", "Worker_TP1"]
    ruling = log.values["available_kv_cache_bytes"]
    assert (ruling.rank, ruling.value) == ("Worker_TP1", int(5.02 * GIB))
    assert log.values["model_loading_bytes"].rank == "Worker_TP0"
    assert log.values["model_loading_s"].value == 2.0


LINE = "Available KV cache memory: 8.88 GiB"


@pytest.mark.parametrize(
    ("raw", "rank"),
    [
        (f"\x1b[1;36m(EngineCore_DP1 pid=21155)\x1b[0;0m INFO 08-03 08:13:56 [a.py:298] {LINE}",
         "EngineCore_DP1"),
        (f"(EngineCore_0 pid=60794) (VllmWorker TP1 pid=73536) INFO 04-07 06:01:23 [a.py:1] {LINE}",
         "VllmWorker TP1"),
        (f"(Worker_PP1 pid=3) INFO 01-01 00:00:00 [v1/worker/gpu_worker.py:436] {LINE}\r",
         "Worker_PP1"),
        (f"(VllmWorkerProcess pid=9) INFO 01-01 00:00:00 worker.py:12] {LINE}",
         "VllmWorkerProcess pid=9"),
        (f"(RayWorkerWrapper pid=7, ip=192.0.2.1) INFO 01-01 00:00:00 [a.py:1] {LINE}",
         "RayWorkerWrapper pid=7, ip=192.0.2.1"),
        (f"[rank3]: {LINE}", "rank3"),
        (f"vllm-1  | INFO 08-26 14:07:28 worker.py:366] {LINE}", None),
        (f"2026-02-24T20:21:58.123456789Z stderr F INFO 08-26 14:07:28 [a.py:1] {LINE}", None),
        (f"[pod/vllm-0/server] INFO 08-26 14:07:28 [a.py:1] {LINE}", None),
        (f"Nov 29 18:14:43 host vllm[123]: INFO 08-26 14:07:28 [a.py:1] {LINE}", None),
        (f"│ INFO 07-04 01:15:44 [worker.py:33] {LINE}              │", None),
        ('{"log":"INFO 08-26 14:07:28 [a.py:1] ' + LINE + '\\n","stream":"stderr"}', None),
        (f"[Stage-0] INFO 08-26 14:07:28 [a.py:1] {LINE}", None),
    ],
)  # fmt: skip
def test_prefixes(raw: str, rank: str | None) -> None:
    value = parse([raw]).values["available_kv_cache_bytes"]
    assert value.value == int(8.88 * GIB)
    assert value.rank == rank


def test_mixed_line_ends_and_progress_bars_keep_the_editors_line_numbers() -> None:
    content = (
        b"\rLoading safetensors checkpoint shards:   0% Completed | 0/1\rLoading 100%\r\n"
        b"\r\n"
        b"INFO 01-01 00:00:00 [a.py:1] Available KV cache memory: 8.88 GiB\r\n"
    )
    log = parse(text.lines([content[:30], content[30:90], content[90:]]))
    assert log.values["available_kv_cache_bytes"].line == 3
    assert log.reached is Phase.KV_CACHE


def test_a_line_cut_anywhere_gives_its_value_or_none_never_another() -> None:
    line = "INFO 01-01 00:00:00 [a.py:1] GPU KV cache size: 1,028,832 tokens, Maximum concurrency "
    line += "for 131,072 tokens per request: 7.85x"
    for end in range(len(line)):
        for value in parse([line[:end]]).every:
            assert value.value in (1_028_832, 131_072, 7.85)


def test_a_container_that_came_back_is_judged_by_its_last_start() -> None:
    first = (DATA / "vllm-logs/cpu-0.27.0-max-model-len-does-not-fit.log").read_text().split("\n")
    second = (DATA / "vllm-logs/cpu-0.27.0-qwen3.5-hybrid-ok.log").read_text().split("\n")
    log = parse([*first, *second])
    assert (log.outcome, log.failure, log.starts) == ("ok", None, 2)
    assert log.values["kv_cache_size_tokens"].value == 975_890
    again = parse([*first, *second[:12]])
    assert again.outcome == "failed"
    assert again.failure is not None
    assert again.failure.type == "kv_cache_smaller_than_one_request"


def test_profiling_override_is_not_the_users() -> None:
    """During graph profiling 0.18 and later print an override of their own."""
    log = parse(["INFO 01-01 00:00:00 [a.py:1] Overriding num_gpu_blocks=0 with "
                 "num_gpu_blocks_override=512"])  # fmt: skip
    assert log.values == {}


def test_compile_cache() -> None:
    assert parse(["Directly load the compiled graph(s) for compile range (1, 2048) from the cache, "
                  "took 2.330 s"]).compile_cache == "hit"  # fmt: skip
    assert parse(["Compiling a graph for compile range (1, 2048) takes 12.08 s"]).compile_cache == (
        "miss"
    )
    assert parse(["nothing"]).compile_cache is None


def test_excerpts_and_nothing() -> None:
    assert parse([]).outcome == "incomplete"
    assert parse(["", "  "]).values == {}
    assert parse(["just", "three", "lines"]).outcome == "incomplete"
    assert parse(["INFO:     Application startup complete."]).outcome == "ok"


def test_values_of_one_name_are_bounded() -> None:
    lines = (f"Available KV cache memory: {9 - i / 1e4:.2f} GiB" for i in range(5_000))
    log = parse(lines)
    assert len(log.every) == startup_log.KEPT_PER_NAME
    assert log.values["available_kv_cache_bytes"].value == int(8.5 * GIB)
    assert log.lines == 5_000


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("INFO 03-12 15:16:19 [api_server.py:1289] vLLM API server version 0.9.0.1", "0.9.0.1"),
        ("(APIServer pid=1) INFO 05-21 17:07:37 [utils.py:297]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version "
         "0.26.1rc1.dev156+g0123abc\r", "0.26.1rc1.dev156+g0123abc"),
        ("Initializing a V1 LLM engine (v0.27.1) with config: model='a'", "0.27.1"),
        ("Initializing an LLM engine (v0.5.5) with config: model='a'", "0.5.5"),
        ("In v0.19, CUDA graph memory profiling will be enabled by default", None),
    ],
)  # fmt: skip
def test_version(line: str, version: str | None) -> None:
    assert parse([line]).vllm_version == version


def test_arguments_of_three_forms() -> None:
    log = parse(
        [
            "INFO 1 args: Namespace(model_tag='a/b', port=8000, max_model_len=None, "
            "config_format=<ConfigFormat.AUTO: 'auto'>, allowed_origins=['*'], "
            "gpu_memory_utilization=0.75)",
            "Initializing a V1 LLM engine (v0.9.0) with config: model='a/b', "
            "speculative_config=SpeculativeConfig(method='mtp', n=3), dtype=torch.bfloat16, "
            "max_seq_len=8192, quantization=None, enforce_eager=True",
        ]
    )
    assert log.arguments is not None
    assert log.arguments["model_tag"] == "a/b"
    assert log.arguments["allowed_origins"] == ["*"]
    assert log.arguments["config_format"] == "<ConfigFormat.AUTO: 'auto'>"
    assert log.arguments["speculative_config"] == "SpeculativeConfig(method='mtp', n=3)"
    assert log.arguments["dtype"] == "torch.bfloat16"
    assert log.arguments["enforce_eager"] is True
    assert log.values["max_model_len_tokens"].value == 8192
    assert log.values["gpu_memory_utilization_ratio"].value == 0.75


def other_digits(line: str, turn: int) -> str:
    """Return ``line`` as another process might have written it at another time."""
    return re.sub(r"[1-9]", lambda found: str(1 + (int(found.group()) + turn) % 9), line)


ALL_LINES = [
    *(
        line
        for path in sorted((DATA / "vllm-logs").glob("*.log"))
        for line in path.read_text().splitlines()
    ),
    *(
        line
        for name in ("good-logs", "failures", "failure-texts", "failures-held-back")
        for record in (DATA / f"{name}.jsonl").read_text().splitlines()
        for line in json.loads(record)["lines"]
    ),
]


def test_the_message_of_a_line_stands_where_it_stands_in_its_shape() -> None:
    for turn, line in enumerate(ALL_LINES):
        span = text.message_span(line)
        other = other_digits(line, turn % 8)
        assert text.shape(other) == text.shape(line)
        if span is not None:
            assert line[slice(*span)] == text.message(line)
            assert other[slice(*span)] == text.message(other), other
            assert text.level(other) == text.level(line)


@pytest.mark.parametrize("path", sorted((DATA / "vllm-logs").glob("*.log")), ids=lambda p: p.name)
def test_remembering_shapes_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log in which the same is said again and again, with other numbers each time."""
    lines = path.read_text(errors="replace").split("\n")
    again = [*lines, *(other_digits(line, 1) for line in lines), *lines]
    remembered = parse(again)
    monkeypatch.setattr(startup_log, "_SHAPES_KEPT", 0)
    assert parse(again) == remembered


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL_LINES), st.integers(0, 7)), max_size=30))
def test_remembering_shapes_changes_nothing_in_any_order(picked: list[tuple[str, int]]) -> None:
    lines = [other_digits(line, turn) for line, turn in picked]
    remembered = parse(lines)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(startup_log, "_SHAPES_KEPT", 0)
        assert parse(lines) == remembered
