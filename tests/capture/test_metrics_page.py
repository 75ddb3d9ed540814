"""Whole /metrics pages: families under one name over the versions, labels, and garbled lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.capture import metrics_page

PAGES = Path(__file__).parents[1] / "data" / "metrics"


@pytest.mark.parametrize("name", sorted(path.name for path in PAGES.glob("*.txt")))
def test_real_pages_parse_whole(name: str) -> None:
    page = metrics_page.parse((PAGES / name).read_text())
    assert page.malformed == []
    found = metrics_page.families(page)
    assert all(value is not None for value in found.values()), found
    config = metrics_page.cache_configs(page)[0]
    assert config.num_gpu_blocks == 1638
    assert config.block_size_tokens == 640
    assert config.kv_cache_size_tokens == 975_890
    assert config.max_concurrency == pytest.approx(29.7818, abs=1e-4)
    assert config.kv_cache_memory_bytes == 2**30
    assert config.enable_prefix_caching is False
    assert config.mamba_block_size_tokens == 32_768
    assert page.cache_config_info == config.labels


def test_under_load() -> None:
    page = metrics_page.parse((PAGES / "0.27.0-qwen3.5-hybrid-under-load.txt").read_text())
    found = metrics_page.families(page)
    assert found["requests_running"] == 4
    assert found["requests_waiting"] == 0
    assert page.types["vllm:num_requests_running"] == "gauge"


def test_old_names_alias_and_engines_add_up() -> None:
    page = metrics_page.parse(
        'vllm:gpu_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:gpu_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:num_requests_running{engine="0"} 3\n'
        'vllm:num_requests_running{engine="1"} 4.0 1795976560777\n'
        'vllm:request_success_total{finished_reason="stop"} 2\n'
        'vllm:request_success_total{finished_reason="length"} 5\n'
    )
    found = metrics_page.families(page)
    assert found["kv_usage_ratio"] == 0.75  # the fullest engine, not 1.0
    assert found["requests_running"] == 7
    assert found["requests_succeeded_total"] == 7
    assert found["preemptions_total"] is None  # not on the page: absent, not 0


def test_garbled_lines_are_kept_apart() -> None:
    page = metrics_page.parse(
        'vllm:a{x="1"} 1\nvllm:a{x="unclosed} 2\nvllm:a\nvllm:a{x="3"} 1_0\n<html>\nvllm:b NaN\n'
    )
    assert [sample.value for sample in page.samples["vllm:a"]] == [1.0]
    assert [number for number, _ in page.malformed] == [2, 3, 4, 5]
    assert metrics_page.families(page)["requests_running"] is None


def test_escaped_labels_and_commas() -> None:
    page = metrics_page.parse('m{a="x\\"y,z\\\\",b="}{"} 1')
    assert page.samples["m"][0].labels == {"a": 'x"y,z\\', "b": "}{"}


def test_page_without_cache_config() -> None:
    page = metrics_page.parse("up 1\n")
    assert page.cache_config_info is None
    assert metrics_page.cache_configs(page) == []
