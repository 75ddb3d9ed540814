"""Usage curves rebuilt from requests: they contain an engine's true usage, and real samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.capture import curves, evalscope
from tasks.capture.curves import UsageRequest, usage_bounds
from tasks.capture.windows import Sample

TREE = Path(__file__).parents[1] / "data" / "evalscope-1.9.1" / "tight-dense"
#: Server samples carry UTC, EvalScope's requests CLOCK_MONOTONIC. This difference makes the
#: sampled success counter follow the requests' ends; both levels give it within 10 ms.
UTC_MINUS_MONOTONIC = 1795973423.641


def dense(tokens: int) -> int:
    return -(-tokens // 128)


def request(start: float, times: Sequence[float], prompt: int = 512) -> UsageRequest:
    return UsageRequest(start, times[-1], prompt, len(times), tuple(times))


def test_one_request_is_exact() -> None:
    """518 tokens hold 5 blocks of 128, and a sixth from the moment at which the 641st is stored."""
    times = [1.0 + i / 100 for i in range(128)]
    bounds = usage_bounds(
        [request(0.5, times, prompt=518)],
        blocks_of=dense,
        num_gpu_blocks=64,
        waited=False,
        preemptions=0,
    )
    assert bounds.case == "exact"
    assert bounds.peak_lower_ratio == bounds.peak_upper_ratio == 6 / 63
    assert curves.usage_at(bounds, 0.4) == (0.0, 0.0)
    assert curves.usage_at(bounds, 0.6) == (0.0, 5 / 63)  # scheduled by then, or not yet
    assert curves.usage_at(bounds, 1.5) == (5 / 63, 5 / 63)
    assert curves.usage_at(bounds, times[-1] + 0.1) == (0.0, 0.0)


def test_hybrid_requests_share_one_block_until_token_641() -> None:
    """Four groups: one of blocks of 640 tokens, three states: 4 blocks, then 5."""
    rule = curves.block_rule([("full", 640, 0), *[("state", 640, 1)] * 3])
    assert [rule(tokens) for tokens in (1, 640, 641, 1281)] == [4, 4, 5, 6]
    four = [request(0.0, [1.0 + i / 10 for i in range(20)], prompt=518) for _ in range(4)]
    bounds = usage_bounds(four, blocks_of=rule, num_gpu_blocks=1638, waited=False, preemptions=0)
    assert bounds.case == "exact"
    assert bounds.peak_upper_ratio == 16 / 1637


def test_waiting_and_preemption_only_bound() -> None:
    many = [request(0.0, [1.0 + i + j / 10 for j in range(10)]) for i in range(30)]
    waited = usage_bounds(many, blocks_of=dense, num_gpu_blocks=64, waited=True, preemptions=0)
    assert waited.case == "bounded"
    assert waited.reason == "requests waited"
    assert waited.peak_upper_ratio == 1.0  # 30 x 5 blocks are asked for, 63 exist
    assert waited.peak_lower_ratio < 0.5
    preempted = usage_bounds(many, blocks_of=dense, num_gpu_blocks=64, waited=True, preemptions=2)
    assert preempted.reason == "requests waited and 2 preemptions"
    assert preempted.peak_lower_ratio <= waited.peak_lower_ratio
    seats = usage_bounds(
        many, blocks_of=dense, num_gpu_blocks=64, max_num_seqs=3, waited=True, preemptions=0
    )
    assert seats.peak_upper_ratio == (4 + 4 + 5) / 63  # one of three has stored a 513th token


def test_a_request_without_an_end_may_hold_anything_and_surely_nothing() -> None:
    lost = UsageRequest(1.0, None, 512, 0, ())
    bounds = usage_bounds([lost], blocks_of=dense, num_gpu_blocks=64, waited=False, preemptions=0)
    assert (bounds.peak_lower_ratio, bounds.peak_upper_ratio) == (0.0, 1.0)
    capped = usage_bounds(
        [lost],
        blocks_of=dense,
        num_gpu_blocks=64,
        waited=False,
        preemptions=0,
        largest_request_tokens=640,
    )
    assert capped.peak_upper_ratio == 5 / 63


def test_coalesced_chunks_widen_the_band() -> None:
    """Two chunks for ten tokens: nobody knows when the block boundary was crossed."""
    some = UsageRequest(0.0, 2.0, 125, 10, (1.0, 2.0))
    bounds = usage_bounds([some], blocks_of=dense, num_gpu_blocks=10, waited=False, preemptions=0)
    assert curves.usage_at(bounds, 1.5) == (1 / 9, 2 / 9)
    assert bounds.case == "bounded"


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        usage_bounds([], blocks_of=dense, num_gpu_blocks=1, waited=False, preemptions=0)
    empty = usage_bounds([], blocks_of=dense, num_gpu_blocks=2, waited=False, preemptions=0)
    assert empty.peak_upper_ratio == 0.0


@pytest.mark.parametrize(
    ("level", "preemptions"), [("parallel_16_number_32", 4), ("parallel_64_number_64", 10)]
)
def test_every_real_sample_lies_between_the_curves(level: str, preemptions: int) -> None:
    """A real run under memory pressure: 63 usable blocks, 12 running, up to 55 waiting."""
    requests = evalscope.requests((TREE / level / "benchmark_data.db").read_bytes())
    bounds = usage_bounds(
        curves.from_requests(requests),
        blocks_of=dense,
        num_gpu_blocks=64,
        max_num_seqs=256,
        waited=True,
        preemptions=preemptions,
    )
    samples = [
        Sample(row["t"] - UTC_MINUS_MONOTONIC, row["kv"])
        for row in map(json.loads, (TREE / "server-samples-250ms.jsonl").read_text().splitlines())
    ]
    # The level's own connection test runs until just before it: 1 request in the pool.
    start = min(request.start_s for request in requests)
    judged = curves.outside(
        [sample for sample in samples if sample.t_s >= start + 0.25], bounds, slack_s=0.15
    )
    assert judged.inside >= 15
    assert judged.outside == ()
    assert bounds.case == "bounded"
    assert bounds.peak_lower_ratio <= 0.968 <= bounds.peak_upper_ratio
    # The curves say something: without preemptions pending the lower one is far from zero.
    assert bounds.peak_lower_ratio >= 0.15
    moved = [Sample(sample.t_s - 2.0, sample.value) for sample in samples]
    assert curves.outside(moved, bounds, slack_s=0.15).outside


@dataclass
class _Running:
    index: int
    prompt: int
    output: int
    made: int = 0
    blocks: int = 0
    times: list[float] = field(default_factory=list)


STEP = 0.1


def simulate(
    arrivals: list[tuple[float, int, int]], usable: int, seats: int
) -> tuple[list[UsageRequest], list[Sample], bool, int]:
    """Play vLLM's scheduler in steps: first come first served, the last one in is preempted."""
    waiting = [
        _Running(i, prompt, output) for i, (_, prompt, output) in enumerate(sorted(arrivals))
    ]
    starts = [start for start, _, _ in sorted(arrivals)]
    running: list[_Running] = []
    done: list[_Running] = []
    samples: list[Sample] = []
    waited, preemptions, now = False, 0, 0.0
    free = usable
    while waiting or running:
        for one in list(running):
            if one not in running:
                continue
            need = dense(one.prompt + one.made) - one.blocks
            while need > free and running[-1] is not one:
                victim = running.pop()
                free += victim.blocks
                victim.blocks = 0
                waiting.insert(0, victim)
                preemptions += 1
            if need > free:
                running.remove(one)
                free += one.blocks
                one.blocks = 0
                waiting.insert(0, one)
                preemptions += 1
                continue
            one.blocks += need
            free -= need
        while waiting and starts[waiting[0].index] <= now and len(running) < seats:
            need = dense(waiting[0].prompt + waiting[0].made)
            if need > free:
                break
            one = waiting.pop(0)
            one.blocks = need
            free -= need
            running.append(one)
        waited = waited or any(starts[one.index] <= now for one in waiting)
        samples.append(Sample(now + STEP / 2, (usable - free) / usable))
        now += STEP
        for one in list(running):
            one.made += 1
            one.times.append(now)
            if one.made == one.output:
                running.remove(one)
                free += one.blocks
                done.append(one)
    requests = [
        UsageRequest(starts[one.index], one.times[-1], one.prompt, one.output, tuple(one.times))
        for one in done
    ]
    return requests, samples, waited, preemptions


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 5, allow_nan=False),
            st.integers(1, 900),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=25,
    ),
    usable=st.integers(8, 80),
    seats=st.integers(1, 30),
)
def test_true_usage_of_a_simulated_engine_is_always_between(
    arrivals: list[tuple[float, int, int]], usable: int, seats: int
) -> None:
    requests, samples, waited, preemptions = simulate(arrivals, usable, seats)
    bounds = usage_bounds(
        requests,
        blocks_of=dense,
        num_gpu_blocks=usable + 1,
        max_num_seqs=seats,
        waited=waited,
        preemptions=preemptions,
    )
    # A request that arrives within a step is scheduled with the next one.
    judged = curves.outside(samples, bounds, slack_s=STEP * 1.01)
    assert judged.outside == ()
    truth = max((sample.value or 0.0) for sample in samples)
    assert bounds.peak_lower_ratio <= truth + 1e-9
    assert truth <= bounds.peak_upper_ratio + 1e-9
    if bounds.case == "exact":
        assert truth == pytest.approx(bounds.peak_upper_ratio)


def test_a_cut_answer_may_hold_anything_for_ever() -> None:
    """EvalScope counts a cut stream's tokens itself: a curve must not be built on them."""
    killed = TREE.parent / "engine-killed.db"
    found = curves.from_requests(evalscope.requests(killed.read_bytes(), answer_tokens=128))
    assert [request.prompt_tokens for request in found] == [None] * 6 + [518] * 2
    bounds = usage_bounds(found, blocks_of=dense, num_gpu_blocks=64, waited=False, preemptions=0)
    assert bounds.peak_upper_ratio == 1.0
    assert bounds.case == "bounded"
    few = usage_bounds(
        found,
        blocks_of=dense,
        num_gpu_blocks=64,
        waited=False,
        preemptions=0,
        largest_request_tokens=646,
    )
    assert few.peak_upper_ratio == 6 * 6 / 63  # the whole ones, of another run, were over
