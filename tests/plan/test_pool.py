"""The pool before a first boot: weights from what is known, non-KV from boots or the default."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.launch import models
from tasks.plan import gpus, pool
from tasks.plan.calibration import Boot, Pool
from tasks.plan.cell import ServerSettings
from tasks.plan.model import describe
from tasks.plan.weights import Component, Stored
from warehouse.errors import BadInput

GIB = 2**30
A10 = gpus.find("A10")
#: A Qwen3-8B as far as its parameters go: 8,190,735,360 by its index.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


def server(**changes: Any) -> ServerSettings:
    return ServerSettings.model_validate({"max_model_len": 8192} | changes)


def weights(
    config: dict[str, Any], checkpoint: Stored | None = None, **changes: Any
) -> pool.Weights:
    return pool.weights_of(server(**changes), config, describe(config), checkpoint)


def test_weights_are_counted_from_the_config_with_their_error() -> None:
    found = weights(QWEN3_8B)
    assert found.value_bytes == 2 * 8_190_735_360
    assert found.error_bytes == int(0.05 * found.value_bytes)
    assert found.source == "counted from the config, bf16"


def test_a_checkpoint_beats_the_count_and_skips_what_is_not_loaded() -> None:
    parts = {Component.LANGUAGE: 8 * GIB, Component.PREDICTION: GIB, Component.VISION: GIB}
    stored = Stored(10 * GIB, None, parts)
    assert weights(QWEN3_8B, stored).value_bytes == 9 * GIB
    assert weights(QWEN3_8B, stored, language_model_only=True).value_bytes == 8 * GIB
    index = weights(QWEN3_8B, Stored(10 * GIB, None, None))
    assert (index.value_bytes, index.source) == (10 * GIB, "checkpoint's index")
    assert weights(QWEN3_8B, stored).error_bytes == int(0.03 * 9 * GIB)


def test_weights_are_loaded_in_the_dtype_asked_for() -> None:
    wide = QWEN3_8B | {"dtype": "float32"}
    stored = Stored(4 * GIB, None, None)
    assert weights(QWEN3_8B, stored, dtype="float32").value_bytes == 8 * GIB
    assert weights(wide, stored, dtype="auto").value_bytes == 2 * GIB
    assert weights(wide, stored, dtype="float32").value_bytes == 4 * GIB
    assert weights(QWEN3_8B, dtype="float32").value_bytes == 4 * 8_190_735_360


def test_ranks_share_the_weights_and_uneven_stages_widen_the_bar() -> None:
    whole = weights(QWEN3_8B)
    two = weights(QWEN3_8B, tensor_parallel_size=2)
    assert two.value_bytes == whole.value_bytes // 2
    staged = weights(QWEN3_8B, pipeline_parallel_size=2)
    assert staged.error_bytes > 4 * two.error_bytes


def test_quantised_weights_are_counted_and_an_unknown_scheme_is_not() -> None:
    found = weights(QWEN3_8B | {"quantization_config": {"quant_method": "fp8"}})
    assert 0.5 < found.value_bytes / (2 * 8_190_735_360) < 0.65
    assert found.error_bytes == int(0.1 * found.value_bytes)
    with pytest.raises(BadInput, match="quantisation 'exl9' with 3 bits"):
        weights(QWEN3_8B | {"quantization_config": {"quant_method": "exl9", "bits": 3}})


def test_a_vision_tower_is_counted_roughly_or_asked_for() -> None:
    text = QWEN3_8B | {"vocab_size": 1000}
    tower = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
    both = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower}
    alone = weights(both, language_model_only=True)
    assert weights(both).value_bytes == alone.value_bytes + 2 * 24 * 16 * 1024**2
    assert weights(both).error_bytes > alone.error_bytes
    with pytest.raises(BadInput, match="vision tower cannot be counted"):
        weights(both | {"vision_config": {}})


def estimate(config: dict[str, Any], boots: list[Boot], **changes: Any) -> Pool | str:
    asked = server(**changes)
    return pool.estimate(asked, config, describe(config), gpu=A10, boots=boots)


def test_the_default_has_a_wide_bar_and_says_what_it_is_made_of() -> None:
    found = estimate(models.config("tiny-qwen3"), [])
    assert isinstance(found, Pool)
    assert 1.4 * GIB < found.error_bytes < 1.5 * GIB
    assert found.source.startswith("non-KV: default: no boot of this model and GPU yet; weights: ")
    assert str(found) == "17.5 ± 1.4 GiB"


def test_boots_bring_weights_and_total_so_that_nothing_has_to_be_known_of_the_model() -> None:
    """Test the recipe's A10: 8.88 GiB at 0.9 gives 4.47 at 0.7 within 2 % of the pool."""
    boot = Boot(A10.total_bytes, 0.9, round(8.61 * GIB), round(8.88 * GIB), 2048)
    opaque = {k: v for k, v in QWEN3_8B.items() if k != "vocab_size"}
    without = estimate(opaque, [])
    assert isinstance(without, str)
    assert "vocab_size is missing" in without
    found = estimate(opaque, [boot], gpu_memory_utilization=0.7)
    assert isinstance(found, Pool)
    assert abs(found.value_bytes - 4.47 * GIB) <= found.error_bytes <= 0.02 * found.value_bytes
    assert "1 boot" in found.source
    assert str(found) == "4.47 ± 0.05 GiB"
