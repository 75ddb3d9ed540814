"""Plans for a GPU: pins by target, estimated pools as ranges, refusals, sizing mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.planning import LOCK, surroundings

from tasks.plan import gpus, model
from tasks.plan.calibration import Boot
from tasks.plan.plan import Plan, PlannedCell, Surroundings, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.plan.weights import Stored
from warehouse.errors import BadInput

GIB = 2**30
A10 = gpus.find("A10")
QWEN35_4B = model.load(
    Path(__file__).parents[1] / "data" / "model-configs" / "Qwen__Qwen3.5-4B.json"
)
#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
#: What the recipe's A10 said: utilization 0.9, loading 8.61, available 8.88 GiB.
BOOT = Boot(A10.total_bytes, 0.9, round(8.61 * GIB), round(8.88 * GIB), 2048)
SWEEP = """
name: recipe
model: Qwen/Qwen3.5-4B
repeats: 1
server: {max_model_len: 32768, max_num_seqs: 8}
load: {prompt_tokens: 16376, output_tokens: 128}
experiments:
  - name: one
    points: [{parallel: 1, number: 2}, {parallel: 8, number: 16}]
"""
POOL_VALUES = {"num_gpu_blocks", "kv_cache_size_tokens", "max_concurrency"}


def gpu_host(**changes: Any) -> Surroundings:
    """Return a machine with an A10 and no boot yet."""
    facts: dict[str, Any] = {
        "target": "local-gpu",
        "device": "cuda",
        "memory_total_bytes": A10.total_bytes,
        "config": lambda name, revision: QWEN35_4B,
        "gpu": A10,
        "checkpoint": lambda name: Stored(9_320_000_000, None, None),
    }
    return surroundings(**(facts | changes))


def planned(text: str = SWEEP, **changes: Any) -> Plan:
    return make_plan(parse_sweep(text, where="x"), gpu_host(**changes))


def only(plan: Plan) -> PlannedCell:
    (cell,) = plan.cells
    return cell


def test_an_engine_made_here_is_pinned_by_its_lock_one_in_an_image_by_the_digest() -> None:
    here = only(planned()).cell.pins
    assert (here.engine_lock_sha256, here.image_digest) == (LOCK, None)
    far = only(planned(engine_lock_sha256=None, image_digest=DIGEST)).cell.pins
    assert (far.engine_lock_sha256, far.image_digest) == (None, DIGEST)
    unknown = planned(engine_lock_sha256=None)
    assert unknown.unresolved == ["one: image_digest"]
    stated = SWEEP.replace("repeats: 1", f"repeats: 1\npins: {{image_digest: '{DIGEST}'}}")
    assert only(planned(stated, engine_lock_sha256=None)).cell.pins.image_digest == DIGEST


def test_the_engines_version_is_free_only_in_an_image() -> None:
    text = SWEEP.replace("repeats: 1", "repeats: 1\npins: {engine_version: 0.28.0}")
    assert only(planned(text, engine_lock_sha256=None)).cell.pins.engine_version == "0.28.0"
    with pytest.raises(BadInput, match=r"engine_version is 0\.28\.0, but target local-gpu offers"):
        planned(text)


def test_an_estimated_pool_gives_a_range_and_no_exact_value() -> None:
    cell = only(planned())
    document: dict[str, Any] = cell.prediction.document(cell.cell.cell_key, made_at=None)
    assert not POOL_VALUES & document["values"].keys()
    assert document["values"]["attention_block_size_tokens"] == 528
    assert document["load"] == []
    pool = document["pool_estimate"]
    assert list(pool) == ["bytes", "low_bytes", "high_bytes", "source"]
    assert pool["low_bytes"] < 8.88 * GIB < pool["high_bytes"]
    ends = document["range"]
    assert list(ends) == ["low", "nominal", "high"]
    blocks = [ends[end]["values"]["num_gpu_blocks"] for end in ends]
    assert blocks[0] < 551 < blocks[2]
    assert blocks == sorted(blocks)
    assert len(ends["low"]["load"]) == 2
    assert document["gpu"]["compute_capability"] == "8.6"
    assert cell.prediction.known


def test_after_one_boot_the_range_is_narrow_and_holds_what_vllm_logged() -> None:
    """Test that 551 blocks and 273,563 tokens lie in a range of at most 2 % to each side."""
    cell = only(planned(boots=lambda cell: [BOOT]))
    found = cell.prediction.range
    assert found is not None
    assert found.pool.error_bytes <= 0.02 * found.pool.value_bytes
    assert found.nominal.values["num_gpu_blocks"] == 551
    assert found.nominal.values["kv_cache_size_tokens"] == 273_563
    low, high = (end.values["kv_cache_size_tokens"] for end in (found.low, found.high))
    assert low is not None
    assert high is not None
    assert 0.98 * 273_563 <= low < 273_563 < high <= 1.02 * 273_563


def test_an_explicit_pool_stays_exact_on_a_gpu() -> None:
    text = SWEEP.replace("max_num_seqs", "kv_cache_memory_bytes: 9534927339, max_num_seqs")
    prediction = only(planned(text)).prediction
    assert prediction.range is None
    assert prediction.value("kv_cache_size_tokens") == 273_563
    text = SWEEP.replace("max_num_seqs", "kv_cache_memory_bytes: 25000000000, max_num_seqs")
    assert "the GPU has 23,686,744,637 in all" in str(only(planned(text)).infeasible)


def test_weights_that_leave_no_pool_are_infeasible_and_the_edge_is_told() -> None:
    large = only(planned(checkpoint=lambda name: Stored(30 * GIB, None, None)))
    assert large.skipped
    assert str(large.infeasible).startswith("pool of -")
    assert "± " in str(large.infeasible)
    assert codes(planned(checkpoint=lambda name: Stored(30 * GIB, None, None))) == []
    edge = only(planned(checkpoint=lambda name: Stored(16 * GIB, None, None)))
    assert edge.infeasible is None
    assert edge.prediction.may_be_refused
    assert edge.prediction.range is not None
    assert edge.prediction.range.low.load == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": None}, "neither the profile nor this machine tells the GPU"),
        ({"checkpoint": None}, "the weights' size is not known before a first boot"),
        ({"config": lambda name, revision: None}, "the model's config.json is not here"),
    ],
)
def test_without_an_estimate_the_reason_is_said(changes: dict[str, Any], said: str) -> None:
    prediction = only(planned(**changes)).prediction
    assert said in str(prediction.unknown)
    assert prediction.range is None


def test_beyond_a_device_that_is_not_known_is_what_the_sweep_states() -> None:
    text = SWEEP.replace(
        "max_num_seqs", "kv_cache_memory_bytes: {beyond_machine: 1000000000000}, max_num_seqs"
    )
    cell = only(planned(text, memory_total_bytes=None, gpu=None))
    assert cell.cell.setting.server.kv_cache_memory_bytes == 10**12


TIGHT = """
name: tight
model: tiny-qwen3
repeats: 1
server: {max_model_len: 640, max_num_seqs: 8, kv_cache_memory_bytes: 16777216}
experiments:
  - name: one
    points: [{parallel: 4, number: 8}]
"""


def test_a_prompt_that_fits_only_without_the_chat_template_is_infeasible() -> None:
    """Test that 512 + 128 in 640 is skipped: 518 to 520 are served, each request is refused."""
    sweep = parse_sweep(TIGHT, where="x")
    cell = only(make_plan(sweep, surroundings()))
    assert cell.skipped
    assert cell.infeasible == (
        "load[0] needs up to 648 tokens (prompt 512 + chat template 8 + output 128), "
        "max_model_len is 640: the server would refuse its requests"
    )
    assert cell.prediction.refusal_type == "prompt_above_context"
    kept = only(make_plan(sweep, surroundings(), keep_infeasible=True))
    assert kept.as_expected("bench_failed")
    fits = parse_sweep(TIGHT.replace("640", "648"), where="x")
    assert only(make_plan(fits, surroundings())).infeasible is None
    # It is said of a model that is not known too.
    blind = only(make_plan(sweep, surroundings(config=lambda name, revision: None)))
    assert blind.skipped


def test_a_prompt_file_states_what_is_served_so_no_template_comes_on_top() -> None:
    text = TIGHT.replace("number: 8", "number: 8, prompts: a.txt")
    sweep = parse_sweep(text, where="x", read=lambda name: "512\ta prompt\n")
    assert only(make_plan(sweep, surroundings())).infeasible is None


def codes(plan: Plan, **given: Any) -> list[str]:
    return [
        finding.code
        for planned_cell in plan.cells
        for finding in planned_cell.findings(plan.surroundings, **given)
    ]


def test_a_clean_sweep_has_no_finding() -> None:
    assert codes(planned(boots=lambda cell: [BOOT])) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("max_num_seqs: 8", "max_num_seqs: 9, gpu_memory_utilization: 0.96"), "utilization"),
        (("{parallel: 1, number: 2}, ", ""), "one-concurrency"),
        (("prompt_tokens: 16376", "prompt_tokens: 512"), "short-context"),
        (("max_num_seqs: 8", "max_num_seqs: 9, enable_prefix_caching: true"), "prefix-overlap"),
        (("max_num_seqs: 8", "max_num_seqs: 64"), "max-num-seqs-beyond-pool"),
        (("max_num_seqs: 8", "max_num_seqs: 8, kv_cache_dtype: fp8"), "fp8-below-8.9"),
        (("parallel: 8", "parallel: 16"), "max-model-len-at-peak"),
    ],
)
def test_each_mistake_is_found_in_a_sweep(change: tuple[str, str], code: str) -> None:
    text = SWEEP.replace(*change)
    if "parallel: 16" in text:
        text = text.replace("max_num_seqs: 8", "max_num_seqs: 15")
    found = codes(planned(text, boots=lambda cell: [BOOT]))
    assert any(one.startswith(code) for one in found), found


def test_an_overlap_that_users_will_have_is_told_from_outside() -> None:
    plan = planned(boots=lambda cell: [BOOT])
    assert codes(plan, prefix_overlap_ratio=0.5) == ["prefix-overlap-unused"]


def test_nothing_is_said_of_a_cpu_pool_in_bytes_or_of_a_cell_that_shall_fail() -> None:
    text = TIGHT.replace("640", "2048")
    assert codes(make_plan(parse_sweep(text, where="x"), surroundings())) == []
    profiled = text.replace(", kv_cache_memory_bytes: 16777216", "")
    assert codes(make_plan(parse_sweep(profiled, where="x"), surroundings())) != []
    meant = profiled.replace("    points", "    expect: refused\n    points")
    assert codes(make_plan(parse_sweep(meant, where="x"), surroundings())) == []


def test_the_range_does_not_move_a_key() -> None:
    """Test that what is known of the pool is no part of a cell's identity."""
    keys = {
        only(planned(**changes)).cell.cell_key
        for changes in ({}, {"boots": lambda cell: [BOOT]}, {"gpu": replace(A10, name="x")})
    }
    assert len(keys) == 1
