"""The guide's sizing mistakes, found in a sweep before it costs a night.

Each finding says what was found, why it misleads and what to do instead. Nothing here refuses a
sweep: a mistake may be what somebody wants to measure.

Source: "How to serve LLMs in production", sections "Common GPU sizing mistakes", "What happens when
a GPU runs out of memory during inference?" and the FAQ on FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.plan import capacity
from tasks.plan.capacity import Capacity
from tasks.plan.gpus import Gpu
from tasks.plan.model import ModelDescription

MAX_UTILIZATION = 0.95
#: Below this share of max_model_len the lengths measured say little about the 95th percentile.
LENGTH_COVERAGE = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """One load point, as far as sizing is concerned."""

    prompt_tokens: int
    output_tokens: int
    parallel: int
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.prefix_tokens + self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """One server configuration of a sweep; None where it is not known."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    kv_cache_dtype: str
    prefix_caching: bool
    points: tuple[Point, ...]
    #: The pool is set in bytes, so utilization does not size it.
    explicit_pool: bool = False
    description: ModelDescription | None = None
    prediction: Capacity | None = None
    gpu: Gpu | None = None
    weights_bytes: int | None = None
    #: Bytes of every parameter as stored, all experts included.
    stored_bytes: int | None = None
    prefix_overlap_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: a stable code and a sentence a user can act on."""

    code: str
    message: str


def check(served: Served) -> list[Finding]:
    """Return every sizing mistake found in one configuration, in a fixed order."""
    found: list[Finding] = []
    for rule in (
        _utilization,
        _concurrency,
        _context,
        _overlap,
        _experts,
        _fp8,
        _sequences,
        _peak_context,
    ):
        found += rule(served)
    return found


def check_all(configurations: Sequence[Served]) -> list[Finding]:
    """Return the findings of several configurations, each once, in order of first appearance."""
    return list(dict.fromkeys(finding for served in configurations for finding in check(served)))


def _utilization(served: Served) -> list[Finding]:
    if served.explicit_pool or served.gpu_memory_utilization <= MAX_UTILIZATION:
        return []
    return [
        Finding(
            "utilization-above-0.95",
            f"gpu_memory_utilization {served.gpu_memory_utilization} leaves no headroom for "
            "activation spikes during prefill; use at most 0.95",
        )
    ]


def _concurrency(served: Served) -> list[Finding]:
    levels = {point.parallel for point in served.points}
    if len(levels) != 1:
        return []
    return [
        Finding(
            "one-concurrency",
            f"every load point has {levels.pop()} requests at once: an average hides the peak that "
            "decides about memory; add the peak concurrency",
        )
    ]


def _context(served: Served) -> list[Finding]:
    if not served.points:
        return []
    longest = max(point.tokens for point in served.points)
    if longest >= LENGTH_COVERAGE * served.max_model_len:
        return []
    return [
        Finding(
            "short-context",
            f"the longest request has {longest:,} tokens, max_model_len is "
            f"{served.max_model_len:,}: the 95th percentile of context drives KV memory; add a "
            "load point at P95, or lower max_model_len",
        )
    ]


def _overlap(served: Served) -> list[Finding]:
    shared = served.prefix_overlap_ratio
    prefixed = any(point.prefix_tokens for point in served.points)
    if served.prefix_caching and not prefixed and not shared:
        return [
            Finding(
                "prefix-overlap-ignored",
                "prefix caching is on and no load point has a shared prefix: caching then only "
                "costs; set prefix_tokens, or give --prefix-overlap-ratio when sizing",
            )
        ]
    if not served.prefix_caching and (prefixed or shared):
        return [
            Finding(
                "prefix-overlap-unused",
                "prompts share a prefix and prefix caching is off: every user pays for the same "
                "blocks; turn it on, or drop the prefix",
            )
        ]
    return []


def _experts(served: Served) -> list[Finding]:
    model = served.description
    if model is None or not model.experts or None in (served.weights_bytes, served.stored_bytes):
        return []
    assert served.weights_bytes is not None
    assert served.stored_bytes is not None
    if served.weights_bytes * 2 >= served.stored_bytes:
        return []
    return [
        Finding(
            "active-parameters-as-memory",
            f"weights of {served.weights_bytes / 2**30:.1f} GiB are given for a mixture of "
            f"{model.experts} experts that stores {served.stored_bytes / 2**30:.1f} GiB: every "
            "expert is loaded, active parameters save compute, not memory",
        )
    ]


def _fp8(served: Served) -> list[Finding]:
    gpu = served.gpu
    if gpu is None or gpu.has_fp8 or not served.kv_cache_dtype.startswith("fp8"):
        return []
    major, minor = gpu.compute_capability
    return [
        Finding(
            "fp8-below-8.9",
            f"kv_cache_dtype {served.kv_cache_dtype} on {gpu.name} (compute capability "
            f"{major}.{minor}): FP8 needs 8.9 (L4, L40S, H100 and later); use another dtype or GPU",
        )
    ]


def _blocks(served: Served) -> tuple[Capacity, int] | None:
    prediction = served.prediction
    if prediction is None or prediction.nominal is None or prediction.nominal.num_gpu_blocks < 2:
        return None
    return prediction, prediction.nominal.num_gpu_blocks


def _sequences(served: Served) -> list[Finding]:
    known = _blocks(served)
    if known is None or not served.points:
        return []
    prediction, blocks = known
    longest = max(point.tokens for point in served.points)
    one = capacity.load(prediction, blocks, 1, longest).blocks_at_full_length
    fitting = (blocks - 1) // one
    if served.max_num_seqs <= fitting:
        return []
    return [
        Finding(
            "max-num-seqs-beyond-pool",
            f"max_num_seqs {served.max_num_seqs} is more than the {fitting} requests of "
            f"{longest:,} tokens that fit: beyond it requests are preempted and recomputed; lower "
            f"it to {max(1, fitting)}",
        )
    ]


def _peak_context(served: Served) -> list[Finding]:
    known = _blocks(served)
    if known is None or not served.points:
        return []
    prediction, blocks = known
    peak = min(served.max_num_seqs, max(point.parallel for point in served.points))
    needed = capacity.load(prediction, blocks, 1, served.max_model_len).blocks_at_full_length
    fitting = (blocks - 1) // needed
    if peak <= fitting:
        return []
    return [
        Finding(
            "max-model-len-at-peak",
            f"max_model_len {served.max_model_len:,} is allowed and {peak} requests run at once, "
            f"of which {fitting} would fit at that length; lower max_model_len to the real P99, or "
            "the concurrency",
        )
    ]
