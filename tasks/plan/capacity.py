"""What vLLM will log about its KV cache, as exact integer arithmetic.

From the bytes that are left for the KV cache onward, every figure vLLM prints follows from the
model's config and the serving settings: block size, pages, groups, number of blocks, tokens and
concurrency. Calculators that treat a hybrid model as dense are off by a factor of 0.5 to 4; this
module follows the engine's own steps, with the switches of each version (tasks/plan/versions.py).

    description = model.describe(model.load(path))
    settings = ServingSettings(vllm_version="0.27.0", max_model_len=32_768)
    capacity = predict(description, settings, available_bytes=9_535_000_000)

The steps are modules: layers (what a layer keeps), model (which layers there are), settings
(defaults filled in), specs (blocks and pages), layout (groups), and here memory and load.

Sources, vLLM 0.27.0: v1/core/kv_cache_utils.py (blocks 993, concurrency 937, tokens 1877, start-up
check 751), config/compilation.py 1490-1510 (sequences above blocks), v1/core/block_pool.py 807
(usage), v1/core/kv_cache_manager.py 463-524 (admission).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from tasks.plan.layers import ceil_div
from tasks.plan.layout import (
    Layout,
    Refusal,
    RefusalType,
    held_blocks,
    layout,
    needed_blocks,
)
from tasks.plan.model import ModelDescription
from tasks.plan.settings import ServingSettings, Speculative, check_positive
from tasks.plan.specs import STATE, need, state_bytes
from warehouse.errors import BadInput

__all__ = [
    "STATE",
    "Candidate",
    "Capacity",
    "Layout",
    "Load",
    "Refusal",
    "RefusalType",
    "ServingSettings",
    "Speculative",
    "blocks_held",
    "gib_interval",
    "layout",
    "load",
    "predict",
    "state_bytes",
    "within",
]

GIB = 2**30
#: No device has more; larger figures are slips (bytes given as GiB).
MAX_GIB = 10**6


@dataclass(frozen=True, slots=True)
class Candidate:
    """One block count the given memory allows, and what vLLM prints for it."""

    num_gpu_blocks: int
    kv_cache_size_tokens: int
    max_concurrency: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """The prediction for one server start."""

    layout: Layout
    attention_block_size_tokens: int | None
    mamba_padding_percent: float | None
    bytes_per_block: int
    blocks_per_request: int
    kv_groups: int
    padding_layers: int
    #: Every block count the given memory allows, smallest first.
    candidates: tuple[Candidate, ...]
    #: The candidate of the memory as given, unrounded: the middle of the candidates.
    nominal: Candidate | None
    #: Set if vLLM would refuse to start with every candidate.
    refusal: Refusal | None
    #: Some candidates are refused and others are not: the logged GiB is too coarse to tell.
    may_be_refused: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a load does to the KV cache in steady state."""

    running: int
    waiting: int
    #: Upper bound of vllm:kv_cache_usage_perc.
    peak_usage_ratio: float
    running_at_admission: int | None
    preemptions_expected: bool | None
    blocks_at_full_length: int
    blocks_at_admission: int | None


def gib_interval(available_gib: float | str | Decimal) -> tuple[int, int]:
    """Return the smallest and largest byte count that vLLM prints as ``available_gib``.

    vLLM rounds to two decimals, so a printed 8.88 stands for 8.875 to 8.885 GiB. A number given
    with more decimals is taken to be rounded at its last one.

    Raises:
        BadInput: it is no finite number of a size that memory can have.
    """
    try:
        number = Decimal(str(available_gib))
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or abs(number) > MAX_GIB:
        raise BadInput(f"available_gib: got {available_gib!r}; wanted a number like 8.88")
    exponent = number.as_tuple().exponent
    digits = max(2, -exponent) if isinstance(exponent, int) else 2
    scale = 10**digits
    units = int(number.scaleb(digits))
    low = ceil_div((2 * units - 1) * GIB, 2 * scale)
    high = (2 * units + 1) * GIB // (2 * scale)
    return low, high


def _candidate(plan: Layout, blocks: int) -> Candidate:
    term = plan.terms
    concurrency = blocks / plan.blocks_per_request
    if term.rules.tokens_from_concurrency:
        tokens = int(concurrency * term.length)
    else:
        groups = sum(table.groups for table in plan.tables)
        smallest = min(spec.block for table in plan.tables for spec in table.specs)
        tokens = blocks // groups * smallest * term.dcp
    return Candidate(blocks, tokens, concurrency)


def _needed_bytes(plan: Layout, stage: int, length: int) -> int:
    """Return the bytes the start-up check asks for on one pipeline stage."""
    term = plan.terms
    check = term.rules.check
    if check == "layers":
        return sum(
            spec.page * counts[stage] * need(spec, term, length)
            for spec, counts in plan.layer_pages
        )
    if check == "all":
        return plan.stage_bytes_per_block[stage] * needed_blocks(plan.tables, term, length)
    first = plan.tables[0]
    blocks = max(need(spec, term, length) for spec in first.specs)
    if check == "first":
        return plan.model_bytes_per_block * blocks
    return plan.stage_bytes_per_block[stage] * blocks


def _largest_fitting(fits: Callable[[int], bool], length: int) -> int:
    """Return the largest context up to ``length`` that fits, 0 if none (estimate_max_model_len)."""
    if not fits(1):
        return 0
    low, high, best = 1, length, 1
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def _gib(size: int) -> str:
    return f"{round(size / GIB, 2)}"


def _no_memory(available: int) -> Refusal:
    return Refusal(
        RefusalType.NO_MEMORY,
        "No memory is left for the cache blocks: weights, activations and CUDA graphs take the "
        "whole budget. Raise --gpu-memory-utilization, or use a smaller model, fewer batched "
        "tokens or more GPUs.",
        available_bytes=available,
    )


def _stage_refusal(plan: Layout, stage: int, available: int) -> Refusal | None:
    """Return why the check of one pipeline stage fails, or None (_check_enough_kv_cache_memory)."""
    if plan.stage_bytes_per_block[stage] == 0:
        return None  # no layer of this stage keeps anything
    length = plan.terms.length
    usable = available
    if plan.terms.rules.check_reserves_null_block:
        usable -= plan.stage_bytes_per_block[stage]
    if usable <= 0:
        return _no_memory(available)
    wanted = _needed_bytes(plan, stage, length)
    if wanted <= usable:
        return None
    estimate = _largest_fitting(lambda tokens: _needed_bytes(plan, stage, tokens) <= usable, length)
    hint = f" At most {estimate:,} tokens would fit." if estimate else ""
    return Refusal(
        RefusalType.CONTEXT_DOES_NOT_FIT,
        f"One request of max_model_len {length:,} tokens needs {_gib(wanted)} GiB of KV cache, "
        f"and {_gib(usable)} GiB are available.{hint} Lower --max-model-len or give the cache "
        "more memory.",
        needed_bytes=wanted,
        available_bytes=usable,
        estimated_max_model_len=estimate or None,
    )


def _refusal(plan: Layout, available: int) -> Refusal | None:
    """Return why vLLM refuses to start with ``available`` bytes a rank, or None."""
    term = plan.terms
    if plan.refusal is not None:
        return plan.refusal
    for stage in range(term.pp):
        refusal = _stage_refusal(plan, stage, available)
        if refusal is not None:
            return refusal
    blocks = available // plan.bytes_per_block
    has_states = any(spec.kind == STATE for table in plan.tables for spec in table.specs)
    if (
        term.rules.refuses_sequences_above_blocks
        and has_states
        and not term.eager
        and term.sequences > blocks
    ):
        return Refusal(
            RefusalType.SEQUENCES_ABOVE_BLOCKS,
            f"max_num_seqs {term.sequences} exceeds the {blocks} cache blocks: every decoding "
            "sequence of this model needs one block for its state, so CUDA graphs cannot be "
            f"captured. Lower --max-num-seqs to at most {blocks} or give the cache more memory.",
            available_bytes=available,
        )
    return None


def _block_range(
    plan: Layout,
    available_bytes: int | None,
    available_gib: float | str | Decimal | None,
    num_gpu_blocks: int | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the lowest and highest block count and the lowest and highest bytes they come from."""
    given = [
        name
        for name, value in (
            ("available_bytes", available_bytes),
            ("available_gib", available_gib),
            ("num_gpu_blocks", num_gpu_blocks),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise BadInput(
            f"memory: got {', '.join(given) or 'nothing'}; wanted exactly one of available_bytes, "
            "available_gib and num_gpu_blocks"
        )
    size = plan.bytes_per_block
    if num_gpu_blocks is not None:
        if num_gpu_blocks < 0:
            raise BadInput(f"num_gpu_blocks: got {num_gpu_blocks}; wanted 0 or more")
        return (num_gpu_blocks, num_gpu_blocks), (num_gpu_blocks * size, num_gpu_blocks * size)
    if available_bytes is not None:
        low = high = available_bytes
    else:
        assert available_gib is not None
        low, high = gib_interval(available_gib)
    return (max(0, low // size), max(0, high // size)), (low, high)


def predict(
    description: ModelDescription,
    settings: ServingSettings,
    *,
    available_bytes: int | None = None,
    available_gib: float | str | Decimal | None = None,
    num_gpu_blocks: int | None = None,
) -> Capacity:
    """Predict what vLLM logs about its KV cache, given the memory that is left for it.

    Give exactly one of ``available_bytes`` (one rank's budget, one answer), ``available_gib`` (as
    logged with two decimals: every answer the rounding allows) and ``num_gpu_blocks``.

    Raises:
        BadInput: a setting is malformed, vLLM cannot serve the model this way, or none or
            several of the three are given.
    """
    plan = layout(description, settings)
    return within(
        plan,
        available_bytes=available_bytes,
        available_gib=available_gib,
        num_gpu_blocks=num_gpu_blocks,
    )


def within(
    plan: Layout,
    *,
    available_bytes: int | None = None,
    available_gib: float | str | Decimal | None = None,
    num_gpu_blocks: int | None = None,
) -> Capacity:
    """Like :func:`predict`, for a layout that is already there.

    Raises:
        BadInput: none or several of the three are given.
    """
    blocks, memory = _block_range(plan, available_bytes, available_gib, num_gpu_blocks)
    lowest = max(1, blocks[0])
    candidates = [_candidate(plan, count) for count in range(lowest, blocks[1] + 1)]
    middle = max(lowest, (memory[0] + memory[1]) // 2 // plan.bytes_per_block)
    refusal = _refusal(plan, memory[1])
    may = refusal is None and memory[0] != memory[1] and _refusal(plan, memory[0]) is not None
    return Capacity(
        layout=plan,
        attention_block_size_tokens=plan.attention_block_size_tokens,
        mamba_padding_percent=plan.mamba_padding_percent,
        bytes_per_block=plan.bytes_per_block,
        blocks_per_request=plan.blocks_per_request,
        kv_groups=sum(table.groups for table in plan.tables),
        padding_layers=plan.padding_layers,
        candidates=tuple(candidates),
        nominal=candidates[middle - lowest] if candidates else None,
        refusal=refusal,
        may_be_refused=may,
    )


def blocks_held(capacity: Capacity, tokens: int) -> int:
    """Return the blocks that a request with ``tokens`` stored tokens holds over all groups."""
    return held_blocks(capacity.layout.tables, capacity.layout.terms, tokens)


def load(
    capacity: Capacity,
    blocks: int,
    requests: int,
    tokens_per_request: int,
    prompt_tokens: int | None = None,
) -> Load:
    """Say what ``requests`` equal requests at once do to a pool of ``blocks`` blocks.

    ``tokens_per_request`` is the length at which a request ends, prompt and answer;
    ``prompt_tokens`` what is stored when it is admitted. Block 0 is never given out.

    ``running`` requests fit at full length. More are admitted if their prompts fit; they then
    grow beyond the pool, and vLLM preempts (releases and recomputes) some of them.

    Raises:
        BadInput: a number is not positive, the prompt is longer than the request, or there is no
            block to use.
    """
    check_positive("requests", requests)
    check_positive("tokens_per_request", tokens_per_request)
    check_positive("prompt_tokens", prompt_tokens)
    if prompt_tokens is not None and prompt_tokens > tokens_per_request:
        raise BadInput(
            f"prompt_tokens: got {prompt_tokens}, more than tokens_per_request "
            f"{tokens_per_request}; the prompt is part of a request's tokens"
        )
    plan = capacity.layout
    usable = blocks - 1
    if usable < 1:
        raise BadInput(f"blocks: got {blocks}; wanted at least 2, one of which is never given out")
    term = plan.terms
    slots = min(requests, term.sequences)
    full = held_blocks(plan.tables, term, tokens_per_request)
    running = min(slots, usable // full)
    admitted = admission = None
    if prompt_tokens is not None:
        admission = held_blocks(plan.tables, term, prompt_tokens)
        admitted = min(slots, usable // admission)
    peak = min(usable, max(running, admitted or 0) * full)
    return Load(
        running=running,
        waiting=requests - running,
        peak_usage_ratio=peak / (usable if term.rules.usage_excludes_null_block else blocks),
        running_at_admission=admitted,
        preemptions_expected=None if admitted is None else admitted > running,
        blocks_at_full_length=full,
        blocks_at_admission=admission,
    )
