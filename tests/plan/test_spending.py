"""What a plan costs and what a budget buys, before and with a history."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.planning import demo, surroundings

from tasks.plan.outlook import Outlook
from tasks.plan.plan import Plan, make_plan
from tasks.plan.spending import (
    NO_HISTORY,
    Choice,
    History,
    Past,
    choose,
    cost_s,
    last_measured,
    spending,
)
from tasks.plan.sweep import parse_sweep

SWEEP = """
name: small
model: tiny-qwen3
repeats: 2
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, max_num_batched_tokens: 512}
experiments:
  - name: one
    vary: {max_num_seqs: [16, 32, 64]}
    points: [{parallel: 1, number: 2}, {parallel: 4, number: 8}]
"""


def plan(text: str = SWEEP, **changes: object) -> Plan:
    """Return the plan of a sweep of three cells with two load points and two repeats."""
    return make_plan(parse_sweep(text, where="x"), surroundings(**changes))


def past(made: Plan, days: dict[int, int], median_s: float | None = 100.0) -> History:
    """Return a history in which cells (by place) were last measured on a day of November."""
    return History(
        {
            made.cells[place].cell.setting_key: Past(
                3, datetime(2026, 11, day, tzinfo=UTC), median_s, 5_000
            )
            for place, day in days.items()
        }
    )


def shown(choice: Choice) -> list[str]:
    return [f"{run.cell.setting.server.max_num_seqs}#{run.repeat}" for run in choice.chosen]


def test_what_was_never_measured_comes_first_then_the_oldest() -> None:
    made = plan()
    runs = [*made.runs()]
    history = past(made, {0: 2, 2: 1})
    never = made.cells[1].estimate_s
    assert shown(choose(runs, history, 2 * never)) == ["32#1", "32#2"]
    assert shown(choose(runs, history, 2 * never + 100)) == ["32#1", "64#1", "32#2"]
    assert shown(choose(runs, history, 2 * never + 300)) == ["16#1", "32#1", "64#1", "32#2", "64#2"]
    assert shown(choose(runs, history, 1e9)) == [f"{n}#{r}" for r in (1, 2) for n in (16, 32, 64)]


def test_a_run_that_no_longer_fits_is_passed_over() -> None:
    made = plan()
    runs = [*made.runs()]
    history = past(made, {1: 1, 2: 2}, median_s=10.0)
    assert shown(choose(runs, history, 25.0)) == ["32#1", "32#2"]
    assert choose(runs, history, 0).left_out == tuple(runs)


def test_a_bisected_line_is_as_old_as_what_was_measured_of_it_last() -> None:
    made = plan(SWEEP.replace("- name: one", "- name: one\n    bisect: max_num_seqs"))
    runs, history = [*made.runs()], past(made, {0: 2, 2: 4})
    assert set(last_measured(runs, history).values()) == {datetime(2026, 11, 4, tzinfo=UTC)}
    # The ends, which settle what is between, before it.
    assert sorted(shown(choose(runs, history, 200.0))) == ["16#1", "64#1"]
    # Of a line, what is left of it when its ends are taken is no older than the whole.
    (middle,) = (run for run in runs if run.planned is made.cells[1] and run.repeat == 1)
    other = replace(runs[0], planned=replace(runs[0].planned, bisect=None))
    last = {
        middle.cell.cell_key: datetime(2026, 11, 4, tzinfo=UTC),
        other.cell.cell_key: datetime(2026, 11, 3, tzinfo=UTC),
    }
    assert choose([middle, other], history, 100.0, last).chosen == (other,)


@settings(deadline=None)
@given(st.floats(0, 2000), st.tuples(*[st.integers(0, 28)] * 3))
def test_a_budget_is_never_passed_and_nothing_is_lost(budget: float, days: tuple[int, ...]) -> None:
    made = plan()
    measured = {place: day for place, day in enumerate(days) if day}
    runs, history = [*made.runs(3)], past(made, measured)
    choice = choose(runs, history, budget)
    assert sum(cost_s(run, history) for run in choice.chosen) <= budget
    both = [*choice.chosen, *choice.left_out]
    assert sorted(map(runs.index, both)) == list(range(len(runs)))
    assert [*map(runs.index, choice.chosen)] == sorted(map(runs.index, choice.chosen))


def test_the_sentinel_is_paid_first() -> None:
    made = plan(SWEEP + "sentinel: one/max_num_seqs=64\n")
    runs = [*made.runs()]
    chosen = choose(runs, past(made, {2: 1}), 3 * 100.0).chosen
    assert [run.sentinel for run in chosen] == [True, True, True]


def test_gpus_count_and_a_cpu_has_none() -> None:
    text = SWEEP.replace(
        "max_model_len", "tensor_parallel_size: 2, pipeline_parallel_size: 2, max_model_len"
    )
    on_gpu, on_cpu = plan(text, device="cuda", memory_total_bytes=None), plan(text)
    run = next(on_gpu.runs())
    assert cost_s(run, NO_HISTORY) == 4 * run.planned.estimate_s
    assert spending([run], NO_HISTORY, slots=2).gpu_s == 4 * run.planned.estimate_s
    assert spending([run], NO_HISTORY, slots=2).wall_s == run.planned.estimate_s / 2
    run = next(on_cpu.runs())
    assert cost_s(run, NO_HISTORY) == run.planned.estimate_s
    cost = spending([run], NO_HISTORY, slots=1)
    assert cost.gpu_s == 0
    assert cost.document(cpu=True)["gpu_hours"] is None


def test_one_start_a_load_point_costs_the_further_starts() -> None:
    made = plan()
    grouped = spending(made.runs(), NO_HISTORY, slots=1)
    apart = spending(made.runs(), NO_HISTORY, slots=1, grouped=False)
    assert (grouped.boots, apart.boots) == (6, 12)
    assert apart.wall_s - grouped.wall_s == pytest.approx(6 * made.cells[0].boot_s)
    assert grouped.wall_s == pytest.approx(made.estimate_s)


def test_past_runs_replace_the_estimates() -> None:
    made = plan()
    history = past(made, {0: 1})
    measured, other = (next(r for r in made.runs() if r.planned is c) for c in made.cells[:2])
    assert (history.seconds(measured), history.bundle_bytes(measured)) == (100.0, 5_000)
    assert history.seconds(other) == other.planned.estimate_s
    assert history.bundle_bytes(other) == other.planned.disk_bytes
    corrected = History(history.settings, bundle_ratio=0.5)
    assert corrected.bundle_bytes(other) == other.planned.disk_bytes // 2


@pytest.mark.parametrize(
    ("places", "ratio", "said"),
    [
        ((), None, "estimated"),
        ((), 0.5, "estimated from others here"),
        ((0,), 0.5, "2 measured, others estimated from others here"),
        ((0, 1, 2), 0.5, "measured"),
    ],
)
def test_it_is_said_where_the_sizes_come_from(
    places: tuple[int, ...], ratio: float | None, said: str
) -> None:
    made = plan()
    history = History(past(made, dict.fromkeys(places, 1)).settings, ratio)
    assert Outlook(made, history).sized_by == said


def test_the_demo_costs_what_it_did() -> None:
    outlook = Outlook(demo(), budget_minutes=2.0)
    assert outlook.spending["as_planned"].boots == 5
    assert outlook.spending["as_planned"].wall_s == demo().estimate_s
    assert outlook.spending["one_boot_a_load_point"].boots == 12
    assert outlook.unit == "slot-minutes"
    assert outlook.choice is not None
    assert len(outlook.choice.chosen) < 5
