"""The seeds' figures that the KV arithmetic must give; each names where it stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tasks.plan import capacity, model
from tasks.plan.capacity import RefusalType, ServingSettings
from tasks.plan.layers import Attention, GatedDelta

CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"
MIB = 2**20

QWEN35_4B = model.describe(model.load(CONFIGS / "Qwen__Qwen3.5-4B.json"))
RECIPE = ServingSettings(
    "0.27.0",
    max_model_len=32_768,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    dtype="bfloat16",
    prefix_caching=False,
)
#: The recipe's pool at utilization 0.90.
POOL = capacity.predict(QWEN35_4B, RECIPE, num_gpu_blocks=551)

QWEN3_4B = model.describe(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
)

HYBRID = model.describe(
    {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
)
DENSE = model.describe(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
)


def test_kv_per_token_and_state_of_the_recipes_model() -> None:
    """Test 32 KiB a token, 49.125 MiB stored and 49.5 MiB reserved state."""
    attention = next(layer for layer, _ in QWEN35_4B.counts if isinstance(layer, Attention))
    state = next(layer for layer, _ in QWEN35_4B.counts if isinstance(layer, GatedDelta))
    counts = dict(QWEN35_4B.counts)
    assert counts[attention] * attention.token_bytes(1, "auto", 2) == 32 * 1024
    assert counts[state] * state.state_bytes(1, 0, 2, 4) == 49.125 * MIB
    assert 3 * POOL.bytes_per_block == 49.5 * MIB


def test_block_and_padding_of_the_recipe() -> None:
    """Test block 528, padding 0.76 %, 16.5 MiB a block, 4 groups without padding layers."""
    assert POOL.attention_block_size_tokens == 528
    assert POOL.mamba_padding_percent == pytest.approx(0.7634, abs=1e-4)
    assert (POOL.bytes_per_block, POOL.kv_groups, POOL.padding_layers) == (17_301_504, 4, 0)


@pytest.mark.parametrize(
    ("tokens", "requests", "mebibytes"), [(640, 1, 82.5), (640, 4, 330.0), (16_512, 1, 577.5)]
)
def test_bytes_of_requests(tokens: int, requests: int, mebibytes: float) -> None:
    """Test 82.5, 330 and 577.5 MiB."""
    load = capacity.load(POOL, 551, requests, tokens)
    assert requests * load.blocks_at_full_length * POOL.bytes_per_block == mebibytes * MIB


@pytest.mark.parametrize(
    ("length", "gib", "printed"),
    [(32_768, "8.88", "8.35"), (8_192, "8.87", "28.95"), (65_536, "8.88", "4.30")],
)
def test_concurrency_at_three_context_limits(length: int, gib: str, printed: str) -> None:
    """Test 8.35x, 28.95x and 4.30x."""
    settings = dataclasses.replace(RECIPE, max_model_len=length)
    result = capacity.predict(QWEN35_4B, settings, available_gib=gib)
    assert printed in {f"{c.max_concurrency:.2f}" for c in result.candidates}


def test_tokens_of_the_recipe() -> None:
    """Test 273,563 tokens."""
    assert POOL.candidates[0].kv_cache_size_tokens == 273_563


@pytest.mark.parametrize(("gib", "printed"), [("4.47", "4.46"), ("6.68", "6.67"), ("8.88", "8.88")])
def test_allocated_pool_is_a_whole_number_of_blocks(gib: str, printed: str) -> None:
    """Test the pools of the three utilizations as the recipe's chart shows them."""
    result = capacity.predict(QWEN35_4B, RECIPE, available_gib=gib)
    pools = {f"{c.num_gpu_blocks * result.bytes_per_block / 2**30:.2f}" for c in result.candidates}
    assert printed in pools


@pytest.mark.parametrize(
    ("requests", "prompt", "tokens", "percent"),
    [
        (1, 512, 640, "0.9"),
        (64, 512, 640, "58.2"),
        (4, 512, 640, "3.6"),
        (16, 8_192, 8_320, "55.3"),
        (16, 16_384, 16_512, "95.5"),
        (64, 16_384, 16_512, "95.5"),
    ],
)
def test_peak_usage_counts_the_null_block_out(
    requests: int, prompt: int, tokens: int, percent: str
) -> None:
    """Test the usages of the recipe's chart; dividing by 551 would give other figures."""
    load = capacity.load(POOL, 551, requests, tokens, prompt)
    assert f"{100 * load.peak_usage_ratio:.1f}" == percent


def test_four_short_requests_use_364_ten_thousandths() -> None:
    """Test cache usage 0.0364."""
    assert f"{capacity.load(POOL, 551, 4, 640).peak_usage_ratio:.4f}" == "0.0364"


@pytest.mark.parametrize("requests", [16, 64])
def test_fifteen_of_the_long_requests_run(requests: int) -> None:
    """Test that 15 run and the others wait; 16 would need 560 of 550 blocks."""
    load = capacity.load(POOL, 551, requests, 16_512, 16_384)
    assert (load.running, load.running_at_admission) == (15, 15)
    assert load.waiting == requests - 15
    assert load.preemptions_expected is False
    needed = 16 * load.blocks_at_full_length * POOL.bytes_per_block
    assert f"{needed / 2**30:.2f}" == "9.02"


def test_prefix_caching_costs_one_state_block_a_group() -> None:
    """Test 7.99x and 261,669 tokens with prefix caching on (facts, section 2)."""
    settings = dataclasses.replace(RECIPE, prefix_caching=True)
    (candidate,) = capacity.predict(QWEN35_4B, settings, num_gpu_blocks=551).candidates
    assert (f"{candidate.max_concurrency:.2f}", candidate.kv_cache_size_tokens) == ("7.99", 261_669)


def test_fp8_doubles_the_block_so_the_gain_is_below_two() -> None:
    """Test block 1056, 15.74x and 515,861 tokens: 1.885 times, not twice (facts, section 2)."""
    settings = dataclasses.replace(RECIPE, kv_cache_dtype="fp8")
    result = capacity.predict(QWEN35_4B, settings, num_gpu_blocks=551)
    (candidate,) = result.candidates
    assert result.attention_block_size_tokens == 1056
    assert (f"{candidate.max_concurrency:.2f}", candidate.kv_cache_size_tokens) == (
        "15.74",
        515_861,
    )
    gain = candidate.max_concurrency / POOL.candidates[0].max_concurrency
    assert f"{gain:.3f}" == "1.886"


def test_dense_qwen3_4b() -> None:
    """Test 147,456 bytes a token and 4.5 GiB for eight sequences of 4,096 tokens."""
    settings = ServingSettings("0.11.2", max_model_len=4096)
    plan = capacity.layout(QWEN3_4B, settings)
    assert plan.bytes_per_block == 16 * 147_456
    assert 8 * plan.blocks_per_request * plan.bytes_per_block == 4.5 * 2**30


def test_hybrid_on_the_cpu_build() -> None:
    """Test block 640, padding 22.14 %, 1638 blocks, 975,890 tokens, 29.78x and 102.38x."""
    settings = ServingSettings("0.27.0", device="cpu", max_model_len=32_768)
    result = capacity.predict(HYBRID, settings, available_bytes=2**30)
    (candidate,) = result.candidates
    assert result.attention_block_size_tokens == 640
    assert f"{result.mamba_padding_percent:.2f}" == "22.14"
    assert (candidate.num_gpu_blocks, candidate.kv_cache_size_tokens) == (1638, 975_890)
    assert f"{candidate.max_concurrency:.2f}" == "29.78"
    shorter = dataclasses.replace(settings, max_model_len=8192)
    (candidate,) = capacity.predict(HYBRID, shorter, available_bytes=2**30).candidates
    assert candidate.kv_cache_size_tokens == 838_656
    assert f"{candidate.max_concurrency:.2f}" == "102.38"


def test_dense_on_the_cpu_build_under_pressure() -> None:
    """Test 64 blocks, 8,192 tokens, 4.00x, at most 12 admitted and 10 at full length."""
    settings = ServingSettings("0.27.0", device="cpu", max_model_len=2048)
    result = capacity.predict(DENSE, settings, available_bytes=16 * MIB)
    (candidate,) = result.candidates
    assert (candidate.num_gpu_blocks, candidate.kv_cache_size_tokens) == (64, 8192)
    assert f"{candidate.max_concurrency:.2f}" == "4.00"
    load = capacity.load(result, 64, 16, 646, 518)
    assert (load.running_at_admission, load.running) == (12, 10)
    assert load.preemptions_expected is True
    assert load.peak_usage_ratio == 1.0


def test_refusal_names_the_longest_context_that_fits() -> None:
    """Test the estimate 8192 that the CPU build printed for 16 MiB at 32,768 tokens."""
    settings = ServingSettings("0.27.0", device="cpu", max_model_len=32_768)
    refusal = capacity.predict(DENSE, settings, available_bytes=16 * MIB).refusal
    assert refusal is not None
    assert refusal.type is RefusalType.CONTEXT_DOES_NOT_FIT
    assert refusal.estimated_max_model_len == 8192
    assert (refusal.needed_bytes, refusal.available_bytes) == (64 * MIB, 16 * MIB)
    assert "8,192" in refusal.message
    assert "--max-model-len" in refusal.message
