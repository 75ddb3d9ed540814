"""How much memory a model's weights take: stored, and loaded by component and precision.

The name of a model says little: a "4B" has 4.66 billion parameters, its vision tower included, and
what is loaded differs from what is stored (prediction layers are skipped, a tied output layer is
not stored twice). Stored bytes come from the checkpoint's index or the headers of its files,
without reading a tensor. The loaded figure is an estimate; the engine's "Model loading took" line
is the truth and replaces it as soon as there is one.

Sources: safetensors' format (8 bytes of header length, then JSON); vLLM 0.27.0
model_executor/models/qwen3_5.py and utils.py (prediction layers skipped on load),
layers/vocab_parallel_embedding.py (vocabulary padded to a multiple of 64).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

from warehouse.errors import BadInput

GIB = 2**30
GB = 10**9

#: Largest header that is read; safetensors itself allows 100 MB.
MAX_HEADER_BYTES = 100_000_000

#: Share by which the logged loading figure was above or below the estimate: allocator, buffers and
#: repacked layouts (recipe: 8.46 GiB of tensors, 8.61 GiB logged).
LOADED_TOLERANCE = 0.03

#: Bytes of one element by safetensors' names.
_STORED_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class Component(StrEnum):
    """Parts of a checkpoint that are loaded or left out together."""

    EMBEDDING = "embedding"
    HEAD = "head"
    LANGUAGE = "language"
    VISION = "vision"
    PREDICTION = "prediction"  # multi-token-prediction layers


#: Parts of a tensor's name that tell its component, tried in order.
_MARKS: tuple[tuple[str, Component], ...] = (
    ("mtp.", Component.PREDICTION),
    ("nextn", Component.PREDICTION),
    ("visual.", Component.VISION),
    ("vision_tower.", Component.VISION),
    ("vision_model.", Component.VISION),
    ("multi_modal_projector.", Component.VISION),
    ("audio_tower.", Component.VISION),
    ("lm_head.", Component.HEAD),
    ("embed_tokens.", Component.EMBEDDING),
    ("wte.", Component.EMBEDDING),
)


def component_of(tensor: str) -> Component:
    """Return the component a tensor belongs to, by its name."""
    for mark, component in _MARKS:
        if mark in tensor:
            return component
    return Component.LANGUAGE


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds."""

    total_bytes: int
    #: Elements over all tensors; None from an index that does not say.
    parameters: int | None
    #: Bytes by component; None where only the total is known.
    by_component: Mapping[Component, int] | None

    @property
    def gb(self) -> float:
        """The total in units of 10**9 bytes."""
        return self.total_bytes / GB

    @property
    def gib(self) -> float:
        """The total in GiB, as vLLM's memory lines count."""
        return self.total_bytes / GIB

    def __str__(self) -> str:
        return f"{self.gb:.2f} GB = {self.gib:.2f} GiB"


def from_index(index: Mapping[str, Any], *, where: str = "model.safetensors.index.json") -> Stored:
    """Return the stored bytes an index states (tensors; the files are larger by their headers).

    Raises:
        BadInput: the index has no ``metadata.total_size``.
    """
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise BadInput(
            f"{where}: metadata.total_size is {total!r}; wanted the bytes of all tensors"
        )
    parameters = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    return Stored(total, parameters if isinstance(parameters, int) else None, None)


def _header(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise BadInput(f"{file}: is {len(prefix)} bytes long; wanted a safetensors file")
        (size,) = struct.unpack("<Q", prefix)
        if size > MAX_HEADER_BYTES:
            raise BadInput(f"{file}: header of {size:,} bytes; wanted a safetensors file")
        raw = stream.read(size)
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise BadInput(
            f"{file}: header is not JSON ({error}); wanted a safetensors file"
        ) from error
    if len(raw) < size or not isinstance(value, dict):
        raise BadInput(f"{file}: header is cut; the file is not complete")
    return value


def from_headers(files: Iterable[Path]) -> Stored:
    """Return what safetensors files hold, from their headers only.

    Raises:
        BadInput: there is no file, or one is no safetensors file.
    """
    sizes: dict[Component, int] = {}
    parameters = total = 0
    found = False
    for file in files:
        found = True
        try:
            header = _header(file)
        except OSError as error:
            raise BadInput(f"{file}: cannot be read ({error.strerror})") from error
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            elements = prod(tensor["shape"])
            size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
            if size != elements * _STORED_BYTES.get(tensor["dtype"], 0):
                # A packed dtype (4 bits and less) that the table does not know: bytes are right.
                elements = elements if tensor["dtype"] in _STORED_BYTES else 0
            component = component_of(name)
            sizes[component] = sizes.get(component, 0) + size
            parameters += elements
            total += size
    if not found:
        raise BadInput("weights: no *.safetensors file; give a model folder or its index")
    return Stored(total, parameters, sizes)


def stored(folder: Path) -> Stored:
    """Return what the checkpoint in ``folder`` holds: headers where the files are, else the index.

    Raises:
        BadInput: there are neither files nor an index.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return from_headers(files)
    index = folder / "model.safetensors.index.json"
    try:
        return from_index(json.loads(index.read_text(encoding="utf-8")), where=str(index))
    except OSError as error:
        raise BadInput(
            f"{folder}: neither *.safetensors nor model.safetensors.index.json; "
            "download one of them, or give the weights' size"
        ) from error
    except ValueError as error:
        raise BadInput(f"{index}: is not JSON ({error})") from error


@dataclass(frozen=True, slots=True)
class Loaded:
    """An estimate of what one rank holds after loading."""

    total_bytes: int
    by_component: Mapping[Component, int] | None
    #: The logged figure may differ by this much in either direction.
    tolerance_bytes: int
    #: What was left out and why, one sentence each.
    notes: tuple[str, ...]


def loaded(
    checkpoint: Stored,
    *,
    language_model_only: bool = False,
    speculative: bool = False,
    tensor_parallel: int = 1,
) -> Loaded:
    """Estimate the bytes one rank loads.

    Prediction layers are skipped without speculation and the vision tower with
    ``--language-model-only``. Tensor parallelism is taken to divide everything; what it replicates
    (norms, small projections) is within the tolerance.
    """
    notes = []
    parts = checkpoint.by_component
    if parts is None:
        notes.append("only the total is known: prediction layers and vision tower are counted")
        total = checkpoint.total_bytes
    else:
        kept = dict(parts)
        if not speculative and kept.pop(Component.PREDICTION, 0):
            notes.append("multi-token-prediction layers are skipped without speculation")
        if language_model_only and kept.pop(Component.VISION, 0):
            notes.append("the vision tower is dropped with --language-model-only")
        if Component.HEAD not in kept:
            notes.append("the output layer is tied to the embedding and not stored twice")
        parts = {component: -(-size // tensor_parallel) for component, size in kept.items()}
        total = sum(kept.values())
    share = -(-total // tensor_parallel)
    return Loaded(share, parts, int(share * LOADED_TOLERANCE), tuple(notes))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by component, from a config alone."""

    by_component: Mapping[Component, int]
    #: Those that quantisation usually leaves at 16 bits: norms, router, convolution, embeddings.
    kept_16_bit: int

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.by_component.values())


@dataclass(frozen=True, slots=True)
class Precision:
    """How many bytes a quantised parameter takes, scales included."""

    name: str
    bytes_per_parameter: float
    meaning: str
    #: Compute capability from which the hardware computes with it; None: any.
    needs: str | None = None


#: Weight precisions: data bits plus scales (and zero points) per group.
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", 4.0, "4 bytes"),
        Precision("bf16", 2.0, "2 bytes", "bf16"),
        Precision("fp16", 2.0, "2 bytes", "fp16"),
        Precision("fp8", 1 + 4 / 128**2, "1 byte, one float32 scale a 128 x 128 block", "fp8"),
        Precision("int8", 1 + 2 / 4096, "1 byte, one 16-bit scale a channel", "int8"),
        Precision("int4", 0.5 + 2 / 128 + 0.5 / 128, "4 bits, 16-bit scale and zero point a 128"),
        Precision("mxfp4", 0.5 + 1 / 32, "4 bits, one 8-bit scale a 32"),
        Precision("nvfp4", 0.5 + 1 / 16, "4 bits, one 8-bit scale a 16"),
    )
}


def precision(name: str) -> Precision:
    """Return a weight precision by name.

    Raises:
        BadInput: it is not known.
    """
    try:
        return PRECISIONS[name]
    except KeyError:
        raise BadInput(
            f"weight precision {name!r}: not known; give one of {', '.join(PRECISIONS)}"
        ) from None


def quantised_bytes(parameters: int, kept_16_bit: int, name: str) -> int:
    """Return the bytes of ``parameters`` in a precision, ``kept_16_bit`` of them in 16 bits.

    16-bit and wider precisions apply to all.

    Raises:
        BadInput: the precision is not known.
    """
    per_parameter = precision(name).bytes_per_parameter
    if per_parameter >= 2:
        return round(parameters * per_parameter)
    return round((parameters - kept_16_bit) * per_parameter) + 2 * kept_16_bit


class _Config:
    """Reads the integers a parameter count needs."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def need(self, *names: str) -> int:
        """Return a positive integer field.

        Raises:
            BadInput: it is missing; the count would be a guess.
        """
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise BadInput(
            f"{self.where}: field {' or '.join(names)} is missing, so parameters cannot be "
            "counted; give the checkpoint's index or the weights' size"
        )

    def get(self, name: str) -> int:
        """Return an integer field, 0 if it is not there."""
        value = self.values.get(name)
        return value if isinstance(value, int) else 0


def _mlp(config: _Config) -> tuple[int, int]:
    """Return the parameters of one feed-forward block and of its router."""
    hidden = config.need("hidden_size")
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return 3 * hidden * config.need("intermediate_size"), 0
    size = config.need("moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size")
    router = hidden * experts + (hidden if shared else 0)
    return 3 * hidden * (experts * size + shared) + router, router


def _attention(config: _Config) -> tuple[int, int]:
    """Return the parameters of one full-attention block and of its norms and biases."""
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    gated = bool(config.values.get("attn_output_gate"))
    kind = str(config.values.get("model_type", ""))
    query = hidden * heads * size * (2 if gated else 1)
    matrices = query + 2 * hidden * kv_heads * size + heads * size * hidden
    small = 2 * size if kind.startswith("qwen3") else 0
    if kind.startswith("qwen2") or config.values.get("attention_bias"):
        small += (heads + 2 * kv_heads) * size
    return matrices + small, small


def _delta(config: _Config) -> tuple[int, int]:
    """Return the parameters of one Gated DeltaNet block and of its small parts."""
    hidden = config.need("hidden_size")
    keys = config.need("linear_num_key_heads") * config.need("linear_key_head_dim")
    heads = config.need("linear_num_value_heads")
    values = heads * config.need("linear_value_head_dim")
    matrices = hidden * (2 * keys + 2 * values) + hidden * 2 * heads + values * hidden
    convolution = (2 * keys + values) * config.need("linear_conv_kernel_dim")
    small = convolution + 2 * heads + config.need("linear_value_head_dim")
    return matrices + small, small


#: Architectures whose parameters are counted from the config.
COUNTED = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }
)


def count_parameters(config: Mapping[str, Any], *, where: str = "config.json") -> Parameters:
    """Count the language part's parameters from a config (no vision tower, no prediction layer).

    Raises:
        BadInput: the architecture is not one of :data:`COUNTED`, or a field is missing.
    """
    text = config.get("text_config")
    part = text if isinstance(text, dict) else config
    kind = part.get("model_type")
    if kind not in COUNTED:
        raise BadInput(
            f"{where}: parameters of {kind!r} are not counted from a config; give the "
            f"checkpoint's index or the weights' size (counted are {', '.join(sorted(COUNTED))})"
        )
    fields = _Config(part, where)
    hidden, layers = fields.need("hidden_size"), fields.need("num_hidden_layers")
    embedding = fields.need("vocab_size") * hidden
    tied = bool(part.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    interval = fields.get("full_attention_interval") or 4
    hybrid = "linear_num_value_heads" in part
    full = layers // interval if hybrid else layers
    attention, attention_small = _attention(fields)
    mlp, router = _mlp(fields)
    state, state_small = _delta(fields) if hybrid else (0, 0)
    norms = layers * 2 * hidden + hidden
    language = full * attention + (layers - full) * state + layers * mlp + norms
    small = full * attention_small + (layers - full) * state_small + layers * router + norms
    head = 0 if tied else embedding
    parts = {
        Component.EMBEDDING: embedding,
        Component.HEAD: head,
        Component.LANGUAGE: language,
    }
    return Parameters(parts, embedding + head + small)
