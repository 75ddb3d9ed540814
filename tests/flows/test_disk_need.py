"""The disk that a measuring asks for before anything is started: for what is missing, no more."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime

import pytest
from testkit.planning import surroundings

from flows.context import SPARE_BYTES, Wishes, need_disk
from tasks import bundle, history
from tasks.canonical import sha256_file
from tasks.home import Home
from tasks.plan.plan import Plan, PlannedRun, make_plan
from tasks.plan.spending import History, Past
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, Round, open_round
from warehouse.errors import BadInput

SWEEP = """
name: small
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
experiments:
  - name: e
    vary: {max_num_seqs: [1, 2, 3]}
    points: [{parallel: 1, number: 1}]
"""
LABEL = "2026-11-29T02-00-00Z"
SIZE = 100_000_000


def plan(*, night: bool = False) -> Plan:
    return make_plan(parse_sweep(SWEEP, where="x"), surroundings(), night=night)


def opened(home: Home, label: str | None = None, target: str = "local") -> Round:
    sweep = parse_sweep(SWEEP, where="x")
    return open_round(home, sweep, SWEEP, target=target, fresh=True, label=label)[0]


def measured(round_: Round, runs: list[PlannedRun], outcome: str = "ok") -> None:
    for number, run in enumerate(runs):
        folder = round_.home.bundles / f"{round_.id}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / bundle.MANIFEST).write_text("{}")
        digest = sha256_file(folder / bundle.MANIFEST)
        key = run.cell.cell_key
        round_.save(RepeatState(key, run.repeat, 1, folder.name, None, outcome, digest))


@pytest.fixture(autouse=True)
def _bundles_so_large(monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past(1, datetime(2026, 11, 1, tzinfo=UTC), 60.0, SIZE)
    settings = {run.cell.setting_key: past for run in plan().runs()}
    monkeypatch.setattr(history, "read", lambda snapshot, target: History(settings))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of every disk."""
    free = [0]
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[0]))
    return free


def needs(
    disk: list[int], home: Home, runs: int, plan_: Plan, target: str = "local", **wishes: object
) -> None:
    """Assert that a measuring needs the disk of so many runs, none of them where it is none."""
    asked = Wishes(**wishes)  # type: ignore[arg-type]
    disk[0] = 2 * SIZE * runs + (SPARE_BYTES if runs else 0)
    need_disk(home, plan_, target, asked)
    if runs:
        disk[0] -= 1
        with pytest.raises(BadInput, match=f"for the bundles of {runs} missing runs of sweep"):
            need_disk(home, plan_, target, asked)


def test_a_measuring_needs_the_disk_of_what_is_missing_in_its_round(
    home: Home, disk: list[int]
) -> None:
    runs = [*plan().runs()]
    needs(disk, home, 3, plan())
    measured(opened(home), runs)  # an older round
    round_ = opened(home)
    needs(disk, home, 3, plan())
    measured(round_, runs[:2])
    needs(disk, home, 1, plan())
    measured(round_, runs[:2], "lost")
    needs(disk, home, 3, plan())
    measured(round_, runs)
    needs(disk, home, 0, plan())
    needs(disk, home, 3, plan(), fresh=True)
    needs(disk, home, 2, plan(), fresh=True, budget_minutes=2.5)


def test_a_night_needs_the_disk_of_its_own_round_and_of_its_sentinel(
    home: Home, disk: list[int]
) -> None:
    night = plan(night=True)
    runs = [*night.runs()]
    assert len(runs) == 5
    measured(opened(home), runs)
    needs(disk, home, 5, night, label=LABEL)
    measured(opened(home, LABEL), runs[:4])
    needs(disk, home, 1, night, label=LABEL)


def test_a_round_on_a_profile_from_a_file_is_known_by_what_was_given(
    disk: list[int], home: Home
) -> None:
    """A round holds the path, a plan the profile's name."""
    measured(opened(home, target="mine/local.yaml"), [*plan().runs()])
    needs(disk, home, 0, plan(), target="mine/local.yaml")
    needs(disk, home, 3, plan(), target="local")
