"""Schedules and nights in the state folder: cron lines, labels, the lock, a restarted night."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime

import pytest

from tasks import processes, schedules
from tasks.files import write_json
from tasks.home import Home
from tasks.schedules import Night, Schedule
from warehouse.errors import BadInput


def schedule(**changes: object) -> Schedule:
    whole = Schedule(
        name="demo",
        sweep="demo",
        target="local",
        cron="0 2 * * *",
        timezone="Europe/Berlin",
        directory="/",
        made_at="2026-11-28T10:00:00.000Z",
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def night(flow_run_id: str = "f1", **changes: object) -> Night:
    pid = os.getpid()
    whole = Night(flow_run_id, pid, processes.start_ticks(pid), "2026-11-29T02:00:05.000Z")
    return replace(whole, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cron", "timezone", "said"),
    [
        ("0 2 * *", "UTC", "wanted five fields"),
        ("0 0 2 * * *", "UTC", "wanted five fields"),
        ("@daily", "UTC", "wanted five fields"),
        ("61 2 * * *", "UTC", "bad minute"),
        ("0 2 * * x", "UTC", "bad day-of-week"),
        ("0 2 31 2 *", "UTC", "bad day-of-month"),
        ("0 2 * * *", "Mars/Olympus", "--timezone: got 'Mars/Olympus'"),
        ("0 2 * * *", "../etc/passwd", "--timezone"),
        ("0 2 * * *", "", "--timezone"),
    ],
)
def test_what_is_no_schedule_is_refused_by_name(cron: str, timezone: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        schedules.check_cron(cron, timezone)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_times_are_those_of_the_zone_in_utc() -> None:
    schedules.check_cron("0 2 * * *", "Europe/Berlin")
    winter = datetime(2026, 11, 29, 12, tzinfo=UTC)
    summer = datetime(2026, 7, 1, 12, tzinfo=UTC)
    assert [f"{t:%d %H:%M}" for t in schedule().next_times(2, after=winter)] == [
        "30 01:00",
        "01 01:00",
    ]
    assert [f"{t:%d %H:%M}" for t in schedule().next_times(1, after=summer)] == ["02 00:00"]


def test_a_label_is_the_scheduled_time_and_leads_back_to_it() -> None:
    moment = datetime.fromisoformat("2026-11-29T03:00:00.123+01:00")
    label = schedules.label_of(moment)
    assert label == "2026-11-29T02-00-00Z"
    assert schedules.LABEL.fullmatch(label)
    assert schedules.time_of(label) == moment.replace(microsecond=0)


def test_a_schedule_is_kept_replaced_and_forgotten(home: Home) -> None:
    assert schedules.schedules(home) == []
    schedules.save(home, schedule())
    schedules.save(home, schedule(cron="0 3 * * *"))
    assert [one.cron for one in schedules.schedules(home)] == ["0 3 * * *"]
    (home.schedules / "half.json").write_text('{"name": "half"}')
    assert schedules.find(home, "demo") == schedule(cron="0 3 * * *")
    schedules.remove(home, "demo")
    assert schedules.find(home, "demo") is None


@pytest.mark.parametrize(
    "damage",
    [
        {"cron": 5},
        {"cron": "0 2 * *"},
        {"timezone": "Mars"},
        {"webhook": 7},
        {"target": []},
        {"name": "../rounds/x"},
    ],
)
def test_a_damaged_schedule_is_none_and_is_told(home: Home, damage: dict[str, object]) -> None:
    """Its name, too, is its file's: `schedule --remove` deletes by it."""
    path = home.schedules / "demo.json"
    write_json(path, asdict(schedule()) | damage)
    assert schedules.schedules(home) == []
    assert schedules.unreadable(home) == [path]
    write_json(path, asdict(schedule()) | {"unknown": 1})
    assert (schedules.schedules(home), schedules.unreadable(home)) == ([schedule()], [])


@pytest.mark.parametrize(
    "damage", [{"began_at": None}, {"message": 5}, {"sweep": [1]}, {"flow_run_id": "../../x"}]
)
def test_a_damaged_night_is_none(home: Home, damage: dict[str, object]) -> None:
    schedules.save_night(home, night("f2"))
    write_json(home.schedules / "nights" / "f1.json", asdict(night()) | damage)
    assert schedules.nights(home) == [night("f2")]
    assert schedules.find_night(home, "f1") is None


def test_the_webhooks_address_can_stay_in_the_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example/secret")
    schedules.save(home, schedule(webhook_env="HOOK"))
    assert "secret" not in (home.schedules / "demo.json").read_text()


def test_a_night_started_again_keeps_its_label(home: Home) -> None:
    first = schedules.note_process(home, "f1", "small")
    assert (first.pid, first.night) == (os.getpid(), None)
    schedules.save_night(home, replace(first, night="2026-11-29T02-00-00Z", pid=1))
    again = schedules.note_process(home, "f1", "small")
    assert (again.pid, again.night) == (os.getpid(), "2026-11-29T02-00-00Z")
    assert again.goes_on


def test_a_night_whose_process_is_gone_has_died(home: Home) -> None:
    gone = night(start_ticks=1)
    assert (gone.goes_on, gone.died) == (False, True)
    ended = night(start_ticks=1, ended_at="2026-11-29T03:00:00.000Z", verdict="ok")
    assert (ended.goes_on, ended.died) == (False, False)


def test_the_newest_nights_are_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "KEPT_NIGHTS", 2)
    for day in (1, 2, 3):
        schedules.save_night(home, night(f"f{day}", began_at=f"2026-11-0{day}T02:00:00.000Z"))
        schedules.log_file(home, f"f{day}").write_text("said")
    schedules.forget_old_nights(home)
    assert [one.flow_run_id for one in schedules.nights(home)] == ["f3", "f2"]
    assert not schedules.log_file(home, "f1").exists()


HOLD = """
import sys, time
from pathlib import Path
from tasks import schedules
from tasks.home import Home
with schedules.only_night(Home(Path(sys.argv[1])), "demo", "f1"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_night_is_free_at_once(home: Home) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        ticks = processes.start_ticks(holder.pid)
        going = night(pid=holder.pid, start_ticks=ticks, sweep="demo", night="2026-11-29T02-00-00Z")
        schedules.save_night(home, going)
        with pytest.raises(schedules.StillGoing) as busy, schedules.only_night(home, "demo", "f2"):
            pass
        assert busy.value.holder == (
            f"night 2026-11-29T02-00-00Z (process {holder.pid}) still goes on"
        )
        with schedules.only_night(home, "another", "f2"):
            pass
        holder.send_signal(signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    with schedules.only_night(home, "demo", "f2"):
        pass
