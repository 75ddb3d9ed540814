"""Figures that others published about a sweep's cells, and what arithmetic says of them.

A printed figure stands for every value that rounds to it. From the memory a document prints as left
for the KV cache the block counts follow that it allows, and from these every other figure of the
cell; so a document can be checked before anything runs, and a run beside both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from tasks.plan import capacity, weights
from tasks.plan.calibration import GIB
from tasks.plan.capacity import Capacity, Layout
from tasks.plan.cell import LoadPoint, PositiveInt, ServerSettings, Setting, Strict
from tasks.plan.layers import Attention, element_bytes
from tasks.plan.model import ModelDescription, describe
from tasks.plan.plan import PlannedCell, Surroundings
from tasks.plan.pool import weights_of
from tasks.plan.prediction import TEMPLATE_TOKENS, serving
from tasks.plan.sweep import NAME, first_problem, parse_yaml
from warehouse.errors import BadInput
from warehouse.registry import LOAD_POINT, STARTUP, Metric, Outcome

#: Quantities that documents print and the registry does not hold, because a run does not measure
#: them as one number.
FURTHER: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("kv_pool_bytes", "bytes", "allocated KV pool: blocks times bytes of a block"),
        Metric("bytes_per_token", "bytes", "keys and values of one token over all layers"),
        Metric("checkpoint_bytes", "bytes", "tensors of the stored checkpoint"),
        Metric("gpu_used_after_start_bytes", "bytes", "device memory in use by a ready server"),
        Metric("oom_total_bytes", "bytes", "the device's memory, by the out-of-memory message"),
        Metric("oom_tried_bytes", "bytes", "allocation that failed, by the same message"),
        Metric("oom_free_bytes", "bytes", "memory that was free then, by the same message"),
        Metric("requests_bytes", "bytes", "KV memory of all requests at full length", "load_point"),
        Metric(
            "weights_and_requests_bytes",
            "bytes",
            "stored tensors and the KV memory of all requests",
            "load_point",
        ),
    )
}
METRICS: dict[str, Metric] = {**STARTUP, **LOAD_POINT, **FURTHER}

#: Metrics that follow from model and settings alone, whatever the size of the pool and the GPU.
POOL_FREE = frozenset(
    {
        "attention_block_size_tokens",
        "mamba_padding_percent",
        "bytes_per_block",
        "bytes_per_token",
        "blocks_per_request",
        "checkpoint_bytes",
        "max_model_len_tokens",
        "requested_kv_cache_bytes",
        "requests_bytes",
        "weights_and_requests_bytes",
    }
)
#: Block count for figures that do not depend on it; vLLM itself needs at least two.
_ANY_BLOCKS = 1_000_000

_PRINTED = re.compile(r"(?P<number>\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z%]*)")
#: Printed unit -> (unit of the registry, factor).
_UNITS: dict[str, tuple[str, Fraction]] = {
    "bytes": ("bytes", Fraction(1)),
    "KiB": ("bytes", Fraction(2**10)),
    "MiB": ("bytes", Fraction(2**20)),
    "GiB": ("bytes", Fraction(GIB)),
    "GB": ("bytes", Fraction(10**9)),
    "tokens": ("tokens", Fraction(1)),
    "requests": ("requests", Fraction(1)),
    "blocks": ("blocks", Fraction(1)),
    "x": ("x", Fraction(1)),
    "s": ("s", Fraction(1)),
    "": ("ratio", Fraction(1)),
}
#: Whole numbers in these units are counts, not roundings.
_COUNTED = frozenset({"bytes", "tokens", "requests", "blocks"})


@dataclass(frozen=True, slots=True)
class Span:
    """A number that is known to lie from ``low`` to ``high``, both included."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within it; floats of arithmetic may miss an end by a hair."""
        hair = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - hair <= value <= self.high + hair

    def meets(self, other: Span) -> bool:
        """Whether both can be the same number."""
        return self.holds(other.low) or self.holds(other.high) or other.holds(self.low)


def read_printed(text: str, unit: str) -> Span:
    """Return what a printed number stands for, in ``unit`` of the registry.

    Raises:
        ValueError: it is no number, or of another unit.
    """
    match = _PRINTED.fullmatch(text)
    if match is None:
        raise ValueError(f"printed: got {text!r}, wanted a number with its unit, as '8.88 GiB'")
    told = match["unit"]
    if told == "%":
        kind, factor = unit, Fraction(1, 100) if unit == "ratio" else Fraction(1)
        known = unit in ("ratio", "percent")
    else:
        kind, factor = _UNITS.get(told, ("", Fraction(1)))
        known = kind == unit
    if not known:
        raise ValueError(f"printed: got {text!r}, wanted a figure in {unit}")
    number = match["number"].replace(",", "")
    decimals = len(number.partition(".")[2])
    half = Fraction(0) if told in _COUNTED and not decimals else Fraction(1, 2 * 10**decimals)
    value = Fraction(number)
    low, high = (value - half) * factor, (value + half) * factor
    return Span(float(value * factor), float(low), float(high))


class Point(Strict):
    """Which load point of a cell a figure is about."""

    prompt_tokens: PositiveInt
    parallel: PositiveInt


class Figure(Strict):
    """One number as a document prints it."""

    metric: str = Field(description="name of the registry, or of FURTHER")
    printed: str = Field(description="number and unit as printed")
    point: Point | None = Field(None, description="load point; none: of the server start")
    about: bool = Field(False, description="the document calls it approximate or varying")
    proof: Literal["arithmetic", "measurement"] = Field(
        description="arithmetic: recomputed by a test; measurement: seen by the author only"
    )
    document: str = Field(description="key of the file's documents")
    section: str = Field(description="where in the document")

    @model_validator(mode="after")
    def _is_a_number_of_its_metric(self) -> Figure:
        metric = METRICS.get(self.metric)
        if metric is None:
            raise ValueError(f"metric: {self.metric!r} is not known, wanted one of the registry")
        if (metric.scope == "load_point") != (self.point is not None):
            raise ValueError(f"{self.metric} is of a {metric.scope}; state point or leave it out")
        read_printed(self.printed, metric.unit)
        return self

    @property
    def unit(self) -> str:
        """The registry's unit; :attr:`span` is in it."""
        return METRICS[self.metric].unit

    @property
    def span(self) -> Span:
        """What the printed number stands for."""
        return read_printed(self.printed, self.unit)


class PublishedCell(Strict):
    """What documents print about one cell."""

    cell: str = Field(description="the cell's label")
    outcome: Outcome | None = Field(None, description="how the documents say that it ends")
    figures: tuple[Figure, ...] = ()


class Published(Strict):
    """What documents print about one sweep's cells."""

    sweep: str = Field(pattern=NAME)
    gpu: str | None = Field(description="GPU of the catalogue; none: nothing was measured")
    engine_version: str = Field(description="vLLM's version")
    documents: dict[str, str] = Field(description="short name -> title, author, set-up, date")
    cells: tuple[PublishedCell, ...]

    @model_validator(mode="after")
    def _documents_are_named(self) -> Published:
        for cell in self.cells:
            for figure in cell.figures:
                if figure.document not in self.documents:
                    raise ValueError(
                        f"cell {cell.cell}: document {figure.document!r} is not among documents"
                    )
        return self


class Gathered(Strict):
    """A sweep without figures of its own: a cell has those of its equal in other sweeps."""

    sweep: str = Field(pattern=NAME)
    of: tuple[str, ...] = Field(min_length=1, description="sweeps with published figures")


def parse(text: str, *, where: str) -> Published | Gathered:
    """Read a file of published figures; raises :class:`BadInput` in one line."""
    document = parse_yaml(text, where=where)
    kind = Gathered if isinstance(document, dict) and "of" in document else Published
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_problem(error)}") from error


def gather(sweep: str, wanted: Sequence[PlannedCell], given: Sequence[Given]) -> Published:
    """Return the figures of cells that other sweeps have with the same settings and load."""
    known: dict[str, PublishedCell] = {}
    documents: dict[str, str] = {}
    for one in given:
        documents |= {f"{one.published.sweep}/{k}": v for k, v in one.published.documents.items()}
        for cell in one.published.cells:
            key = one.setting(cell.cell).key
            figures = tuple(
                figure.model_copy(update={"document": f"{one.published.sweep}/{figure.document}"})
                for figure in cell.figures
            )
            before = known.get(key)
            known[key] = PublishedCell(
                cell=cell.cell,
                outcome=cell.outcome or (before.outcome if before else None),
                figures=(before.figures if before else ()) + figures,
            )
    cells = tuple(
        known[one.cell.setting_key].model_copy(update={"cell": one.cell.label})
        for one in wanted
        if one.cell.setting_key in known
    )
    first = given[0].published
    return Published(
        sweep=sweep,
        gpu=first.gpu,
        engine_version=first.engine_version,
        documents=documents,
        cells=cells,
    )


@dataclass(frozen=True, slots=True)
class Given:
    """Published figures with the planned cells they are about."""

    published: Published
    cells: tuple[PlannedCell, ...]

    def planned(self, label: str) -> PlannedCell:
        """Return the cell of a label; raises :class:`BadInput` where the sweep has none."""
        for one in self.cells:
            if one.cell.label == label:
                return one
        raise BadInput(
            f"published figures of {self.published.sweep}: the sweep has no cell {label!r}, only "
            f"{', '.join(one.cell.label for one in self.cells)}"
        )

    def setting(self, label: str) -> Setting:
        """Return the settings and load of a label's cell."""
        return self.planned(label).cell.setting


def load_point(figure: Figure, setting: Setting) -> int | None:
    """Return the index of the load point a figure is about, ``None`` for the server start.

    Raises:
        BadInput: the cell has no such load point, or more than one.
    """
    if figure.point is None:
        return None
    wanted = (figure.point.prompt_tokens, figure.point.parallel)
    found = [
        index
        for index, point in enumerate(setting.load)
        if (point.prompt_tokens, point.parallel) == wanted
    ]
    if len(found) != 1:
        raise BadInput(
            f"published {figure.metric}: {len(found)} load points have {wanted[0]} prompt tokens "
            f"at concurrency {wanted[1]}, wanted one"
        )
    return found[0]


class Arithmetic:
    """What follows from the figures that a document prints about one cell's memory."""

    def __init__(
        self, planned: PlannedCell, figures: Sequence[Figure], where: Surroundings
    ) -> None:
        """Raises :class:`BadInput` for an architecture that the capacity model does not know."""
        self.planned = planned
        self.where = where
        self.config = planned.prediction.model_config
        self.layout = _layout(planned, where)
        #: Block counts that the printed memory allows; none: no memory is printed.
        self.blocks = () if self.layout is None else tuple(_blocks(figures, self.layout))

    @property
    def server(self) -> ServerSettings:
        """The cell's server settings."""
        return self.planned.cell.setting.server

    def values(
        self, metric: str, index: int | None = None, *, blocks: Sequence[int] | None = None
    ) -> list[float]:
        """Return what a metric is with each block count (by default, those that are allowed)."""
        counts = list(self.blocks if blocks is None else blocks)
        if not counts and metric in POOL_FREE:
            counts = [_ANY_BLOCKS]
        found = (self._value(metric, index, count) for count in counts)
        return [value for value in found if value is not None]

    def predicted(self, metric: str, index: int | None = None) -> Span | None:
        """Return the arithmetic's value, else the plan's estimate; ``None``: neither knows it."""
        values = self.values(metric, index)
        if values:
            return Span(values[len(values) // 2], min(values), max(values))
        return self._estimate(metric, index)

    def _value(self, metric: str, index: int | None, blocks: int) -> float | None:
        if self.layout is None or self.config is None:
            return None
        if index is not None:
            return self._point_value(metric, self.planned.cell.setting.load[index], blocks)
        result = capacity.within(self.layout, num_gpu_blocks=blocks)
        (candidate,) = result.candidates
        values: dict[str, float | None] = {
            "num_gpu_blocks": blocks,
            "kv_cache_size_tokens": candidate.kv_cache_size_tokens,
            "max_concurrency": candidate.max_concurrency,
            "kv_pool_bytes": blocks * result.bytes_per_block,
            "attention_block_size_tokens": result.attention_block_size_tokens,
            "mamba_padding_percent": result.mamba_padding_percent,
            "bytes_per_block": result.bytes_per_block,
            "blocks_per_request": result.blocks_per_request,
            "max_model_len_tokens": self.server.max_model_len,
            "requested_kv_cache_bytes": self.server.kv_cache_memory_bytes,
            "bytes_per_token": self._token_bytes(describe(self.config)),
            "checkpoint_bytes": self._checkpoint_bytes(),
        }
        return values.get(metric)

    def _point_value(self, metric: str, point: LoadPoint, blocks: int) -> float | None:
        assert self.layout is not None
        result: Capacity = capacity.within(self.layout, num_gpu_blocks=blocks)
        prompt = point.prefix_tokens + point.prompt_tokens
        prompt += 0 if point.dataset == "file" else TEMPLATE_TOKENS
        load = capacity.load(
            result,
            blocks,
            requests=point.parallel,
            tokens_per_request=prompt + point.output_tokens - 1,
            prompt_tokens=prompt,
        )
        held = point.parallel * load.blocks_at_full_length * result.bytes_per_block
        stored = self._checkpoint_bytes()
        values: dict[str, float | None] = {
            "peak_kv_usage_ratio": load.peak_usage_ratio,
            "peak_requests_running": load.running_at_admission,
            "requests_bytes": held,
            "weights_and_requests_bytes": None if stored is None else stored + held,
        }
        return values.get(metric)

    def _token_bytes(self, description: ModelDescription) -> int:
        kind, dtype = self.server.kv_cache_dtype, self.server.dtype
        own = (description.dtype or "bfloat16") if dtype == "auto" else dtype
        element = element_bytes(own if kind == "auto" else kind)
        return sum(
            count * layer.token_bytes(self.server.tensor_parallel_size, kind, element)
            for layer, count in description.counts
            if isinstance(layer, Attention)
        )

    def _checkpoint_bytes(self) -> int | None:
        stored = self._stored()
        return None if stored is None else stored.total_bytes

    def _stored(self) -> weights.Stored | None:
        find = self.where.checkpoint
        return find(self.planned.cell.setting.model.name) if find else None

    def _estimate(self, metric: str, index: int | None) -> Span | None:
        gpu, span = self.where.gpu, self.planned.prediction.range
        if metric in ("total_memory_bytes", "oom_total_bytes") and gpu is not None:
            return Span(gpu.total_bytes, gpu.total_bytes, gpu.total_bytes)
        if metric == "model_loading_bytes" and self.config is not None:
            try:
                loaded = weights_of(self.server, self.config, describe(self.config), self._stored())
            except BadInput:
                return None
            size, error = loaded.value_bytes, loaded.error_bytes
            return Span(size, size - error, size + error)
        if span is None or index is not None:
            return None
        if metric == "available_kv_cache_bytes":
            pool = span.pool
            return Span(pool.value_bytes, pool.low_bytes, pool.high_bytes)
        ends = [end.values.get(metric) for end in (span.nominal, span.low, span.high)]
        known = [end for end in ends if end is not None]
        return Span(*known) if len(known) == len(ends) else None


def _layout(planned: PlannedCell, where: Surroundings) -> Layout | None:
    config = planned.prediction.model_config
    if config is None:
        return None
    settings = serving(
        planned.cell.setting.server,
        version=planned.cell.pins.engine_version,
        device=planned.cell.pins.device,
        compute_capability=None if where.gpu is None else where.gpu.compute_capability,
    )
    return capacity.layout(describe(config), settings)


def _blocks(figures: Sequence[Figure], layout: Layout) -> Iterator[int]:
    """Yield the block counts that fit both the printed budget and the printed pool."""
    size = layout.bytes_per_block
    bounds = []
    for figure in figures:
        span = figure.span
        if figure.metric == "available_kv_cache_bytes":
            bounds.append((int(span.low) // size, int(span.high) // size))
        elif figure.metric == "kv_pool_bytes":
            bounds.append((-(-int(span.low) // size), int(span.high) // size))
    if bounds:
        yield from range(max(low for low, _ in bounds), min(high for _, high in bounds) + 1)


def document(figure: Figure, arithmetic: Arithmetic, index: int | None) -> dict[str, Any]:
    """Return a figure with its prediction as JSON values."""
    span, predicted = figure.span, arithmetic.predicted(figure.metric, index)
    return {
        "load_point": index,
        "point": None if figure.point is None else figure.point.model_dump(),
        "metric": figure.metric,
        "unit": figure.unit,
        "printed": figure.printed,
        "about": figure.about,
        "published": span.value,
        "published_low": span.low,
        "published_high": span.high,
        "proof": figure.proof,
        "document": figure.document,
        "section": figure.section,
        "predicted": None if predicted is None else predicted.value,
        "predicted_low": None if predicted is None else predicted.low,
        "predicted_high": None if predicted is None else predicted.high,
        "predicted_agrees": None if predicted is None else span.meets(predicted),
    }
