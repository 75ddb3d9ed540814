"""How a model is served: the settings as given, and with every default filled in.

An option left out is vLLM's default for that version, device and model; filled in wrongly, it moves
a prediction as much as a wrong formula would.

Sources, vLLM 0.27.0: engine/arg_utils.py 2520-2640 (batch sizes, prefix caching),
model_executor/models/config.py 600-655 (prefix caching of hybrids), config/vllm.py 540-561 (tokens
in flight).
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.plan.layers import (
    PER_TOKEN_HEAD,
    AttentionLayer,
    GatedDelta,
    Mamba2,
    element_bytes,
)
from tasks.plan.model import ModelDescription
from tasks.plan.versions import EngineVersion, Rules, rules
from warehouse.errors import BadInput

#: vLLM's defaults for an API server on a card below 70 GiB (engine/arg_utils.py 2552-2561).
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQUENCES = {"cuda": 256, "cpu": 128}
#: Block size without --block-size: CacheConfig 16; the CPU platform 128; MLA backends 64.
DEFAULT_BLOCK = {"cuda": 16, "cpu": 128}
LATENT_BLOCK = 64
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


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BadInput(f"{name}: got {value}; wanted a positive integer")


def _check(settings: ServingSettings) -> None:
    if settings.device not in DEFAULT_BLOCK:
        raise BadInput(f"device: got {settings.device!r}; wanted cuda or cpu")
    check_positive("max_model_len", settings.max_model_len)
    check_positive("max_num_batched_tokens", settings.max_num_batched_tokens)
    check_positive("max_num_seqs", settings.max_num_seqs)
    check_positive("tensor_parallel", settings.tensor_parallel)
    check_positive("pipeline_parallel", settings.pipeline_parallel)
    check_positive("decode_context_parallel", settings.decode_context_parallel)
    check_positive("block_size", settings.block_size)
    if settings.mamba_cache_mode not in {None, "none", "align", "all"}:
        raise BadInput(
            f"mamba_cache_mode: got {settings.mamba_cache_mode!r}; wanted none, align or all"
        )


def _resolved(description: ModelDescription, name: str, rule: Rules) -> str:
    """Return the KV cache dtype; "auto" is the checkpoint's own scheme where a version takes it."""
    scheme = description.quantised_cache
    if name != "auto" or scheme is None:
        return name
    resolves = {
        ("modelopt", "fp8"): rule.resolves_modelopt_fp8,
        ("modelopt", "nvfp4"): rule.resolves_modelopt_nvfp4,
        ("compressed-tensors", "fp8"): rule.resolves_compressed_tensors,
    }
    return scheme[1] if resolves[scheme] else name


def _cache_dtype(
    description: ModelDescription, settings: ServingSettings, rule: Rules
) -> tuple[str, int]:
    """Return the KV cache dtype in force and the bytes of one element.

    Sparse latent attention turns fp8 into its own packed format (mla_attention.py 329-343).

    ``auto`` is the model's dtype, whatever the weights are quantised to. A checkpoint of float32
    is served in 16 bits unless --dtype says float32 (config/model.py: _resolve_auto_dtype).
    """
    name = _resolved(description, settings.kv_cache_dtype, rule)
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
    cache, element = _cache_dtype(description, settings, rule)
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
