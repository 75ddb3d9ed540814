"""The cache of one layer under given settings, and how many blocks a request needs of it.

A spec is vLLM's KVCacheSpec: kind, block, page. The block of a hybrid is chosen so that one page
of attention holds one state; everything after follows from blocks and pages.

Sources, vLLM 0.27.0: platforms/interface.py 765-940 (block of hybrids), v1/kv_cache_interface.py
(bytes and need of each kind), layers/attention/attention.py 622-697 (sliding layers),
v1/core/single_type_kv_cache_manager.py 1253 (blocks a running state holds).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from tasks.plan.layers import (
    Attention,
    AttentionLayer,
    GatedDelta,
    KimiDelta,
    Latent,
    Layer,
    Mamba2,
    Span,
    StateLayer,
    ceil_div,
    element_bytes,
)
from tasks.plan.model import ModelDescription
from tasks.plan.settings import DRAFTLESS, ServingSettings, Speculative, Terms
from warehouse.errors import BadInput

#: FlashInfer's GDN prefill exports states at multiples of this (v1/attention/backends/gdn_attn.py).
CHECKPOINT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """One layer's cache under the serving settings (vLLM's KVCacheSpec)."""

    kind: str
    block: int
    page: int
    layer: Layer | None
    window: int | None = None

    @property
    def family(self) -> tuple[str, int | None]:
        """What must be equal for layers to be of one type (UniformTypeKVCacheSpecs)."""
        return self.kind, None if self.kind == Span.FULL else self.window


STATE = "state"


def draft_layers(
    description: ModelDescription, speculative: Speculative | None
) -> tuple[Layer, ...]:
    """Return the attention layers that speculative decoding adds."""
    if speculative is None or speculative.method in DRAFTLESS:
        return ()
    if speculative.draft is not None:
        return speculative.draft
    if description.draft_layer is None:
        raise BadInput(
            f"speculative {speculative.method}: {description.architecture} has no full attention "
            "layer to take the draft's shape from; describe the draft's layers"
        )
    if speculative.method == "mtp" or speculative.method.endswith("_mtp"):
        if description.draft_layers == 0:
            raise BadInput(
                f"speculative {speculative.method}: the config of {description.architecture} has "
                "no multi-token-prediction layers; use another method"
            )
        return description.draft_layer * description.draft_layers
    # A draft of one layer with the target's shape; a draft of another shape is described by it.
    return description.draft_layer


def _state_elements(settings: ServingSettings, description: ModelDescription) -> tuple[int, int]:
    """Return the bytes of one element of the convolution buffer and of the recurrent state."""
    conv_name = settings.mamba_cache_dtype
    if conv_name == "auto":
        conv_name = settings.dtype
    conv = 2 if conv_name == "auto" else element_bytes(conv_name)
    state_name = settings.mamba_ssm_cache_dtype
    if state_name == "auto":
        state_name = description.state_dtype or "auto"
    return conv, conv if state_name == "auto" else element_bytes(state_name)


def _state_bytes(
    layer: StateLayer, settings: ServingSettings, term: Terms, description: ModelDescription
) -> int:
    conv, state = _state_elements(settings, description)
    speculative = term.speculative if _counts_speculation(layer, term, description) else 0
    return layer.state_bytes(term.tp, speculative, conv, state)


def state_bytes(
    layer: StateLayer, settings: ServingSettings, description: ModelDescription
) -> tuple[int, int]:
    """Return the bytes of one layer's state on one rank and how much of it is convolution buffer.

    Raises:
        BadInput: the state cannot be divided by the tensor-parallel size.
    """
    conv, state = _state_elements(settings, description)
    tp = settings.tensor_parallel
    whole = layer.state_bytes(tp, 0, conv, state)
    return whole, whole - layer.state_bytes(tp, 0, 0, state)


def _counts_speculation(layer: Layer, term: Terms, description: ModelDescription) -> bool:
    """Whether the state's convolution buffer grows by the speculative tokens."""
    rule = term.rules
    if isinstance(layer, Mamba2):
        if description.language in {"nemotron_h", "mamba2"}:
            return rule.mamba2_counts_speculation
        return rule.every_mamba2_counts_speculation
    return rule.kda_counts_speculation or not isinstance(layer, KimiDelta)


def _alignment(description: ModelDescription, term: Terms) -> int:
    """Return what a hybrid's block is a multiple of, in tokens."""
    rule = term.rules
    align = max(term.kernel, term.block) if rule.aligns_to_block_size else term.kernel
    if description.is_latent:
        return max(align, rule.latent_alignment_tokens)
    blackwell = term.capability is not None and term.capability[0] == 10
    wide = any(isinstance(la, Attention) and la.head_size == 256 for la, _ in description.counts)
    if rule.aligns_wide_heads and blackwell and wide:
        return 32
    if term.checkpoints and any(isinstance(la, GatedDelta) for la, _ in description.counts):
        return lcm(align, CHECKPOINT_ALIGNMENT)
    return align


def _hybrid_block(token: int, state: int, term: Terms, description: ModelDescription) -> int:
    """Return the attention block of a hybrid, in tokens (platforms/interface.py 765-940).

    The smallest aligned block whose page holds one state; never below the block size in force.
    """
    align = _alignment(description, term)
    if term.mode == "all":
        chunk = lcm(description.state_chunk_tokens, align)
        wanted = chunk * ceil_div(ceil_div(state, token), chunk)
    else:
        wanted = align * ceil_div(state, align * token)
    return max(term.block, wanted)


def _sliding_block(block: int, term: Terms) -> int:
    """Return the block a sliding layer starts with, before pages get one size."""
    if term.rules.sliding_block == "block":
        return block
    if term.rules.sliding_block == "kernel":
        return term.kernel
    return max(term.kernel, block // term.kernel * term.kernel)


def _attention_spec(layer: AttentionLayer, block: int, term: Terms) -> Spec:
    cache = term.cache
    if layer.span is Span.SLIDING:
        block = _sliding_block(block, term)
        if cache == "int4_per_token_head" and term.rules.sliding_ignores_int4:
            cache = "int8_per_token_head"
    page = block * layer.token_bytes(term.tp, cache, term.element)
    return Spec(str(layer.span), block, page, layer, layer.window)


def _check_heads(layer: AttentionLayer, tp: int) -> None:
    if isinstance(layer, Latent) or tp == 1:
        return
    large, small = max(layer.heads, tp), min(layer.heads, tp)
    if large % small:
        raise BadInput(
            f"tensor parallel size {tp}: the model has {layer.heads} KV heads, which neither "
            "divide it nor are divided by it; vLLM refuses that"
        )


def need(spec: Spec, term: Terms, length: int) -> int:
    """Return the blocks vLLM reserves for one request of ``length`` tokens in one group."""
    kind = spec.kind
    if kind == Span.FULL:
        return ceil_div(ceil_div(length, term.dcp), spec.block)
    if kind == STATE:
        return _state_need(spec, term, length)
    window = spec.window or 0
    if kind == Span.SLIDING:
        tokens = min(window - 1 + term.retained + term.in_flight, length)
        return ceil_div(tokens, spec.block) + 1
    if kind == Span.CHUNKED:
        return ceil_div(min(window + term.in_flight, length), spec.block)
    return ceil_div(term.encoder_tokens, spec.block)


def _state_need(spec: Spec, term: Terms, length: int) -> int:
    if not term.rules.state_cache_modes:
        return ceil_div(length, spec.block) if term.mode == "all" else 1
    if term.mode == "none":
        return 1 + term.speculative
    if term.mode == "align":
        return 2 + term.speculative + term.checkpoints
    extra = term.speculative if term.rules.all_mode_counts_speculation else 0
    return ceil_div(length, spec.block) + extra


def held(spec: Spec, term: Terms, tokens: int) -> int:
    """Return the blocks one running request with ``tokens`` stored tokens holds at most."""
    if spec.kind == STATE:
        if term.mode == "align":
            return min(2, ceil_div(tokens, spec.block)) + term.speculative
        return _state_need(spec, term, tokens)
    if spec.kind == Span.FULL:
        return ceil_div(ceil_div(tokens, term.dcp), spec.block)
    if spec.kind == Span.CROSS:
        return need(spec, term, tokens)
    return min(ceil_div(tokens, spec.block), need(spec, term, tokens))


def layer_specs(
    description: ModelDescription, settings: ServingSettings, draft: Iterable[Layer], term: Terms
) -> tuple[dict[Layer, Spec], int, float | None]:
    """Return each distinct layer's spec, the attention block and the padding of the state."""
    layers = dict.fromkeys([layer for layer, _ in description.counts])
    layers.update(dict.fromkeys(draft))
    attention = [layer for layer in layers if isinstance(layer, AttentionLayer)]
    sizes = {
        layer: _state_bytes(layer, settings, term, description)
        for layer in layers
        if not isinstance(layer, AttentionLayer)
    }
    block, padding, page = term.block, None, 0
    state = max(sizes.values(), default=0)
    if state and not description.is_attention_free:
        token = attention[0].token_bytes(term.tp, term.cache, term.element)
        block = _hybrid_block(token, state, term, description)
        page = block * token
        padding = 100 * (page - state) / state
    state_block = term.length if term.mode == "none" else block
    specs: dict[Layer, Spec] = {}
    for layer in layers:
        if isinstance(layer, AttentionLayer):
            _check_heads(layer, term.tp)
            specs[layer] = _attention_spec(layer, block, term)
        else:
            specs[layer] = Spec(STATE, state_block, max(sizes[layer], page), layer)
    return specs, block, padding
