"""Cells for tests, as the JSON text that a run gets: small, valid, keys and all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.canonical import canonical_json, content_key
from tasks.plan.cell import prompts_of
from tests.double.engine import MODEL_REVISION

#: 64 blocks of 128 tokens of the dense double: the memory-pressure cell of the demo.
TIGHT_BYTES = 16 << 20

SERVER: dict[str, Any] = {
    "max_model_len": 2048,
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "kv_cache_memory_bytes": TIGHT_BYTES,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "block_size": None,
    "language_model_only": False,
    "seed": 0,
}

POINT: dict[str, Any] = {
    "prompt_tokens": 512,
    "output_tokens": 16,
    "parallel": 2,
    "number": 4,
    "warmup": 1,
    "prefix_tokens": 0,
    "temperature": 0.0,
    "seed": 42,
    "ignore_eos": True,
    "enable_thinking": False,
    "dataset": "random",
}

PINS: dict[str, Any] = {
    "device": "cpu",
    "model_revision": MODEL_REVISION,
    "engine_version": "0.27.0",
    "engine_lock_sha256": "0" * 64,
    "image_digest": None,
    "bench_version": "1.9.1",
    "bench_lock_sha256": "0" * 64,
}


def cell(
    *,
    server: dict[str, Any] | None = None,
    load: Sequence[dict[str, Any]] = ({},),
    pins: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    prompts: str | None = None,
) -> dict[str, Any]:
    """Return a cell's document; every argument is laid over the defaults above.

    ``prompts`` is the content of a prompt file that every load point then sends, unless it states
    ``dataset`` random.
    """
    points = [POINT | point for point in load]
    carried: dict[str, Any] = {}
    if prompts is not None:
        named = prompts_of(prompts).model_dump(mode="json")
        longest = {"prompt_tokens": max(named["tokens"]), "prefix_tokens": 0}
        file = longest | {"dataset": "file", "prompts": named}
        points = [POINT | (point if "dataset" in point else point | file) for point in load]
        carried = {"prompts": {named["sha256"]: prompts}}
    setting = {
        "model": {"name": "tiny-qwen3"},
        "server": SERVER | (server or {}),
        "load": points,
    }
    all_pins = PINS | (pins or {})
    setting_key = content_key(setting)
    return {
        "format": 1,
        "harness": 1,
        "label": "test",
        "setting": setting,
        "pins": all_pins,
        "limits": {
            "start_s": 20.0,
            "ready_s": 10.0,
            "load_point_s": [20.0] * len(load),
            "stop_s": 5.0,
            "run_s": 60.0,
            **(limits or {}),
        },
        "expect": None,
        "sampling": {
            "server_interval_s": 0.05,
            "process_interval_s": 0.2,
            "gpu_interval_s": 1.0,
            **(sampling or {}),
        },
        "setting_key": setting_key,
        "cell_key": content_key({"setting_key": setting_key, "pins": all_pins, "harness": 1}),
        **carried,
    }


def cell_text(**parts: Any) -> str:
    """Return :func:`cell` as the text of MEMSWEEP_CELL."""
    return canonical_json(cell(**parts))
