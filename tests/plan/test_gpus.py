"""The GPU catalogue."""

from __future__ import annotations

import pytest

from tasks.plan import gpus
from warehouse.errors import BadInput


def test_usable_memory_is_below_the_advertised_size() -> None:
    """Test that no entry repeats the advertised size as usable memory."""
    for gpu in gpus.GPUS:
        assert 0.85 * gpu.advertised_gb * 1e9 < gpu.total_bytes < 1.07 * gpu.advertised_gb * 1e9


def test_a10_has_the_recipes_total() -> None:
    """Test that the A10 reports 22.06 GiB, not the 24 GB on its box."""
    assert round(gpus.find("a10").total_bytes / 2**30, 2) == 22.06


@pytest.mark.parametrize(
    ("name", "fp8"),
    [("T4", False), ("A10", False), ("A100-80GB", False), ("L4", True), ("NVIDIA H100", True)],
)
def test_fp8_needs_capability_8_9(name: str, fp8: bool) -> None:
    """Test that FP8 is a matter of compute capability."""
    assert gpus.find(name).has_fp8 is fp8


def test_large_cards_have_larger_defaults_except_the_a100() -> None:
    """Test vLLM's defaults for 70 GiB and more."""
    assert gpus.find("H100").default_batched_tokens == 8192
    assert gpus.find("A100-80GB").default_batched_tokens == 2048
    assert gpus.find("L4").default_sequences == 256


def test_unknown_gpu_is_refused_with_the_known_names() -> None:
    """Test that a typo names the catalogue."""
    with pytest.raises(BadInput, match="A100-80GB"):
        gpus.find("H1000")
