"""The double's arithmetic is vLLM's: otherwise the tests that use it would prove something else.

Figures from the recorded runs in facts/vllm-evalscope.md (section 7, real memory pressure).
"""

from __future__ import annotations

import pytest

from tests.double.scheduler import Request, Scheduler


def dense(**changes: int) -> Scheduler:
    """The dense tiny model with 16 MiB: 64 blocks of 128 tokens."""
    return Scheduler(
        num_blocks=changes.get("num_blocks", 64),
        block_size=changes.get("block_size", 128),
        max_num_seqs=changes.get("max_num_seqs", 256),
        max_num_batched_tokens=2048,
        state_blocks=changes.get("state_blocks", 0),
    )


def run(scheduler: Scheduler, requests: list[Request]) -> tuple[float, int]:
    """Run to the end; return peak usage and the most requests running at once."""
    for request in requests:
        scheduler.add(request)
    usage, running = 0.0, 0
    for _ in range(100_000):
        if not scheduler.running and not scheduler.waiting:
            break
        scheduler.step()
        usage = max(usage, scheduler.usage)
        running = max(running, len(scheduler.running))
    assert all(request.finished for request in requests)
    assert scheduler.used == 0
    return usage, running


def requests(number: int, *, prompt: int = 518, output: int = 128) -> list[Request]:
    return [Request(str(i), prompt, output) for i in range(number)]


def test_pressure_is_vllms() -> None:
    """Five blocks a request at admission: twelve run; only ten fit when full, hence preemptions."""
    scheduler = dense()
    usage, running = run(scheduler, requests(64))
    assert running == 12
    assert 60 / 63 <= usage <= 1.0
    assert scheduler.preemptions > 0


def test_a_pool_that_is_large_enough_never_preempts() -> None:
    scheduler = dense(num_blocks=4096)
    usage, running = run(scheduler, requests(64))
    assert (running, scheduler.preemptions) == (64, 0)
    assert 64 * 5 / 4095 <= usage <= 64 * 6 / 4095


def test_the_hybrids_state_takes_a_block_for_each_group() -> None:
    scheduler = dense(num_blocks=1638, block_size=640, state_blocks=3)
    usage, running = run(scheduler, requests(4, output=100))
    assert running == 4
    assert usage == pytest.approx(4 * 4 / 1637)


def test_a_step_takes_at_most_the_batched_tokens() -> None:
    scheduler = dense(num_blocks=4096)
    for request in requests(5):
        scheduler.add(request)
    scheduler.step()
    assert [r.computed for r in scheduler.running] == [518, 518, 518, 494]
    assert len(scheduler.waiting) == 1


def test_at_most_max_num_seqs_run() -> None:
    assert run(dense(num_blocks=4096, max_num_seqs=3), requests(8))[1] == 3


def test_a_dropped_request_gives_its_blocks_back() -> None:
    scheduler = dense()
    first, second = requests(2)
    scheduler.add(first)
    scheduler.step()
    scheduler.add(second)
    assert scheduler.used == 5
    scheduler.drop(first)
    scheduler.drop(second)
    assert (scheduler.used, len(scheduler.waiting)) == (0, 0)
