"""The guide's mistakes as findings: each is found, and its absence is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.plan import capacity, gpus, model, sizing_lint
from tasks.plan.capacity import ServingSettings
from tasks.plan.sizing_lint import Point, Served

CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"
QWEN35_4B = model.describe(model.load(CONFIGS / "Qwen__Qwen3.5-4B.json"))
POOL = capacity.predict(
    QWEN35_4B,
    ServingSettings("0.27.0", max_model_len=32_768, prefix_caching=False),
    num_gpu_blocks=551,
)
#: A configuration without any mistake.
CLEAN = Served(
    gpu_memory_utilization=0.9,
    max_model_len=32_768,
    max_num_seqs=8,
    kv_cache_dtype="auto",
    prefix_caching=False,
    points=(Point(512, 128, 1), Point(16_384, 128, 8)),
    description=QWEN35_4B,
    prediction=POOL,
    gpu=gpus.find("A10"),
)


def test_a_clean_configuration_has_no_finding() -> None:
    """Test that nothing is found where nothing is wrong."""
    assert sizing_lint.check(CLEAN) == []


MIXTURE = replace(QWEN35_4B, experts=128)


@pytest.mark.parametrize(
    ("served", "code"),
    [
        (replace(CLEAN, gpu_memory_utilization=0.96), "utilization-above-0.95"),
        (replace(CLEAN, points=(Point(16_384, 1, 8),)), "one-concurrency"),
        (replace(CLEAN, points=(Point(512, 1, 1), Point(512, 1, 8))), "short-context"),
        (replace(CLEAN, prefix_caching=True), "prefix-overlap-ignored"),
        (
            replace(CLEAN, points=(Point(1, 1, 1, 500), Point(16_384, 1, 8))),
            "prefix-overlap-unused",
        ),
        (
            replace(CLEAN, description=MIXTURE, weights_bytes=3 * 2**30, stored_bytes=65 * 2**30),
            "active-parameters-as-memory",
        ),
        (replace(CLEAN, kv_cache_dtype="fp8"), "fp8-below-8.9"),
        (replace(CLEAN, max_num_seqs=64), "max-num-seqs-beyond-pool"),
        (
            replace(CLEAN, max_num_seqs=15, points=(Point(512, 1, 1), Point(16_384, 1, 12))),
            "max-model-len-at-peak",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_mistake_is_found_alone(served: Served, code: str) -> None:
    """Test one configuration a mistake, with the one finding it deserves."""
    assert [finding.code for finding in sizing_lint.check(served)] == [code]


def test_an_explicit_pool_is_not_sized_by_utilization() -> None:
    """Test that utilization does not matter under kv_cache_memory_bytes."""
    served = replace(CLEAN, gpu_memory_utilization=0.99, explicit_pool=True)
    assert sizing_lint.check(served) == []


def test_fp8_on_an_l4_is_fine() -> None:
    """Test the same dtype on a card that has it."""
    served = replace(CLEAN, kv_cache_dtype="fp8", gpu=gpus.find("L4"))
    assert sizing_lint.check(served) == []


def test_without_a_prediction_nothing_is_said_about_the_pool() -> None:
    """Test that the pool rules stay silent where the pool is not known."""
    served = replace(CLEAN, prediction=None, max_num_seqs=10_000)
    assert sizing_lint.check(served) == []


def test_the_same_finding_of_several_cells_comes_once() -> None:
    """Test that a sweep of ten cells does not repeat itself."""
    served = replace(CLEAN, gpu_memory_utilization=0.96)
    assert len(sizing_lint.check_all([served] * 10)) == 1
