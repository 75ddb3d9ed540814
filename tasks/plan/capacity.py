"""What vLLM will log about its KV cache, as exact integer arithmetic.

From the bytes that are left for the KV cache onward, every figure vLLM prints follows from the
model's config and the serving settings: block size, pages, groups, number of blocks, tokens and
concurrency. Calculators that treat a hybrid model as dense are off by a factor of 0.5 to 4; this
module follows the engine's own steps, with the switches of each version (tasks/plan/versions.py).

    description = model.describe(model.load(path))
    settings = ServingSettings(vllm_version="0.27.0", max_model_len=32_768)
    capacity = predict(description, settings, available_bytes=9_535_000_000)

Sources, all vLLM 0.27.0 unless said otherwise: v1/core/kv_cache_utils.py (groups 1140-1290,
blocks 993, concurrency 937, tokens 1877, start-up check 751, PP projection 2063),
platforms/interface.py 765-940 (block size of hybrids), v1/kv_cache_interface.py (bytes and need
of each kind), model_executor/models/config.py 600-655 (prefix caching of hybrids),
config/vllm.py 540-561 (tokens in flight), distributed/utils.py (pipeline stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from math import lcm

from tasks.plan.layers import (
    PER_TOKEN_HEAD,
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
from tasks.plan.versions import EngineVersion, Rules, rules
from warehouse.errors import BadInput

GIB = 2**30
#: No device has more; larger figures are slips (bytes given as GiB).
MAX_GIB = 10**6

#: vLLM's defaults for an API server on a card below 70 GiB (engine/arg_utils.py 2552-2561).
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQUENCES = {"cuda": 256, "cpu": 128}
#: Block size without --block-size: CacheConfig 16; the CPU platform 128; MLA backends 64.
DEFAULT_BLOCK = {"cuda": 16, "cpu": 128}
LATENT_BLOCK = 64
#: FlashInfer's GDN prefill exports states at multiples of this (v1/attention/backends/gdn_attn.py).
CHECKPOINT_ALIGNMENT = 64

#: Speculative methods whose draft has no attention layers of its own.
DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
#: Speculative methods that switch asynchronous scheduling off (config/vllm.py 1107-1118).
SYNCHRONOUS = frozenset({"ngram", "suffix", "medusa", "mlp_speculator", "draft_model"})


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding: vLLM's method name, tokens proposed a step, and the draft's layers."""

    method: str
    tokens: int
    #: Attention of each draft layer, in order; None: as the method and the model say.
    draft: tuple[AttentionLayer, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Speculative:
        """Read ``METHOD:N``, for example ``mtp:3``.

        Raises:
            BadInput: it has another form.
        """
        method, _, number = text.partition(":")
        if not method or not number.isdigit() or int(number) < 1:
            raise BadInput(f"speculative {text!r}: wanted METHOD:N, for example mtp:3")
        return cls(method, int(number))


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """How the model is served; None means vLLM's default for that version and model."""

    vllm_version: str
    device: str = "cuda"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    prefix_caching: bool | None = None
    #: none, align or all; None: as the version chooses when prefix caching is on.
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    block_size: int | None = None
    speculative: Speculative | None = None
    async_scheduling: bool | None = None
    #: Of the GPU, for the few rules that depend on it; None: one before Hopper is assumed.
    compute_capability: tuple[int, int] | None = None
    enforce_eager: bool = False
    disable_hybrid_kv_cache_manager: bool = False


class RefusalType(StrEnum):
    """Why vLLM does not start."""

    NO_MEMORY = "no_available_memory"
    CONTEXT_DOES_NOT_FIT = "max_model_len_does_not_fit"
    SEQUENCES_ABOVE_BLOCKS = "max_num_seqs_above_blocks"
    UNSUPPORTED = "unsupported_combination"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A start-up refusal, with the numbers of its message and a reason a user can follow."""

    type: RefusalType
    message: str
    needed_bytes: int | None = None
    available_bytes: int | None = None
    #: Largest max_model_len that would fit; None where vLLM gives no estimate.
    estimated_max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One block count the given memory allows, and what vLLM prints for it."""

    num_gpu_blocks: int
    kv_cache_size_tokens: int
    max_concurrency: float


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


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings with every default filled in."""

    rules: Rules
    device: str
    length: int
    in_flight: int
    encoder_tokens: int
    sequences: int
    cache: str
    element: int
    tp: int
    pp: int
    dcp: int
    speculative: int
    #: Tokens kept below a sliding window for several prediction modules.
    retained: int
    mode: str
    #: Blocks a state keeps for prefill checkpoints in mode "align".
    checkpoints: int
    block: int
    #: The backend's smallest block, in tokens.
    kernel: int
    capability: tuple[int, int] | None
    eager: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks, pages and groups: everything that does not depend on the memory available."""

    terms: Terms
    attention_block_size_tokens: int | None
    mamba_padding_percent: float | None
    #: Bytes of one block on the pipeline stage where it is largest.
    bytes_per_block: int
    #: The same for every pipeline stage.
    stage_bytes_per_block: tuple[int, ...]
    tables: tuple[_Table, ...]
    padding_layers: int
    blocks_per_request: int
    #: The same for the whole model, as if it were on one stage.
    model_bytes_per_block: int
    #: Every spec before pages are unified, with its layers on each pipeline stage.
    layer_pages: tuple[tuple[Spec, tuple[int, ...]], ...]
    refusal: Refusal | None


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


# --- settings -----------------------------------------------------------------------------------


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BadInput(f"{name}: got {value}; wanted a positive integer")


def _check(settings: ServingSettings) -> None:
    if settings.device not in DEFAULT_BLOCK:
        raise BadInput(f"device: got {settings.device!r}; wanted cuda or cpu")
    _positive("max_model_len", settings.max_model_len)
    _positive("max_num_batched_tokens", settings.max_num_batched_tokens)
    _positive("max_num_seqs", settings.max_num_seqs)
    _positive("tensor_parallel", settings.tensor_parallel)
    _positive("pipeline_parallel", settings.pipeline_parallel)
    _positive("decode_context_parallel", settings.decode_context_parallel)
    _positive("block_size", settings.block_size)
    if settings.mamba_cache_mode not in {None, "none", "align", "all"}:
        raise BadInput(
            f"mamba_cache_mode: got {settings.mamba_cache_mode!r}; wanted none, align or all"
        )


def _cache_dtype(description: ModelDescription, settings: ServingSettings) -> tuple[str, int]:
    """Return the KV cache dtype in force and the bytes of one element.

    Sparse latent attention turns fp8 into its own packed format (mla_attention.py 329-343).

    ``auto`` is the model's dtype, whatever the weights are quantised to. A checkpoint of float32
    is served in 16 bits unless --dtype says float32 (config/model.py: _resolve_auto_dtype).
    """
    name = settings.kv_cache_dtype
    if name == "auto":
        dtype = settings.dtype
        if dtype == "auto":
            return "auto", 2
        return "auto", element_bytes(dtype)
    if name.startswith("turboquant_"):
        raise BadInput(
            f"kv_cache_dtype {name}: its packed pages were not checked and are not predicted; "
            "use another dtype"
        )
    if name in PER_TOKEN_HEAD or name in {"nvfp4", "fp8_ds_mla"}:
        return name, 1
    if description.is_sparse and name.startswith("fp8"):
        return "fp8_ds_mla", 1
    return name, element_bytes(name)


def _prefix_caching(description: ModelDescription, settings: ServingSettings, rule: Rules) -> bool:
    if settings.prefix_caching is not None:
        return settings.prefix_caching
    if description.is_encoder_decoder:
        return False
    if description.is_hybrid or description.is_attention_free:
        return rule.hybrids_cache_prefixes
    return True


def _mode(description: ModelDescription, settings: ServingSettings, rule: Rules) -> str:
    """Return how states are cached: none, align or all (config.py: MambaModelConfig)."""
    if not (description.is_hybrid or description.is_attention_free):
        return "none"
    if not rule.states_can_be_cached or not _prefix_caching(description, settings, rule):
        return "none"
    can_all = rule.has_all_mode and _can_cache_all(description, rule)
    if not rule.state_cache_modes:
        return "all" if can_all else "none"
    asked = settings.mamba_cache_mode
    if asked == "all":
        return "all" if can_all else "align"
    if asked == "align":
        return "align"
    return "all" if can_all and rule.prefers_all_mode else "align"


def _can_cache_all(description: ModelDescription, rule: Rules) -> bool:
    if description.all_mode is None:
        return False
    first, end = description.all_mode
    if rule.version < EngineVersion.parse(first):
        return False
    return end is None or rule.version < EngineVersion.parse(end)


def _batches_in_flight(
    description: ModelDescription, settings: ServingSettings, rule: Rules
) -> int:
    """Return how many batches may be scheduled and not settled (config/vllm.py 540)."""
    if not rule.counts_batches_in_flight:
        return 1
    pipeline = settings.pipeline_parallel
    asynchronous = settings.async_scheduling
    if asynchronous is None:
        asynchronous = (
            settings.speculative is None or settings.speculative.method not in SYNCHRONOUS
        )
    if not asynchronous:
        return pipeline
    second = settings.device == "cuda" and (
        rule.second_runner == "all"
        or (
            rule.second_runner == "dense"
            and not (description.experts or description.is_hybrid or description.is_attention_free)
        )
    )
    if second:
        return pipeline + 1
    return 2 if pipeline == 1 else pipeline


def _checkpoints(description: ModelDescription, settings: ServingSettings, rule: Rules) -> int:
    """Return the checkpoint blocks a state keeps in mode "align".

    GDN layers have one where FlashInfer computes their prefill: on Hopper, and on Blackwell with
    key heads of 128 and CUDA 13 (gdn/qwen_gdn_linear_attn.py: _resolve_gdn_prefill_backend).
    """
    if not rule.keeps_prefill_checkpoint:
        return 0
    states = [layer for layer, _ in description.counts if not isinstance(layer, AttentionLayer)]
    capability = settings.compute_capability
    hopper = settings.device == "cuda" and capability is not None and capability >= (9, 0)
    if any(isinstance(layer, Mamba2) for layer in states):
        return 1
    if hopper and any(
        isinstance(layer, GatedDelta) and (capability == (9, 0) or layer.key_size == 128)
        for layer in states
    ):
        return 1
    return 0


def _kernel_block(settings: ServingSettings, rule: Rules) -> int:
    """Return the smallest block of the attention backend (get_supported_kernel_block_sizes)."""
    return 32 if settings.device == "cpu" and rule.version.release >= (0, 32, 0) else 16


def _retained(description: ModelDescription, speculative: Speculative | None, rule: Rules) -> int:
    """Return the tokens kept below a sliding window for a chain of prediction modules."""
    if speculative is None or not rule.retains_lookahead or speculative.method != "mtp":
        return 0
    if min(description.draft_layers, speculative.tokens) <= 1:
        return 0
    return speculative.tokens - 1


def terms(description: ModelDescription, settings: ServingSettings) -> Terms:
    """Fill in vLLM's defaults for this version, device and model.

    Raises:
        BadInput: a setting has no meaning, or max_model_len is given neither here nor there.
    """
    _check(settings)
    rule = rules(settings.vllm_version)
    length = settings.max_model_len or description.max_model_len
    if length is None:
        raise BadInput(
            f"max_model_len: not given, and the config of {description.architecture} has no "
            "context limit; give --max-model-len"
        )
    world = settings.tensor_parallel * settings.pipeline_parallel
    scale = world if settings.device == "cpu" else 1
    batched = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS * scale
    cache, element = _cache_dtype(description, settings)
    mode = _mode(description, settings, rule)
    block = settings.block_size
    if block is None:
        latent = description.is_latent and settings.device == "cuda"
        block = LATENT_BLOCK if latent else DEFAULT_BLOCK[settings.device]
    return Terms(
        rules=rule,
        device=settings.device,
        length=length,
        in_flight=_batches_in_flight(description, settings, rule) * batched,
        encoder_tokens=(
            description.encoder_tokens or batched if rule.reserves_encoder_length else batched
        ),
        sequences=settings.max_num_seqs or DEFAULT_SEQUENCES[settings.device] * scale,
        cache=cache,
        element=element,
        tp=settings.tensor_parallel,
        pp=settings.pipeline_parallel,
        dcp=settings.decode_context_parallel,
        speculative=settings.speculative.tokens if settings.speculative else 0,
        retained=_retained(description, settings.speculative, rule),
        mode=mode,
        checkpoints=_checkpoints(description, settings, rule) if mode == "align" else 0,
        block=block,
        kernel=_kernel_block(settings, rule),
        capability=settings.compute_capability,
        eager=settings.enforce_eager or settings.device == "cpu",
    )


# --- one layer's cache --------------------------------------------------------------------------


def _draft_layers(
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


# --- need of one request ------------------------------------------------------------------------


def _need(spec: Spec, term: Terms, length: int) -> int:
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


def _held(spec: Spec, term: Terms, tokens: int) -> int:
    """Return the blocks one running request with ``tokens`` stored tokens holds at most."""
    if spec.kind == STATE:
        if term.mode == "align":
            return min(2, ceil_div(tokens, spec.block)) + term.speculative
        return _state_need(spec, term, tokens)
    if spec.kind == Span.FULL:
        return ceil_div(ceil_div(tokens, term.dcp), spec.block)
    if spec.kind == Span.CROSS:
        return _need(spec, term, tokens)
    return min(ceil_div(tokens, spec.block), _need(spec, term, tokens))


# --- groups -------------------------------------------------------------------------------------


def _can_pad(spec: Spec, term: Terms) -> bool:
    if term.rules.pads_everywhere:
        return not isinstance(spec.layer, Latent)
    return term.rules.pads_attention_pages and term.device == "cuda"


def _unify(specs: list[tuple[Spec, int]], term: Terms) -> list[tuple[Spec, int]]:
    """Give all pages one size: larger blocks where they divide, padding where they may."""
    largest = max(spec.page for spec, _ in specs)
    if not term.rules.unifies_pages and any(spec.page != largest for spec, _ in specs):
        raise BadInput(
            f"vLLM {term.rules.version.release}: layers with pages of different sizes cannot be "
            "served together before 0.12; the engine refuses this model"
        )
    unified = []
    for spec, count in specs:
        if spec.page == largest:
            unified.append((spec, count))
        elif spec.kind == STATE:
            unified.append((Spec(STATE, spec.block, largest, spec.layer), count))
        elif largest % spec.page == 0:
            block = spec.block * (largest // spec.page)
            unified.append((Spec(spec.kind, block, largest, spec.layer, spec.window), count))
        elif _can_pad(spec, term):
            unified.append((Spec(spec.kind, spec.block, largest, spec.layer, spec.window), count))
        else:
            raise BadInput(
                f"vLLM {term.rules.version.release}: a page of {spec.page} bytes does not divide "
                f"the largest page of {largest} bytes and cannot be padded; the engine refuses "
                "this model with these settings"
            )
    return unified


def _group_size(lengths: Sequence[int], growth_percent: int | None) -> int:
    smallest, largest = min(lengths), max(lengths)
    if growth_percent is not None and largest * 100 < smallest * growth_percent:
        return largest
    return smallest


def _same_type(specs: Sequence[tuple[Spec, int]]) -> bool:
    families = {spec.family for spec, _ in specs}
    blocks = {spec.block for spec, _ in specs}
    return len(families) == 1 and len(blocks) == 1


def _as_full(specs: list[tuple[Spec, int]], term: Terms) -> list[tuple[Spec, int]]:
    """Allocate sliding and chunked layers like full ones (unify_hybrid_kv_cache_specs)."""
    full = next((spec for spec, _ in specs if spec.kind == Span.FULL), None)
    if full is None or len(specs) == 1:
        return specs
    changed = []
    for spec, count in specs:
        if spec.kind == STATE:
            raise BadInput(
                "hybrid KV cache manager: disabled, but the model keeps states; vLLM refuses "
                "that, so leave it enabled"
            )
        if spec.kind in {Span.SLIDING, Span.CHUNKED}:
            assert isinstance(spec.layer, AttentionLayer)
            rule = term.rules
            drops = (
                rule.promoted_chunks_drop_packing
                if spec.kind == Span.CHUNKED
                else rule.promoted_sliding_drops_packing
            )
            cache = "auto" if drops else term.cache
            page = full.block * spec.layer.token_bytes(term.tp, cache, term.element)
            spec = Spec(str(Span.FULL), full.block, page, spec.layer, spec.window)
        changed.append((spec, count))
    if not _same_type(changed):
        raise BadInput(
            "hybrid KV cache manager: disabled, but the layers cannot be given one kind; vLLM "
            "refuses that, so leave it enabled"
        )
    return changed


def _stages(description: ModelDescription, pp: int, draft: Sequence[Layer]) -> list[list[Layer]]:
    """Return the caches on each pipeline stage (distributed/utils.py: get_pp_indices).

    What is left over goes one each to the stages before the last; drafts run on the last stage.
    """
    total = len(description.layers)
    sizes = [total // pp] * pp
    for index in range(2, total % pp + 2):
        sizes[-index] += 1
    stages, start = [], 0
    for size in sizes:
        caches = [cache for layer in description.layers[start : start + size] for cache in layer]
        stages.append(caches)
        start += size
    stages[-1].extend(draft)
    return stages


@dataclass(frozen=True, slots=True)
class _Table:
    """Specs that share block tables, ``groups`` times; ``stage_bytes`` per block and stage."""

    specs: tuple[Spec, ...]
    groups: int
    layers: int
    stage_bytes: tuple[int, ...]
    model_bytes: int


def _one_spec(specs: Sequence[tuple[Spec, int]]) -> bool:
    """Whether all layers share one spec; full ones may differ in the window they compute with."""
    if len(specs) == 1:
        return True
    first = specs[0][0]
    if any(spec.kind != Span.FULL or isinstance(spec.layer, Latent) for spec, _ in specs):
        return False
    windows = {spec.window for spec, _ in specs if spec.window is not None}

    def shape(spec: Spec) -> tuple[int, int, object]:
        layer = spec.layer
        assert isinstance(layer, Attention)
        return spec.block, spec.page, (layer.heads, layer.head_size, layer.head_size_v)

    return len(windows) <= 1 and all(shape(spec) == shape(first) for spec, _ in specs)


def _tables(
    specs: list[tuple[Spec, int]], placed: list[list[int]], term: Terms
) -> tuple[list[_Table], int]:
    """Group the layers; return the tables and the number of padding layers.

    ``placed`` holds for each spec the pipeline stage of each of its layers, in order.
    """
    stages = range(term.pp)
    if _one_spec(specs) or (term.rules.uniform_type_groups and _same_type(specs)):
        whole = sum(spec.page * count for spec, count in specs)
        stage_bytes = tuple(
            sum(spec.page * placed[i].count(stage) for i, (spec, _) in enumerate(specs))
            for stage in stages
        )
        if not _one_spec(specs) and not term.rules.projects_uniform_groups:
            stage_bytes = (whole,) * term.pp
        layers = sum(count for _, count in specs)
        return [_Table(tuple(spec for spec, _ in specs), 1, layers, stage_bytes, whole)], 0
    unified = _unify(specs, term)
    size = _group_size([count for _, count in unified], term.rules.group_growth_percent)
    tables, padding = [], 0
    for index, (spec, count) in enumerate(unified):
        groups = ceil_div(count, size)
        padding += groups * size - count
        if term.pp == 1:
            stage_bytes = (spec.page * size,)
        else:
            at = placed[index]
            stage_bytes = tuple(
                spec.page * max(at[first::groups].count(stage) for first in range(groups))
                for stage in stages
            )
        tables.append(_Table((spec,), groups, count, stage_bytes, spec.page * size))
    return tables, padding


def _specs(
    description: ModelDescription, settings: ServingSettings, draft: Sequence[Layer], term: Terms
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


def layout(description: ModelDescription, settings: ServingSettings) -> Layout:
    """Compute blocks, pages and groups of a model under given settings.

    Raises:
        BadInput: a setting is malformed, or vLLM cannot serve the model this way at all.
    """
    term = terms(description, settings)
    draft = _draft_layers(description, settings.speculative)
    by_layer, block, padding = _specs(description, settings, draft, term)
    counts = dict(description.counts)
    for layer in draft:
        counts[layer] = counts.get(layer, 0) + 1
    original = [(by_layer[layer], count) for layer, count in counts.items()]
    specs = original
    chunked = any(spec.kind == Span.CHUNKED for spec, _ in specs)
    if settings.disable_hybrid_kv_cache_manager or (
        chunked and not term.rules.chunked_layers_apart
    ):
        specs = _as_full(specs, term)
    if term.pp == 1:
        placed = [[0] * count for _, count in specs]
    else:
        order = {layer: index for index, layer in enumerate(counts)}
        placed = [[] for _ in specs]
        for stage, caches in enumerate(_stages(description, term.pp, draft)):
            for layer in caches:
                placed[order[layer]].append(stage)
    tables, padding_layers = _tables(specs, placed, term)
    if len(tables) == 1:
        stage_bytes = tables[0].stage_bytes
    else:
        stage_bytes = tuple(
            max(table.stage_bytes[stage] for table in tables) for stage in range(term.pp)
        )
    has_attention = not description.is_attention_free
    return Layout(
        terms=term,
        attention_block_size_tokens=block if has_attention else None,
        mamba_padding_percent=padding,
        bytes_per_block=max(stage_bytes),
        stage_bytes_per_block=stage_bytes,
        model_bytes_per_block=max(table.model_bytes for table in tables),
        tables=tuple(tables),
        padding_layers=padding_layers,
        blocks_per_request=_blocks(tables, term, term.length),
        layer_pages=tuple(
            (spec, tuple(placed[index].count(stage) for stage in range(term.pp)))
            for index, (spec, _) in enumerate(original)
        ),
        refusal=_combination(original if term.rules.check == "layers" else specs, term),
    )


def _combination(specs: Sequence[tuple[Spec, int]], term: Terms) -> Refusal | None:
    if term.dcp > 1 and any(spec.kind == Span.SLIDING for spec, _ in specs):
        return Refusal(
            RefusalType.UNSUPPORTED,
            "Decode context parallelism does not work with sliding-window layers: the engine "
            "asserts that its size is 1. Leave --decode-context-parallel-size at 1.",
        )
    return None


def _blocks(tables: Iterable[_Table], term: Terms, length: int) -> int:
    """Return the blocks one request of ``length`` tokens needs over all groups."""
    return sum(
        table.groups * max(_need(spec, term, length) for spec in table.specs) for table in tables
    )


def _held_blocks(tables: Iterable[_Table], term: Terms, tokens: int) -> int:
    return sum(
        table.groups * max(_held(spec, term, tokens) for spec in table.specs) for table in tables
    )


# --- prediction ---------------------------------------------------------------------------------


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
            spec.page * counts[stage] * _need(spec, term, length)
            for spec, counts in plan.layer_pages
        )
    if check == "all":
        return plan.stage_bytes_per_block[stage] * _blocks(plan.tables, term, length)
    first = plan.tables[0]
    blocks = max(_need(spec, term, length) for spec in first.specs)
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
    _positive("requests", requests)
    _positive("tokens_per_request", tokens_per_request)
    _positive("prompt_tokens", prompt_tokens)
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
    full = _held_blocks(plan.tables, term, tokens_per_request)
    running = min(slots, usable // full)
    admitted = admission = None
    if prompt_tokens is not None:
        admission = _held_blocks(plan.tables, term, prompt_tokens)
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
