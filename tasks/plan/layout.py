"""Groups of layers that share block tables, and the bytes of one block.

vLLM gives all layers of a model pages of one size and deals the layers into groups of equal
length; a request then takes whole blocks from each group's table. Everything here is independent
of how much memory there is.

Sources, vLLM 0.27.0: v1/core/kv_cache_utils.py 1070 (pages), 1140-1290 and 1781 (groups), 1510
(local layers as full ones), 2063 (pipeline stages); distributed/utils.py (get_pp_indices).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.plan.layers import Attention, AttentionLayer, Latent, Layer, Span, ceil_div
from tasks.plan.model import ModelDescription
from tasks.plan.settings import ServingSettings, Terms, terms
from tasks.plan.specs import STATE, Spec, draft_layers, held, layer_specs, need
from warehouse.errors import BadInput


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
class Table:
    """Specs that share block tables, ``groups`` times; ``stage_bytes`` per block and stage."""

    specs: tuple[Spec, ...]
    groups: int
    layers: int
    stage_bytes: tuple[int, ...]
    model_bytes: int


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
    tables: tuple[Table, ...]
    padding_layers: int
    blocks_per_request: int
    #: The same for the whole model, as if it were on one stage.
    model_bytes_per_block: int
    #: Every spec before pages are unified, with its layers on each pipeline stage.
    layer_pages: tuple[tuple[Spec, tuple[int, ...]], ...]
    refusal: Refusal | None


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
) -> tuple[list[Table], int]:
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
        return [Table(tuple(spec for spec, _ in specs), 1, layers, stage_bytes, whole)], 0
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
        tables.append(Table((spec,), groups, count, stage_bytes, spec.page * size))
    return tables, padding


def layout(description: ModelDescription, settings: ServingSettings) -> Layout:
    """Compute blocks, pages and groups of a model under given settings.

    Raises:
        BadInput: a setting is malformed, or vLLM cannot serve the model this way at all.
    """
    term = terms(description, settings)
    draft = draft_layers(description, settings.speculative)
    by_layer, block, padding = layer_specs(description, settings, draft, term)
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
        blocks_per_request=needed_blocks(tables, term, term.length),
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


def needed_blocks(tables: Iterable[Table], term: Terms, length: int) -> int:
    """Return the blocks one request of ``length`` tokens needs over all groups."""
    return sum(
        table.groups * max(need(spec, term, length) for spec in table.specs) for table in tables
    )


def held_blocks(tables: Iterable[Table], term: Terms, tokens: int) -> int:
    return sum(
        table.groups * max(held(spec, term, tokens) for spec in table.specs) for table in tables
    )
