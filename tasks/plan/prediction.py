"""The prediction of one cell: made before the run, stored beside the measurement, never corrected.

It is arithmetic from the model's config and the cell's settings (:mod:`tasks.plan.capacity`). Where
memory profiling sizes the pool, arithmetic starts from an estimate (:mod:`tasks.plan.pool`): what
follows from it is a range with both ends, never one number that would look exact. Without an
estimate it is left out with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from tasks.pins import PREDICTION_FORMAT
from tasks.plan import capacity
from tasks.plan.calibration import Pool
from tasks.plan.capacity import Capacity, Layout, ServingSettings
from tasks.plan.cell import Cell, LoadPoint, ServerSettings
from tasks.plan.gpus import Gpu
from tasks.plan.model import ModelDescription, describe

#: EvalScope 1.9.1 subtracts the chat template's length as it is with thinking on; with thinking
#: off a 512-token prompt reached the server as 518 to 520 tokens. Bounds assume the longest.
TEMPLATE_TOKENS = 8

FIRST_BOOT = "the pool depends on a first boot"
#: Refusals that are ours, not the engine's start-up check.
ABOVE_MEMORY = "kv_cache_above_memory"
PROMPT_ABOVE_CONTEXT = "prompt_above_context"


@dataclass(frozen=True, slots=True)
class PredictedLoad:
    """What one load point will do to the KV cache."""

    prompt_tokens_assumed: int
    running: int | None  # that fit at full length
    running_at_admission: int | None  # that fit when only the prompt is stored
    waiting: int | None
    peak_kv_usage_ratio_bound: float | None
    preemptions_expected: bool | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What follows from one size of the pool: an end or the middle of an estimate."""

    pool_bytes: int
    values: Mapping[str, float | None]
    load: tuple[PredictedLoad, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """An estimated pool and what follows from its ends."""

    pool: Pool
    low: Outlook
    nominal: Outlook
    high: Outlook


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the server will log and what its load will do, or why that is not known."""

    #: Exact ones only; what follows from an estimated pool is in ``range``.
    values: Mapping[str, float | None]
    load: tuple[PredictedLoad, ...]
    refusal: str | None
    refusal_type: str | None
    unknown: str | None
    model_config: Mapping[str, object] | None
    vllm_version: str
    gpu: Gpu | None = None
    range: Range | None = None
    #: The estimate's lower end would be refused, its upper end not.
    may_be_refused: bool = False
    #: The arithmetic behind it, of the middle of an estimate; not part of the document.
    capacity: Capacity | None = field(default=None, repr=False, compare=False)
    #: Read from ``model_config``; not part of the document.
    description: ModelDescription | None = field(default=None, repr=False, compare=False)

    @property
    def known(self) -> bool:
        """Whether the pool's size could be predicted or estimated."""
        return self.unknown is None

    def value(self, name: str) -> float | None:
        """Return one predicted value (names of :data:`warehouse.registry.STARTUP`)."""
        return self.values.get(name)

    def document(self, cell_key: str, *, made_at: str | None) -> dict[str, object]:
        """Return the JSON object of ``prediction.json``."""
        return {
            "format": PREDICTION_FORMAT,
            "cell_key": cell_key,
            "made_at": made_at,
            "vllm_version": self.vllm_version,
            "gpu": None if self.gpu is None else _gpu_document(self.gpu),
            "values": dict(self.values),
            "load": [asdict(point) for point in self.load],
            "pool_estimate": None if self.range is None else _pool_document(self.range.pool),
            "range": (
                None
                if self.range is None
                else {end: asdict(getattr(self.range, end)) for end in ("low", "nominal", "high")}
            ),
            "refused": (
                {"type": self.refusal_type, "message": self.refusal} if self.refusal else None
            ),
            "may_be_refused": self.may_be_refused,
            "unknown": self.unknown,
            "model_config": self.model_config,
        }


def _gpu_document(gpu: Gpu) -> dict[str, object]:
    return {
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "source": gpu.source,
    }


def _pool_document(pool: Pool) -> dict[str, object]:
    return {
        "bytes": pool.value_bytes,
        "low_bytes": pool.low_bytes,
        "high_bytes": pool.high_bytes,
        "source": pool.source,
    }


def serving(
    server: ServerSettings,
    *,
    version: str,
    device: str,
    compute_capability: tuple[int, int] | None = None,
) -> ServingSettings:
    """Translate a cell's server settings into the capacity model's."""
    return ServingSettings(
        vllm_version=version,
        device=device,
        max_model_len=server.max_model_len,
        max_num_batched_tokens=server.max_num_batched_tokens,
        max_num_seqs=server.max_num_seqs,
        dtype=server.dtype,
        kv_cache_dtype=server.kv_cache_dtype,
        prefix_caching=server.enable_prefix_caching,
        tensor_parallel=server.tensor_parallel_size,
        pipeline_parallel=server.pipeline_parallel_size,
        block_size=server.block_size,
        enforce_eager=server.enforce_eager,
        compute_capability=compute_capability,
    )


def predict(
    cell: Cell,
    config: dict[str, object] | None,
    *,
    memory_total_bytes: int | None,
    gpu: Gpu | None = None,
    pool: Pool | str = FIRST_BOOT,
    description: ModelDescription | None = None,
) -> Prediction:
    """Predict ``cell`` for a model with ``config`` (its config.json; ``None``: not known here).

    ``memory_total_bytes`` is that of the device the engine computes on, ``None`` where it is not
    known; ``pool`` the estimate, or why there is none, where the cell sets no size; ``description``
    what ``config`` describes, where that was read already.

    Raises :class:`warehouse.errors.BadInput` for an architecture the capacity model does not know.
    """
    if description is None and config is not None:
        description = describe(config)
    made = _predicted(cell, config, description, memory_total_bytes, gpu, pool)
    beyond = _beyond_context(cell)
    if made.refusal is None and beyond is not None:
        return replace(made, refusal=beyond, refusal_type=PROMPT_ABOVE_CONTEXT, load=())
    return made


def _predicted(
    cell: Cell,
    config: dict[str, object] | None,
    description: ModelDescription | None,
    memory_total_bytes: int | None,
    gpu: Gpu | None,
    pool: Pool | str,
) -> Prediction:
    version = cell.pins.engine_version
    empty = Prediction({}, (), None, None, None, config, version, gpu, description=description)
    if description is None:
        return replace(empty, unknown="the model's config.json is not here")
    server = cell.setting.server
    settings = serving(
        server,
        version=version,
        device=cell.pins.device,
        compute_capability=None if gpu is None else gpu.compute_capability,
    )
    plan = capacity.layout(description, settings)
    asked = server.kv_cache_memory_bytes
    if asked is None:
        return _within_estimate(empty, cell, plan, pool)
    if memory_total_bytes is not None and asked > memory_total_bytes:
        where = "the machine" if cell.pins.device == "cpu" else "the GPU"
        message = f"KV cache of {asked:,} bytes asked, {where} has {memory_total_bytes:,} in all"
        return replace(empty, refusal=message, refusal_type=ABOVE_MEMORY)
    result = capacity.within(plan, available_bytes=asked)
    layout = _layout_values(plan, server)
    if result.refusal is not None:
        return replace(
            empty,
            values=layout,
            refusal=result.refusal.message,
            refusal_type=result.refusal.type.value,
            capacity=result,
        )
    outlook = _outlook(cell, result, asked)
    return replace(empty, values=layout | dict(outlook.values), load=outlook.load, capacity=result)


def _within_estimate(empty: Prediction, cell: Cell, plan: Layout, pool: Pool | str) -> Prediction:
    """Return what follows from an estimated pool: exact where the pool does not matter."""
    layout = _layout_values(plan, cell.setting.server)
    if isinstance(pool, str):
        return replace(empty, values=layout, unknown=pool)
    low, nominal, high = (
        capacity.within(plan, available_bytes=size)
        for size in (pool.low_bytes, pool.value_bytes, pool.high_bytes)
    )
    ends = Range(
        pool,
        _outlook(cell, low, pool.low_bytes),
        _outlook(cell, nominal, pool.value_bytes),
        _outlook(cell, high, pool.high_bytes),
    )
    refusal = high.refusal
    return replace(
        empty,
        values=layout,
        refusal=None if refusal is None else f"pool of {pool} estimated: {refusal.message}",
        refusal_type=None if refusal is None else refusal.type.value,
        range=ends,
        may_be_refused=refusal is None and low.refusal is not None,
        capacity=nominal,
    )


def _beyond_context(cell: Cell) -> str | None:
    """Return why the server would refuse every request of a load point, or ``None``.

    A cell is only checked for what it asks; the chat template comes on top of that.
    """
    limit = cell.setting.server.max_model_len
    for index, point in enumerate(cell.setting.load):
        prompt, template = _served_prompt(point), _template_tokens(point)
        if prompt + point.output_tokens > limit:
            return (
                f"load[{index}] needs up to {prompt + point.output_tokens} tokens (prompt "
                f"{prompt - template} + chat template {template} + output {point.output_tokens}), "
                f"max_model_len is {limit}: the server would refuse its requests"
            )
    return None


def _template_tokens(point: LoadPoint) -> int:
    # The tokens of a prompt file are those the server counts.
    return 0 if point.dataset == "file" else TEMPLATE_TOKENS


def _served_prompt(point: LoadPoint) -> int:
    return point.prefix_tokens + point.prompt_tokens + _template_tokens(point)


def _layout_values(plan: Layout, server: ServerSettings) -> dict[str, float | None]:
    return {
        "attention_block_size_tokens": plan.attention_block_size_tokens,
        "mamba_padding_percent": plan.mamba_padding_percent,
        "bytes_per_block": plan.bytes_per_block,
        "blocks_per_request": plan.blocks_per_request,
        "kv_padding_layers": plan.padding_layers,
        "max_model_len_tokens": server.max_model_len,
    }


def _outlook(cell: Cell, result: Capacity, pool_bytes: int) -> Outlook:
    candidate = result.nominal
    values = {
        "num_gpu_blocks": candidate.num_gpu_blocks if candidate else None,
        "kv_cache_size_tokens": candidate.kv_cache_size_tokens if candidate else None,
        "max_concurrency": candidate.max_concurrency if candidate else None,
    }
    if candidate is None or candidate.num_gpu_blocks < 2 or result.refusal is not None:
        return Outlook(pool_bytes, values, ())
    blocks = candidate.num_gpu_blocks
    load = tuple(_point(result, blocks, point) for point in cell.setting.load)
    return Outlook(pool_bytes, values, load)


def _point(result: Capacity, blocks: int, point: LoadPoint) -> PredictedLoad:
    prompt = _served_prompt(point)
    requests = min(point.parallel, point.number)
    load = capacity.load(
        result,
        blocks,
        requests=requests,
        tokens_per_request=prompt + point.output_tokens - 1,
        prompt_tokens=prompt,
    )
    return PredictedLoad(
        prompt_tokens_assumed=prompt,
        running=load.running,
        running_at_admission=load.running_at_admission,
        waiting=_waiting(requests, load),
        peak_kv_usage_ratio_bound=load.peak_usage_ratio,
        preemptions_expected=load.preemptions_expected,
    )


def _waiting(requests: int, load: capacity.Load) -> int:
    """Return how many wait for cache at admission; a scheduler step's token limit adds others."""
    admitted = load.running if load.running_at_admission is None else load.running_at_admission
    return requests - admitted
