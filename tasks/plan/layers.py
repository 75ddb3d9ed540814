"""What one layer of a model keeps per request, before any serving setting is applied.

These are the words a model description is made of: an attention layer keeps keys and values of
every token (or of a window, or of a chunk), a latent one a compressed vector, a state layer a
state of fixed size. Sizes are in elements here; how many bytes they take depends on dtype and
tensor parallelism and is computed by the functions below.

A state layer's ``state_bytes(tp, speculative, conv, state)`` gives the bytes of one state on one
rank: ``speculative`` is the number of speculative tokens, ``conv`` and ``state`` are the bytes of
one element of the convolution buffer and of the recurrent state.

Sources: vLLM 0.27.0 v1/kv_cache_interface.py (AttentionSpec 138-193, FullAttentionSpec 196-342,
MLAAttentionSpec 391-428) and model_executor/layers/mamba/mamba_utils.py (116-300).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from warehouse.errors import BadInput

#: Bytes of one element by vLLM's dtype names (utils/torch_utils.py: STR_DTYPE_TO_TORCH_DTYPE).
ELEMENT_BYTES: dict[str, int] = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

#: KV cache dtypes with a scale (float32) per token and head for keys and for values.
PER_TOKEN_HEAD = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``.

    Raises:
        BadInput: the dtype is not known.
    """
    try:
        return ELEMENT_BYTES[dtype.removeprefix("torch.")]
    except KeyError:
        raise BadInput(
            f"dtype {dtype!r}: not known; give one of {', '.join(sorted(ELEMENT_BYTES))}"
        ) from None


class Span(StrEnum):
    """Which tokens an attention layer keeps."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values per head; ``window`` is the sliding window or the chunk, in tokens."""

    heads: int
    head_size: int
    head_size_v: int
    span: Span = Span.FULL
    window: int | None = None

    def token_bytes(self, tp: int, cache: str, element: int) -> int:
        """Return the bytes one token takes in this layer on one rank (facts, section 4.1)."""
        heads = max(1, self.heads // tp)
        key, value = self.head_size, self.head_size_v
        if cache == "nvfp4":
            key, value = nvfp4_size(key), nvfp4_size(value)
        elif cache == "int4_per_token_head":
            key, value = key // 2, value // 2
        scales = 2 * heads * 4 if cache in PER_TOKEN_HEAD else 0
        return heads * (key + value) * element + scales


@dataclass(frozen=True, slots=True)
class Latent:
    """A compressed vector (MLA): one head, not divided by tensor parallelism."""

    size: int
    #: The indexer of sparse attention: one uint8 vector with its scale, whatever the cache dtype.
    indexer: bool = False
    span: Span = Span.FULL
    window: int | None = None

    def token_bytes(self, _tp: int, cache: str, element: int) -> int:
        """Return the bytes one token takes in this layer on every rank (facts, section 4.2)."""
        if self.indexer:
            return self.size
        if cache == "fp8_ds_mla":
            return 656
        if cache == "int4_per_token_head":
            return self.size // 2 * element + 2 * 4
        scales = 2 * 4 if cache in PER_TOKEN_HEAD else 0
        return self.size * element + scales


def nvfp4_size(head_size: int) -> int:
    """Return the bytes of one head in nvfp4: 4 bits an element and a scale for every 16."""
    return head_size // 2 + head_size // 16


def _shard(size: int, tp: int, what: str) -> int:
    """Divide ``size`` by ``tp`` as vLLM does: it must divide (distributed/utils.py: divide)."""
    if size % tp:
        raise BadInput(
            f"tensor parallel size {tp}: {what} {size} cannot be divided by it; "
            f"give a divisor of {size}"
        )
    return size // tp


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5 and later)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int

    def state_bytes(self, tp: int, speculative: int, conv: int, state: int) -> int:
        """Source: mamba_utils.py: gated_delta_net_state_shape."""
        width = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        buffer = _shard(width, tp, "convolution width") * (self.conv_kernel - 1 + speculative)
        matrix = _shard(self.value_heads, tp, "value heads") * self.value_size * self.key_size
        return buffer * conv + matrix * state


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba2 (Bamba, FalconH1, GraniteMoeHybrid, Nemotron-H, Zamba2)."""

    inner: int
    groups: int
    heads: int
    head_size: int
    state_size: int
    conv_kernel: int

    def state_bytes(self, tp: int, speculative: int, conv: int, state: int) -> int:
        """Source: mamba_utils.py: mamba2_state_shape; groups are raised to ``tp`` if needed."""
        groups = self.groups if self.groups % tp == 0 else tp
        width = self.inner + 2 * groups * self.state_size
        buffer = _shard(width, tp, "convolution width") * (self.conv_kernel - 1 + speculative)
        matrix = _shard(self.heads, tp, "state heads") * self.head_size * self.state_size
        return buffer * conv + matrix * state


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Mamba1 (Mamba, Jamba)."""

    inner: int
    state_size: int
    conv_kernel: int

    def state_bytes(self, tp: int, _speculative: int, conv: int, state: int) -> int:
        """Source: mamba_utils.py: mamba1_state_shape."""
        width = _shard(self.inner, tp, "inner size")
        return width * ((self.conv_kernel - 1) * conv + self.state_size * state)


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (Kimi-Linear)."""

    heads: int
    head_size: int
    conv_kernel: int

    def state_bytes(self, tp: int, speculative: int, conv: int, _state: int) -> int:
        """Source: mamba_utils.py: kda_state_shape; the recurrent state is always float32."""
        width = _shard(3 * self.heads * self.head_size, tp, "convolution width")
        buffer = width * (self.conv_kernel - 1 + speculative)
        matrix = _shard(self.heads, tp, "heads") * self.head_size * self.head_size
        return buffer * conv + matrix * 4


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short convolution (LFM2): only its last inputs are kept."""

    width: int
    conv_kernel: int

    def state_bytes(self, tp: int, _speculative: int, conv: int, _state: int) -> int:
        """Source: mamba_utils.py: short_conv_state_shape."""
        return _shard(self.width, tp, "convolution width") * (self.conv_kernel - 1) * conv


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention (MiniMax-Text-01): one matrix a head."""

    heads: int
    head_size: int

    def state_bytes(self, tp: int, _speculative: int, conv: int, _state: int) -> int:
        """Source: mamba_utils.py: linear_attention_state_shape (heads // tp)."""
        return self.heads // tp * self.head_size * self.head_size * conv


StateLayer = GatedDelta | Mamba2 | Mamba1 | KimiDelta | ShortConv | LinearAttention
AttentionLayer = Attention | Latent
Layer = AttentionLayer | StateLayer
