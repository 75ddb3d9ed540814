"""Weights: stored bytes from indexes and headers, loaded estimates, parameters, precisions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tasks.plan import weights
from tasks.plan.weights import Component
from warehouse.errors import BadInput

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a file whose header names ``tensors`` as (dtype, shape, bytes); no data behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_the_recipes_checkpoint_in_both_units() -> None:
    """Test 9.32 GB = 8.68 GiB from an index's total."""
    checkpoint = weights.from_index({"metadata": {"total_size": 9_320_000_000}})
    assert str(checkpoint) == "9.32 GB = 8.68 GiB"


def test_qwen3_4b_as_the_seed_has_it() -> None:
    """Test 8,044,936,192 B = 7.49 GiB, and 11.99 GiB with 4.5 GiB of cache."""
    checkpoint = weights.from_index({"metadata": {"total_size": 8_044_936_192}})
    assert f"{checkpoint.gib:.4f}" == "7.4924"
    assert f"{checkpoint.gib + 4.5:.2f}" == "11.99"


def test_parameters_counted_from_the_config_give_the_same_bytes() -> None:
    """Test that Qwen3-4B's parameters in bf16 are the bytes its index states."""
    counted = weights.count_parameters(QWEN3_4B)
    assert 2 * counted.total == 8_044_936_192
    assert counted.by_component[Component.HEAD] == 0


def test_a_mixture_counts_every_expert() -> None:
    """Test that memory follows all experts: 30.5 billion parameters of Qwen3-30B-A3B."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    }
    assert weights.count_parameters(config).total == 30_532_122_624


@pytest.mark.parametrize(
    "index",
    [{}, {"metadata": {}}, {"metadata": {"total_size": "8"}}, {"metadata": {"total_size": True}}],
)
def test_an_index_without_a_total_is_refused(index: dict[str, Any]) -> None:
    """Test that a missing total is never taken as 0."""
    with pytest.raises(BadInput, match="total_size"):
        weights.from_index(index)


def test_headers_give_bytes_by_component(tmp_path: Path) -> None:
    """Test that only headers are read and names tell the component."""
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", [10, 4], 80),
            "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [8, 4], 32),
            "model.layers.0.mlp.up_proj.weight_scale": ("F32", [1], 4),
            "model.visual.blocks.0.attn.weight": ("BF16", [5], 10),
            "mtp.layers.0.mlp.weight": ("BF16", [3], 6),
        },
    )
    checkpoint = weights.stored(tmp_path)
    assert checkpoint.total_bytes == 132
    assert checkpoint.parameters == 81
    assert checkpoint.by_component == {
        Component.EMBEDDING: 80,
        Component.LANGUAGE: 36,
        Component.VISION: 10,
        Component.PREDICTION: 6,
    }


def test_prediction_layers_and_vision_are_left_out_when_they_are(tmp_path: Path) -> None:
    """Test the loaded estimate with and without speculation and vision."""
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", [100], 200),
            "visual.weight": ("BF16", [50], 100),
            "mtp.fc.weight": ("BF16", [10], 20),
        },
    )
    checkpoint = weights.stored(tmp_path)
    plain = weights.loaded(checkpoint)
    assert plain.total_bytes == 300
    assert any("prediction" in note for note in plain.notes)
    assert any("tied" in note for note in plain.notes)
    assert weights.loaded(checkpoint, speculative=True).total_bytes == 320
    text = weights.loaded(checkpoint, language_model_only=True, tensor_parallel=2)
    assert text.total_bytes == 100
    assert text.tolerance_bytes == 3


def test_the_recipes_loading_is_within_the_tolerance() -> None:
    """Test 8.46 GiB of parameters against the logged 8.61 GiB."""
    parts = {Component.LANGUAGE: int(8.46 * 2**30), Component.HEAD: 0}
    estimate = weights.loaded(weights.Stored(sum(parts.values()), None, parts))
    assert abs(estimate.total_bytes - 8.61 * 2**30) <= estimate.tolerance_bytes


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 16, struct.pack("<Q", 9) + b"{"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Test that a cut or foreign file is refused with its path."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        weights.stored(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Test that nothing is estimated from nothing."""
    with pytest.raises(BadInput, match="neither"):
        weights.stored(tmp_path)


def test_quantised_bytes_keep_the_16_bit_parts() -> None:
    """Test that FP8 and INT4 pay for scales and for what stays at 16 bits."""
    assert weights.quantised_bytes(1000, 100, "bf16") == 2000
    assert weights.quantised_bytes(10**9, 0, "fp8") == round(10**9 * (1 + 4 / 16_384))
    four_bit = weights.quantised_bytes(10**9, 0, "int4")
    assert 1.03 < four_bit / (10**9 / 2) < 1.15
    with pytest.raises(BadInput, match="int4"):
        weights.quantised_bytes(1, 0, "int3")


def test_unknown_architectures_are_not_counted() -> None:
    """Test that a count is refused rather than guessed."""
    with pytest.raises(BadInput, match="'mamba'"):
        weights.count_parameters({"model_type": "mamba"})
    with pytest.raises(BadInput, match="vocab_size"):
        weights.count_parameters({**QWEN3_4B, "vocab_size": None})
