"""Every reason of the validity table: when it is given, when not, and what it does."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.capture import validity
from tasks.capture.validity import (
    CHECKS,
    Check,
    Compared,
    Evidence,
    Scope,
    Weight,
    judge,
    judgements,
)


def names(**known: Any) -> list[str]:
    return [reason.name for reason in judge(Evidence(**known))]


def test_nothing_known_is_nothing_doubted() -> None:
    assert judge(Evidence()) == []
    assert validity.is_valid([])


#: name -> (evidence that gives the reason, evidence just within the limit)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "settings_in_force": (
        {"settings": [Compared("max_model_len", 32768, "8192", equal=False)]},
        {
            "settings": [
                Compared("max_model_len", 32768, "32768", equal=True),
                Compared("block_size", None, "128", equal=None),
            ]
        },
    ),
    "model_revision": (
        {"model_revision": Compared("model_revision", "sha256:1", "sha256:2", equal=False)},
        {"model_revision": Compared("model_revision", "sha256:1", "sha256:1", equal=True)},
    ),
    "first_completion": (
        {"completion": {"alias": True, "tokens": False}},
        {"completion": {"alias": True}},
    ),
    "port_free": ({"port_free": False}, {"port_free": True}),
    "machine_memory_returned": (
        {
            "memory_back": False,
            "memory_before_start_bytes": 2**32,
            "memory_after_stop_bytes": 2**31,
        },
        {
            "memory_back": True,
            "memory_before_start_bytes": 2**32,
            "memory_after_stop_bytes": 2**32,
        },
    ),
    "bundle_complete": ({"files_missing": ["server.log: absent"]}, {"files_missing": []}),
    "clock_mapped": ({"clock_mapped": False}, {"clock_mapped": True}),
    "peak_within_bound": (
        {"peak_kv_usage_ratio": 0.5, "peak_kv_usage_ratio_bound": 0.4},
        {"peak_kv_usage_ratio": 0.4, "peak_kv_usage_ratio_bound": 0.4},
    ),
    "sources_agree": (
        {"stated": {"num_gpu_blocks": {"log": (551, 551), "cache_config_info": (550, 550)}}},
        {
            "stated": {
                "max_concurrency": {"log": (8.345, 8.355), "cache_config_info": (8.3485, 8.3485)},
                "num_gpu_blocks": {"prediction": (550, 551), "cache_config_info": (551, 551)},
                "kv_cache_size_tokens": {"log": (273563, 273563)},
            }
        },
    ),
    "requests_complete": (
        {"requests_asked": 32, "requests_sent": 32, "requests_succeeded": 31},
        {"requests_asked": 32, "requests_sent": 32, "requests_succeeded": 32},
    ),
    "client_concurrency": (
        {"parallel_asked": 64, "parallel_achieved": 50.0},
        {"parallel_asked": 64, "parallel_achieved": 60.0},
    ),
    "client_lag": (
        {"client_lag_s": 0.21, "request_latency_s": 2.0},
        {"client_lag_s": 0.2, "request_latency_s": 2.0},
    ),
    "prefix_cache_unused": (
        {"prefix_caching_wanted": False, "prefix_queries": 1000, "prefix_hits": 11},
        {"prefix_caching_wanted": False, "prefix_queries": 1000, "prefix_hits": 10},
    ),
    "samples_complete": (
        {"ticks_expected": 100, "ticks_kept": 90},
        {
            "ticks_expected": 100,
            "ticks_kept": 95,
            "largest_gap_s": 1.9,
            "sample_interval_s": 0.25,
        },
    ),
    "server_uninterrupted": ({"counter_resets": 1}, {"counter_resets": 0}),
    "gpu_exclusive": ({"gpu_foreign_pids": [7, 7, 3]}, {"gpu_foreign_pids": []}),
    "gpu_unthrottled": ({"throttle_reasons": [0, 0x1, 0x40]}, {"throttle_reasons": [0x1, 0x2]}),
    "gpu_memory_sound": ({"ecc_errors": 2}, {"ecc_errors": 0}),
    "memory_returned": (
        {"gpu_memory_back": False, "processes_left": 0},
        {"gpu_memory_back": True, "processes_left": 0},
    ),
    "samples_between_curves": ({"samples_outside_curves": 1}, {"samples_outside_curves": 0}),
    "power_capped": ({"throttle_reasons": [0x1, 0x4]}, {"throttle_reasons": [0x1]}),
    "preempted": ({"preemptions": 4.0}, {"preemptions": 0.0}),
    "queued": ({"peak_requests_waiting": 55.0}, {"peak_requests_waiting": 0.0}),
}


def test_every_check_has_a_case_and_a_name_of_its_own() -> None:
    assert set(CASES) == {check.name for check in CHECKS}
    assert len(CASES) == len(CHECKS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_reason_is_given_and_not_given(name: str) -> None:
    wrong, right = CASES[name]
    assert names(**wrong) == [name]
    assert names(**right) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_holds_is_broken_or_unknown_with_its_reason(check: Check) -> None:
    """Unknown is neither: a check that nobody could make must not look as if it had passed."""
    wrong, right = CASES[check.name]
    for known, wanted in ((wrong, False), (right, True), ({}, None)):
        one = next(j for j in judgements(Evidence(**known)) if j.name == check.name)
        assert (one.holds, one.weight) == (wanted, check.weight)
        assert one.reason


def test_run_and_load_point_are_judged_apart() -> None:
    run = {one.name for one in judgements(Evidence(), Scope.RUN)}
    point = {one.name for one in judgements(Evidence(), Scope.LOAD_POINT)}
    assert run | point == set(CASES)
    assert run & point == {"server_uninterrupted"}
    assert {"settings_in_force", "sources_agree", "port_free", "memory_returned"} <= run


def test_no_sample_at_all_is_a_gap() -> None:
    assert names(ticks_expected=0, ticks_kept=0) == ["samples_complete"]


def test_a_record_without_some_requests_is_not_complete() -> None:
    known = {"requests_asked": 8, "requests_sent": 8, "requests_succeeded": 8}
    assert names(**known, requests_recorded=8) == []
    assert names(**known, requests_recorded=7) == ["requests_complete"]


def test_prefix_hits_are_wanted_where_caching_is() -> None:
    hits = {"prefix_queries": 1000, "prefix_hits": 900}
    assert names(prefix_caching_wanted=True, **hits) == []
    assert names(prefix_caching_wanted=None, **hits) == []
    assert names(prefix_caching_wanted=False, prefix_queries=0, prefix_hits=0) == []


def test_long_gap_with_all_ticks() -> None:
    assert names(largest_gap_s=2.5, sample_interval_s=0.25) == ["samples_complete"]


def test_weights_decide_what_is_compared() -> None:
    by_name = {check.name: check.weight for check in CHECKS}
    assert by_name["settings_in_force"] is Weight.FAILS
    assert by_name["preempted"] is by_name["queued"] is Weight.NOTES
    assert validity.is_valid(judge(Evidence(preemptions=3, peak_requests_waiting=9)))
    assert not validity.is_valid(judge(Evidence(client_lag_s=1.0)))


def test_messages_say_both_sides_and_keep_every_source() -> None:
    reason = judge(
        Evidence(
            stated={
                "num_gpu_blocks": {
                    "log": (551, 551),
                    "cache_config_info": (551, 551),
                    "prediction": (549, 550),
                }
            }
        )
    )[0]
    assert reason.message.endswith(
        "num_gpu_blocks: cache_config_info 551, log 551, prediction 549..550"
    )
    wrong = Compared("dtype", "bfloat16", "float16", equal=False)
    mismatch = judge(Evidence(settings=[wrong]))[0]
    assert "wanted 'bfloat16', in force 'float16'" in mismatch.message


def test_weights_are_those_that_were_promised() -> None:
    """Who relies on a weight must not lose it to an edit of the table."""
    by_weight: dict[Weight, set[str]] = {}
    for check in CHECKS:
        by_weight.setdefault(check.weight, set()).add(check.name)
    assert by_weight[Weight.FAILS] == {"settings_in_force", "model_revision"}
    assert by_weight[Weight.INVALIDATES] == {
        "sources_agree",
        "first_completion",
        "requests_complete",
        "client_concurrency",
        "client_lag",
        "prefix_cache_unused",
        "samples_complete",
        "server_uninterrupted",
        "gpu_exclusive",
        "gpu_unthrottled",
        "gpu_memory_sound",
        "memory_returned",
        "port_free",
    }
    # A machine's whole memory and its power limit are not the server's; the rest is the purpose.
    assert by_weight[Weight.NOTES] == {
        "machine_memory_returned",
        "bundle_complete",
        "clock_mapped",
        "samples_between_curves",
        "peak_within_bound",
        "power_capped",
        "preempted",
        "queued",
    }


@pytest.mark.parametrize("quantity", ["num_gpu_blocks", "kv_cache_size_tokens", "max_concurrency"])
def test_log_server_and_prediction_must_agree_on_each_quantity(quantity: str) -> None:
    """Each pair of sources can disagree, on blocks, tokens or concurrency."""
    for one, other in (
        ("log", "cache_config_info"),
        ("log", "prediction"),
        ("cache_config_info", "prediction"),
    ):
        assert names(stated={quantity: {one: (10, 10), other: (11, 11)}}) == ["sources_agree"]
        assert names(stated={quantity: {one: (10, 11), other: (11, 11)}}) == []


def test_a_short_request_allows_what_an_idle_loop_needs() -> None:
    """A tenth of next to nothing would blame every client; without a latency the least holds."""
    assert names(client_lag_s=0.05, request_latency_s=0.1) == []
    assert names(client_lag_s=0.05) == []
    assert names(client_lag_s=0.06, request_latency_s=0.1) == ["client_lag"]
    assert names(client_lag_s=0.06) == ["client_lag"]


def test_the_limit_of_prefix_hits_is_one_percent() -> None:
    asked = {"prefix_caching_wanted": False, "prefix_queries": 10_000}
    assert names(**asked, prefix_hits=100) == []
    assert names(**asked, prefix_hits=101) == ["prefix_cache_unused"]
