"""Published figures: what print stands for, and that arithmetic gives every figure it can."""

from __future__ import annotations

from functools import cache

import pytest

from flows.commands.published import given
from flows.shipped import published, shipped, shipped_model, with_published
from tasks.home import Home
from tasks.plan import weights
from tasks.plan.plan import Surroundings
from tasks.plan.published import (
    POOL_FREE,
    Arithmetic,
    Figure,
    Given,
    Published,
    PublishedCell,
    load_point,
    parse,
    read_printed,
)
from warehouse.errors import BadInput

GIB = 2**30
#: Block counts that all figures of a cell together leave, by sweep and cell.
BLOCKS = {
    ("memory-utilization", "budget/gpu_memory_utilization=0.7"): [277],
    ("memory-utilization", "budget/gpu_memory_utilization=0.8"): [414],
    ("memory-utilization", "budget/gpu_memory_utilization=0.9"): [551],
    ("context-limit", "limit/max_model_len=8192"): [550],
    ("context-limit", "limit/max_model_len=32768"): [551],
    ("context-limit", "limit/max_model_len=65536"): [550, 551],
    ("prompt-length", "fill"): [551],
    ("misconfiguration", "recovery"): [551],
    ("scheduler-limits", "batched-tokens/max_num_batched_tokens=2048"): [551],
    ("kv-dtype", "dtype/kv_cache_dtype=auto"): [551],
    ("kv-dtype", "dtype/kv_cache_dtype=fp8"): [551],
}


@cache
def sweep_figures(name: str) -> tuple[Given, Surroundings]:
    return given(name, Home.find())


def cells() -> list[tuple[str, PublishedCell]]:
    found = []
    for name in with_published():
        figures = published(name)
        if isinstance(figures, Published):
            found += [(name, cell) for cell in figures.cells]
    return found


def arithmetic_of(name: str, cell: PublishedCell) -> Arithmetic:
    figures, where = sweep_figures(name)
    return Arithmetic(figures.planned(cell.cell), cell.figures, where)


def point_of(name: str, cell: PublishedCell, figure: Figure) -> int | None:
    return load_point(figure, sweep_figures(name)[0].setting(cell.cell))


def test_every_shipped_sweep_of_a_document_has_figures() -> None:
    assert set(with_published()) == set(shipped()) - {"demo"}


@pytest.mark.parametrize(("name", "cell"), cells(), ids=lambda x: getattr(x, "cell", x))
def test_published_memory_gives_every_arithmetic_figure(name: str, cell: PublishedCell) -> None:
    """Test that each figure marked so is among what the printed memory allows."""
    arithmetic = arithmetic_of(name, cell)
    for figure in cell.figures:
        values = arithmetic.values(figure.metric, point_of(name, cell, figure))
        if figure.proof == "arithmetic":
            assert any(figure.span.holds(value) for value in values), (figure, values)
        elif figure.metric not in POOL_FREE:
            assert not values, f"{figure.metric} can be computed, so it is no mere measurement"


@pytest.mark.parametrize(("name", "cell"), cells(), ids=lambda x: getattr(x, "cell", x))
def test_published_block_count_gives_figures_exactly(name: str, cell: PublishedCell) -> None:
    """Test that one block count explains all figures of a cell, and gives each as printed."""
    arithmetic = arithmetic_of(name, cell)
    proofs = [f for f in cell.figures if f.proof == "arithmetic"]
    left = [
        count
        for count in arithmetic.blocks
        if all(
            figure.span.holds(value)
            for figure in proofs
            for value in arithmetic.values(
                figure.metric, point_of(name, cell, figure), blocks=[count]
            )
        )
    ]
    assert left == BLOCKS.get((name, cell.cell), [])


def test_the_recipes_tokens_to_the_last_digit() -> None:
    """Test 273,563 at 551 blocks and that 550, which 8.88 GiB allows too, gives another number."""
    figures, _ = sweep_figures("memory-utilization")
    (cell,) = [c for c in figures.published.cells if c.cell.endswith("0.9")]
    arithmetic = arithmetic_of("memory-utilization", cell)
    assert arithmetic.values("kv_cache_size_tokens", blocks=[550, 551]) == [273_066, 273_563]


def test_fp8_gives_less_than_twice_the_concurrency() -> None:
    """Test 15.74x of 8.35x for the same blocks."""
    figures, _ = sweep_figures("kv-dtype")
    auto, fp8 = (
        arithmetic_of("kv-dtype", cell).values("max_concurrency")[0]
        for cell in figures.published.cells
    )
    assert f"{fp8 / auto:.3f}" == "1.886"


def test_estimates_of_a_first_boot_hold_what_the_recipe_measured() -> None:
    """Test that budget and loaded weights lie within the plan's error bars."""
    for name, cell in cells():
        arithmetic = arithmetic_of(name, cell)
        for figure in cell.figures:
            if figure.metric in ("available_kv_cache_bytes", "model_loading_bytes"):
                predicted = arithmetic.predicted(figure.metric)
                assert predicted is not None, (name, cell.cell)
                assert predicted.meets(figure.span), (name, cell.cell, figure.metric)


def test_nightly_has_the_figures_of_the_cells_it_shares() -> None:
    """Test that equal settings join, whatever the label, and that figures of two sweeps add up."""
    figures, where = sweep_figures("nightly")
    by_label = {cell.cell: cell for cell in figures.published.cells}
    recovery = by_label["recovery"]
    assert {figure.document for figure in recovery.figures} == {
        "memory-utilization/recipe",
        "context-limit/recipe",
        "misconfiguration/recipe",
    }
    assert by_label["misconfiguration"].outcome == "oom"
    assert "budget/gpu_memory_utilization=0.7" in by_label
    arithmetic = Arithmetic(figures.planned("recovery"), recovery.figures, where)
    assert arithmetic.values("kv_cache_size_tokens") == [273_563]


def test_the_dense_models_config_counts_to_its_index() -> None:
    """Test 8,044,936,192 bytes: the fields that the guide does not print are right together."""
    known = shipped_model("Qwen/Qwen3-4B")
    assert known is not None
    assert 2 * weights.count_parameters(known.config).total == known.stored.total_bytes
    assert known.revision == "1cfa9a7208912126459214e8b04321603b3df60c"
    assert known.is_of("unresolved")
    assert not known.is_of("0" * 40)
    assert shipped_model("Qwen/Qwen3.5-4B") is not None
    assert shipped_model("Qwen/no-such-model") is None


@pytest.mark.parametrize(
    ("printed", "unit", "low", "high"),
    [
        ("8.88 GiB", "bytes", 8.875 * GIB, 8.885 * GIB),
        ("273,563 tokens", "tokens", 273_563, 273_563),
        ("8.35x", "x", 8.345, 8.355),
        ("58.2 %", "ratio", 0.5815, 0.5825),
        ("0.76 %", "percent", 0.755, 0.765),
        ("0.0364", "ratio", 0.03635, 0.03645),
        ("5 s", "s", 4.5, 5.5),
        ("9.32 GB", "bytes", 9.315e9, 9.325e9),
        ("15 requests", "requests", 15, 15),
        ("330 MiB", "bytes", 329.5 * 2**20, 330.5 * 2**20),
    ],
)
def test_print_stands_for_what_rounds_to_it(
    printed: str, unit: str, low: float, high: float
) -> None:
    span = read_printed(printed, unit)
    assert (span.low, span.high) == pytest.approx((low, high), rel=1e-12)


@pytest.mark.parametrize("printed", ["8.88", "8.88 GB/s", "x", "about 8 GiB", "1,23 GiB", "8.88 s"])
def test_print_of_another_kind_is_refused(printed: str) -> None:
    with pytest.raises(ValueError, match="printed: got"):
        read_printed(printed, "bytes")


GOOD = """
sweep: x
gpu: A10
engine_version: 0.27.0
documents: {d: a document}
cells:
  - cell: one
    figures:
      - {metric: max_concurrency, printed: 8.35x, proof: arithmetic, document: d, section: s}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_concurrency", "max_concurency", "'max_concurency' is not known"),
        ("8.35x", "8.35 GiB", "wanted a figure in x"),
        ("document: d,", "document: e,", "'e' is not among documents"),
        ("metric: max_concurrency", "metric: preemptions", "state point or leave it out"),
        ("section: s", "section: s, more: 1", "no such key"),
        ("sweep: x", "sweep: x\nof: [y]", "no such key"),
    ],
)
def test_slips_in_a_file_are_one_line(old: str, new: str, said: str) -> None:
    assert isinstance(parse(GOOD, where="f"), Published)
    with pytest.raises(BadInput, match=r"^f: ") as caught:
        parse(GOOD.replace(old, new), where="f")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_figures_of_a_load_point_that_is_not_there_are_refused() -> None:
    figures, _ = sweep_figures("prompt-length")
    (cell,) = figures.published.cells
    figure = cell.figures[1].model_copy(
        update={"point": cell.figures[1].point.model_copy(update={"parallel": 2})}  # type: ignore[union-attr]
    )
    with pytest.raises(BadInput, match="0 load points have 512 prompt tokens at concurrency 2"):
        load_point(figure, figures.setting("fill"))
    with pytest.raises(BadInput, match="the sweep has no cell 'nope'"):
        figures.planned("nope")
