"""Runs vLLM's own sizing code; started by test_engine_sizing.py with the engine's Python.

Reads cases (a model's config and the settings) as JSON from stdin and writes what the engine's
functions say about each, so that our arithmetic can be compared with theirs. Only what needs a
GPU or weights is replaced: the configuration object, the model class that names a state's shape,
and the attention backend. Blocks, pages, groups, checks and logged figures come from vLLM.

Modules are imported by name because vLLM is not installed where this file is type-checked.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

torch: Any = import_module("torch")
utils: Any = import_module("vllm.v1.core.kv_cache_utils")
interface: Any = import_module("vllm.v1.kv_cache_interface")
platform: Any = import_module("vllm.platforms.interface")
states: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils")
config_module: Any = import_module("vllm.config.vllm")
models: Any = import_module("vllm.model_executor.models")
backend_module: Any = import_module("vllm.v1.attention.backend")
torch_utils: Any = import_module("vllm.utils.torch_utils")
mamba_config: Any = import_module("vllm.model_executor.models.config")
distributed: Any = import_module("vllm.distributed.utils")

Shapes = states.MambaStateShapeCalculator
DTYPES = torch_utils.STR_DTYPE_TO_TORCH_DTYPE


def max_in_flight(settings: dict[str, Any]) -> int:
    """Two batches may be in flight with asynchronous scheduling on one stage, else one a stage."""
    stub = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=settings["pp"]),
        scheduler_config=SimpleNamespace(async_scheduling=settings["async"]),
        use_v2_model_runner=settings["second_runner"],
    )
    batches = config_module.VllmConfig.max_concurrent_batches.fget(stub)
    return int(batches * settings["batched"])


def engine_config(case: dict[str, Any]) -> Any:
    """Return the parts of VllmConfig that the sizing code reads."""
    settings = case["settings"]
    text = case["config"].get("text_config", case["config"])
    dtype = DTYPES[settings["dtype"]]
    heads = text.get("num_key_value_heads", text.get("decoder_attention_heads", 1))
    head_size = text.get("head_dim") or 1
    if case["latent"]:
        head_size = text["kv_lora_rank"] + text["qk_rope_head_dim"]

    class Model(SimpleNamespace):
        def get_num_kv_heads(self, _parallel: Any) -> int:
            return 1 if self.use_mla else max(1, heads // settings["tp"])

        def get_head_size(self) -> int:
            return int(head_size)

        def get_mamba_chunk_size(self) -> int:
            return int(text.get("mamba_chunk_size") or text.get("chunk_size") or 2048)

    cache_dtype = settings["kv_cache_dtype"]
    return SimpleNamespace(
        model_config=Model(
            max_model_len=settings["max_model_len"],
            original_max_model_len=settings["max_model_len"],
            dtype=dtype,
            use_mla=case["latent"],
            is_hybrid=case["hybrid"],
            architecture="stub",
            supports_mamba_prefix_caching=case["all_mode"],
        ),
        cache_config=SimpleNamespace(
            block_size=settings["block"],
            cache_dtype=cache_dtype,
            num_gpu_blocks_override=None,
            enable_prefix_caching=settings["prefix_caching"],
            mamba_cache_mode="none",
            mamba_block_size=None,
            mamba_page_size_padded=None,
            user_specified_mamba_block_size=False,
            kv_cache_dtype_skip_layers=[],
            skip_page_size_padded=None,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=settings["dcp"],
            tensor_parallel_size=settings["tp"],
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=settings["no_hybrid_manager"],
            enable_chunked_prefill=True,
            max_num_encoder_input_tokens=settings["batched"],
        ),
        max_in_flight_tokens=max_in_flight(settings),
        speculative_config=None,
        kv_transfer_config=None,
    )


def state_shapes(text: dict[str, Any], tp: int, spec: int) -> tuple[Any, Any]:
    """Return shapes and dtypes of the state layer that the config describes."""
    kind = text["model_type"]
    if "linear_num_key_heads" in text:
        shape = Shapes.gated_delta_net_state_shape(
            tp,
            text["linear_num_key_heads"],
            text["linear_num_value_heads"],
            text["linear_key_head_dim"],
            text["linear_value_head_dim"],
            text["linear_conv_kernel_dim"],
            spec,
        )
    elif kind == "nemotron_h":
        shape = Shapes.mamba2_state_shape(
            tp_world_size=tp,
            intermediate_size=text["mamba_num_heads"] * text["mamba_head_dim"],
            n_groups=text["n_groups"],
            num_heads=text["mamba_num_heads"],
            head_dim=text["mamba_head_dim"],
            state_size=text["ssm_state_size"],
            conv_kernel=text["conv_kernel"],
            num_spec=spec,
        )
    elif kind == "jamba":
        shape = Shapes.mamba1_state_shape(
            tp_world_size=tp,
            intermediate_size=text["mamba_expand"] * text["hidden_size"],
            state_size=text["mamba_d_state"],
            conv_kernel=text["mamba_d_conv"],
        )
    elif kind == "lfm2":
        shape = Shapes.short_conv_state_shape(
            tp_world_size=tp,
            intermediate_size=text["conv_dim"],
            conv_kernel=text["conv_L_cache"],
        )
    else:
        linear = text["linear_attn_config"]
        shape = Shapes.kda_state_shape(
            tp,
            linear["num_heads"],
            linear["head_dim"],
            conv_kernel_size=linear["short_conv_kernel_size"],
            num_spec=spec,
        )
    return shape, len(shape)


def state_dtypes(text: dict[str, Any], settings: dict[str, Any], count: int) -> tuple[Any, ...]:
    """Return the dtypes of a state as the calculators of vLLM say."""
    calculator = states.MambaStateDtypeCalculator
    dtype = settings["dtype"]
    ssm = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or "auto"
    if count == 1:
        return tuple(calculator.short_conv_state_dtype(dtype, "auto"))
    if "linear_attn_config" in text:
        return tuple(calculator.kda_state_dtype(dtype, "auto"))
    return tuple(calculator.mamba2_state_dtype(dtype, "auto", ssm))


class Backend:
    """An attention backend with the block sizes of FlashAttention and the CPU one."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [backend_module.MultipleOf(16)]


def align(config: Any, shapes: Any, dtypes: Any) -> None:
    """Choose cache mode, block size and padding of a hybrid as the engine does."""
    mamba_config.MambaModelConfig.verify_and_update_config(config)

    class StateModel:
        @staticmethod
        def get_mamba_state_shape_from_config(_config: Any) -> Any:
            return shapes

        @staticmethod
        def get_mamba_state_dtype_from_config(_config: Any) -> Any:
            return dtypes

    models.ModelRegistry.resolve_model_cls = lambda *_a, **_k: (StateModel, "stub")
    config_module.set_current_vllm_config = lambda _config: contextlib.nullcontext()
    platform.Platform._align_hybrid_block_size(config, Backend)


class Specs:
    """Makes vLLM's spec of each kind of layer, once for each distinct layer of a case."""

    def __init__(self, case: dict[str, Any], config: Any) -> None:
        self.settings = settings = case["settings"]
        self.text = case["config"].get("text_config", case["config"])
        self.cache_config = config.cache_config
        cache = settings["kv_cache_dtype"]
        self.dtype = DTYPES[settings["dtype"] if cache == "auto" else cache]
        self.quant = interface.get_kv_quant_mode(cache)
        if case["hybrid"]:
            self.shapes, count = state_shapes(self.text, settings["tp"], settings["speculative"])
            self.dtypes = state_dtypes(self.text, settings, count)
            align(config, self.shapes, self.dtypes)
        self.made: dict[str, Any] = {}

    def get(self, cache_kind: list[Any]) -> Any:
        """Return the spec of ``[kind, *numbers]``; equal layers share one."""
        key = json.dumps(cache_kind)
        if key not in self.made:
            kind, *numbers = cache_kind
            self.made[key] = getattr(self, kind)(*numbers)
        return self.made[key]

    def common(self, heads: int, size: int) -> dict[str, Any]:
        return {
            "num_kv_heads": max(1, heads // self.settings["tp"]),
            "head_size": size,
            "dtype": self.dtype,
            "kv_quant_mode": self.quant,
            "indexes_kv_by_block_stride": self.settings["pads"],
        }

    def full(self, heads: int, size: int) -> Any:
        block = self.cache_config.block_size
        return interface.FullAttentionSpec(block_size=block, **self.common(heads, size))

    def cross(self, heads: int, size: int) -> Any:
        block = self.cache_config.block_size
        return interface.CrossAttentionSpec(block_size=block, **self.common(heads, size))

    def sliding(self, heads: int, size: int) -> Any:
        """Without padding: the kernel's smallest block (layers/attention/attention.py)."""
        window = self.text["sliding_window"]
        return interface.SlidingWindowSpec(
            block_size=16, sliding_window=window, **self.common(heads, size)
        )

    def chunked(self, heads: int, size: int) -> Any:
        return interface.ChunkedLocalAttentionSpec(
            block_size=self.cache_config.block_size,
            attention_chunk_size=self.text["attention_chunk_size"],
            **self.common(heads, size),
        )

    def latent(self) -> Any:
        return interface.MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            cache_dtype_str=self.settings["kv_cache_dtype"],
            **self.common(1, self.text["kv_lora_rank"] + self.text["qk_rope_head_dim"]),
        )

    def indexer(self) -> Any:
        head = self.text["index_head_dim"]
        return interface.MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=head + head // 128 * 4,
            dtype=torch.uint8,
        )

    def state(self) -> Any:
        return interface.MambaSpec(
            shapes=self.shapes,
            dtypes=self.dtypes,
            block_size=self.cache_config.mamba_block_size,
            page_size_padded=self.cache_config.mamba_page_size_padded,
            mamba_cache_mode=self.cache_config.mamba_cache_mode,
            num_speculative_blocks=self.settings["speculative"],
        )


def layer_specs(case: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return one spec a cache, named so that the layer's index can be found again."""
    specs = Specs(case, config)
    return {
        f"layers.{index}.{number}": specs.get(cache_kind)
        for index, caches in enumerate(case["layers"])
        for number, cache_kind in enumerate(caches)
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine says about one case."""
    config = engine_config(case)
    specs = layer_specs(case, config)
    pp = case["settings"]["pp"]
    total = len(case["layers"]) - case["draft"]
    bounds = [distributed.get_pp_indices(total, rank, pp) for rank in range(pp)]
    workers: list[dict[str, Any]] = [{} for _ in range(pp)]
    for name, spec in specs.items():
        index = int(name.split(".")[1])
        stage = next((r for r, (a, b) in enumerate(bounds) if a <= index < b), pp - 1)
        workers[stage][name] = spec
    answer: dict[str, Any] = {
        "block": config.cache_config.block_size,
        "page_padded": config.cache_config.mamba_page_size_padded,
        "mode": config.cache_config.mamba_cache_mode,
    }
    try:
        result = utils.get_kv_cache_configs(config, workers, [case["available"]] * pp)
    except ValueError as error:
        text = str(error)
        if "Failed to promote" in text:
            answer["unsupported"] = text
            return answer
        estimate = re.search(r"estimated maximum model length is (\d+)", text)
        answer["refused"] = text
        answer["estimate"] = int(estimate[1]) if estimate else None
        return answer
    except (NotImplementedError, AssertionError) as error:
        answer["unsupported"] = f"{type(error).__name__}: {error}"
        return answer
    scheduler = utils.generate_scheduler_kv_cache_config(result)
    tokens, concurrency = utils.get_kv_cache_capacity(config, scheduler)
    answer |= {
        "num_blocks": scheduler.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": len(scheduler.kv_cache_groups),
    }
    return answer


def main() -> None:
    """Answer every case."""
    cases = json.load(sys.stdin)
    json.dump([run(case) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
