"""The prediction of one cell: made before the run, stored beside the measurement, never corrected.

It is arithmetic from the model's config and the cell's settings (:mod:`tasks.plan.capacity`). What
arithmetic cannot give before a boot, the size of the pool under memory profiling, is left out with
the reason; a guess would look like a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tasks.pins import PREDICTION_FORMAT
from tasks.plan import capacity
from tasks.plan.capacity import Capacity, ServingSettings
from tasks.plan.cell import Cell, LoadPoint, ServerSettings
from tasks.plan.model import describe

#: EvalScope 1.9.1 subtracts the chat template's length as it is with thinking on; with thinking
#: off a 512-token prompt reached the server as 518 to 520 tokens. Bounds assume the longest.
TEMPLATE_TOKENS = 8


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
class Prediction:
    """What the server will log and what its load will do, or why that is not known."""

    values: Mapping[str, float | None]
    load: tuple[PredictedLoad, ...]
    refusal: str | None
    refusal_type: str | None
    unknown: str | None
    model_config: Mapping[str, object] | None
    vllm_version: str

    @property
    def known(self) -> bool:
        """Whether the pool's size could be predicted."""
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
            "values": dict(self.values),
            "load": [asdict(point) for point in self.load],
            "refused": (
                {"type": self.refusal_type, "message": self.refusal} if self.refusal else None
            ),
            "unknown": self.unknown,
            "model_config": self.model_config,
        }


def serving(server: ServerSettings, *, version: str, device: str) -> ServingSettings:
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
    )


def predict(cell: Cell, config: dict[str, object] | None, *, memory_total_bytes: int) -> Prediction:
    """Predict ``cell`` for a model with ``config`` (its config.json; ``None``: not known here).

    Raises :class:`warehouse.errors.BadInput` for an architecture the capacity model does not know.
    """
    version = cell.pins.engine_version
    if config is None:
        return _unknown("the model's config.json is not here", None, version)
    server = cell.setting.server
    description = describe(config)
    settings = serving(server, version=version, device=cell.pins.device)
    pool = server.kv_cache_memory_bytes
    if pool is None:
        return _unknown("the pool depends on a first boot", config, version)
    if cell.pins.device == "cpu" and pool > memory_total_bytes:
        message = f"KV cache of {pool:,} bytes asked, the machine has {memory_total_bytes:,} in all"
        return Prediction({}, (), message, "kv_cache_above_memory", None, config, version)
    result = capacity.predict(description, settings, available_bytes=pool)
    if result.refusal is not None:
        return Prediction(
            _layout_values(result, server),
            (),
            result.refusal.message,
            result.refusal.type.value,
            None,
            config,
            version,
        )
    candidate = result.candidates[0]
    values = _layout_values(result, server) | {
        "num_gpu_blocks": candidate.num_gpu_blocks,
        "kv_cache_size_tokens": candidate.kv_cache_size_tokens,
        "max_concurrency": candidate.max_concurrency,
    }
    load = tuple(
        _point(result, candidate.num_gpu_blocks, point, server) for point in cell.setting.load
    )
    return Prediction(values, load, None, None, None, config, version)


def _unknown(reason: str, config: dict[str, object] | None, version: str) -> Prediction:
    return Prediction({}, (), None, None, reason, config, version)


def _layout_values(result: Capacity, server: ServerSettings) -> dict[str, float | None]:
    return {
        "attention_block_size_tokens": result.attention_block_size_tokens,
        "mamba_padding_percent": result.mamba_padding_percent,
        "bytes_per_block": result.bytes_per_block,
        "blocks_per_request": result.blocks_per_request,
        "kv_padding_layers": result.padding_layers,
        "max_model_len_tokens": server.max_model_len,
    }


def _point(
    result: Capacity, blocks: int, point: LoadPoint, server: ServerSettings
) -> PredictedLoad:
    prompt = point.prefix_tokens + point.prompt_tokens + TEMPLATE_TOKENS
    # What does not fit the context is cut off by the server's own refusal, not stored.
    prompt = min(prompt, server.max_model_len - point.output_tokens)
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


def peak_usage_bound(
    prediction: Mapping[str, object],
    cell: Cell,
    *,
    prompt_tokens: int,
    output_tokens: int,
    parallel: int,
) -> float | None:
    """Return the highest KV usage ``parallel`` requests of these served lengths can reach.

    Taken from what was served, so it is derived, not predicted. The last sampled token has no KV
    yet, so a request stores prompt + output − 1 tokens; the usage divides by blocks − 1. ``None``
    where the prediction has no block count.
    """
    config, values = prediction.get("model_config"), prediction.get("values")
    blocks = values.get("num_gpu_blocks") if isinstance(values, Mapping) else None
    pool = cell.setting.server.kv_cache_memory_bytes
    if not isinstance(config, dict) or not isinstance(blocks, int) or pool is None:
        return None
    settings = serving(
        cell.setting.server, version=cell.pins.engine_version, device=cell.pins.device
    )
    result = capacity.predict(describe(config), settings, available_bytes=pool)
    load = capacity.load(
        result,
        blocks,
        requests=parallel,
        tokens_per_request=prompt_tokens + output_tokens - 1,
        prompt_tokens=prompt_tokens,
    )
    return load.peak_usage_ratio
