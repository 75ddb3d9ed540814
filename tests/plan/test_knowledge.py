"""What a finished run settles: each rule in its direction, and nothing beyond it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.planning import surroundings

from tasks.plan.knowledge import (
    RULES,
    Finished,
    Knowledge,
    Rule,
    as_predicted,
    at_worst,
    foreseen,
)
from tasks.plan.order import bisection
from tasks.plan.plan import Plan, PlannedCell, PlannedRun, make_plan
from tasks.plan.sweep import parse_sweep
from warehouse.registry import Outcome

SWEEP = """
name: edges
model: tiny-qwen35
repeats: {repeats}
server: {{max_model_len: 4096, {server}}}
experiments:
  - name: line
    {more}
    vary: {vary}
    points: [{{parallel: 1, number: 2}}]
"""
#: Values of each axis, rising, and what else the server has to have for a rule on it.
VALUES: dict[str, list[float]] = {
    "gpu_memory_utilization": [0.5, 0.6, 0.7, 0.8, 0.9],
    "kv_cache_memory_bytes": [2**30, 2**31, 2**32, 2**33, 2**34],
    "max_model_len": [1024, 2048, 4096, 8192, 16384],
    "max_num_seqs": [8, 16, 32, 64, 128],
    "max_num_batched_tokens": [1024, 2048, 4096, 8192, 16384],
}


def plan(
    axis: str, *, server: str = "max_num_batched_tokens: 2048", more: str = "", repeats: int = 1
) -> Plan:
    """Return a plan of one line of cells along an axis, without any prediction."""
    text = SWEEP.format(
        server=server, more=more, repeats=repeats, vary={axis: VALUES[axis]}
    ).replace("'", "")
    where = surroundings(device="cuda", config=lambda name, revision: None)
    return make_plan(parse_sweep(text, where="x"), where)


def runs(made: Plan) -> list[PlannedRun]:
    """Return the first run of every cell in the file's order."""
    return [PlannedRun(planned, 1) for planned in made.cells]


def ended(run: PlannedRun, failure: str | None, outcome: Outcome | None = None) -> Finished:
    """Return how a run ended: well where there is no failure."""
    kind = Outcome.OOM if failure and "oom" in failure else Outcome.REFUSED
    kind = outcome or (kind if failure else Outcome.OK)
    return Finished(f"uuid-{run.cell.label}", run.cell, kind.value, failure)


def settled(made: Plan, *finished: Finished) -> list[int]:
    """Return the places of the cells whose outcome is known."""
    knowledge = Knowledge.of(finished)
    return [place for place, run in enumerate(runs(made)) if knowledge.known(run)]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.axis}-{r.towards}-{min(r.types)}")
def test_each_failure_settles_what_lies_beyond_it(rule: Rule) -> None:
    made = plan(rule.axis)
    wanted = [0, 1] if rule.towards == "lower" else [3, 4]
    for failure in rule.types:
        assert settled(made, ended(runs(made)[2], failure)) == wanted, failure


#: Which side of a failing value each failure settles, on every axis where it settles any.
@pytest.mark.parametrize(
    ("axis", "failure", "sides"),
    [
        ("gpu_memory_utilization", "kv_cache_smaller_than_one_request", "lower"),
        ("gpu_memory_utilization", "free_memory_below_utilization", "higher"),
        ("gpu_memory_utilization", "oom_graph_capture", "higher"),
        ("gpu_memory_utilization", "oom_profile", ""),
        ("gpu_memory_utilization", "oom_model_load", ""),
        ("kv_cache_memory_bytes", "no_memory_for_cache_blocks", "lower"),
        ("kv_cache_memory_bytes", "requested_kv_cache_exceeds_memory", "higher"),
        ("kv_cache_memory_bytes", "free_memory_below_utilization", ""),
        ("max_model_len", "kv_cache_smaller_than_one_request", "higher"),
        ("max_model_len", "no_memory_for_cache_blocks", ""),
        ("max_num_seqs", "mamba_blocks_below_max_num_seqs", "higher"),
        ("max_num_seqs", "oom_profile", "higher"),
        ("max_num_batched_tokens", "oom_profile", "higher"),
        ("max_num_batched_tokens", "oom_graph_capture", ""),
    ],
)
def test_a_failure_settles_one_side_only(axis: str, failure: str, sides: str) -> None:
    made = plan(axis)
    wanted = {"lower": [0, 1], "higher": [3, 4], "": []}[sides]
    assert settled(made, ended(runs(made)[2], failure)) == wanted


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        ("kv_cache_smaller_than_one_request", Outcome.LOST),
        ("kv_cache_smaller_than_one_request", Outcome.STOPPED),
        ("kv_cache_smaller_than_one_request", Outcome.TIMED_OUT),
        ("kv_cache_smaller_than_one_request", Outcome.CRASHED),
        ("killed_by_oom_killer", Outcome.OOM),
        ("host_out_of_memory", Outcome.OOM),
        ("memory_profiling_disturbed", Outcome.REFUSED),
        ("bad_flag", Outcome.REFUSED),
        ("unknown", Outcome.CRASHED),
        (None, Outcome.REFUSED),
    ],
)
def test_what_may_not_come_again_settles_nothing(failure: str | None, outcome: Outcome) -> None:
    for axis in VALUES:
        made = plan(axis)
        assert settled(made, ended(runs(made)[2], failure, outcome)) == []


def test_utilization_settles_nothing_where_the_pool_is_set_in_bytes() -> None:
    made = plan("gpu_memory_utilization", server="kv_cache_memory_bytes: 1073741824")
    assert settled(made, ended(runs(made)[2], "kv_cache_smaller_than_one_request")) == []
    assert settled(made, ended(runs(made)[2], "free_memory_below_utilization")) == [3, 4]


def changed(run: PlannedRun, **changes: Any) -> PlannedRun:
    """Return a run whose cell has another setting, pin or load."""
    document = run.cell.model_dump(mode="json")
    for path, value in changes.items():
        part: Any = document
        *folders, name = path.split("__")
        for folder in folders:
            part = part[int(folder) if folder.isdecimal() else folder]
        part[name] = value
    cell = type(run.cell).model_validate(document)
    planned = run.planned
    return PlannedRun(
        PlannedCell(cell, planned.experiment, planned.prediction, 1.0, 1.0, planned.bisect), 1
    )


@pytest.mark.parametrize(
    "change",
    [
        {"setting__server__dtype": "float16"},
        {"setting__server__enforce_eager": True},
        {"setting__model__name": "tiny-qwen3"},
        {"pins__engine_version": "0.28.0"},
        {"pins__model_revision": "sha256:" + "1" * 64},
        {"harness": 99},
    ],
)
def test_a_second_difference_settles_nothing(change: dict[str, Any]) -> None:
    made = plan("gpu_memory_utilization")
    knowledge = Knowledge.of([ended(runs(made)[2], "kv_cache_smaller_than_one_request")])
    lower = runs(made)[0]
    assert knowledge.known(lower) is not None
    assert knowledge.known(changed(lower, **change)) is None


def test_the_load_counts_only_for_what_came_of_serving() -> None:
    made = plan("gpu_memory_utilization")
    higher = changed(runs(made)[4], setting__load__0__number=3)
    for failure, known in (("oom_graph_capture", True), ("oom_serving", False)):
        knowledge = Knowledge.of([ended(runs(made)[2], failure)])
        assert (knowledge.known(higher) is not None) is known, failure
        assert knowledge.known(runs(made)[4]) is not None


def test_the_reason_names_witness_setting_and_failure() -> None:
    made = plan("gpu_memory_utilization")
    witness = ended(runs(made)[3], "no_memory_for_cache_blocks")
    known = Knowledge.of([witness]).known(runs(made)[2])
    assert known is not None
    assert (known.outcome, known.run_uuid) == (Outcome.REFUSED, witness.run_uuid)
    assert known.reason == (
        "refused at gpu_memory_utilization 0.8 already (no_memory_for_cache_blocks, run "
        f"{witness.run_uuid}), and at 0.7 the pool only shrinks"
    )


def test_a_sentinel_and_a_stated_expectation_are_always_measured() -> None:
    made = plan("gpu_memory_utilization")
    knowledge = Knowledge.of([ended(runs(made)[2], "kv_cache_smaller_than_one_request")])
    lower = runs(made)[0]
    assert knowledge.known(PlannedRun(lower.planned, 1, sentinel=True)) is None
    expecting = plan("gpu_memory_utilization", more="expect: refused")
    assert knowledge.known(runs(expecting)[0]) is None


def test_a_repeat_of_the_witness_itself_is_measured() -> None:
    made = plan("gpu_memory_utilization")
    knowledge = Knowledge.of([ended(runs(made)[2], "kv_cache_smaller_than_one_request")])
    assert knowledge.known(PlannedRun(made.cells[2], 2)) is None


@pytest.mark.parametrize(("worked", "known"), [(0, []), (2, []), (3, [0, 1]), (4, [0, 1])])
def test_a_failure_that_something_contradicts_settles_nothing(
    worked: int, known: list[int]
) -> None:
    """Refused at 0.7, but something worked there or below: chance, not a rule."""
    made = plan("gpu_memory_utilization")
    failed = ended(runs(made)[2], "kv_cache_smaller_than_one_request")
    assert settled(made, failed, ended(runs(made)[worked], None)) == known


def test_that_a_cell_works_is_only_concluded_on_a_frontier() -> None:
    made = plan("max_model_len")
    assert settled(made, ended(runs(made)[3], None)) == []
    frontier = plan("max_model_len", more="bisect: max_model_len")
    assert settled(frontier, ended(runs(frontier)[3], None)) == [0, 1, 2]
    known = Knowledge.of([ended(runs(frontier)[3], None)]).known(runs(frontier)[0])
    assert known is not None
    assert known.outcome is Outcome.OK
    assert known.reason.startswith("ok at max_model_len 8192 already (run uuid-line/")


def test_where_both_ends_fail_only_what_lies_between_two_works() -> None:
    made = plan("gpu_memory_utilization", more="bisect: gpu_memory_utilization")
    assert settled(made, ended(runs(made)[3], None)) == []
    assert settled(made, ended(runs(made)[1], None), ended(runs(made)[3], None)) == [2]
    failed = ended(runs(made)[2], "oom_graph_capture")
    assert settled(made, *(ended(runs(made)[n], None) for n in (1, 3)), failed) == []


def test_fewer_batched_tokens_may_be_refused_where_more_work() -> None:
    """A block of a hybrid with prefix caching, or one image, has to fit in a step."""
    made = plan("max_num_batched_tokens", server="", more="bisect: max_num_batched_tokens")
    assert settled(made, ended(runs(made)[3], None)) == []
    assert settled(made, *(ended(runs(made)[n], None) for n in (0, 3))) == [1, 2]


@settings(deadline=None)
@given(st.integers(0, 5), st.booleans())
def test_a_frontier_is_found_in_the_order_planned(first_bad: int, seeded: bool) -> None:
    """Whatever is left out ends as concluded, and less than everything is measured."""
    made = plan("max_model_len", more="bisect: max_model_len")
    places = {planned.cell.cell_key: place for place, planned in enumerate(made.cells)}
    order = [places[run.cell.cell_key] for run in made.runs(7 if seeded else None)]
    assert order == bisection(5)
    knowledge, measured = Knowledge(), 0
    for run in made.runs(7 if seeded else None):
        works = places[run.cell.cell_key] < first_bad
        known = knowledge.known(run)
        if known is None:
            measured += 1
            knowledge.add(ended(run, None if works else "kv_cache_smaller_than_one_request"))
        else:
            assert (known.outcome is Outcome.OK) == works
    assert measured <= 4


def test_what_is_foreseen_goes_by_prediction_or_by_the_worst() -> None:
    made = plan("gpu_memory_utilization", repeats=2)
    assert len(foreseen(made.runs(), as_predicted)) == 10
    # Nothing is predicted: each is refused, rising values leave nothing out of repeat 1, and
    # afterwards all but the highest follow from it.
    assert len(foreseen(made.runs(), at_worst)) == 6
    falling = sorted(made.runs(), key=lambda r: -r.cell.setting.server.gpu_memory_utilization)
    assert len(foreseen(falling, at_worst)) == 2


def test_nothing_is_looked_up_while_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of waiting runs are asked for at every start."""
    first, other, *_ = runs(plan("gpu_memory_utilization"))
    knowledge = Knowledge.of([Finished("a", first.cell, "ok")])
    monkeypatch.delattr("tasks.plan.knowledge._rest")
    assert knowledge.known(other) is None
