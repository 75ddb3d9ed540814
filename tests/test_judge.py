"""Whether a number came back: each rule, and that nothing is claimed without known noise."""

from __future__ import annotations

import pytest

from tasks.judge import Answer, Judged, Noise, Number, _overall, judge

GIB = 2**30


def exactly(*values: float) -> list[Number]:
    return [Number(value, value, value) for value in values]


def printed(value: float) -> Number:
    return Number(value, value - 0.005 * GIB, value + 0.005 * GIB)


def told(
    metric: str,
    old: float,
    new: list[float],
    *,
    earlier: tuple[float, ...] = (),
    rounds: int = 1,
    floor: float | None = None,
    profiled: bool = False,
) -> Answer:
    noise = Noise(exactly(old, *earlier), rounds, floor)
    return judge(metric, exactly(old)[0], exactly(*new), noise, profiled=profiled)[0]


def test_exact_arithmetic_must_be_equal() -> None:
    assert told("num_gpu_blocks", 1638, [1638]) is Answer.REPRODUCED
    assert told("num_gpu_blocks", 1638, [1637]) is Answer.NOT
    assert told("num_gpu_blocks", 1638, [1638, 1637]) is Answer.NOT
    # Noise, however wide, is no excuse.
    assert told("num_gpu_blocks", 1638, [1637], earlier=(1600, 1700), floor=100) is Answer.NOT


def test_a_profiled_pool_may_differ_as_two_boots_do() -> None:
    assert told("num_gpu_blocks", 551, [550], profiled=True) is Answer.REPRODUCED
    assert told("num_gpu_blocks", 551, [520], profiled=True) is Answer.NOT
    # Its layout may not: the block is arithmetic whatever the pool.
    assert told("attention_block_size_tokens", 528, [544], profiled=True) is Answer.NOT


def test_what_a_log_rounds_is_the_same_within_its_rounding() -> None:
    old, new = printed(8.61 * GIB), printed(8.62 * GIB)
    noise = Noise([old], 1, None)
    assert judge("model_loading_bytes", old, [new], noise, profiled=True)[0] is Answer.REPRODUCED
    far = printed(8.64 * GIB)
    assert judge("model_loading_bytes", old, [far], noise, profiled=True)[0] is Answer.UNKNOWN


def test_one_earlier_run_tells_no_noise() -> None:
    assert told("ttft_p50_ms", 100, [100]) is Answer.REPRODUCED
    assert told("ttft_p50_ms", 100, [101]) is Answer.UNKNOWN


def test_earlier_runs_tell_it() -> None:
    some = (101, 99, 102, 98, 100.5)
    assert told("ttft_p50_ms", 100, [101.5], earlier=some) is Answer.REPRODUCED
    assert told("ttft_p50_ms", 100, [105], earlier=some) is Answer.REPRODUCED
    # Far outside: one round alone does not show how rounds differ, two do.
    assert told("ttft_p50_ms", 100, [150], earlier=some) is Answer.UNKNOWN
    assert told("ttft_p50_ms", 100, [150], earlier=some, rounds=2) is Answer.NOT


def test_a_limit_as_wide_as_the_number_tells_nothing() -> None:
    assert told("ttft_p50_ms", 100, [130], earlier=(120,), rounds=2) is Answer.UNKNOWN


def test_the_sentinels_spread_is_noise_too() -> None:
    assert told("ttft_p50_ms", 100, [108], floor=10) is Answer.REPRODUCED
    assert told("ttft_p50_ms", 100, [112], floor=10) is Answer.NOT


def one(metric: str, answer: Answer) -> Judged:
    return Judged(None, metric, 1, 1, answer, "why")


@pytest.mark.parametrize(
    ("numbers", "new", "same", "wanted"),
    [
        ([("num_gpu_blocks", Answer.REPRODUCED)], ["ok"], True, Answer.REPRODUCED),
        ([("num_gpu_blocks", Answer.REPRODUCED)], ["ok"], None, Answer.REPRODUCED),
        ([("num_gpu_blocks", Answer.NOT)], ["ok"], True, Answer.NOT),
        ([("ttft_p50_ms", Answer.NOT)], ["ok"], True, Answer.NOT),
        ([("ttft_p50_ms", Answer.UNKNOWN)], ["ok"], True, Answer.REPRODUCED),
        ([("preemptions", Answer.UNKNOWN)], ["ok"], True, Answer.REPRODUCED),
        ([("graph_capture_bytes", Answer.UNKNOWN)], ["ok"], True, Answer.UNKNOWN),
        ([("num_gpu_blocks", Answer.REPRODUCED)], ["oom"], True, Answer.NOT),
        ([("num_gpu_blocks", Answer.REPRODUCED)], ["ok", "oom"], True, Answer.NOT),
        ([("num_gpu_blocks", Answer.REPRODUCED)], [], None, Answer.UNKNOWN),
        ([("num_gpu_blocks", Answer.NOT)], ["ok"], False, Answer.UNKNOWN),
    ],
)
def test_overall(
    numbers: list[tuple[str, Answer]], new: list[str], same: bool | None, wanted: Answer
) -> None:
    judged = [one(metric, answer) for metric, answer in numbers]
    assert _overall("ok", new, judged, same_hardware=same)[0] is wanted
