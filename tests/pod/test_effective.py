"""Effective against asked configuration: different is a mismatch, untold is unknown."""

from __future__ import annotations

from typing import Any

from tasks.pod.effective import compare, mismatches
from tasks.pod.inputs import parse_cell
from tasks.pod.readiness import completion_checks, model_names
from tests.double import cells

MODELS = {"data": [{"id": "memsweep", "max_model_len": 2048}]}
LABELS = {
    "block_size": "128",
    "cache_dtype": "auto",
    "enable_prefix_caching": "False",
    "gpu_memory_utilization": "0.9",
    "kv_cache_memory_bytes": "16777216",
}


def states(
    *, models: Any = MODELS, labels: Any = LABELS, version: Any = None, **server: Any
) -> dict[str, object]:
    cell = parse_cell(cells.cell_text(server=server))
    told = {"version": "0.27.0+cpu"} if version is None else version
    checks = compare(cell, version=told, models=models, labels=labels)
    return {str(check["name"]): check["state"] for check in checks}


def test_equal_and_left_to_vllm() -> None:
    got = states()
    assert got.pop("block_size") == "unknown"  # not asked for
    assert set(got.values()) == {"equal"}


def test_each_difference_is_named() -> None:
    cell = parse_cell(cells.cell_text(server={"kv_cache_dtype": "fp8", "block_size": 16}))
    checks = compare(
        cell,
        version={"version": "0.28.0"},
        models={"data": [{"id": "memsweep", "max_model_len": 1024}]},
        labels=LABELS | {"enable_prefix_caching": "True", "gpu_memory_utilization": "0.8"},
    )
    assert mismatches(checks) == [
        "max_model_len: got 1024, wanted 2048",
        "engine_version: got 0.28.0, wanted 0.27.0",
        "block_size: got 128, wanted 16",
        "gpu_memory_utilization: got 0.8, wanted 0.9",
        "kv_cache_dtype: got auto, wanted fp8",
        "enable_prefix_caching: got True, wanted False",
    ]


def test_what_is_not_told_is_unknown() -> None:
    got = states(models=None, labels=None, version={})
    assert set(got.values()) == {"unknown"}


def test_a_number_that_is_none_differs() -> None:
    got = states(labels=LABELS | {"kv_cache_memory_bytes": "None"})
    assert got["kv_cache_memory_bytes"] == "differs"


GOOD: dict[str, Any] = {
    "model": "memsweep",
    "choices": [{"finish_reason": "stop", "message": {"content": "hi", "reasoning": None}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
}


def failed(status: int, **changes: Any) -> list[str]:
    return [name for name, good in completion_checks(status, GOOD | changes).items() if not good]


def test_a_good_completion_passes() -> None:
    assert failed(200) == []


def test_every_check_can_fail() -> None:
    assert failed(500) == ["status"]
    assert failed(200, model="other") == ["alias"]
    assert failed(200, choices=[{"finish_reason": None, "message": {"content": ""}}]) == [
        "finish_reason"
    ]
    assert failed(200, usage={"prompt_tokens": 10, "completion_tokens": 0}) == ["usage"]
    assert failed(200, usage=None) == ["usage"]
    for message in (
        {"content": "hi", "reasoning_content": "hm"},
        {"content": "hi", "reasoning": "hm"},
        {"content": "<think>hm</think>hi"},
    ):
        choice = {"finish_reason": "stop", "message": message}
        assert failed(200, choices=[choice]) == ["no_reasoning"]
    assert len([n for n, good in completion_checks(200, "noise").items() if not good]) == 4


def test_model_names_survive_noise() -> None:
    assert model_names(MODELS) == ["memsweep"]
    noises: list[object] = [None, [], {"data": None}, {"data": ["x", {"object": "model"}]}]
    for noise in noises:
        assert model_names(noise) == []
