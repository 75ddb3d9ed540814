"""The double's log lines are vLLM's, word for word, with the figures of the recorded runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.double.logs import Boot, pool

HYBRID = {"num_blocks": 1638, "block_size": 640, "state_blocks": 3, "max_model_len": 32768}
DENSE = {"num_blocks": 64, "block_size": 128, "state_blocks": 0, "max_model_len": 2048}


def boot(version: str, **numbers: Any) -> Boot:
    return Boot(
        version=version,
        model="m",
        port=1,
        arguments={},
        kv_cache_bytes=1 << 30,
        total_bytes=16 << 30,
        **numbers,
    )


@pytest.mark.parametrize(
    ("version", "numbers", "texts"),
    [
        (
            "0.27.0",
            HYBRID,
            [
                "GPU KV cache size: 975,890 tokens",
                "Maximum concurrency for 32,768 tokens per request: 29.78x",
            ],
        ),
        (
            "0.32.0",
            HYBRID | {"max_model_len": 8192},
            [
                "CPU KV cache size: 838,656 tokens, Maximum concurrency for 8,192 tokens per "
                "request: 102.38x"
            ],
        ),
        ("0.11.2", DENSE, ["GPU KV cache size: 8,192 tokens", "tokens per request: 4.00x"]),
    ],
)
def test_the_pool_is_told_as_vllm_tells_it(
    version: str, numbers: dict[str, int], texts: list[str]
) -> None:
    lines = pool(boot(version, **numbers), 7)
    for text in texts:
        assert sum(line.endswith(text) for line in lines) == 1
    name = "EngineCore_DP0" if version == "0.11.2" else "EngineCore"
    assert all(line.startswith(f"({name} pid=7) INFO ") for line in lines)
