"""The pool before a boot and after: the recipe's three utilizations from one of them."""

from __future__ import annotations

import pytest

from tasks.plan.calibration import (
    DEFAULT_ERROR_BYTES,
    Boot,
    estimate_non_kv,
    estimate_pool,
    requested_bytes,
)
from warehouse.errors import BadInput

GIB = 2**30
TOTAL = round(22.06 * GIB)
LOADING = round(8.61 * GIB)


def boot(utilization: float, available: float, batched: int = 2048) -> Boot:
    """Return a boot of the recipe's A10."""
    return Boot(TOTAL, utilization, LOADING, round(available * GIB), batched)


def test_requested_memory_is_rounded_up() -> None:
    """Test ceil(total x utilization)."""
    assert requested_bytes(101, 0.5) == 51
    with pytest.raises(BadInput, match="utilization"):
        requested_bytes(100, 1.1)


def test_without_a_boot_the_default_is_named_and_its_bar_is_wide() -> None:
    """Test that the default contains the recipe's pool and says that it is a default."""
    non_kv = estimate_non_kv([], 2048)
    assert non_kv.error_bytes == DEFAULT_ERROR_BYTES
    assert "default" in non_kv.source
    pool = estimate_pool(total_bytes=TOTAL, utilization=0.9, weights_bytes=LOADING, non_kv=non_kv)
    assert pool.low_bytes < 8.88 * GIB < pool.high_bytes


@pytest.mark.parametrize(("utilization", "available"), [(0.7, 4.47), (0.8, 6.68), (0.9, 8.88)])
def test_one_boot_predicts_the_other_utilizations_within_two_percent(
    utilization: float, available: float
) -> None:
    """Test 4.47, 6.68 and 8.88 GiB from the boot at 0.9."""
    non_kv = estimate_non_kv([boot(0.9, 8.88)], 2048)
    pool = estimate_pool(
        total_bytes=TOTAL, utilization=utilization, weights_bytes=LOADING, non_kv=non_kv
    )
    assert abs(pool.value_bytes - available * GIB) <= pool.error_bytes
    assert pool.error_bytes <= 0.02 * pool.value_bytes
    assert pool.source == "1 boot"


def test_boots_with_several_batch_sizes_give_a_line() -> None:
    """Test that activations grow with the batch: 2.0 GiB at 2048, 2.6 at 8192, so 2.2 at 4096."""
    boots = [boot(0.9, 9.244, 2048), boot(0.9, 8.644, 8192)]
    non_kv = estimate_non_kv(boots, 4096)
    assert non_kv.value_bytes / GIB == pytest.approx(2.2, abs=0.01)
    assert "2 batch sizes" in non_kv.source


def test_an_unseen_batch_size_widens_the_bar() -> None:
    """Test that one boot does not vouch for another batch size."""
    boots = [boot(0.9, 8.88, 2048)]
    assert (
        estimate_non_kv(boots, 16_384).error_bytes > 10 * estimate_non_kv(boots, 2048).error_bytes
    )


def test_a_model_that_does_not_fit_has_a_negative_pool() -> None:
    """Test that too large weights are told and not cut at zero."""
    pool = estimate_pool(
        total_bytes=TOTAL, utilization=0.9, weights_bytes=30 * GIB, non_kv=estimate_non_kv([], 2048)
    )
    assert pool.high_bytes < 0
