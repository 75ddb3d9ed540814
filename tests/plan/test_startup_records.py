"""Every recorded start-up of tests/data/startup-logs.jsonl, against the arithmetic.

The records come from public logs of 0.9.2 to 0.32.0. A record is exact if one block count within
the rounding of the logged GiB gives both logged numbers; without GiB, if any block count does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tasks.plan import capacity, model
from tasks.plan.capacity import Candidate, ServingSettings, Speculative
from tasks.plan.layers import Attention, Span

DATA = Path(__file__).parents[1] / "data"
RECORDS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "startup-logs.jsonl").read_text().splitlines()
]
EXACT = [record for record in RECORDS if record["evidence"] != "fail"]
#: Block counts tried where neither bytes nor GiB nor blocks were logged.
SEARCHED = 60_000


def describe(record: dict[str, Any]) -> model.ModelDescription:
    """Return the description of the record's model."""
    return model.describe(model.load(DATA / "model-configs" / f"{record['config']}.json"))


def speculative(engine: dict[str, Any]) -> Speculative | None:
    """Return the speculation a record states, with its draft's layers where they are known."""
    tokens = engine.get("num_spec")
    if not tokens:
        return None
    draft = engine.get("draft_spec")
    if draft is None:
        return Speculative("mtp", tokens)
    layer = Attention(
        draft["kv_heads"],
        draft["head_dim"],
        draft["head_dim"],
        Span(draft["kind"]),
        draft["window"],
    )
    return Speculative("dflash", tokens, (layer,) * draft["layers"])


def settings(record: dict[str, Any]) -> ServingSettings:
    """Return the settings of a record: engine and fitted flags first, then flags, then assumed."""
    engine = {**record["engine"], **record.get("fitted_flags", {})}
    flags = {
        **record["assumed"],
        **{key: value for key, value in record["flags"].items() if value is not None},
    }
    prefix = engine.get("prefix_caching", flags.get("enable_prefix_caching"))
    if prefix is None:
        prefix = record["assumed"].get("prefix_caching")
    tp = engine.get("tp", flags.get("tp", 1))
    return ServingSettings(
        vllm_version=record["vllm_version"],
        max_model_len=record["parsed"]["max_model_len"],
        max_num_batched_tokens=engine.get(
            "max_num_batched_tokens", flags.get("max_num_batched_tokens")
        ),
        max_num_seqs=flags.get("max_num_seqs"),
        dtype=engine.get("dtype", flags.get("dtype", "auto")),
        kv_cache_dtype=engine.get("kv_cache_dtype", flags.get("kv_cache_dtype", "auto")),
        prefix_caching=prefix,
        tensor_parallel=tp,
        decode_context_parallel=engine.get("dcp", 1),
        block_size=engine.get("default_block"),
        speculative=speculative(engine),
    )


def candidates(record: dict[str, Any], plan: capacity.Layout) -> Iterable[Candidate]:
    """Return what the logged memory (or block count) allows, else every block count in turn."""
    parsed = record["parsed"]
    if parsed["num_gpu_blocks"] is not None:
        return capacity.within(plan, num_gpu_blocks=parsed["num_gpu_blocks"]).candidates
    if parsed["available_gib"] is not None:
        return capacity.within(plan, available_gib=parsed["available_gib"]).candidates
    return (
        capacity.within(plan, num_gpu_blocks=blocks).candidates[0] for blocks in range(1, SEARCHED)
    )


def agrees(candidate: Candidate, parsed: dict[str, Any]) -> bool:
    """Whether a candidate gives every number the record logged."""
    tokens, concurrency = parsed["kv_cache_tokens"], parsed["max_concurrency"]
    if tokens is not None and candidate.kv_cache_size_tokens != tokens:
        return False
    return concurrency is None or f"{candidate.max_concurrency:.2f}" == f"{concurrency:.2f}"


@pytest.mark.parametrize("record", EXACT, ids=lambda record: str(record["id"]))
def test_a_candidate_gives_the_logged_numbers(record: dict[str, Any]) -> None:
    """Test that tokens and concurrency of a real start-up come out of one block count."""
    plan = capacity.layout(describe(record), settings(record))
    parsed = record["parsed"]
    assert any(agrees(candidate, parsed) for candidate in candidates(record, plan))
    if parsed["attention_block_size"] is not None:
        assert plan.attention_block_size_tokens == parsed["attention_block_size"]
    if parsed["mamba_padding_pct"] is not None:
        assert plan.mamba_padding_percent is not None
        assert f"{plan.mamba_padding_percent:.2f}" == f"{parsed['mamba_padding_pct']:.2f}"


def by_id(name: str) -> dict[str, Any]:
    """Return one record."""
    return next(record for record in RECORDS if record["id"] == name)


def test_the_recipes_32k_start_has_551_blocks() -> None:
    """Test that only 551 blocks explain 273,563 tokens at 8.88 GiB."""
    record = by_id("seed-32k")
    plan = capacity.layout(describe(record), settings(record))
    found = [c.num_gpu_blocks for c in candidates(record, plan) if agrees(c, record["parsed"])]
    assert found == [551]


@pytest.mark.parametrize(("batched", "blocks"), [(8192, 13_637), (2048, 9_797)])
def test_gemma4_reserves_what_another_project_traced(batched: int, blocks: int) -> None:
    """Test the traced reservation per sequence: a record without a logged pair."""
    description = describe(by_id("gemma4-31b-trace"))
    plan = capacity.layout(
        description,
        ServingSettings("0.27.0", max_model_len=262_144, max_num_batched_tokens=batched),
    )
    assert (plan.blocks_per_request, plan.bytes_per_block) == (blocks, 2_621_440)


def test_gptoss_shares_its_blocks_with_the_second_length_of_the_same_server() -> None:
    """Test 7.77x at 81,920 on the server of the 6.51x record: same blocks, another length."""
    record = by_id("gptoss120b-98k")
    description, base = describe(record), settings(record)
    long_ = capacity.layout(description, base)
    near = range(40_000, 42_000)
    tried = (capacity.within(long_, num_gpu_blocks=blocks).candidates[0] for blocks in near)
    fitting = {c.num_gpu_blocks for c in tried if agrees(c, record["parsed"])}
    short = capacity.layout(
        description,
        ServingSettings("0.11.2", max_model_len=81_920, max_num_batched_tokens=2048),
    )
    assert any(f"{blocks / short.blocks_per_request:.2f}" == "7.77" for blocks in fitting)


def test_nemotron_pads_one_layer() -> None:
    """Test the logged 'Add 1 padding layers, may waste at most 4.35%'."""
    record = by_id("nemotron3-nano-tp2")
    plan = capacity.layout(describe(record), settings(record))
    assert plan.padding_layers == 1
    assert f"{100 * plan.padding_layers / 23:.2f}" == "4.35"


def test_dflash_makes_fifteen_groups() -> None:
    """Test the logged '15 KV cache groups - 10x Mamba, 4x Full, 1x SlidingWindow'."""
    record = by_id("dflash2-arm1")
    result = capacity.predict(describe(record), settings(record), num_gpu_blocks=1018)
    assert result.kv_groups == 15
    kinds = {table.specs[0].kind: table.groups for table in result.layout.tables}
    assert kinds == {"state": 10, "full": 4, "sliding": 1}


def test_the_record_that_fails_is_one_rank_of_four() -> None:
    """Test that the known non-match stays one: its GiB line is not of the smallest rank."""
    record = by_id("qwen3-235b-21348")
    plan = capacity.layout(describe(record), settings(record))
    assert not any(agrees(candidate, record["parsed"]) for candidate in candidates(record, plan))
