"""What to change after a failure: every type has an answer, and its arithmetic is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.capture import advice, signatures, startup_log

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "failure-texts.jsonl").read_text().splitlines()
]


def advised(*lines: str) -> list[str]:
    return advice.advise(startup_log.parse(lines))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{text['type']}-{text['source'][-20:]}")
def test_every_failure_has_an_answer_of_its_own(text: dict[str, Any]) -> None:
    lines = advised(*text["lines"])
    assert lines
    assert advice._NO_ADVICE not in lines


def test_rules_name_known_types_only() -> None:
    known = {s.type for s in signatures.SIGNATURES} | set(signatures.OOM_BY_PHASE.values())
    assert set(advice._RULES) | set(advice._FIXED) <= known | {"unknown"}


def test_utilization_is_rounded_down() -> None:
    lines = advised(
        "ValueError: Free memory on device cuda:0 (31.44/51.64 GiB) on startup is less than "
        "desired GPU memory utilization (0.95, 49.06 GiB)."
    )
    assert "at most 0.60:" in lines[0]  # 31.44 / 51.64 = 0.6088
    assert lines[1] == "Or free 17.62 GiB that other processes hold."


def test_missing_pool_becomes_a_utilization() -> None:
    lines = advised(
        "INFO 01-01 00:00:00 [u.py:1] non-default args: {'gpu_memory_utilization': 0.8}",
        "Free memory on device (78.0/80.0 GiB) on startup. Desired GPU memory utilization is (0.8, "
        "64.0 GiB). Actual usage is 60.0 GiB for consumed memory (weights + non-torch), 1.0 GiB "
        "for peak activation",
        "ValueError: To serve at least one request with the model's max seq len (262144), (8.0 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (3.0 GiB).",
    )
    assert lines == ["Or give the KV cache 5.00 GiB more: --gpu-memory-utilization 0.87."]


def test_fragmentation_is_told_from_lack() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a "
    error += "total capacity of 23.00 GiB of which 1.50 GiB is free."
    assert any("fragmented" in line for line in advised(error.format("1.00")))
    assert any("1.50 GiB were missing" in line for line in advised(error.format("3.00")))


def test_divisors() -> None:
    lines = advised(
        "ValueError: Total number of attention heads (12) must be divisible by tensor parallel "
        "size (8)."
    )
    assert lines == ["Use a --tensor-parallel-size that divides 12 heads: 1, 2, 3, 4, 6, 12."]


def test_nothing_to_change_without_a_failure() -> None:
    assert advised("INFO:     Application startup complete.") == []
