"""How many users fit on a GPU, and how many GPUs given users need.

The published guide gives two calculations that do not agree: its VRAM formula adds 15 % and
forgets the state, its worked example counts the state and forgets whole blocks. Both are shown by
name beside the answer in real blocks, which is what the scheduler gives out, so that a user sees
which assumption moves the number.

Sources: "How to serve LLMs in production" (VRAM formula, worked example); tasks/plan/capacity.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from tasks.plan import capacity, weights
from tasks.plan.calibration import Boot, NonKv, Pool, estimate_non_kv, estimate_pool
from tasks.plan.capacity import ServingSettings
from tasks.plan.gpus import Gpu
from tasks.plan.layers import AttentionLayer
from tasks.plan.model import ModelDescription
from warehouse.errors import BadInput

GIB = 2**30

#: The guide's "2 GB overhead" and its margin.
GUIDE_OVERHEAD_BYTES = 2_000_000_000
GUIDE_MARGIN = Fraction(115, 100)
#: Share of the advertised memory that the guide's worked example uses: vLLM's default since 0.20.
GUIDE_UTILIZATION = Fraction(92, 100)
#: Tensor-parallel sizes tried when the weights do not fit on one GPU.
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Workload:
    """Who is to be served: users at once, each at the 95th percentile of context."""

    p95_tokens: int
    users: int | None = None
    #: Share of each prompt that all users have in common; needs prefix caching.
    prefix_overlap_ratio: float = 0.0

    def check(self) -> None:
        """Refuse a workload without meaning.

        Raises:
            BadInput: a number is out of its range.
        """
        if self.p95_tokens < 1:
            raise BadInput(f"P95 context: got {self.p95_tokens}; wanted a positive integer")
        if self.users is not None and self.users < 1:
            raise BadInput(f"users: got {self.users}; wanted a positive integer")
        if not 0 <= self.prefix_overlap_ratio < 1:
            raise BadInput(
                f"prefix overlap ratio: got {self.prefix_overlap_ratio}; wanted 0 or more, below 1"
            )


@dataclass(frozen=True, slots=True)
class PerUser:
    """What one user costs, in the guide's terms and in blocks."""

    #: Bytes of keys and values a token, all attention layers.
    kv_bytes_per_token: int
    #: Recurrent state, without the convolution buffer, as the guide counts it.
    state_bytes: int
    #: Convolution buffers, which the guide leaves out.
    convolution_bytes: int
    blocks: int
    block_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """What the scheduler gives one user."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Users on one group of GPUs by one way of counting."""

    name: str
    users: int
    #: Memory left for users by this way of counting; None where it does not use one.
    pool_bytes: int | None
    meaning: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one model, precision, KV dtype and GPU."""

    gpu: Gpu
    tensor_parallel: int
    kv_cache_dtype: str
    weights_bytes: int
    per_user: PerUser
    guide_formula: Answer
    guide_example: Answer
    #: Real blocks in the worked example's budget: only the counting differs.
    real_blocks: Answer
    #: Real blocks in the budget the GPU really has, with its error bar.
    on_this_gpu: Answer
    users_low: int
    users_high: int
    pool: Pool
    #: GPUs for the users asked for, by real blocks on this GPU; None if none were asked for.
    gpus_needed: int | None
    notes: tuple[str, ...]


def per_user(
    description: ModelDescription, settings: ServingSettings, workload: Workload
) -> PerUser:
    """Return what one user at the 95th percentile of context costs on one rank.

    Raises:
        BadInput: vLLM cannot serve the model with these settings.
    """
    plan = capacity.layout(description, replace(settings, max_model_len=workload.p95_tokens))
    term = plan.terms
    kv = state = convolution = 0
    for layer, count in description.counts:
        if isinstance(layer, AttentionLayer):
            kv += count * layer.token_bytes(term.tp, term.cache, term.element)
        else:
            # Sizes of one element: buffers in the model's dtype, the state as the config says.
            whole, buffer = capacity.state_bytes(layer, settings, description)
            state += count * (whole - buffer)
            convolution += count * buffer
    result = capacity.within(plan, num_gpu_blocks=2)
    load = capacity.load(result, 2, 1, workload.p95_tokens)
    return PerUser(kv, state, convolution, load.blocks_at_full_length, plan.bytes_per_block)


def guide_formula(user: PerUser, workload: Workload, *, memory: int, weights_bytes: int) -> Answer:
    """Turn the guide's VRAM formula round: the users its right side allows in ``memory`` bytes.

    VRAM = weights + 2 GB + users x P95 x KV a token x 1.15; the state is not in it.
    """
    pool = memory - weights_bytes - GUIDE_OVERHEAD_BYTES
    one = workload.p95_tokens * user.kv_bytes_per_token * GUIDE_MARGIN
    return Answer(
        "guide's VRAM formula",
        max(0, floor(pool / one)),
        pool,
        "advertised memory − weights − 2 GB, over P95 × KV/token × 1.15; no state",
    )


def guide_budget(advertised_gb: int, gpus: int, weights_bytes: int) -> int:
    """Return the pool of the guide's worked example: 92 % of the advertised size − 2 GB − weights.

    ``gpus`` share the weights; each has its overhead.
    """
    usable = floor(advertised_gb * 10**9 * GUIDE_UTILIZATION) - GUIDE_OVERHEAD_BYTES
    return gpus * usable - weights_bytes


def guide_example(user: PerUser, workload: Workload, *, pool: int) -> Answer:
    """Count like the guide's worked example: no margin, but the recurrent state of each user."""
    one = workload.p95_tokens * user.kv_bytes_per_token + user.state_bytes
    return Answer(
        "guide's worked example",
        max(0, pool // one),
        pool,
        "advertised memory × 0.92 − 2 GB − weights, over P95 × KV/token + state; no blocks",
    )


def users_in_blocks(user: PerUser, pool: int, *, shared_blocks: int = 0) -> int:
    """Return how many users' whole blocks fit in a pool, the null block left out.

    ``shared_blocks`` of every user's are the same ones and are given out once.
    """
    usable = pool // user.block_bytes - 1 - shared_blocks
    own = user.blocks - shared_blocks
    return max(0, usable // own) if own > 0 else max(0, usable)


def _shared_blocks(
    description: ModelDescription, settings: ServingSettings, workload: Workload
) -> int:
    """Return how many whole blocks a prefix that all users share saves each of them.

    Only attention blocks can be shared while a request runs; each keeps its own state.
    """
    shared = int(workload.p95_tokens * workload.prefix_overlap_ratio)
    if shared == 0:
        return 0
    plan = capacity.layout(description, replace(settings, max_model_len=workload.p95_tokens))
    return sum(
        table.groups * (shared // spec.block)
        for table in plan.tables
        for spec in table.specs[:1]
        if spec.kind == "full"
    )


def _pool(
    gpu: Gpu, tensor_parallel: int, weights_bytes: int, utilization: float, non_kv: NonKv
) -> Pool:
    share = -(-weights_bytes // tensor_parallel)
    return estimate_pool(
        total_bytes=gpu.total_bytes,
        utilization=utilization,
        weights_bytes=share,
        weights_error_bytes=int(share * weights.LOADED_TOLERANCE),
        non_kv=non_kv,
    )


def _smallest_parallel(
    gpu: Gpu, description: ModelDescription, weights_bytes: int, utilization: float, non_kv: NonKv
) -> int:
    for size in TENSOR_PARALLEL:
        if _pool(gpu, size, weights_bytes, utilization, non_kv).value_bytes > 0:
            return size
    raise BadInput(
        f"{gpu.name}: {weights_bytes / GIB:.1f} GiB of weights of {description.architecture} do "
        f"not fit on {TENSOR_PARALLEL[-1]} of them; use a larger GPU or a smaller precision"
    )


def fit(
    description: ModelDescription,
    settings: ServingSettings,
    workload: Workload,
    gpu: Gpu,
    *,
    weights_bytes: int,
    utilization: float = 0.92,
    boots: Sequence[Boot] = (),
    tensor_parallel: int | None = None,
) -> Fit:
    """Say how many users fit, and how many GPUs the users asked for need.

    ``weights_bytes`` are those of the whole model as loaded. Without ``tensor_parallel`` the
    smallest size is taken on which the weights leave a pool.

    Raises:
        BadInput: the workload has no meaning, the weights do not fit, or vLLM cannot serve the
            model with these settings.
    """
    workload.check()
    if weights_bytes < 1:
        raise BadInput(f"weights: got {weights_bytes} bytes; wanted a positive number")
    batched = settings.max_num_batched_tokens or gpu.default_batched_tokens
    non_kv = estimate_non_kv(boots, batched)
    tp = tensor_parallel or _smallest_parallel(gpu, description, weights_bytes, utilization, non_kv)
    serving = replace(
        settings,
        tensor_parallel=tp,
        max_num_batched_tokens=batched,
        compute_capability=gpu.compute_capability,
        prefix_caching=True if workload.prefix_overlap_ratio else settings.prefix_caching,
    )
    user = per_user(description, serving, workload)
    whole = per_user(description, replace(serving, tensor_parallel=1), workload)
    shared = _shared_blocks(description, serving, workload)
    budget = guide_budget(gpu.advertised_gb, tp, weights_bytes)
    pool = _pool(gpu, tp, weights_bytes, utilization, non_kv)
    formula = guide_formula(
        whole, workload, memory=tp * gpu.advertised_gb * 10**9, weights_bytes=weights_bytes
    )
    example = guide_example(whole, workload, pool=budget)
    blocks = Answer(
        "real blocks, same budget",
        users_in_blocks(user, budget // tp, shared_blocks=shared),
        budget,
        "the worked example's budget, given out in whole blocks as the scheduler does",
    )
    low, here, high = (
        users_in_blocks(user, size, shared_blocks=shared)
        for size in (pool.low_bytes, pool.value_bytes, pool.high_bytes)
    )
    on_gpu = Answer(
        "real blocks, this GPU",
        here,
        tp * pool.value_bytes,
        "memory the runtime reports × utilization − weights − non-KV, in whole blocks",
    )
    needed = None
    if workload.users is not None:
        if here == 0:
            raise BadInput(
                f"{gpu.name}: not one user of {workload.p95_tokens:,} tokens fits on {tp}; use a "
                "larger GPU, more ranks or a smaller KV cache dtype"
            )
        needed = tp * -(-workload.users // here)
    return Fit(
        gpu=gpu,
        tensor_parallel=tp,
        kv_cache_dtype=settings.kv_cache_dtype,
        weights_bytes=weights_bytes,
        per_user=user,
        guide_formula=formula,
        guide_example=example,
        real_blocks=blocks,
        on_this_gpu=on_gpu,
        users_low=max(0, low),
        users_high=high,
        pool=pool,
        gpus_needed=needed,
        notes=_notes(formula, example, blocks, user, serving, gpu),
    )


def _notes(
    formula: Answer,
    example: Answer,
    blocks: Answer,
    user: PerUser,
    settings: ServingSettings,
    gpu: Gpu,
) -> tuple[str, ...]:
    notes = []
    if example.users != blocks.users:
        notes.append(
            f"the worked example gives {example.users} users, real blocks {blocks.users} in the "
            f"same budget: a user takes {user.blocks} whole blocks, "
            f"{user.reserved_bytes / 2**20:.1f} MiB"
        )
    if formula.users != blocks.users:
        notes.append(
            f"the VRAM formula gives {formula.users} users: it has a 15 % margin and no state"
        )
    if settings.kv_cache_dtype.startswith("fp8") and not gpu.has_fp8:
        major, minor = gpu.compute_capability
        notes.append(
            f"{gpu.name} has compute capability {major}.{minor}; FP8 needs 8.9, so an FP8 KV "
            "cache is emulated or refused there"
        )
    return tuple(notes)


def precision_table(
    parameters: int, kept_16_bit: int, names: Sequence[str] = ("bf16", "fp8", "int4")
) -> Mapping[str, int]:
    """Return the weights' bytes by precision, scales and 16-bit parts included.

    Raises:
        BadInput: a precision is not known.
    """
    return {name: weights.quantised_bytes(parameters, kept_16_bit, name) for name in names}
