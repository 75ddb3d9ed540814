"""Model descriptions: what each kind of architecture keeps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.plan import model
from tasks.plan.layers import (
    Attention,
    GatedDelta,
    KimiDelta,
    Latent,
    LinearAttention,
    Mamba1,
    Mamba2,
    ShortConv,
    Span,
)
from warehouse.errors import BadInput

CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"
BASE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 1024,
}


def counts(**config: Any) -> dict[type | Span, int]:
    """Return how many layers of each kind a config has; attention by its span."""
    found: dict[type | Span, int] = {}
    for layer, count in model.describe({**BASE, **config}).counts:
        key: type | Span = layer.span if isinstance(layer, Attention) else type(layer)
        found[key] = found.get(key, 0) + count
    return found


MAMBA2_NAMES = {
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
MAMBA1_NAMES = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, {Span.FULL: 8}),
        ({"model_type": "mistral", "sliding_window": 4096}, {Span.SLIDING: 8}),
        ({"model_type": "mistral", "sliding_window": None}, {Span.FULL: 8}),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
            {Span.FULL: 8},
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, {Span.SLIDING: 4, Span.FULL: 4}),
        ({"model_type": "gemma3_text", "sliding_window": 64}, {Span.SLIDING: 7, Span.FULL: 1}),
        ({"model_type": "cohere2", "sliding_window": 64}, {Span.SLIDING: 6, Span.FULL: 2}),
        ({"model_type": "gpt_oss", "sliding_window": 128}, {Span.SLIDING: 4, Span.FULL: 4}),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 512},
            {Span.CHUNKED: 6, Span.FULL: 2},
        ),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            {Latent: 8},
        ),
        (
            {
                "model_type": "deepseek_v32",
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "index_topk": 2048,
            },
            {Latent: 16},
        ),
        (
            {
                "model_type": "bamba",
                "layers_block_type": ["mamba", "attention"] * 4,
                **MAMBA2_NAMES,
            },
            {Mamba2: 4, Span.FULL: 4},
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "layer_types": ["mamba"] * 7 + ["attention"],
                **MAMBA2_NAMES,
            },
            {Mamba2: 7, Span.FULL: 1},
        ),
        ({"model_type": "falcon_h1", **MAMBA2_NAMES}, {Mamba2: 8, Span.FULL: 8}),
        (
            {
                "model_type": "zamba2",
                "layers_block_type": ["mamba", "hybrid"] * 4,
                "n_mamba_heads": 32,
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
            },
            {Mamba2: 8, Span.FULL: 4},
        ),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-M*ME-*",
                "mamba_num_heads": 32,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
                "conv_kernel": 4,
            },
            {Mamba2: 3, Span.FULL: 2},
        ),
        (
            {
                "model_type": "jamba",
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                **MAMBA1_NAMES,
            },
            {Mamba1: 7, Span.FULL: 1},
        ),
        (
            {
                "model_type": "mamba",
                "state_size": 16,
                "conv_kernel": 4,
                "intermediate_size": 2048,
            },
            {Mamba1: 8},
        ),
        (
            {"model_type": "mamba2", "num_heads": 32, "state_size": 128, "conv_kernel": 4},
            {Mamba2: 8},
        ),
        (
            {
                "model_type": "lfm2",
                "conv_L_cache": 3,
                "layer_types": ["conv"] * 6 + ["full_attention"] * 2,
            },
            {ShortConv: 6, Span.FULL: 2},
        ),
        (
            {
                "model_type": "kimi_linear",
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3, 5, 6, 7],
                    "num_heads": 16,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                },
            },
            {KimiDelta: 6, Latent: 2},
        ),
        (
            {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1] * 2},
            {LinearAttention: 6, Span.FULL: 2},
        ),
        (
            {"model_type": "whisper", "decoder_layers": 4, "decoder_attention_heads": 8}
            | {"d_model": 512},
            {Span.FULL: 4, Span.CROSS: 4},
        ),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_layers_of_each_architecture(
    config: dict[str, Any], expected: dict[type | Span, int]
) -> None:
    """Test which layer keeps what."""
    assert counts(**config) == expected


def test_gdn_hybrids_have_every_fourth_layer_full() -> None:
    """Test the nested config of Qwen3.5: 24 states and 8 full layers, one prediction layer."""
    description = model.describe(model.load(CONFIGS / "Qwen__Qwen3.5-4B.json"))
    kinds = {type(layer): count for layer, count in description.counts}
    assert kinds == {GatedDelta: 24, Attention: 8}
    assert (description.is_hybrid, description.state_dtype) == (True, "float32")
    assert description.draft_layers == 1
    assert description.language == "qwen3_5_text"


def test_layer_types_win_over_the_interval() -> None:
    """Test that a stated list of layers is taken as it is."""
    types = ["linear_attention", "full_attention"] * 4
    found = counts(
        model_type="qwen3_5_text",
        layer_types=types,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    assert found == {GatedDelta: 4, Span.FULL: 4}


def test_gemma4_full_layers_have_their_own_heads() -> None:
    """Test global head count and size, and that shared layers keep nothing."""
    config = model.load(CONFIGS / "google__gemma-4-31B-it.json")
    description = model.describe(config)
    full = next(
        la for la, _ in description.counts if isinstance(la, Attention) and la.span is Span.FULL
    )
    assert (full.heads, full.head_size) == (4, 512)
    shared = json.loads(json.dumps(config))
    shared["text_config"]["num_kv_shared_layers"] = 10
    assert sum(count for _, count in model.describe(shared).counts) == 50


def test_defaults_of_transformers_fill_what_gemma3_leaves_out() -> None:
    """Test a config as published: heads and head size are the class's defaults."""
    description = model.describe(
        {
            "model_type": "gemma3",
            "vision_config": {},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        }
    )
    assert description.counts[0][0] == Attention(4, 256, 256, Span.SLIDING, 1024)
    assert description.max_model_len == 131_072
    assert description.has_vision


@pytest.mark.parametrize("wrapper", ["text_config", "llm_config", "language_config"])
def test_the_language_part_of_a_multimodal_config(wrapper: str) -> None:
    """Test the keys under which it is kept."""
    description = model.describe(
        {"model_type": "some_vl", wrapper: {**BASE, "model_type": "qwen2"}}
    )
    assert description.counts[0][1] == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "rwkv7"}, "'rwkv7' is not known"),
        ({}, "None is not known"),
        ({"model_type": "llama", "num_hidden_layers": None}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "positive"),
        ({"model_type": "llama", "num_key_value_heads": "8"}, "wanted an integer"),
        ({"model_type": "llama", "num_key_value_heads": True}, "wanted an integer"),
        ({"model_type": "llama", "layer_types": "full_attention"}, "list of texts"),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, "1 entries"),
        ({"model_type": "llama", "layer_types": ["strange"] * 8}, "'strange'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "mamba_num_heads"),
        ({"model_type": "deepseek_v3", "compress_ratios": [4]}, "not supported"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            "refused by vLLM",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    """Test that nothing is guessed and the message names the file and the field."""
    with pytest.raises(BadInput, match=words) as caught:
        model.describe({**BASE, **config}, where="here/config.json")
    assert "here/config.json" in str(caught.value)


def test_every_recorded_config_is_described() -> None:
    """Test that no recorded model is refused."""
    for file in CONFIGS.glob("*.json"):
        assert model.describe(model.load(file)).counts


def test_the_smallest_stated_limit_is_the_context() -> None:
    """Test several names of the context limit; model_max_length wins."""
    limits = {"max_position_embeddings": 4096, "seq_length": 2048}
    assert model.describe({**BASE, "model_type": "llama", **limits}).max_model_len == 2048
    limits["model_max_length"] = 8192
    assert model.describe({**BASE, "model_type": "llama", **limits}).max_model_len == 8192


def test_a_folder_or_a_file_is_loaded(tmp_path: Path) -> None:
    """Test both, and the messages for what is neither."""
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert model.load(tmp_path) == model.load(tmp_path / "config.json") == BASE
    with pytest.raises(BadInput, match="cannot be read"):
        model.load(tmp_path / "nowhere")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(BadInput, match="wanted a JSON object"):
        model.load(tmp_path / "list.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        model.load(tmp_path / "broken.json")


def test_an_absurd_number_of_layers_is_refused_and_not_expanded() -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 1_000_000_000,
        "hidden_size": 128,
        "num_attention_heads": 4,
    }
    with pytest.raises(BadInput, match="1000000000 hidden layers, wanted at most 10000"):
        model.describe(config)
