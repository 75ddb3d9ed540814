"""Scanning /metrics: a wrong name never raises, its column is just empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.pod.families import FAMILIES, MAXIMUM, cache_config, scan
from warehouse.registry import SERVER_FAMILIES

DATA = Path(__file__).parents[1] / "data" / "metrics"

OLD = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:gpu_cache_usage_perc{engine="0"} 0.25
vllm:gpu_cache_usage_perc{engine="1"} 0.5
vllm:num_preemptions_total{engine="0"} 1
vllm:num_preemptions_total{engine="1"} 2
vllm:request_success_total{finished_reason="stop"} 5.0
vllm:request_success_total{finished_reason="length"} 1e1
vllm:gpu_prefix_cache_hits_total 7"""


def test_the_table_is_the_registrys() -> None:
    """The run's own code does not import the registry, so it may not drift from it."""
    assert {name: aliases for name, (aliases, _) in SERVER_FAMILIES.items()} == FAMILIES
    assert set(FAMILIES) >= MAXIMUM


def test_engines_are_summed_old_names_alias_absent_is_none() -> None:
    values, problems = scan(OLD)
    assert problems == []
    assert values == {
        "kv_usage_ratio": 0.5,  # the fullest engine: a sum could pass 1
        "requests_running": 7.0,
        "requests_waiting": 2.0,  # not the family with the longer name
        "preemptions_total": 3.0,
        "prompt_tokens_total": None,
        "generation_tokens_total": None,
        "requests_succeeded_total": 15.0,
        "prefix_cache_queries_total": None,
        "prefix_cache_hits_total": 7.0,
    }


def test_the_new_name_counts_where_both_are_given() -> None:
    """vLLM 0.11.2 gives usage under both names; adding them would double it."""
    page = b"vllm:gpu_cache_usage_perc 0.1\nvllm:kv_cache_usage_perc 0.2\n"
    assert scan(page)[0]["kv_usage_ratio"] == 0.2


@pytest.mark.parametrize("text", [b"NaN", b"+Inf", b"0.5.1", b"", b"\xff"])
def test_an_unreadable_value_is_none_and_named(text: bytes) -> None:
    values, problems = scan(b'vllm:kv_cache_usage_perc{engine="0"} ' + text + b"\n")
    assert values["kv_usage_ratio"] is None
    assert len(problems) == 1
    assert problems[0].startswith("vllm:kv_cache_usage_perc: ")


@pytest.mark.parametrize("page", [b"", b"\n", b"\x00\xff" * 100, b"vllm:", b"vllm:kv_cache_usage"])
def test_noise_gives_no_value(page: bytes) -> None:
    values, _ = scan(page)
    assert set(values.values()) == {None}


def test_the_effective_configuration_is_read_from_its_labels() -> None:
    page = 'x 1\nvllm:cache_config_info{block_size="640",list="[\\"a\\", 1]",engine="0"} 1.0\n'
    assert cache_config(page) == {"block_size": "640", "list": '[\\"a\\", 1]', "engine": "0"}
    assert cache_config("vllm:other 1\n") is None
