"""What must hold for every model and every setting, tried on random ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as configure
from hypothesis import strategies as st

from tasks.plan import capacity, model
from tasks.plan.capacity import GIB, ServingSettings
from tasks.plan.layers import AttentionLayer
from warehouse.errors import BadInput

VERSIONS = ("0.9.2", "0.11.2", "0.14.1", "0.17.1", "0.20.0", "0.24.0", "0.27.0", "0.30.0", "0.33.0")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a config: dense, hybrid, sliding or latent."""
    kind = draw(st.sampled_from(["dense", "hybrid", "sliding", "latent"]))
    layers = draw(st.integers(4, 64))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8])),
        "head_dim": draw(st.sampled_from([64, 128, 256])),
        "max_position_embeddings": 131_072,
    }
    if kind == "dense":
        return config | {"model_type": "qwen3"}
    if kind == "latent":
        return config | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if kind == "sliding":
        return config | {"model_type": "gemma3_text", "sliding_window": 1024}
    return config | {
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": draw(st.sampled_from([16, 32, 48])),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }


@st.composite
def settings(draw: st.DrawFn) -> ServingSettings:
    """Draw serving settings that every drawn model can be served with."""
    return ServingSettings(
        draw(st.sampled_from(VERSIONS)),
        max_model_len=draw(st.integers(1, 131_072)),
        max_num_batched_tokens=draw(st.sampled_from([512, 2048, 8192])),
        max_num_seqs=draw(st.sampled_from([1, 256])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        prefix_caching=draw(st.sampled_from([None, True, False])),
        tensor_parallel=draw(st.sampled_from([1, 2, 4])),
    )


@configure(deadline=None)  # a busy machine must not decide
@given(configs(), settings(), st.integers(0, 200 * GIB), st.integers(0, 20 * GIB))
def test_more_bytes_never_give_less(
    config: dict[str, Any], serving: ServingSettings, base: int, more: int
) -> None:
    """Test that blocks, tokens and concurrency grow with the bytes, and a fit stays one."""
    plan = capacity.layout(model.describe(config), serving)
    small = capacity.within(plan, available_bytes=base)
    large = capacity.within(plan, available_bytes=base + more)
    if small.candidates:
        before, after = small.candidates[0], large.candidates[0]
        assert after.num_gpu_blocks >= before.num_gpu_blocks
        assert after.kv_cache_size_tokens >= before.kv_cache_size_tokens
        assert after.max_concurrency >= before.max_concurrency
    if small.refusal is None:
        assert large.refusal is None


@configure(deadline=None)  # a busy machine must not decide
@given(configs(), settings(), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(
    config: dict[str, Any], serving: ServingSettings, rng: Any
) -> None:
    """Test that a shuffled config gives the same prediction."""
    keys = list(config)
    rng.shuffle(keys)
    shuffled = {key: config[key] for key in keys}
    first = capacity.predict(model.describe(config), serving, available_bytes=4 * GIB)
    second = capacity.predict(model.describe(shuffled), serving, available_bytes=4 * GIB)
    assert first == second


@configure(deadline=None)  # a busy machine must not decide
@given(configs(), settings())
def test_need_is_never_below_the_naive_formula(
    config: dict[str, Any], serving: ServingSettings
) -> None:
    """Test that whole blocks cost at least the raw bytes of full attention and state."""
    description = model.describe(config)
    plan = capacity.layout(description, serving)
    term = plan.terms
    raw = 0
    for layer, count in description.counts:
        if isinstance(layer, AttentionLayer):
            tokens = term.length if layer.window is None else min(term.length, layer.window)
            raw += count * tokens * layer.token_bytes(term.tp, term.cache, term.element)
        else:
            raw += count * layer.state_bytes(term.tp, 0, 2, 4)
    assert plan.blocks_per_request * plan.bytes_per_block >= raw


@configure(deadline=None)  # a busy machine must not decide
@given(configs(), settings(), st.integers(GIB // 8, 200 * GIB))
def test_the_rounded_gib_keeps_the_truth(
    config: dict[str, Any], serving: ServingSettings, available: int
) -> None:
    """Test that the candidates of the printed GiB contain the answer of the exact bytes."""
    plan = capacity.layout(model.describe(config), serving)
    exact = capacity.within(plan, available_bytes=available)
    printed = f"{available / GIB:.2f}"
    allowed = capacity.within(plan, available_gib=printed)
    assert set(exact.candidates) <= set(allowed.candidates)
    # vLLM drops trailing zeros; the interval is the same.
    assert capacity.gib_interval(printed) == capacity.gib_interval(float(printed))


@configure(deadline=None)  # a busy machine must not decide
@given(st.integers(0, 400 * GIB))
def test_the_interval_holds_exactly_what_prints_the_same(available: int) -> None:
    """Test both ends of the interval: the next byte outside prints another number."""
    printed = f"{round(available / GIB, 2):.2f}"
    low, high = capacity.gib_interval(printed)
    assert low <= available <= high
    assert abs((low - 1) / GIB - float(printed)) > 0.005
    assert abs((high + 1) / GIB - float(printed)) > 0.005


@configure(deadline=None)  # a busy machine must not decide
@given(configs(), settings(), st.integers(2, 5000), st.integers(1, 300), st.data())
def test_a_load_never_uses_more_than_the_pool(
    config: dict[str, Any],
    serving: ServingSettings,
    blocks: int,
    requests: int,
    data: st.DataObject,
) -> None:
    """Test running + waiting, the order of the two running counts and usage within 0..1."""
    tokens = data.draw(st.integers(1, serving.max_model_len or 1))
    prompt = data.draw(st.integers(1, tokens))
    result = capacity.predict(model.describe(config), serving, num_gpu_blocks=blocks)
    load = capacity.load(result, blocks, requests, tokens, prompt)
    assert load.running + load.waiting == requests
    assert load.running_at_admission is not None
    assert load.running <= load.running_at_admission <= requests
    assert 0 <= load.peak_usage_ratio <= 1
    assert load.preemptions_expected is (load.running_at_admission > load.running)


@pytest.mark.parametrize(
    "memory", [{}, {"available_bytes": 1, "num_gpu_blocks": 1}, {"num_gpu_blocks": -1}]
)
def test_memory_is_given_in_exactly_one_way(memory: dict[str, int]) -> None:
    """Test that none, two or a negative figure is refused."""
    description = model.describe(
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 128,
            "max_position_embeddings": 128,
        }
    )
    with pytest.raises(BadInput, match="wanted"):
        capacity.predict(description, ServingSettings("0.27.0"), **memory)


def test_importing_the_library_loads_nothing_heavy() -> None:
    """Test that none of prefect, polyaxon, duckdb, torch and pydantic is imported."""
    code = (
        "import sys; from tasks.plan import capacity, model, weights, sizing, gpus, calibration;"
        "print([name for name in ('prefect', 'polyaxon', 'duckdb', 'torch', 'pydantic', 'rich')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
