"""Our arithmetic against the engine's own sizing code, over random models and settings.

Takes about one minute: one start of the engine's Python answers all cases. A rule that was read
wrongly shows here, with the case that tells; recorded logs alone cannot cover every combination.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tasks.home import Home
from tasks.pins import ENGINE_VERSION
from tasks.plan import capacity, model
from tasks.plan.capacity import RefusalType, ServingSettings, Speculative
from warehouse.errors import BadInput

pytestmark = pytest.mark.real

CASES = 600
SEED = 20_261_129
SCRIPT = Path(__file__).with_name("engine_sizing.py")
#: Names the engine's Python where it is not in the state folder.
VARIABLE = "MEMSWEEP_ENGINE_PYTHON"


@dataclass
class Model:
    """A random model: its config, and what the engine builds for each of its layers."""

    config: dict[str, Any]
    layers: list[list[list[Any]]]
    kv_heads: int
    hybrid: bool = False
    latent: bool = False
    sparse: bool = False
    all_mode: bool = False
    drafts: list[list[Any]] = field(default_factory=list)


def dense(rng: random.Random) -> Model:
    heads, size = rng.choice([1, 2, 4, 8]), rng.choice([64, 80, 128, 256])
    count = rng.randint(1, 80)
    config = {
        "model_type": rng.choice(["llama", "qwen3", "qwen3_moe"]),
        "num_hidden_layers": count,
        "num_attention_heads": 16,
        "num_key_value_heads": heads,
        "head_dim": size,
        "hidden_size": 2048,
    }
    return Model(config, [[["full", heads, size]]] * count, heads)


def latent(rng: random.Random) -> Model:
    sparse = rng.random() < 0.5
    count = rng.randint(1, 80)
    config = {
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        "num_hidden_layers": count,
        "num_attention_heads": 64,
        "kv_lora_rank": rng.choice([256, 512]) if not sparse else 512,
        "qk_rope_head_dim": 64,
    }
    layer: list[list[Any]] = [["latent"]]
    if sparse:
        config |= {"index_topk": 2048, "index_head_dim": 128}
        layer = [["latent"], ["indexer"]]
    return Model(config, [layer] * count, 1, latent=True, sparse=sparse)


def delta(rng: random.Random) -> Model:
    heads, size = rng.choice([1, 2, 4]), rng.choice([64, 128, 256])
    interval, count = rng.randint(2, 6), rng.randint(6, 64)
    config = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": count,
        "num_attention_heads": 16,
        "num_key_value_heads": heads,
        "head_dim": size,
        "full_attention_interval": interval,
        "linear_num_key_heads": rng.choice([2, 8, 16]),
        "linear_num_value_heads": rng.choice([16, 32, 48]),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
    }
    if rng.random() < 0.7:
        config["mamba_ssm_dtype"] = "float32"
    layers = [
        [["full", heads, size]] if (index + 1) % interval == 0 else [["state"]]
        for index in range(count)
    ]
    return Model(config, layers, heads, hybrid=True, drafts=[["full", heads, size]])


def nemotron(rng: random.Random) -> Model:
    pattern = "M*" + "".join(rng.choice("MMME*-") for _ in range(rng.randint(4, 60)))
    heads = rng.choice([2, 4, 8])
    config = {
        "model_type": "nemotron_h",
        "num_hidden_layers": len(pattern),
        "num_attention_heads": 32,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": rng.choice([64, 128]),
        "mamba_head_dim": 64,
        "n_groups": rng.choice([1, 2, 8]),
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": rng.choice([128, 256]),
        "mamba_ssm_cache_dtype": rng.choice(["float32", "float16"]),
    }
    kinds: dict[str, list[list[Any]]] = {"M": [["state"]], "*": [["full", heads, 128]]}
    layers = [kinds.get(letter, []) for letter in pattern]
    return Model(config, layers, heads, hybrid=True, all_mode=True)


def jamba(rng: random.Random) -> Model:
    count, period = rng.randint(8, 48), rng.randint(2, 8)
    offset = rng.randrange(period)
    config = {
        "model_type": "jamba",
        "num_hidden_layers": count,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    }
    layers = [
        [["full", 8, 128]] if index % period == offset else [["state"]] for index in range(count)
    ]
    return Model(config, layers, 8, hybrid=True, all_mode=True)


def short_conv(rng: random.Random) -> Model:
    count = rng.randint(6, 40)
    types = ["conv", "full_attention"] + [
        rng.choice(["conv", "conv", "full_attention"]) for _ in range(count - 2)
    ]
    config = {
        "model_type": "lfm2",
        "num_hidden_layers": count,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "conv_dim": 2048,
        "conv_L_cache": 3,
        "layer_types": types,
    }
    layers = [[["full", 8, 64]] if t == "full_attention" else [["state"]] for t in types]
    return Model(config, layers, 8, hybrid=True)


def kimi(rng: random.Random) -> Model:
    count = rng.randint(6, 40)
    at = [i + 1 for i in range(count) if i % 4 != 3]
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": count,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "kda_layers": at,
            "num_heads": rng.choice([16, 32]),
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }
    layers: list[list[list[Any]]] = [
        [["state"]] if i + 1 in at else [["latent"]] for i in range(count)
    ]
    return Model(config, layers, 1, hybrid=True, latent=True)


def sliding(rng: random.Random) -> Model:
    heads, count = rng.choice([1, 4, 8, 16]), rng.randint(2, 62)
    types = ["full_attention", "sliding_attention"] + [
        rng.choice(["full_attention", "sliding_attention", "sliding_attention"])
        for _ in range(count - 2)
    ]
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": count,
        "num_attention_heads": 64,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "sliding_window": rng.choice([128, 512, 1024, 4096]),
        "layer_types": types,
    }
    layers = [[["full" if kind == "full_attention" else "sliding", heads, 64]] for kind in types]
    return Model(config, layers, heads)


def gemma4(rng: random.Random) -> Model:
    heads, wide, count = rng.choice([4, 8, 16]), rng.choice([1, 2, 4]), rng.randint(6, 60)
    size, wide_size = 256, rng.choice([256, 512])
    types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)]
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": count,
        "num_attention_heads": 32,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": wide,
        "attention_k_eq_v": True,
        "head_dim": size,
        "global_head_dim": wide_size,
        "sliding_window": 1024,
        "layer_types": types,
    }
    layers: list[list[list[Any]]] = [
        [["full", wide, wide_size]] if kind == "full_attention" else [["sliding", heads, size]]
        for kind in types
    ]
    return Model(config, layers, wide)


def chunked(rng: random.Random) -> Model:
    count = rng.randint(4, 48)
    config = {
        "model_type": "llama4_text",
        "num_hidden_layers": count,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": rng.choice([1024, 8192]),
        "no_rope_layers": [int((index + 1) % 4 != 0) for index in range(count)],
    }
    layers: list[list[list[Any]]] = [
        [["chunked" if (index + 1) % 4 else "full", 8, 128]] for index in range(count)
    ]
    return Model(config, layers, 8)


def whisper(rng: random.Random) -> Model:
    count = rng.randint(2, 32)
    config = {
        "model_type": "whisper",
        "decoder_layers": count,
        "decoder_attention_heads": 20,
        "d_model": 1280,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    return Model(config, [[["full", 20, 64], ["cross", 20, 64]]] * count, 20)


MAKERS = (
    dense,
    latent,
    delta,
    nemotron,
    jamba,
    short_conv,
    kimi,
    sliding,
    gemma4,
    chunked,
    whisper,
)


@dataclass
class Case:
    """One random model served in one random way, for both sides."""

    config: dict[str, Any]
    settings: ServingSettings
    available: int
    engine: dict[str, Any]


def make_case(rng: random.Random) -> Case:
    """Draw a case; the settings of both sides are written down independently."""
    drawn = rng.choice(MAKERS)(rng)
    # The largest tensor-parallel size that every head count allows is drawn down from.
    tp = rng.choice([1, 1, 2, 4])
    if drawn.config["model_type"] == "whisper":
        tp = rng.choice([1, 2, 4])
    pp = rng.choice([1, 1, 1, 2, 3])
    if len(drawn.layers) < 3 * pp:
        pp = 1
    device = rng.choice(["cpu", "cuda"])
    caches = ["auto", "auto", "fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"]
    if not drawn.latent:
        caches += ["nvfp4", "int4_per_token_head"]
    cache = rng.choice(caches)
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    speculative = rng.choice([0, 0, 1, 3, 7])
    drafts = drawn.drafts if speculative else []
    method = "mtp" if drafts else "ngram"
    prefix = rng.random() < 0.5
    block = rng.choice([None, None, 16, 32, 64, 128])
    dcp = rng.choice([1, 1, 1, 2]) if tp > 1 else 1
    length = rng.choice([448, 1024, 8192, 32_768, 131_072, rng.randint(1, 262_144)])
    batched = rng.choice([512, 2048, 8192, 16_384])
    asynchronous = rng.random() < 0.7
    no_manager = not drawn.hybrid and rng.random() < 0.15
    settings = ServingSettings(
        vllm_version=ENGINE_VERSION,
        device=device,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_num_seqs=1,
        dtype=dtype,
        kv_cache_dtype=cache,
        prefix_caching=prefix,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        decode_context_parallel=dcp,
        block_size=block,
        speculative=Speculative(method, speculative) if speculative else None,
        async_scheduling=asynchronous,
        disable_hybrid_kv_cache_manager=no_manager,
    )
    default = 128 if device == "cpu" else 64 if drawn.latent else 16
    dense_model = not drawn.hybrid and drawn.config["model_type"] != "qwen3_moe"
    engine_cache = "fp8_ds_mla" if drawn.sparse and cache in {"fp8", "fp8_e5m2"} else cache
    case = {
        "config": drawn.config,
        "layers": drawn.layers + [[draft] for draft in drafts],
        "draft": len(drafts),
        "hybrid": drawn.hybrid,
        "latent": drawn.latent,
        "all_mode": drawn.all_mode,
        "settings": {
            "dtype": dtype,
            "kv_cache_dtype": engine_cache,
            "tp": tp,
            "pp": pp,
            "dcp": dcp,
            "block": block or default,
            "prefix_caching": prefix,
            "speculative": speculative,
            "max_model_len": length,
            "batched": batched,
            "async": asynchronous,
            "second_runner": device == "cuda" and dense_model,
            "pads": device == "cuda",
            "no_hybrid_manager": no_manager,
        },
    }
    per_block = rng.randint(50_000, 60_000_000)
    available = int(per_block * 10 ** rng.uniform(0, 4))
    case["available"] = available
    return Case(drawn.config, settings, available, case)


def engine_python() -> Path:
    """Return the engine's Python.

    Raises:
        AssertionError: there is none; the tier needs the engine environment.
    """
    given = os.environ.get(VARIABLE)
    python = Path(given) if given else Home.find().envs / "engine" / "bin" / "python"
    assert python.exists(), (
        f"{python}: no engine environment; run `memsweep setup`, or name its Python in {VARIABLE}"
    )
    return python


def ask_engine(cases: list[Case]) -> list[dict[str, Any]]:
    """Let vLLM's code answer every case in one process."""
    done = subprocess.run(
        [str(engine_python()), str(SCRIPT)],
        input=json.dumps([case.engine for case in cases]),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def difference(case: Case, answer: dict[str, Any]) -> str | None:
    """Return how our prediction differs from the engine's answer, or None."""
    description = model.describe(case.config)
    try:
        ours = capacity.predict(description, case.settings, available_bytes=case.available)
    except BadInput as error:
        return None if "unsupported" in answer else f"we refuse the input: {error}"
    refusal = ours.refusal
    if "unsupported" in answer:
        unsupported = refusal is not None and refusal.type is RefusalType.UNSUPPORTED
        return None if unsupported else "the engine cannot serve this, we predict"
    if "refused" in answer:
        if refusal is None:
            return "the engine refuses, we do not"
        if refusal.estimated_max_model_len != answer["estimate"]:
            return f"estimate {refusal.estimated_max_model_len} != {answer['estimate']}"
        return None
    if refusal is not None:
        return f"we refuse ({refusal.type}), the engine does not"
    (candidate,) = ours.candidates
    got: tuple[Any, ...] = (
        candidate.num_gpu_blocks,
        candidate.kv_cache_size_tokens,
        candidate.max_concurrency,
        ours.kv_groups,
    )
    want: tuple[Any, ...] = (
        answer["num_blocks"],
        answer["tokens"],
        answer["concurrency"],
        answer["groups"],
    )
    if description.is_hybrid:
        got += (ours.attention_block_size_tokens, ours.layout.terms.mode)
        want += (answer["block"], answer["mode"])
    return None if got == want else f"{got} != {want}"


def test_every_random_case_agrees_exactly_with_the_engine() -> None:
    """Test that blocks, tokens, concurrency, groups and refusals equal the engine's."""
    rng = random.Random(SEED)
    cases = [make_case(rng) for _ in range(CASES)]
    answers = ask_engine(cases)
    wrong = [
        f"{text}\n    {case.engine}"
        for case, answer in zip(cases, answers, strict=True)
        if (text := difference(case, answer)) is not None
    ]
    assert not wrong, f"{len(wrong)} of {CASES} differ; the first:\n{wrong[0]}"
    served = sum("num_blocks" in answer for answer in answers)
    refused = sum("refused" in answer for answer in answers)
    # The draw must keep covering both outcomes, or agreement means little.
    assert served > CASES / 4
    assert refused > CASES / 20
    assert all(math.isfinite(answer.get("concurrency", 0.0)) for answer in answers)
