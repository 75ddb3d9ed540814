"""Which rule of vLLM's memory arithmetic holds in which of its versions.

A prediction made with the rules of another version is wrong by up to a factor of two and looks
plausible. Every switch stands here once, with the first release that has it; it was read from
vLLM's own Python sources of these releases (0.9.0.1 to 0.33.0) and the file is named beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from warehouse.errors import BadInput

#: First and last release whose sources were read.
OLDEST = "0.9.0"
NEWEST = "0.33.0"

_VERSION = re.compile(
    r"^v?(?P<release>\d+(?:\.\d+)*)(?P<pre>(?:\.?(?:a|b|rc|dev)\d*)+)?(?:\.?post\d+)?"
    r"(?:\.dev\d+)?(?:\+.*)?$"
)


@dataclass(frozen=True, slots=True, order=True)
class EngineVersion:
    """A vLLM version, ordered: a pre-release comes before its release."""

    release: tuple[int, int, int]
    is_final: bool

    @classmethod
    def parse(cls, text: str) -> EngineVersion:
        """Read a version as vLLM prints it (``0.27.0``, ``0.20.1rc1.dev7+gabc``, ``0.27.0+cpu``).

        Raises:
            BadInput: the text is no version, or it is older than any release that was read.
        """
        match = _VERSION.match(text.strip())
        if match is None:
            raise BadInput(f"vLLM version {text!r}: not a version number; give one like 0.27.0")
        numbers = [int(part) for part in match["release"].split(".")][:3]
        numbers += [0] * (3 - len(numbers))
        version = cls((numbers[0], numbers[1], numbers[2]), match["pre"] is None)
        if version.release < (0, 9, 0):
            raise BadInput(
                f"vLLM version {text!r}: the rules of versions before {OLDEST} are not known; "
                f"give {OLDEST} to {NEWEST}"
            )
        return version


@dataclass(frozen=True, slots=True)
class Rules:
    """The switches of one vLLM version; every field says what is true in that version."""

    version: EngineVersion
    #: "GPU KV cache size" is int(concurrency x max_model_len), from 0.20.1; before, it is
    #: blocks // groups x smallest block (v1/core/kv_cache_utils.py: get_kv_cache_capacity).
    tokens_from_concurrency: bool
    #: Layers of one kind with different page sizes form one group, from 0.11
    #: (v1/kv_cache_interface.py: UniformTypeKVCacheSpecs).
    uniform_type_groups: bool
    #: The largest bucket gives the group size if it is smaller than this many hundredths of the
    #: smallest one: 125 from 0.12, 150 from 0.18; None: always the smallest
    #: (kv_cache_utils.py: _get_kv_cache_groups_uniform_page_size).
    group_growth_percent: int | None
    #: ``mamba_cache_mode`` none/align/all exists, from 0.15 (config/cache.py).
    state_cache_modes: bool
    #: Mode "all" counts speculative blocks, from 0.22 (kv_cache_interface.py: MambaSpec).
    all_mode_counts_speculation: bool
    #: Attention pages that do not divide the largest page are padded where the backend allows
    #: it, from 0.24 (kv_cache_utils.py: unify_kv_cache_spec_page_size).
    pads_attention_pages: bool
    #: Sliding and chunked needs count the tokens of all batches in flight, from 0.26
    #: (config/vllm.py: max_in_flight_tokens); before, one batch.
    counts_batches_in_flight: bool
    #: What the start-up check adds up (kv_cache_utils.py): "layers" as they are before grouping
    #: (before 0.14), the need of the "first" group of the model (0.14 to 0.16), that of the
    #: first group on each pipeline stage ("first of stage", 0.17, 0.18), "all" groups (0.19).
    check: str
    #: Layers of one kind with different pages are counted per pipeline stage, from 0.17; before,
    #: every stage paid for the pages of the whole model (_project_kv_cache_groups_to_worker).
    projects_uniform_groups: bool
    #: Hybrid models refuse max_num_seqs above the number of blocks when full CUDA graphs are
    #: captured, from 0.20 (config/compilation.py).
    refuses_sequences_above_blocks: bool
    #: Usage divides by N - 1 (the null block is not counted), from 0.10.2; before by N
    #: (v1/core/block_pool.py: get_usage).
    usage_excludes_null_block: bool
    #: Chunked-attention layers keep their own cache kind by default, from 0.14
    #: (envs.py: VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE); before, as full attention.
    chunked_layers_apart: bool
    #: Hybrid models cache prefixes by default (engine/arg_utils.py), from 0.28.
    hybrids_cache_prefixes: bool
    #: Prefix caching of states was possible at all, from 0.11.1; before, it was switched off
    #: (model_executor/models/config.py: MambaModelConfig).
    states_can_be_cached: bool
    #: Mode "all" is taken by default where the model supports it, before 0.28; from 0.28 "align".
    prefers_all_mode: bool
    #: Mode "all" exists, before 0.32 (config/cache.py: MambaCacheMode).
    has_all_mode: bool
    #: A hybrid's block is aligned to the block size in force, from 0.20
    #: (platforms/interface.py: _align_hybrid_block_size); before, to the kernel's block.
    aligns_to_block_size: bool
    #: A hybrid with latent attention is aligned to 128 tokens, from 0.27; before, to 64.
    latent_alignment_tokens: int
    #: On compute capability 10 and head size 256 a hybrid was aligned to 32 tokens, 0.11.1 to
    #: 0.19 (model_executor/models/config.py); later it is the backend's matter.
    aligns_wide_heads: bool
    #: How a sliding layer next to others gets its block: "block" is the block size in force,
    #: "kernel" the kernel's smallest (0.26 to 0.29), "fitting" the largest multiple of it within
    #: the block size (from 0.30) (layers/attention/attention.py: get_kv_cache_spec).
    sliding_block: str
    #: Pages of any attention but latent are padded, on every device, from 0.29; before, only
    #: where the backend reads pages by block stride (not on CPU).
    pads_everywhere: bool
    #: The start-up check keeps one block (the null block) back, from 0.29
    #: (kv_cache_utils.py; kv_cache_planning.py from 0.33).
    check_reserves_null_block: bool
    #: Several prediction modules keep that many more tokens below a sliding window, from 0.28
    #: (kv_cache_interface.py: extra_retained_tokens).
    retains_lookahead: bool
    #: Mamba2 layers (and GDN ones on FlashInfer) keep a checkpoint block in mode "align",
    #: from 0.33 (layers/mamba/mamba_mixer2.py: get_kv_cache_spec).
    keeps_prefill_checkpoint: bool
    #: Which models run on the second model runner (matters with pipeline parallelism only):
    #: "none", "dense" (0.26 to 0.28: neither hybrid nor MoE) or "all" (from 0.29), on CUDA.
    second_runner: str
    #: Sliding layers keep whole bytes under int4_per_token_head, 0.25 to 0.27
    #: (kv_cache_interface.py: SlidingWindowSpec.real_page_size_bytes).
    sliding_ignores_int4: bool
    #: Local layers allocated as full ones lose the packing of a quantised cache: sliding ones
    #: before 0.21, chunked ones before 0.28 (kv_cache_utils.py: _promote_local_kv_cache_specs).
    promoted_sliding_drops_packing: bool
    promoted_chunks_drop_packing: bool
    #: States whose convolution buffer grows by the speculative tokens, beside Gated DeltaNet:
    #: Mamba2 of Nemotron-H and Mamba2 itself from 0.17, of every model from 0.32, KDA from 0.27
    #: (layers/mamba/mamba_utils.py and the models' get_mamba_state_shape_from_config).
    mamba2_counts_speculation: bool
    every_mamba2_counts_speculation: bool
    kda_counts_speculation: bool
    #: Layers with different page sizes can be served together at all, from 0.12
    #: (kv_cache_utils.py: unify_kv_cache_spec_page_size).
    unifies_pages: bool
    #: Releases in which a checkpoint's own KV scheme makes "auto" quantised: modelopt's fp8 from
    #: 0.14, its nvfp4 from 0.20, compressed-tensors' from 0.17 (utils/torch_utils.py,
    #: layers/attention/attention.py).
    resolves_modelopt_fp8: bool
    resolves_modelopt_nvfp4: bool
    resolves_compressed_tensors: bool
    #: Cross attention reserves the encoder's own length, before 0.13 (config/vllm.py); from 0.13
    #: the encoder budget, which is max_num_batched_tokens (config/scheduler.py).
    reserves_encoder_length: bool


@lru_cache(maxsize=256)
def rules(text: str) -> Rules:
    """Return the rules of the vLLM version ``text``.

    Versions above the newest one read (:data:`NEWEST`) get its rules; the caller says so.

    Raises:
        BadInput: ``text`` is no version or too old.
    """
    version = EngineVersion.parse(text)

    def since(major: int, minor: int, patch: int = 0) -> bool:
        return version >= EngineVersion((major, minor, patch), True)

    growth = 150 if since(0, 18) else 125 if since(0, 12) else None
    return Rules(
        version=version,
        tokens_from_concurrency=since(0, 20, 1),
        uniform_type_groups=since(0, 11),
        group_growth_percent=growth,
        state_cache_modes=since(0, 15),
        all_mode_counts_speculation=since(0, 22),
        pads_attention_pages=since(0, 24),
        counts_batches_in_flight=since(0, 26),
        check=(
            "all"
            if since(0, 19)
            else "first of stage"
            if since(0, 17)
            else "first"
            if since(0, 14)
            else "layers"
        ),
        projects_uniform_groups=since(0, 17),
        refuses_sequences_above_blocks=since(0, 20),
        usage_excludes_null_block=since(0, 10, 2),
        chunked_layers_apart=since(0, 14),
        hybrids_cache_prefixes=since(0, 28),
        states_can_be_cached=since(0, 11, 1),
        prefers_all_mode=not since(0, 28),
        has_all_mode=not since(0, 32),
        aligns_to_block_size=since(0, 20),
        latent_alignment_tokens=128 if since(0, 27) else 64,
        aligns_wide_heads=since(0, 11, 1) and not since(0, 20),
        sliding_block="fitting" if since(0, 30) else "kernel" if since(0, 26) else "block",
        pads_everywhere=since(0, 29),
        check_reserves_null_block=since(0, 29),
        retains_lookahead=since(0, 28),
        keeps_prefill_checkpoint=since(0, 33),
        second_runner="all" if since(0, 29) else "dense" if since(0, 26) else "none",
        sliding_ignores_int4=since(0, 25) and not since(0, 28),
        promoted_sliding_drops_packing=not since(0, 21),
        promoted_chunks_drop_packing=not since(0, 28),
        mamba2_counts_speculation=since(0, 17),
        every_mamba2_counts_speculation=since(0, 32),
        kda_counts_speculation=since(0, 27),
        unifies_pages=since(0, 12),
        resolves_modelopt_fp8=since(0, 14),
        resolves_modelopt_nvfp4=since(0, 20),
        resolves_compressed_tensors=since(0, 17),
        reserves_encoder_length=not since(0, 13),
    )
