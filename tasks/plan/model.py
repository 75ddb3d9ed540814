"""From a Hugging Face ``config.json`` to what each layer keeps per request.

The sizes that decide about KV memory hide under different names in every architecture, and a
guess is silently wrong by a whole factor (a hybrid read as dense is four times too large). So
each architecture vLLM serves is named here with the reader that understands it, and one that is
not named is refused.

Sources: vLLM 0.27.0 transformers_utils/model_arch_config_convertor.py (heads, head sizes, MLA,
context limit), model_executor/models/* (which layer has which cache), engine/arg_utils.py
1935-1942 (a sliding window without layer types holds for all layers).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.plan.layers import (
    Attention,
    AttentionLayer,
    GatedDelta,
    KimiDelta,
    Latent,
    Layer,
    LinearAttention,
    Mamba1,
    Mamba2,
    ShortConv,
    Span,
)
from warehouse.errors import BadInput

#: Caches of one hidden layer: none (a pure MLP), one, or several (self and cross attention).
HiddenLayer = tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model keeps per request, independent of how it is served."""

    #: ``model_type`` of the config, as read.
    architecture: str
    #: ``model_type`` of the language part: the reader in :data:`READERS` that was used.
    language: str
    #: One entry a hidden layer, in order, with the caches it has.
    layers: tuple[HiddenLayer, ...]
    #: The distinct caches with how many layers have them, in order of first appearance.
    counts: tuple[tuple[Layer, int], ...]
    #: Hidden layers that pipeline parallelism divides.
    hidden_layers: int
    #: The checkpoint's dtype, None if the config does not say.
    dtype: str | None
    #: Longest context the config allows, in tokens; None if it does not say.
    max_model_len: int | None
    #: Some layers keep a state of fixed size (GDN, Mamba, ...) besides attention.
    is_hybrid: bool
    #: No layer has attention at all (pure Mamba).
    is_attention_free: bool
    #: Attention is multi-head latent attention.
    is_latent: bool
    #: Sparse attention with an indexer (DeepSeek-V3.2, GLM-5).
    is_sparse: bool
    #: Cross attention to an encoder (Whisper).
    is_encoder_decoder: bool
    #: dtype of the recurrent state by the config, None: the dtype of the convolution buffer.
    state_dtype: str | None
    #: Chunk of the state's kernel in tokens, for prefix caching in mode "all".
    state_chunk_tokens: int
    #: Releases in which the model caches prefixes in mode "all": [first, end) as text, or None.
    all_mode: tuple[str, str | None] | None
    #: Attention of one multi-token-prediction layer and how many the checkpoint has.
    draft_layer: HiddenLayer | None
    draft_layers: int
    #: The checkpoint has a vision (or audio) encoder beside the language model.
    has_vision: bool
    #: Experts of a mixture; 0 for a dense model.
    experts: int
    #: Who quantised the checkpoint's KV cache and to what ("modelopt", "fp8"); None: nobody.
    quantised_cache: tuple[str, str] | None
    #: Tokens of the encoder's output (Whisper: 1500); None without an encoder.
    encoder_tokens: int | None


#: Far above any model; a larger number is a slip and would be expanded layer by layer.
MAX_LAYERS = 10_000


class Fields:
    """Reads fields of a config and names the one that is missing or of the wrong type."""

    def __init__(
        self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.defaults = defaults or {}

    def get(self, *names: str) -> Any:
        """Return the first of ``names`` that is present and not null, else its default."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        for name in names:
            if name in self.defaults:
                return self.defaults[name]
        return None

    def whole(self, *names: str) -> int:
        """Return a positive integer field.

        Raises:
            BadInput: none of ``names`` is there, or it is not a positive integer.
        """
        value = self.maybe(*names)
        if value is None:
            raise BadInput(
                f"{self.where}: field {' or '.join(names)} is missing; "
                "give the model's complete config.json"
            )
        if value <= 0:
            raise BadInput(f"{self.where}: field {names[0]} is {value}; wanted a positive integer")
        return value

    def maybe(self, *names: str) -> int | None:
        """Return an integer field or None.

        Raises:
            BadInput: the field is there but no integer.
        """
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{self.where}: field {names[0]} is {value!r}; wanted an integer")
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts or None.

        Raises:
            BadInput: the field is there but no list of texts.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadInput(f"{self.where}: field {name} is {value!r}; wanted a list of texts")
        return value


def _head_size(fields: Fields) -> int:
    explicit = fields.maybe("head_dim", "hidden_size_per_head", "attention_head_dim")
    if explicit:
        return explicit
    return fields.whole("hidden_size", "d_model", "n_embd") // _heads(fields)


def _heads(fields: Fields) -> int:
    return fields.whole("num_attention_heads", "n_head", "decoder_attention_heads", "n_heads")


def _kv_heads(fields: Fields) -> int:
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    return fields.maybe(*names, "num_attention_groups") or _heads(fields)


def _hidden_layers(fields: Fields) -> int:
    count = fields.whole("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    if count > MAX_LAYERS:
        raise BadInput(f"{fields.where}: {count} hidden layers, wanted at most {MAX_LAYERS}")
    return count


def _full(fields: Fields) -> Attention:
    size = _head_size(fields)
    return Attention(_kv_heads(fields), size, size)


def _windowed(fields: Fields, span: Span, window: int) -> Attention:
    return replace(_full(fields), span=span, window=window)


def _all_or_window(fields: Fields) -> list[HiddenLayer]:
    """Full attention in every layer, or a sliding window where the config has one.

    ``layer_types`` decides if it is there; a window without layer types holds for all layers
    unless ``use_sliding_window`` says no.
    """
    count = _hidden_layers(fields)
    types = fields.texts("layer_types")
    if types is not None:
        return _by_type(fields, types, count)
    window = fields.maybe("sliding_window")
    if not window or fields.get("use_sliding_window") is False:
        return [(_full(fields),)] * count
    if fields.get("use_sliding_window"):
        first = fields.maybe("max_window_layers")
        if first is not None and first < count:
            raise BadInput(
                f"{fields.where}: use_sliding_window with max_window_layers {first} below "
                f"num_hidden_layers {count} is refused by vLLM; set use_sliding_window to false"
            )
        if first is not None:
            return [(_full(fields),)] * count
    return [(_windowed(fields, Span.SLIDING, window),)] * count


def _by_type(fields: Fields, types: list[str], count: int) -> list[HiddenLayer]:
    if len(types) < count:
        raise BadInput(
            f"{fields.where}: layer_types has {len(types)} entries; wanted {count}, "
            "one a hidden layer"
        )
    full = (_full(fields),)
    layers: list[HiddenLayer] = []
    for kind in types[:count]:
        if kind in {"full_attention", "attention"}:
            layers.append(full)
        elif kind == "sliding_attention":
            layers.append((_windowed(fields, Span.SLIDING, fields.whole("sliding_window")),))
        elif kind == "chunked_attention":
            chunk = fields.whole("attention_chunk_size")
            layers.append((_windowed(fields, Span.CHUNKED, chunk),))
        else:
            raise BadInput(
                f"{fields.where}: layer_types has {kind!r}, which is not known for this "
                "architecture"
            )
    return layers


def _dense(fields: Fields) -> list[HiddenLayer]:
    return _all_or_window(fields)


def _full_only(fields: Fields) -> list[HiddenLayer]:
    return [(_full(fields),)] * _hidden_layers(fields)


def _pattern(period: int, *, full_at: int) -> Callable[[Fields], list[HiddenLayer]]:
    """Sliding windows with full attention at index ``full_at`` of every ``period`` layers."""

    def read(fields: Fields) -> list[HiddenLayer]:
        count = _hidden_layers(fields)
        types = fields.texts("layer_types")
        if types is not None:
            return _by_type(fields, types, count)
        window = fields.maybe("sliding_window")
        if not window:
            return [(_full(fields),)] * count
        step = fields.maybe("sliding_window_pattern", "_sliding_window_pattern") or period
        at = step - 1 if full_at < 0 else full_at
        full, sliding = (_full(fields),), (_windowed(fields, Span.SLIDING, window),)
        return [full if index % step == at else sliding for index in range(count)]

    return read


def _gemma4(fields: Fields) -> list[HiddenLayer]:
    """Full layers have their own head count and size; shared layers have no cache of their own."""
    count = _hidden_layers(fields)
    types = fields.texts("layer_types")
    if types is None:
        types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)]
    size = fields.maybe("global_head_dim") or _head_size(fields)
    heads = _kv_heads(fields)
    if fields.get("attention_k_eq_v"):
        heads = fields.maybe("num_global_key_value_heads") or heads
    layers = [
        (Attention(heads, size, size),) if types[index] == "full_attention" else caches
        for index, caches in enumerate(_by_type(fields, types, count))
    ]
    return _without_shared(fields, layers)


def _without_shared(fields: Fields, layers: list[HiddenLayer]) -> list[HiddenLayer]:
    shared = fields.maybe("num_kv_shared_layers") or 0
    return [caches if i < len(layers) - shared else () for i, caches in enumerate(layers)]


def _gemma3n(fields: Fields) -> list[HiddenLayer]:
    return _without_shared(fields, _pattern(5, full_at=-1)(fields))


def _llama4(fields: Fields) -> list[HiddenLayer]:
    """Chunked attention where rotary embedding is used, full attention in the other layers.

    ``no_rope_layers`` holds 1 for layers WITH rotary embedding (model_executor/models/llama4.py).
    """
    count = _hidden_layers(fields)
    chunk = fields.maybe("attention_chunk_size")
    rope = fields.get("no_rope_layers")
    if not isinstance(rope, list) or not rope:
        step = fields.maybe("no_rope_layer_interval") or 4
        rope = [int((index + 1) % step != 0) for index in range(count)]
    full = (_full(fields),)
    if not chunk:
        return [full] * count
    chunked = (_windowed(fields, Span.CHUNKED, chunk),)
    return [chunked if rope[index] else full for index in range(count)]


def _latent(fields: Fields) -> HiddenLayer:
    size = fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim")
    if fields.maybe("index_topk") is None:
        return (Latent(size),)
    # One byte an element and one float32 scale for each 128 of them (deepseek_v2.py: Indexer).
    head = fields.maybe("index_head_dim") or 128
    return (Latent(size), Latent(head + head // 128 * 4, indexer=True))


def _mla(fields: Fields) -> list[HiddenLayer]:
    if fields.get("compress_ratios") is not None:
        raise BadInput(
            f"{fields.where}: compressed latent attention (compress_ratios, DeepSeek-V4) is not "
            "supported; its packed layout was not checked against any log"
        )
    if fields.maybe("kv_lora_rank") is None:
        return _dense(fields)
    return [_latent(fields)] * _hidden_layers(fields)


def _gdn_layer(fields: Fields) -> GatedDelta:
    return GatedDelta(
        key_heads=fields.whole("linear_num_key_heads"),
        value_heads=fields.whole("linear_num_value_heads"),
        key_size=fields.whole("linear_key_head_dim"),
        value_size=fields.whole("linear_value_head_dim"),
        conv_kernel=fields.whole("linear_conv_kernel_dim"),
    )


def _gdn(fields: Fields) -> list[HiddenLayer]:
    count = _hidden_layers(fields)
    types = fields.texts("layer_types")
    if types is None:
        step = fields.maybe("full_attention_interval") or 4
        types = [
            "full_attention" if (index + 1) % step == 0 else "linear_attention"
            for index in range(count)
        ]
    return _mixed(fields, types, {"linear_attention": (_gdn_layer(fields),)})


def _mixed(
    fields: Fields, types: list[str], states: Mapping[str, HiddenLayer]
) -> list[HiddenLayer]:
    full = (_full(fields),)
    known: dict[str, HiddenLayer] = {"full_attention": full, "attention": full, **states}
    layers: list[HiddenLayer] = []
    for kind in types[: _hidden_layers(fields)]:
        if kind not in known:
            raise BadInput(
                f"{fields.where}: layer type {kind!r} is not known for this architecture; "
                f"known are {', '.join(sorted(known))}"
            )
        layers.append(known[kind])
    return layers


def _nemotron_h(fields: Fields) -> list[HiddenLayer]:
    """One letter a layer: M is Mamba2, * is attention, - and E have no cache."""
    state = Mamba2(
        inner=fields.whole("mamba_num_heads") * fields.whole("mamba_head_dim"),
        groups=fields.whole("n_groups"),
        heads=fields.whole("mamba_num_heads"),
        head_size=fields.whole("mamba_head_dim"),
        state_size=fields.whole("ssm_state_size"),
        conv_kernel=fields.whole("conv_kernel"),
    )
    letters: dict[str, HiddenLayer] = {"M": (state,), "*": (_full(fields),), "-": (), "E": ()}
    words = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        names = fields.texts("layers_block_type") or fields.texts("layer_types") or []
        pattern = "".join(words.get(name, "?") for name in names)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(letters):
        raise BadInput(
            f"{fields.where}: hybrid_override_pattern is {pattern!r}; wanted letters of M * - E"
        )
    return [letters[letter] for letter in pattern]


def _mamba2_like(fields: Fields, *, expand: int | None = None) -> Mamba2:
    """Mamba2 with the ``mamba_*`` names of Bamba, GraniteMoeHybrid and FalconH1."""
    hidden = fields.whole("hidden_size")
    inner = fields.maybe("mamba_d_ssm", "mamba_intermediate")
    if inner is None:
        inner = (expand or fields.maybe("mamba_expand") or 2) * hidden
    heads = fields.whole("mamba_n_heads")
    size = fields.get("mamba_d_head")
    return Mamba2(
        inner=inner,
        groups=fields.whole("mamba_n_groups"),
        heads=heads,
        head_size=size if isinstance(size, int) else inner // heads,
        state_size=fields.whole("mamba_d_state"),
        conv_kernel=fields.whole("mamba_d_conv"),
    )


def _bamba(fields: Fields) -> list[HiddenLayer]:
    count = _hidden_layers(fields)
    types = fields.texts("layers_block_type") or fields.texts("layer_types")
    if types is None:
        raw = fields.get("attn_layer_indices")
        at = set(raw) if isinstance(raw, list) else set()
        types = ["attention" if index in at else "mamba" for index in range(count)]
    return _mixed(fields, types, {"mamba": (_mamba2_like(fields),)})


def _falcon_h1(fields: Fields) -> list[HiddenLayer]:
    """Every layer has both: a state and full attention."""
    return [(_mamba2_like(fields), _full(fields))] * _hidden_layers(fields)


def _zamba2(fields: Fields) -> list[HiddenLayer]:
    """Mamba2 in every layer; hybrid ones also run a shared attention block."""
    hidden = fields.whole("hidden_size")
    inner = (fields.maybe("mamba_expand") or 2) * hidden
    heads = fields.whole("n_mamba_heads")
    state = Mamba2(
        inner=inner,
        groups=fields.maybe("mamba_ngroups") or 1,
        heads=heads,
        head_size=fields.maybe("mamba_headdim") or inner // heads,
        state_size=fields.whole("mamba_d_state"),
        conv_kernel=fields.whole("mamba_d_conv"),
    )
    types = fields.texts("layers_block_type")
    if types is None:
        raise BadInput(f"{fields.where}: field layers_block_type is missing; wanted one a layer")
    size = fields.maybe("attention_head_dim") or 2 * hidden // _heads(fields)
    attention = Attention(_kv_heads(fields), size, size)
    return [(state, attention) if kind == "hybrid" else (state,) for kind in types]


def _mamba1_layer(fields: Fields) -> Mamba1:
    inner = fields.maybe("intermediate_size", "d_inner") if _is_pure(fields) else None
    if inner is None:
        inner = (fields.maybe("mamba_expand", "expand") or 2) * fields.whole(
            "hidden_size", "d_model"
        )
    return Mamba1(
        inner=inner,
        state_size=fields.whole("mamba_d_state", "state_size", "d_state"),
        conv_kernel=fields.maybe("mamba_d_conv", "conv_kernel", "d_conv") or 4,
    )


def _is_pure(fields: Fields) -> bool:
    return fields.get("mamba_d_state") is None


def _mamba1(fields: Fields) -> list[HiddenLayer]:
    return [(_mamba1_layer(fields),)] * _hidden_layers(fields)


def _mamba2(fields: Fields) -> list[HiddenLayer]:
    inner = (fields.maybe("expand") or 2) * fields.whole("hidden_size")
    state = Mamba2(
        inner=inner,
        groups=fields.maybe("n_groups") or 1,
        heads=fields.whole("num_heads"),
        head_size=fields.whole("head_dim"),
        state_size=fields.whole("state_size"),
        conv_kernel=fields.whole("conv_kernel"),
    )
    return [(state,)] * _hidden_layers(fields)


def _jamba(fields: Fields) -> list[HiddenLayer]:
    period, offset = fields.whole("attn_layer_period"), fields.maybe("attn_layer_offset") or 0
    types = [
        "attention" if index % period == offset else "mamba"
        for index in range(_hidden_layers(fields))
    ]
    return _mixed(fields, types, {"mamba": (_mamba1_layer(fields),)})


def _lfm2(fields: Fields) -> list[HiddenLayer]:
    width = fields.maybe("conv_dim") or fields.whole("hidden_size")
    state = ShortConv(width=width, conv_kernel=fields.whole("conv_L_cache"))
    types = fields.texts("layer_types")
    if types is None:
        raw = fields.get("full_attn_idxs")
        at = set(raw) if isinstance(raw, list) else set()
        count = _hidden_layers(fields)
        types = ["full_attention" if index in at else "conv" for index in range(count)]
    return _mixed(fields, types, {"conv": (state,)})


def _kimi_linear(fields: Fields) -> list[HiddenLayer]:
    linear = fields.get("linear_attn_config")
    if not isinstance(linear, dict):
        return _mla(fields)
    inner = Fields(linear, f"{fields.where}: linear_attn_config")
    state = KimiDelta(
        heads=inner.whole("num_heads"),
        head_size=inner.whole("head_dim"),
        conv_kernel=inner.whole("short_conv_kernel_size"),
    )
    at = linear.get("kda_layers") or []  # counted from 1 (configs/kimi_linear.py: is_kda_layer)
    latent = _latent(fields)
    return [(state,) if index + 1 in at else latent for index in range(_hidden_layers(fields))]


def _minimax(fields: Fields) -> list[HiddenLayer]:
    raw = fields.get("attn_type_list")
    if not isinstance(raw, list):
        return _dense(fields)
    state = LinearAttention(heads=_heads(fields), head_size=_head_size(fields))
    return [(_full(fields),) if kind else (state,) for kind in raw]


def _whisper(fields: Fields) -> list[HiddenLayer]:
    heads = fields.whole("decoder_attention_heads")
    size = fields.whole("d_model") // heads
    own = Attention(heads, size, size)
    return [(own, replace(own, span=Span.CROSS))] * fields.whole("decoder_layers")


Reader = Callable[[Fields], list[HiddenLayer]]


def _names(reader: Reader, names: str) -> dict[str, Reader]:
    return dict.fromkeys(names.split(), reader)


#: Every architecture that is known, by ``model_type`` of the language part.
READERS: dict[str, Reader] = {
    **_names(
        _dense,
        "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl "
        "qwen2_5_vl_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text starcoder2 olmo3 "
        "qwen2_5_omni_text qwen3_omni_moe_text "
        "ministral ministral3 phi3 apertus seed_oss smollm3 exaone4 arcee",
    ),
    **_names(
        _full_only,
        "gemma granite granitemoe granitemoeshared olmo olmo2 olmoe internlm2 internlm3 glm glm4 "
        "glm4_moe glm4v glm4v_text glm4v_moe glm4v_moe_text stablelm phi phimoe cohere nemotron "
        "ernie4_5 ernie4_5_moe dots1 hunyuan_v1_dense hunyuan_v1_moe gpt2 gpt_neox gptj opt bloom "
        "baichuan chatglm minicpm mimo bailing_moe jais exaone gpt_bigcode deepseek minimax_m2 "
        "aquila orion qwen solar hyperclovax grok-1",
    ),
    **_names(_pattern(6, full_at=-1), "gemma3 gemma3_text"),
    **_names(_pattern(2, full_at=1), "gemma2 gpt_oss"),
    **_names(_pattern(4, full_at=-1), "cohere2"),
    **_names(_gemma3n, "gemma3n gemma3n_text"),
    **_names(_gemma4, "gemma4 gemma4_text"),
    **_names(_llama4, "llama4 llama4_text"),
    **_names(
        _mla,
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa glm4_moe_lite longcat_flash "
        "pangu_ultra_moe",
    ),
    **_names(_gdn, "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text"),
    **_names(_nemotron_h, "nemotron_h"),
    **_names(_bamba, "bamba granitemoehybrid"),
    **_names(_falcon_h1, "falcon_h1"),
    **_names(_zamba2, "zamba2"),
    **_names(_jamba, "jamba"),
    **_names(_mamba1, "mamba falcon_mamba"),
    **_names(_mamba2, "mamba2"),
    **_names(_lfm2, "lfm2 lfm2_moe"),
    **_names(_kimi_linear, "kimi_linear"),
    **_names(_minimax, "minimax_text_01 minimax_m1"),
    **_names(_whisper, "whisper"),
}

#: Values that a class of transformers fills in when a config leaves them out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "gemma2": {"head_dim": 256},
    "gemma": {"head_dim": 256},
}

#: Keys under which a multimodal config keeps its language part.
_TEXT_KEYS = ("text_config", "llm_config", "language_config")

#: Names of the longest context (model_arch_config_convertor.py: derive_max_model_len_and_key).
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

#: Releases whose model class can cache prefixes in mode "all" (SupportsMambaPrefixCaching).
#: Counted to 0.31: 0.32 knows no mode "all" any more.
_ALL_MODE: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(
        ("falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2"),
        ("0.11.1", None),
    ),
    "bamba": ("0.11.1", "0.24.0"),
}


def _language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):
        return _language_part(thinker)[0], True
    for key in _TEXT_KEYS:
        part = config.get(key)
        if isinstance(part, dict):
            return part, True
    return config, False


def _reader(architecture: str | None, wrapper: str | None, where: str) -> tuple[str, Reader]:
    for name in (architecture, wrapper):
        if name is not None and name in READERS:
            return name, READERS[name]
    name = architecture or wrapper
    raise BadInput(
        f"{where}: architecture {name!r} is not known, and a guess would be wrong without notice; "
        f"known are {', '.join(sorted(READERS))}"
    )


def _max_model_len(text: Mapping[str, Any], fields: Fields) -> int | None:
    lengths = [value for key in _LENGTH_KEYS if isinstance(value := text.get(key), int)]
    explicit = text.get("model_max_length")
    if isinstance(explicit, int):
        return explicit
    if lengths:
        return min(lengths)
    return fields.maybe("max_position_embeddings")


def _draft(
    fields: Fields, architecture: str, layers: list[HiddenLayer]
) -> tuple[HiddenLayer | None, int]:
    """Attention of one multi-token-prediction layer and how many the checkpoint has."""
    count = fields.maybe("mtp_num_hidden_layers", "num_nextn_predict_layers") or 0
    if architecture == "qwen3_next" and count == 0:
        count = 1  # qwen3_next_mtp.py: getattr(config, "num_nextn_predict_layers", 1)
    for caches in layers:
        attention = tuple(c for c in caches if isinstance(c, AttentionLayer))
        if attention and all(c.span is Span.FULL for c in attention):
            return attention, count
    return None, count


def _quantised_cache(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a quantised checkpoint says about its KV cache.

    Sources: vLLM 0.27.0 utils/torch_utils.py 310-392 (modelopt), layers/attention/attention.py
    284-290 (compressed-tensors).
    """
    stated = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(stated, dict):
        return None
    method = str(stated.get("quant_method", ""))
    if method == "compressed-tensors" and stated.get("kv_cache_scheme") is not None:
        return "compressed-tensors", "fp8"
    if not method.startswith("modelopt"):
        return None
    inner = stated.get("quantization")
    inner = inner if isinstance(inner, dict) else stated
    scheme = inner.get("kv_cache_scheme") or stated.get("kv_cache_scheme")
    scheme = scheme or inner.get("kv_cache_quant_algo") or stated.get("kv_cache_quant_algo")
    if isinstance(scheme, dict) and scheme.get("type") == "float":
        if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
            scheme = "fp8"
        elif scheme.get("num_bits") == 4:
            scheme = "nvfp4"
    if isinstance(scheme, str) and scheme.lower() in {"fp8", "nvfp4"}:
        return "modelopt", scheme.lower()
    return None


def describe(config: Mapping[str, Any], *, where: str = "config.json") -> ModelDescription:
    """Return what the model of a Hugging Face ``config.json`` keeps per request.

    ``where`` names the config in messages.

    Raises:
        BadInput: the architecture is not known, or a field it needs is missing or malformed.
    """
    text, nested = _language_part(config)
    wrapper = config.get("model_type")
    inner = text.get("model_type")
    name, reader = _reader(inner, wrapper if nested or inner is None else None, where)
    fields = Fields(text, where, DEFAULTS.get(name))
    layers = reader(fields)
    counts: dict[Layer, int] = {}
    for caches in layers:
        for cache in caches:
            counts[cache] = counts.get(cache, 0) + 1
    if not counts:
        raise BadInput(f"{where}: no layer of {name} keeps anything; the config is incomplete")
    attention = [cache for cache in counts if isinstance(cache, AttentionLayer)]
    draft, drafts = _draft(fields, name, layers)
    state_dtype = fields.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if state_dtype is None and name == "nemotron_h":
        state_dtype = "float32"  # config.py: NemotronHForCausalLMConfig
    dtype = text.get("dtype") or text.get("torch_dtype")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    return ModelDescription(
        architecture=str(wrapper or name),
        language=name,
        layers=tuple(layers),
        counts=tuple(counts.items()),
        hidden_layers=len(layers),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        max_model_len=_max_model_len(text, fields),
        is_hybrid=bool(attention) and len(attention) < len(counts),
        is_attention_free=not attention,
        is_latent=any(isinstance(cache, Latent) for cache in attention),
        is_sparse=any(isinstance(cache, Latent) and cache.indexer for cache in attention),
        is_encoder_decoder=any(cache.span is Span.CROSS for cache in attention),
        state_dtype=state_dtype,
        state_chunk_tokens=fields.maybe("mamba_chunk_size", "chunk_size") or 2048,
        all_mode=_ALL_MODE.get(name),
        draft_layer=draft,
        draft_layers=drafts,
        has_vision=any(key in config for key in ("vision_config", "visual", "audio_config")),
        experts=fields.maybe("num_experts", "n_routed_experts", "num_local_experts") or 0,
        quantised_cache=_quantised_cache(config, text),
        encoder_tokens=fields.maybe("max_source_positions"),
    )


def load(path: Path) -> dict[str, Any]:
    """Read a ``config.json`` (or a model folder that holds one).

    Raises:
        BadInput: there is no such file, or it holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}); give a config.json") from error
    except ValueError as error:
        raise BadInput(f"{file}: is not JSON ({error}); give a model's config.json") from error
    if not isinstance(value, dict):
        raise BadInput(f"{file}: holds {type(value).__name__}; wanted a JSON object")
    return value
