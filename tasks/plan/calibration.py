"""The memory that is left for the KV cache, before and after a first boot.

vLLM gives the cache what utilization allows minus what it measured: weights, activations, NCCL,
the CUDA context and CUDA graphs. The last four (here "non-KV") cannot be computed. Before the
first boot a stated default stands in for them, with a wide error bar; one boot of the same model,
image and GPU replaces it, and several with different batch sizes give their growth. An estimate
never goes without its error bar.

Sources: vLLM 0.27.0 v1/worker/utils.py 414 (requested memory), utils/mem_utils.py 317-326 (non-KV),
v1/worker/gpu_worker.py 544-565 (available).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from warehouse.errors import BadInput

GIB = 2**30

#: Non-KV without any boot: the recipe's A10 boot (requested 19.854 GiB, loading 8.61, available
#: 8.88) left 2.36 GiB, graphs included. Other models and batch sizes were seen from 1 to 4 GiB.
DEFAULT_NON_KV_BYTES = int(2.4 * GIB)
DEFAULT_ERROR_BYTES = int(1.4 * GIB)

#: Half of the last printed digit of each logged GiB: available, loading.
LOG_ERROR_BYTES = ceil(0.005 * GIB)
#: Two boots of one configuration differ by this share of the pool (first boots of a shape by more).
BOOT_SPREAD_RATIO = 0.005


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of the engine, as its log and the GPU reported it."""

    total_bytes: int
    utilization: float
    loading_bytes: int
    available_bytes: int
    max_num_batched_tokens: int

    @property
    def non_kv_bytes(self) -> int:
        """What was neither weights nor cache."""
        requested = requested_bytes(self.total_bytes, self.utilization)
        return requested - self.loading_bytes - self.available_bytes


@dataclass(frozen=True, slots=True)
class NonKv:
    """An estimate of the memory that is neither weights nor cache."""

    value_bytes: int
    error_bytes: int
    #: Where it comes from, as a phrase for the user.
    source: str


@dataclass(frozen=True, slots=True)
class Pool:
    """The estimated budget of the KV cache on one rank."""

    value_bytes: int
    error_bytes: int
    source: str

    def __str__(self) -> str:
        """The value with its error bar, in GiB."""
        digits = 1 if self.error_bytes >= 0.1 * GIB else 2
        return f"{self.value_bytes / GIB:.{digits}f} ± {self.error_bytes / GIB:.{digits}f} GiB"

    @property
    def low_bytes(self) -> int:
        """The smallest budget within the error bar."""
        return self.value_bytes - self.error_bytes

    @property
    def high_bytes(self) -> int:
        """The largest budget within the error bar."""
        return self.value_bytes + self.error_bytes


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """Return the memory the engine asks for: total times utilization, rounded up.

    Raises:
        BadInput: the utilization is not within 0 to 1.
    """
    if not 0 < utilization <= 1:
        raise BadInput(f"gpu_memory_utilization: got {utilization}; wanted above 0 and at most 1")
    return ceil(total_bytes * utilization)


def estimate_non_kv(boots: Sequence[Boot], max_num_batched_tokens: int) -> NonKv:
    """Estimate non-KV memory from boots of the same model, image and GPU.

    No boot gives the stated default, one its own figure, and boots with different batch sizes a
    straight line through them: activations grow with the tokens of a batch.
    """
    if not boots:
        return NonKv(
            DEFAULT_NON_KV_BYTES, DEFAULT_ERROR_BYTES, "default: no boot of this model and GPU yet"
        )
    values = [boot.non_kv_bytes for boot in boots]
    spread = max(int(BOOT_SPREAD_RATIO * boot.available_bytes) for boot in boots)
    sizes = {boot.max_num_batched_tokens for boot in boots}
    if len(sizes) == 1:
        mean = sum(values) // len(values)
        error = max(abs(value - mean) for value in values) + 2 * LOG_ERROR_BYTES + spread
        distance = abs(max_num_batched_tokens - sizes.pop())
        if distance:
            # Activations of an unseen batch size: at most what is known of non-KV itself.
            error = max(error, abs(mean) // 2)
        return NonKv(mean, error, f"{len(boots)} boot{'s' if len(boots) > 1 else ''}")
    slope, level = _line([boot.max_num_batched_tokens for boot in boots], values)
    value = round(level + slope * max_num_batched_tokens)
    residual = max(
        abs(round(level + slope * boot.max_num_batched_tokens) - boot.non_kv_bytes)
        for boot in boots
    )
    error = residual + 2 * LOG_ERROR_BYTES + spread
    return NonKv(value, error, f"{len(boots)} boots with {len(sizes)} batch sizes")


def _line(xs: Sequence[int], ys: Sequence[int]) -> tuple[Fraction, Fraction]:
    """Return slope and level of the least-squares line, exactly."""
    count = len(xs)
    mean_x, mean_y = Fraction(sum(xs), count), Fraction(sum(ys), count)
    spread = sum((x - mean_x) ** 2 for x in xs)
    product = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope = Fraction(product) / Fraction(spread)
    return slope, mean_y - slope * mean_x


def estimate_pool(
    *,
    total_bytes: int,
    utilization: float,
    weights_bytes: int,
    weights_error_bytes: int = 0,
    non_kv: NonKv,
) -> Pool:
    """Estimate the budget of the KV cache on one rank.

    The value can be negative: the model then does not fit, and the engine says "No available
    memory for the cache blocks".

    Raises:
        BadInput: the utilization is not within 0 to 1.
    """
    value = requested_bytes(total_bytes, utilization) - weights_bytes - non_kv.value_bytes
    return Pool(value, non_kv.error_bytes + weights_error_bytes, non_kv.source)
