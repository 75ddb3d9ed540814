"""The KV pool of a cell that memory profiling sizes: an estimate with its error bar, before a boot.

    pool = ceil(total x utilization) - weights - non-KV

Weights come from a boot of the same thing, else from the checkpoint's headers or index, else from
the config; non-KV from boots, else from a stated default. Where one of them is not known there is
no estimate, and the reason is said instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.plan import weights
from tasks.plan.calibration import Boot, Pool, estimate_non_kv, estimate_pool
from tasks.plan.cell import ServerSettings
from tasks.plan.gpus import Gpu
from tasks.plan.layers import element_bytes
from tasks.plan.model import ModelDescription
from warehouse.errors import BadInput

#: A count from the config misses buffers and small tensors.
COUNTED_TOLERANCE = 0.05
#: Quantised checkpoints leave more or less in 16 bits and pack scales in several ways.
QUANTISED_TOLERANCE = 0.10
#: A vision tower's count is rough: embeddings, mergers and gates differ by model.
VISION_TOLERANCE = 0.5
#: Pipeline stages are uneven: the first has the embedding, the last the output layer.
STAGE_TOLERANCE = 0.25

#: quant_method of a config -> weight precision, by the bits it states.
_QUANTISED: dict[tuple[str, int | None], str] = {
    ("fp8", None): "fp8",
    ("fp8", 8): "fp8",
    ("awq", 4): "int4",
    ("gptq", 4): "int4",
    ("gptq", 8): "int8",
    ("mxfp4", None): "mxfp4",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes one rank loads, and by how much that may be wrong."""

    value_bytes: int
    error_bytes: int
    source: str


def estimate(
    server: ServerSettings,
    config: Mapping[str, Any],
    description: ModelDescription,
    *,
    gpu: Gpu,
    checkpoint: weights.Stored | None = None,
    boots: Sequence[Boot] = (),
) -> Pool | str:
    """Return the estimated budget of the KV cache on one rank, or why there is no estimate.

    With ``boots`` of the same thing the total and the weights are what they measured: both then
    cancel out, and what is left of the error is that of a log's two decimals.
    """
    non_kv = estimate_non_kv(boots, server.max_num_batched_tokens)
    if boots:
        total = boots[-1].total_bytes
        loaded = Weights(sum(b.loading_bytes for b in boots) // len(boots), 0, "boots")
    else:
        total = gpu.total_bytes
        try:
            loaded = weights_of(server, config, description, checkpoint)
        except BadInput as error:
            return f"the weights' size is not known before a first boot: {error}"
    pool = estimate_pool(
        total_bytes=total,
        utilization=server.gpu_memory_utilization,
        weights_bytes=loaded.value_bytes,
        weights_error_bytes=loaded.error_bytes,
        non_kv=non_kv,
    )
    source = f"non-KV: {non_kv.source}; weights: {loaded.source}; {gpu.name}"
    return Pool(pool.value_bytes, pool.error_bytes, source)


def weights_of(
    server: ServerSettings,
    config: Mapping[str, Any],
    description: ModelDescription,
    checkpoint: weights.Stored | None,
) -> Weights:
    """Return what one rank loads: from the checkpoint where it is known, else from the config.

    Raises:
        BadInput: parameters cannot be counted from this config.
    """
    if checkpoint is not None:
        whole = _of_checkpoint(server, config, description, checkpoint)
    else:
        whole = _counted(server, config, description)
    ranks = server.tensor_parallel_size * server.pipeline_parallel_size
    share, error = -(-whole.value_bytes // ranks), -(-whole.error_bytes // ranks)
    if server.pipeline_parallel_size > 1:
        error += int(share * STAGE_TOLERANCE)
    return Weights(share, error, whole.source)


def _of_checkpoint(
    server: ServerSettings,
    config: Mapping[str, Any],
    description: ModelDescription,
    checkpoint: weights.Stored,
) -> Weights:
    loaded = weights.loaded(checkpoint, language_model_only=server.language_model_only)
    size, error = loaded.total_bytes, loaded.tolerance_bytes
    if _quantisation(config) is None and description.dtype is not None:
        # Loaded in the dtype asked for; "auto" takes float32 checkpoints in 16 bits.
        there = element_bytes(description.dtype)
        here = 4 if server.dtype == "float32" else 2
        size, error = size * here // there, error * here // there
    source = "checkpoint's headers" if checkpoint.by_component else "checkpoint's index"
    return Weights(size, error, source)


def _counted(
    server: ServerSettings, config: Mapping[str, Any], description: ModelDescription
) -> Weights:
    counted = weights.count_parameters(config)
    name = _precision(server, config)
    size = weights.quantised_bytes(counted.total, counted.kept_16_bit, name)
    quantised = weights.precision(name).bytes_per_parameter < 2
    error = int(size * (QUANTISED_TOLERANCE if quantised else COUNTED_TOLERANCE))
    if description.has_vision and not server.language_model_only:
        vision = 2 * _vision_parameters(config)
        size, error = size + vision, error + int(vision * VISION_TOLERANCE)
    return Weights(size, error, f"counted from the config, {name}")


def _precision(server: ServerSettings, config: Mapping[str, Any]) -> str:
    quantisation = _quantisation(config)
    if quantisation is not None:
        method, bits = quantisation.get("quant_method"), quantisation.get("bits")
        name = _QUANTISED.get((str(method), bits if isinstance(bits, int) else None))
        if name is None:
            raise BadInput(
                f"quantisation {method!r} with {bits} bits is not counted from a config; put the "
                "checkpoint's index beside it"
            )
        return name
    return "fp32" if server.dtype == "float32" else "bf16"


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    stated = config.get("quantization_config") or inner
    return stated if isinstance(stated, Mapping) else None


def _vision_parameters(config: Mapping[str, Any]) -> int:
    part = config.get("vision_config")
    fields = part if isinstance(part, Mapping) else {}
    layers = fields.get("depth") or fields.get("num_hidden_layers")
    hidden = fields.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise BadInput(
            "the vision tower cannot be counted from this config; put the checkpoint's index "
            "beside it, or serve with language_model_only"
        )
    inner = fields.get("intermediate_size")
    inner = inner if isinstance(inner, int) else 4 * hidden
    return layers * (4 * hidden * hidden + 3 * hidden * inner)
