"""``memsweep plan`` says what a sweep costs, with and without what saves, and on a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flows import cli, context
from flows.commands import planning
from tasks import history, record
from tasks.home import Home
from tasks.launch import models, target
from tasks.plan.outlook import Outlook
from tasks.plan.spending import NO_HISTORY, Past, Spending
from tests.support.bundle_maker import Lab

SWEEP = """
name: costly
model: tiny-qwen35
repeats: 2
server: {max_num_seqs: 64, max_model_len: 32768}
experiments:
  - name: profiled
    vary: {gpu_memory_utilization: [0.9, 0.7, 0.5]}
    points: [{parallel: 1, number: 2}, {parallel: 16, number: 32}]
"""
#: Keys of `plan --json` that scripts rely on; keys are only ever added.
KEYS = {
    "format",
    "sweep",
    "sweep_sha256",
    "target",
    "repeats",
    "boots",
    "estimate_s",
    "disk_bytes",
    "disk_source",
    "gpu_hours",
    "unresolved",
    "cells",
    "findings",
    "spending",
    "seed",
    "order",
    "budget",
}
CELL_KEYS = {
    "label",
    "cell_key",
    "setting_key",
    "expect",
    "infeasible",
    "skipped",
    "estimate_s",
    "past_runs",
    "last_measured_at",
    "median_s",
    "bundle_bytes",
    "cell",
    "prediction",
}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """An empty state folder, a sweep in the current one, and no GPU."""
    monkeypatch.setenv("MEMSWEEP_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "_gpu_here", lambda: None)
    (tmp_path / "costly.yaml").write_text(SWEEP)
    return Home(tmp_path / "state")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a runner of ``plan``: stdout and stderr."""

    def call(*arguments: str) -> tuple[str, str]:
        assert cli.run(["plan", *arguments]) == 0
        out, err = capsys.readouterr()
        return out, err

    return call


def document(plan: Any, *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(plan(*arguments, "--json")[0])
    return value


def test_keys_scripts_rely_on(plan: Any) -> None:
    value = document(plan, "demo", "--budget", "1")
    assert set(value) >= KEYS
    assert set(value["cells"][0]) >= CELL_KEYS
    assert set(value["budget"]) >= {"minutes", "unit", "spent_minutes", "runs", "left_out"}
    for cost in value["spending"].values():
        assert set(cost) == {"boots", "estimate_s", "gpu_hours"}


def test_costs_with_and_without_what_saves(plan: Any) -> None:
    value = document(plan, "costly.yaml", "--target", "local-gpu")
    boots = {name: cost["boots"] for name, cost in value["spending"].items()}
    assert boots == {
        "as_planned": 6,
        "one_boot_a_load_point": 12,
        "if_predictions_hold": 6,
        # 0.9 refused in both repeats, everything below follows.
        "if_the_unknown_is_refused": 2,
    }
    assert value["spending"]["one_boot_a_load_point"]["gpu_hours"] > value["gpu_hours"] > 0
    _, err = plan("costly.yaml", "--target", "local-gpu")
    assert "6 server starts, about " in err
    assert "without sharing: 12 server starts, one a load point" in err
    assert "less what earlier ends settle: 2 starts" in err
    assert "GPU-hours" in err


def test_a_budget_names_its_unit_and_what_it_leaves_out(plan: Any) -> None:
    value = document(plan, "costly.yaml", "--target", "local-gpu", "--budget", "7")
    budget = value["budget"]
    assert budget["unit"] == "GPU-minutes"
    assert budget["spent_minutes"] <= 7
    assert [run["repeat"] for run in budget["runs"]] == [1] * len(budget["runs"])
    assert len(budget["runs"]) + len(budget["left_out"]) == 6
    _, err = plan("demo", "--budget", "2")
    print(err)
    assert "budget of 2 slot-minutes: " in err
    assert "left out: context-limit/max_model_len=32768 #1" in err


def test_a_seed_shows_its_order_and_a_night_its_sentinel(plan: Any) -> None:
    plain = document(plan, "costly.yaml", "--target", "local-gpu")
    seeded = document(plan, "costly.yaml", "--target", "local-gpu", "--seed", "5")
    assert (plain["seed"], seeded["seed"]) == (None, 5)
    assert plain["order"] != seeded["order"]
    key = lambda turn: (turn["label"], turn["repeat"])  # noqa: E731
    assert sorted(plain["order"], key=key) == sorted(seeded["order"], key=key)
    out, err = plan("costly.yaml", "--target", "local-gpu", "--seed", "5", "--night")
    assert "Order with seed 5" in out
    assert "sentinel: profiled/gpu_memory_utilization=0.9, 3 runs" in err


def test_past_runs_tell_times_and_sizes(plan: Any, state: Home) -> None:
    from tests.test_history import on

    value = document(plan, "demo")
    assert (value["disk_source"], value["cells"][0]["past_runs"]) == ("estimated", 0)
    lab = Lab(state)
    record.ingest(state, [lab.seal(change=on("local"), started_s=1001.0, ended_s=1031.0)])
    value = document(plan, "demo")
    assert value["disk_source"] == "estimated from others here"
    assert value["disk_bytes"] < 5_000_000


def test_a_damaged_warehouse_does_not_keep_a_plan_from_being_made(plan: Any, state: Home) -> None:
    state.warehouse_snapshot.parent.mkdir(parents=True)
    state.warehouse_snapshot.write_bytes(b"no database" * 1000)
    _, err = plan("demo")
    assert "past runs are not taken into account" in err


def test_a_run_on_a_profile_from_a_file_knows_its_history_by_the_profiles_name(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are stored under the name, not under the path that was given to --target."""
    profile, sweep = tmp_path / "mine.yaml", tmp_path / "costly.yaml"
    profile.write_text("description: x\ndevice: cpu\noperation: local.yaml\npoll_s: 3\n")
    sweep.write_text(SWEEP.replace("gpu_memory_utilization: [0.9, 0.7, 0.5]", "seed: [1]"))
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    monkeypatch.setattr(context, "port_of", Mock())
    monkeypatch.setattr(models, "revision", lambda *_: "sha256:" + "0" * 64)
    asked: list[str] = []
    monkeypatch.setattr(history, "read", lambda _, name: asked.append(name))
    opened = context.open_context(str(sweep), str(profile), context.Wishes(), flow_run_id="f1")
    assert asked == ["mine"]
    assert opened.measuring.poll_s == 3


def test_a_short_sweep_takes_less_than_a_minute_and_its_cells_add_up(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outlook, "run_s", lambda _self, _planned: 3.0)
    cost = Spending(boots=6, wall_s=18.0, gpu_s=0.0)
    assert planning._cost(cost, "starts") == "6 starts, less than a minute"
    assert planning._cost(replace(cost, wall_s=80.0), "starts") == "6 starts, about 1 minute"
    assert planning._cost(replace(cost, wall_s=252.0), "starts") == "6 starts, about 4 minutes"
    out, _ = plan("costly.yaml")
    assert " 0.1 " in out


def test_a_cells_minutes_are_the_median_of_its_past_runs() -> None:
    from testkit.planning import demo

    made = demo()
    planned = made.cells[0]
    assert Outlook(made).run_s(planned) == planned.estimate_s
    at = datetime(2026, 11, 29, tzinfo=UTC)
    past = Past(runs=3, last_at=at, median_s=3.0, bundle_bytes=None)
    history_ = replace(NO_HISTORY, settings={planned.cell.setting_key: past})
    assert Outlook(made, history_).run_s(planned) == 3.0


def test_a_budget_is_as_small_as_run_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "costly.yaml", "--budget", "0"]) == 2
    assert "0.1" in capsys.readouterr().err
