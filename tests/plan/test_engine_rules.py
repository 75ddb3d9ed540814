"""The version switches: each as a number that differs on its two sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tasks.plan import capacity, model, specs
from tasks.plan.capacity import RefusalType, ServingSettings, Speculative
from tasks.plan.versions import EngineVersion, rules
from warehouse.errors import BadInput

GDN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hybrid_override_pattern": "MEM*MEM*",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
}
SLIDING: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


def plan(config: dict[str, Any], version: str, **changes: Any) -> capacity.Layout:
    """Return the layout of a config in one version."""
    settings = ServingSettings(version, max_model_len=32_768, max_num_seqs=1, **changes)
    return capacity.layout(model.describe(config), settings)


@pytest.mark.parametrize(
    ("text", "release", "final"),
    [
        ("0.27.0", (0, 27, 0), True),
        ("v0.27", (0, 27, 0), True),
        ("0.27.0+cpu", (0, 27, 0), True),
        ("0.9.0.1", (0, 9, 0), True),
        ("0.20.1rc1", (0, 20, 1), False),
        ("0.26.1rc1.dev156+gabc", (0, 26, 1), False),
        ("0.11.2.post2", (0, 11, 2), True),
    ],
)
def test_versions_as_engines_print_them(
    text: str, release: tuple[int, int, int], final: bool
) -> None:
    """Test releases, pre-releases, local and post versions."""
    assert EngineVersion.parse(text) == EngineVersion(release, final)


@pytest.mark.parametrize("text", ["", "latest", "0.8.5", "0.27.x"])
def test_a_version_without_known_rules_is_refused(text: str) -> None:
    """Test that nothing is predicted for text that is no version, or for too old ones."""
    with pytest.raises(BadInput, match="version"):
        rules(text)


def test_a_release_candidate_has_the_old_rule() -> None:
    """Test that 0.20.1rc1 still multiplies blocks, as 0.20.0 does."""
    assert not rules("0.20.1rc1").tokens_from_concurrency
    assert rules("0.20.1").tokens_from_concurrency


def test_tokens_before_0_20_1_are_blocks_over_groups() -> None:
    """Test both token formulas on the same pool."""
    old = capacity.within(plan(GDN, "0.20.0"), num_gpu_blocks=1258).candidates[0]
    new = capacity.within(plan(GDN, "0.20.1"), num_gpu_blocks=1258).candidates[0]
    assert old.kv_cache_size_tokens == 1258 // 4 * 528
    assert new.kv_cache_size_tokens == int(1258 / 66 * 32_768)
    assert old.max_concurrency == new.max_concurrency


@pytest.mark.parametrize(
    ("version", "mode"),
    [("0.14.1", "none"), ("0.17.1", "none"), ("0.27.0", "none"), ("0.28.0", "align")],
)
def test_hybrids_cache_prefixes_by_default_from_0_28(version: str, mode: str) -> None:
    """Test the default of prefix caching for hybrids."""
    assert plan(GDN, version).terms.mode == mode


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("0.11.0", "none"),
        ("0.14.1", "all"),
        ("0.17.1", "all"),
        ("0.27.0", "all"),
        ("0.28.0", "align"),
        ("0.32.0", "align"),
    ],
)
def test_cache_mode_of_mamba2_with_prefix_caching(version: str, mode: str) -> None:
    """Test which mode a model that supports "all" gets."""
    assert plan(NEMOTRON, version, prefix_caching=True).terms.mode == mode


def test_mode_all_can_be_asked_for_until_0_31() -> None:
    """Test that "all" is a choice before 0.32 and falls back to "align" after."""
    asked = {"prefix_caching": True, "mamba_cache_mode": "all"}
    assert plan(NEMOTRON, "0.31.0", **asked).terms.mode == "all"
    assert plan(NEMOTRON, "0.32.0", **asked).terms.mode == "align"


def test_mode_all_counts_speculation_from_0_22() -> None:
    """Test the blocks of one request with three speculative tokens."""
    speculative = Speculative("ngram", 3)
    old, new = (
        plan(NEMOTRON, version, prefix_caching=True, speculative=speculative)
        for version in ("0.21.0", "0.22.0")
    )
    states = next(t.groups for t in new.tables if t.specs[0].kind == capacity.STATE)
    assert new.blocks_per_request - old.blocks_per_request == 3 * states


def test_checkpoint_block_of_mamba2_from_0_33() -> None:
    """Test that aligned Mamba2 states keep one block more in 0.33."""
    old, new = (plan(NEMOTRON, version, prefix_caching=True) for version in ("0.32.0", "0.33.0"))
    states = next(t.groups for t in new.tables if t.specs[0].kind == capacity.STATE)
    assert new.blocks_per_request - old.blocks_per_request == states


def test_checkpoint_block_of_delta_states_depends_on_the_gpu() -> None:
    """Test that 0.33 keeps a checkpoint for GDN on Hopper only, on blocks of 64 tokens."""
    ampere = plan(GDN, "0.33.0", compute_capability=(8, 6))
    hopper = plan(GDN, "0.33.0", compute_capability=(9, 0))
    assert (ampere.attention_block_size_tokens, hopper.attention_block_size_tokens) == (528, 576)
    assert ampere.blocks_per_request == 63 + 3 * 2
    assert hopper.blocks_per_request == 57 + 3 * 3


def test_group_size_may_be_the_largest_bucket_from_0_12() -> None:
    """Test 12 sliding and 13 full layers: 13 in a group from 0.12, 12 before."""
    config = dict(SLIDING, num_hidden_layers=25, model_type="gpt_oss")
    config["layer_types"] = ["full_attention", "sliding_attention"] * 12 + ["full_attention"]
    before, after = plan(config, "0.11.2"), plan(config, "0.12.0")
    assert sum(table.groups for table in before.tables) == 3
    assert sum(table.groups for table in after.tables) == 2
    assert (before.padding_layers, after.padding_layers) == (11, 1)


@pytest.mark.parametrize(("version", "batches"), [("0.25.1", 1), ("0.26.0", 2)])
def test_sliding_windows_wait_for_batches_in_flight_from_0_26(version: str, batches: int) -> None:
    """Test the need of a sliding window with one and with two batches in flight."""
    layout = plan(SLIDING, version, max_num_batched_tokens=2048)
    need = next(
        specs.need(table.specs[0], layout.terms, 32_768)
        for table in layout.tables
        if table.specs[0].kind == "sliding"
    )
    assert need == -(-(1023 + batches * 2048) // 16) + 1


def test_without_asynchronous_scheduling_one_batch_is_in_flight() -> None:
    """Test that --no-async-scheduling lowers the sliding need."""
    fast, slow = (plan(SLIDING, "0.27.0", async_scheduling=choice) for choice in (True, False))
    assert slow.terms.in_flight * 2 == fast.terms.in_flight


def test_batched_tokens_matter_for_windows_only() -> None:
    """Test that max_num_batched_tokens moves sliding need and not full attention's."""
    dense = {"model_type": "llama", **{k: SLIDING[k] for k in list(SLIDING)[1:5]}}
    small, large = ({"max_num_batched_tokens": size} for size in (512, 8192))
    assert (
        plan(dense, "0.27.0", **small).blocks_per_request
        == plan(dense, "0.27.0", **large).blocks_per_request
    )
    assert (
        plan(SLIDING, "0.27.0", **small).blocks_per_request
        < plan(SLIDING, "0.27.0", **large).blocks_per_request
    )


def test_chunked_layers_count_as_full_ones_before_0_14() -> None:
    """Test Llama-4: one group before 0.14, groups apart from then on."""
    config = {
        "model_type": "llama4_text",
        "num_hidden_layers": 8,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    }
    old, new = plan(config, "0.13.0"), plan(config, "0.14.0")
    assert [table.groups for table in old.tables] == [1]
    assert [table.groups for table in new.tables] == [3, 1]
    assert old.blocks_per_request == 2048


def test_start_up_check_of_0_17_looks_at_the_first_group_only() -> None:
    """Test that a hybrid whose first layer keeps a state passed the check of 0.17."""
    description = model.describe(GDN)
    for version, refused in (("0.17.1", False), ("0.19.0", True)):
        settings = ServingSettings(version, max_model_len=32_768, max_num_seqs=1)
        result = capacity.predict(description, settings, num_gpu_blocks=20)
        assert (result.refusal is not None) is refused


def test_start_up_check_keeps_the_null_block_from_0_29() -> None:
    """Test a pool of exactly the blocks one request needs."""
    description = model.describe(GDN)
    for version, refused in (("0.27.0", False), ("0.29.0", True)):
        settings = ServingSettings(
            version, max_model_len=32_768, max_num_seqs=1, prefix_caching=False
        )
        result = capacity.predict(description, settings, num_gpu_blocks=66)
        assert (result.refusal is not None) is refused


def test_usage_counted_the_null_block_until_0_10() -> None:
    """Test the denominator on both sides of the switch."""
    dense = {"model_type": "llama", **{k: SLIDING[k] for k in list(SLIDING)[1:5]}}
    for version, blocks in (("0.9.2", 101), ("0.10.2", 100)):
        settings = ServingSettings(version, max_model_len=32)
        result = capacity.predict(model.describe(dense), settings, num_gpu_blocks=101)
        assert capacity.load(result, 101, 1, 16).peak_usage_ratio == 1 / blocks


@pytest.mark.parametrize(
    ("version", "device", "eager", "refused"),
    [
        ("0.27.0", "cuda", False, True),
        ("0.27.0", "cuda", True, False),
        ("0.27.0", "cpu", False, False),
        ("0.19.1", "cuda", False, False),
    ],
)
def test_a_hybrid_with_fewer_blocks_than_sequences_is_refused(
    version: str, device: str, eager: bool, refused: bool
) -> None:
    """Test max_num_seqs above the blocks: only with CUDA graphs, from 0.20."""
    settings = ServingSettings(
        version, device=device, max_model_len=1024, max_num_seqs=256, enforce_eager=eager
    )
    refusal = capacity.predict(model.describe(GDN), settings, num_gpu_blocks=200).refusal
    if refused:
        assert refusal is not None
        assert refusal.type is RefusalType.SEQUENCES_ABOVE_BLOCKS
        assert "at most 200" in refusal.message
    else:
        assert refusal is None


def test_mtp_joins_the_full_layers() -> None:
    """Test the 27B of the facts: 17 full, 48 GDN, three padding layers, 179 blocks."""
    config = dict(GDN, num_hidden_layers=64, num_attention_heads=24, linear_num_value_heads=48)
    settings = ServingSettings(
        "0.24.0",
        max_model_len=262_144,
        dtype="float16",
        kv_cache_dtype="fp8_e5m2",
        prefix_caching=True,
        tensor_parallel=2,
        speculative=Speculative("mtp", 3),
    )
    layout = capacity.layout(model.describe(config), settings)
    assert layout.attention_block_size_tokens == 1600
    assert (layout.bytes_per_block, layout.padding_layers) == (27_852_800, 3)
    assert layout.blocks_per_request == 179


def test_speculation_without_a_draft_adds_state_blocks_only() -> None:
    """Test that ngram adds a state block per token and group, and no layer."""
    base, with_ngram = plan(GDN, "0.27.0"), plan(GDN, "0.27.0", speculative=Speculative("ngram", 2))
    assert with_ngram.tables[0].layers == base.tables[0].layers
    assert with_ngram.blocks_per_request > base.blocks_per_request


def test_mtp_of_a_model_without_it_is_refused() -> None:
    """Test that no layer is made up for a checkpoint without prediction layers."""
    config = {key: value for key, value in GDN.items() if key != "mtp_num_hidden_layers"}
    with pytest.raises(BadInput, match="no multi-token-prediction layers"):
        plan(config, "0.27.0", speculative=Speculative("mtp", 1))


@pytest.mark.parametrize("text", ["mtp", "mtp:", ":3", "mtp:0", "mtp:x"])
def test_malformed_speculation_is_refused(text: str) -> None:
    """Test METHOD:N."""
    with pytest.raises(BadInput, match="METHOD:N"):
        Speculative.parse(text)


def test_heads_are_replicated_when_there_are_more_ranks() -> None:
    """Test that 4 KV heads cost the same at tensor parallel 4 and 8."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    four, eight = (plan(config, "0.27.0", tensor_parallel=tp) for tp in (4, 8))
    assert four.bytes_per_block == eight.bytes_per_block


def test_heads_that_do_not_divide_are_refused() -> None:
    """Test three ranks for four heads."""
    dense = {"model_type": "llama", **{k: SLIDING[k] for k in list(SLIDING)[1:5]}}
    with pytest.raises(BadInput, match="KV heads"):
        plan(dense, "0.27.0", tensor_parallel=3)


def test_pipeline_stages_take_the_smallest_number_of_blocks() -> None:
    """Test 32 dense layers on three stages: all but the last get what is left over."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    layout = plan(config, "0.27.0", pipeline_parallel=3)
    page = 16 * 8 * 256 * 2
    assert layout.stage_bytes_per_block == (11 * page, 11 * page, 10 * page)
    result = capacity.within(layout, available_bytes=10**9)
    assert result.candidates[0].num_gpu_blocks == 10**9 // (11 * page)


def test_context_parallelism_shrinks_attention_and_not_state() -> None:
    """Test that only the full group's need halves with two ranks."""
    one, two = (
        plan(GDN, "0.27.0", tensor_parallel=2, decode_context_parallel=dcp) for dcp in (1, 2)
    )
    states = 3
    halves = -(-(32_768 // 2) // (two.attention_block_size_tokens or 1))
    assert two.blocks_per_request == halves + states
    assert one.blocks_per_request > two.blocks_per_request


def test_context_parallelism_with_windows_is_refused_with_a_reason() -> None:
    """Test the combination the engine asserts against."""
    settings = ServingSettings(
        "0.27.0", max_model_len=1024, tensor_parallel=2, decode_context_parallel=2
    )
    refusal = capacity.predict(model.describe(SLIDING), settings, num_gpu_blocks=10_000).refusal
    assert refusal is not None
    assert refusal.type is RefusalType.UNSUPPORTED


def test_scales_of_per_token_heads_cost_bytes() -> None:
    """Test int8_per_token_head: one byte an element and two float32 scales a head."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    layout = plan(config, "0.27.0", kv_cache_dtype="int8_per_token_head")
    assert layout.bytes_per_block == 16 * 8 * (2 * 128 + 2 * 4)
    packed = plan(config, "0.27.0", kv_cache_dtype="int4_per_token_head")
    assert packed.bytes_per_block == 16 * 8 * (2 * 64 + 2 * 4)
    nvfp4 = plan(config, "0.27.0", kv_cache_dtype="nvfp4")
    assert nvfp4.bytes_per_block == 16 * 8 * 2 * (64 + 8)


@pytest.mark.parametrize(
    ("scheme", "version", "cache"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "0.13.0", "auto"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "0.14.0", "fp8"),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, "0.19.0", "auto"),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, "0.24.0", "nvfp4"),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
            "0.27.0",
            "fp8",
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {}}, "0.27.0", "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "0.27.0", "auto"),
        ({"quant_method": "fp8"}, "0.27.0", "auto"),
    ],
)
def test_a_checkpoints_own_cache_scheme(scheme: dict[str, Any], version: str, cache: str) -> None:
    """Test that "auto" follows the checkpoint where the version does, and weights alone do not."""
    config = dict(SLIDING, quantization_config=scheme)
    assert plan(config, version).terms.cache == cache
    assert plan(config, version, kv_cache_dtype="fp8_e5m2").terms.cache == "fp8_e5m2"


def test_sparse_latent_attention_packs_fp8() -> None:
    """Test DeepSeek-V3.2: 656 bytes a token with fp8, 1152 without, 132 for the indexer."""
    config = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 2,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
    }
    auto, fp8 = (plan(config, "0.27.0", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert auto.bytes_per_block == 64 * 2 * (1152 + 132)
    assert fp8.bytes_per_block == 64 * 2 * (656 + 132)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "cuda or cpu"),
        ({"tensor_parallel": 0}, "positive"),
        ({"kv_cache_dtype": "fp3"}, "dtype"),
        ({"kv_cache_dtype": "turboquant_4bit"}, "not predicted"),
        ({"mamba_cache_mode": "some"}, "none, align or all"),
    ],
)
def test_malformed_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    """Test that a setting without meaning names itself."""
    with pytest.raises(BadInput, match=words):
        plan(GDN, "0.27.0", **changes)


def test_without_any_context_limit_one_is_asked_for() -> None:
    """Test that no context limit is made up."""
    with pytest.raises(BadInput, match="--max-model-len"):
        capacity.layout(model.describe(GDN), ServingSettings("0.27.0"))


def test_the_configs_limit_is_the_default() -> None:
    """Test max_position_embeddings as max_model_len."""
    description = model.describe(dict(GDN, max_position_embeddings=262_144))
    assert capacity.layout(description, ServingSettings("0.27.0")).terms.length == 262_144


def test_a_short_context_gives_the_smallest_block_in_the_old_formula() -> None:
    """Test that before 0.20.1 a state's block (the context limit) could be the smallest."""
    settings = ServingSettings("0.19.0", max_model_len=256, prefix_caching=False)
    result = capacity.predict(model.describe(GDN), settings, num_gpu_blocks=400)
    assert result.candidates[0].kv_cache_size_tokens == 400 // 4 * 256
    longer = dataclasses.replace(settings, max_model_len=1024)
    result = capacity.predict(model.describe(GDN), longer, num_gpu_blocks=400)
    assert result.candidates[0].kv_cache_size_tokens == 400 // 4 * 528
