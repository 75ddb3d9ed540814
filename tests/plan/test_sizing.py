"""Users on a GPU: the guide's two calculations and real blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.plan import gpus, model, sizing
from tasks.plan.calibration import Boot
from tasks.plan.capacity import ServingSettings
from tasks.plan.sizing import Workload
from warehouse.errors import BadInput

GIB = 2**30
CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"
QWEN35_4B = model.describe(model.load(CONFIGS / "Qwen__Qwen3.5-4B.json"))
QWEN36_35B = model.describe(model.load(CONFIGS / "Qwen__Qwen3.6-35B-A3B.json"))
QWEN36_27B = model.describe(model.load(CONFIGS / "Qwen__Qwen3.6-27B.json"))
L4 = gpus.find("L4")


def fit(gib: float, cache: str, workload: Workload) -> sizing.Fit:
    """Size Qwen3.5-4B on an L4 with weights of ``gib`` GiB."""
    settings = ServingSettings("0.27.0", kv_cache_dtype=cache, prefix_caching=False)
    return sizing.fit(QWEN35_4B, settings, workload, L4, weights_bytes=round(gib * GIB))


def test_the_worked_example_gives_47_and_real_blocks_45() -> None:
    """Test 4.9 GiB of weights and an FP8 cache at 16,000 tokens: 856 blocks, 19 a user."""
    answer = fit(4.9, "fp8", Workload(16_000))
    assert answer.guide_example.users == 47
    assert answer.per_user.blocks == 19
    assert answer.real_blocks.pool_bytes is not None
    assert answer.real_blocks.pool_bytes // answer.per_user.block_bytes == 856
    assert answer.real_blocks.users == 45
    assert any("47" in note and "45" in note for note in answer.notes)


def test_the_worked_example_gives_18_with_bf16() -> None:
    """Test 8.7 GiB of weights and a bf16 cache."""
    assert fit(8.7, "auto", Workload(16_000)).guide_example.users == 18


def test_the_vram_formula_has_a_margin_and_no_state() -> None:
    """Test weights + 2 GB + users x P95 x KV x 1.15 on 24e9 bytes."""
    answer = fit(4.9, "fp8", Workload(16_000))
    one = 16_000 * 16_384 * 1.15
    assert answer.guide_formula.users == int((24e9 - 4.9 * GIB - 2e9) / one)


@pytest.mark.parametrize(
    ("description", "cache", "kibibytes"),
    [
        (QWEN35_4B, "auto", 32),
        (QWEN35_4B, "fp8", 16),
        (QWEN36_27B, "auto", 64),
        (QWEN36_27B, "fp8", 32),
        (QWEN36_35B, "auto", 20),
        (QWEN36_35B, "fp8", 10),
    ],
)
def test_kv_per_token_of_the_guides_models(
    description: model.ModelDescription, cache: str, kibibytes: int
) -> None:
    """Test 32/16, 64/32 and 20/10 KiB a token."""
    settings = ServingSettings("0.27.0", kv_cache_dtype=cache)
    user = sizing.per_user(description, settings, Workload(1000))
    assert user.kv_bytes_per_token == kibibytes * 1024


@pytest.mark.parametrize(
    ("description", "mebibytes", "convolution"),
    [(QWEN35_4B, 48, 1.125), (QWEN36_27B, 144, 2.8125), (QWEN36_35B, 60, 1.40625)],
)
def test_states_of_the_guides_models(
    description: model.ModelDescription, mebibytes: float, convolution: float
) -> None:
    """Test 48, 144 and 60 MiB of state, and the convolution the guide leaves out."""
    user = sizing.per_user(description, ServingSettings("0.27.0"), Workload(1000))
    assert user.state_bytes == mebibytes * 2**20
    assert user.convolution_bytes == convolution * 2**20


@pytest.mark.parametrize(("tokens", "mebibytes"), [(16_000, 250.0), (24_000, 375.0)])
def test_kv_of_the_guides_contexts(tokens: int, mebibytes: float) -> None:
    """Test 250 and 375 MiB of FP8 cache."""
    settings = ServingSettings("0.27.0", kv_cache_dtype="fp8")
    user = sizing.per_user(QWEN35_4B, settings, Workload(tokens))
    assert tokens * user.kv_bytes_per_token == mebibytes * 2**20


def test_sixteen_users_of_24k_need_66_gib() -> None:
    """Test the guide's 6.6 GiB: 16 x (375 + 48) MiB."""
    settings = ServingSettings("0.27.0", kv_cache_dtype="fp8")
    user = sizing.per_user(QWEN35_4B, settings, Workload(24_000))
    total = 16 * (24_000 * user.kv_bytes_per_token + user.state_bytes)
    assert f"{total / GIB:.1f}" == "6.6"


def test_the_answer_on_the_gpu_has_an_error_bar_until_a_boot() -> None:
    """Test that one boot narrows the range of users."""
    before = fit(8.7, "auto", Workload(16_000))
    assert before.users_low < before.on_this_gpu.users < before.users_high
    boot = Boot(L4.total_bytes, 0.9, round(8.61 * GIB), round(8.88 * GIB), 2048)
    settings = ServingSettings("0.27.0", prefix_caching=False)
    after = sizing.fit(
        QWEN35_4B, settings, Workload(16_000), L4, weights_bytes=round(8.7 * GIB), boots=[boot]
    )
    assert after.users_high - after.users_low < before.users_high - before.users_low


def test_gpus_for_given_users() -> None:
    """Test whole replicas: 100 users at 42 each need three GPUs."""
    answer = fit(4.9, "fp8", Workload(16_000, users=100))
    per_gpu = answer.on_this_gpu.users
    assert answer.gpus_needed == -(-100 // per_gpu)


def test_weights_larger_than_a_gpu_take_more_ranks() -> None:
    """Test that 70 GB of a mixture do not fit on one L40S; active parameters do not count."""
    answer = sizing.fit(
        QWEN36_35B,
        ServingSettings("0.27.0"),
        Workload(16_000, users=10),
        gpus.find("L40S"),
        weights_bytes=70 * 10**9,
    )
    assert answer.tensor_parallel == 2
    assert answer.gpus_needed is not None
    assert answer.gpus_needed % 2 == 0
    with pytest.raises(BadInput, match="do not fit"):
        sizing.fit(
            QWEN36_35B, ServingSettings("0.27.0"), Workload(1000), L4, weights_bytes=300 * 10**9
        )


def test_a_shared_prefix_is_paid_for_once() -> None:
    """Test that an overlap lets more users in, and each keeps its own state."""
    alone, shared = (fit(4.9, "fp8", Workload(16_000, prefix_overlap_ratio=r)) for r in (0, 0.8))
    assert shared.real_blocks.users > alone.real_blocks.users
    assert shared.per_user.blocks > alone.per_user.blocks  # prefix caching holds a second state


@pytest.mark.parametrize(
    "workload",
    [
        Workload(0),
        Workload(1, users=0),
        Workload(1, prefix_overlap_ratio=1.0),
        Workload(1, prefix_overlap_ratio=-0.1),
    ],
)
def test_a_workload_without_meaning_is_refused(workload: Workload) -> None:
    """Test ranges."""
    with pytest.raises(BadInput, match="wanted"):
        fit(4.9, "fp8", workload)


def test_fp8_below_8_9_is_noted() -> None:
    """Test the note for an A10."""
    settings = ServingSettings("0.27.0", kv_cache_dtype="fp8")
    answer = sizing.fit(
        QWEN35_4B, settings, Workload(1000), gpus.find("A10"), weights_bytes=5 * GIB
    )
    assert any("8.9" in note for note in answer.notes)


def test_precision_table() -> None:
    """Test that the table is from arithmetic: a 4B in bf16, FP8 and INT4."""
    table = sizing.precision_table(4_022_468_096, 390_000_000)
    assert table["bf16"] == 8_044_936_192
    assert table["int4"] < table["fp8"] < table["bf16"]
