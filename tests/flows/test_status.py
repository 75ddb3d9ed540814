"""``status`` and ``schedule``: told from files where need be, with a command for every need."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows import cli, context, overview
from tasks import processes, schedules
from tasks.canonical import sha256_file
from tasks.files import write_json
from tasks.home import Home
from tasks.launch import services
from tasks.launch.settings import run_outputs
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, Round, open_round
from tasks.schedules import Night, Schedule
from tests.support.bundle_maker import Lab
from warehouse import ledger

SWEEP = """
name: small
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
experiments:
  - {name: e, points: [{parallel: 1, number: 1}]}
"""
LABEL = "2026-11-29T02-00-00Z"
UUID = "00000000-0000-4000-8000-000000000001"

#: Keys scripts rely on; more are only ever added.
KEYS = {
    "": "format services schedules nights running uncollected rounds disk quarantined needs",
    "services": "name state pid url",
    "schedules": "name sweep target cron timezone next_times max_late_hours budget_minutes webhook "
    "directory in_prefect paused late",
    "nights": "night sweep target verdict message began_at ended_at round flow_run_id pid webhook",
    "running": "round label repeat run_uuid planned phase load_point since pid status pending",
    "uncollected": "round label repeat run_uuid planned phase load_point since pid status pending "
    "newest collected_by command",
    "rounds": "round sweep target opened_at pid runs finished unexpected problem newest left",
    "disk": "free_bytes low",
    "quarantined": "bundle reason",
    "needs": "what command",
}


@pytest.fixture(autouse=True)
def _in_force(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def schedule(home: Home, **changes: Any) -> Schedule:
    whole = Schedule(
        "small", "/sweeps/small.yaml", "local", "0 2 * * *", "UTC", "/", "2026-11-28T10:00:00.000Z"
    )
    schedules.save(home, made := replace(whole, **changes))
    return made


def night(home: Home, flow_run_id: str, verdict: str | None, **changes: Any) -> None:
    """Keep a night; without a verdict its process is gone."""
    whole = Night(
        flow_run_id, os.getpid(), 1, f"2026-11-29T02:00:0{len(schedules.nights(home))}.000Z",
        sweep="small", target="local", night=LABEL, verdict=verdict,
        ended_at="2026-11-29T03:00:00.000Z" if verdict else None,
    )  # fmt: skip
    schedules.save_night(home, replace(whole, **changes))


def round_id(home: Home, *, label: str | None = LABEL) -> str:
    sweep = parse_sweep(SWEEP, where="x")
    return open_round(home, sweep, SWEEP, target="local", fresh=True, label=label)[0].id


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.run(["status", "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def needs(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    return [(need["what"], need["command"]) for need in told(capsys)["needs"]]


def test_keys_scripts_rely_on(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    schedule(home)
    night(home, "f1", "failed", message="0 of 1 cells as expected")
    round_ = opened(home, TWICE)
    round_.save(RepeatState("key", 1, 1, UUID, None))
    write_json(home.quarantine / "x" / "reason.json", {"path": UUID, "reason": "no manifest"})
    value = told(capsys)
    with round_.only_flow():
        value["running"] = told(capsys)["running"]
    for part, keys in KEYS.items():
        rows = value if part == "" else value[part]
        row = rows[0] if isinstance(rows, list) else rows
        assert set(row) >= set(keys.split()), part


def test_nothing_here_needs_no_hand_and_makes_nothing(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["status"]) == 0
    assert "Nothing needs a hand." in capsys.readouterr().out
    assert not home.root.exists()


def test_a_schedule_without_its_scheduler_needs_the_services(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule(home)
    value = told(capsys)
    assert value["needs"][0]["command"] == "memsweep services up"
    assert value["schedules"][0]["next_times"][0].endswith("T02:00:00Z")
    assert value["schedules"][0]["in_prefect"] is None, "nobody could be asked"


def test_a_variable_that_the_scheduler_lacks_is_told(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "lacking", lambda _home: {"small": ["HOOK"]})
    (need,) = overview.overview(home)["needs"]
    assert "nights of small need HOOK" in need["what"]
    assert need["command"] == "HOOK=VALUE memsweep services up"


def test_the_latest_night_that_was_not_skipped_tells_what_to_do(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule(home)
    night(home, "f1", "missed", message="9.0 h late")
    night(home, "f2", "skipped", message="still going")
    assert (
        f"night {LABEL} of small: missed - 9.0 h late",
        "memsweep run /sweeps/small.yaml --fresh",
    ) in needs(capsys)
    night(home, "f3", "regression", message="fewer tokens", round="small-1")
    assert (
        f"night {LABEL} of small: regression - fewer tokens",
        "memsweep compare small@small-1",
    ) in needs(capsys)
    night(home, "f4", "ok")
    assert not [what for what, _ in needs(capsys) if "night" in what and LABEL in what]


def test_a_killed_night_and_a_webhook_that_was_not_taken_are_told(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    night(home, "f1", None, webhook="webhook http://h/…: it answered 500")
    found = needs(capsys)
    log = schedules.log_file(home, "f1")
    assert (f"night {LABEL} of small: died", f"tail -n 40 {log}") in found
    assert any("it answered 500" in what for what, _ in found)


def test_an_unfinished_round_is_gone_on_with_by_its_own_copy_of_the_sweep(
    home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = round_id(home)
    ((what, command),) = needs(capsys)
    assert f"{name}: unfinished" in what
    assert command == f"memsweep run {home.rounds / name / 'sweep.yaml'}"
    file = tmp_path / "small.yaml"
    file.write_text(SWEEP)
    schedule(home, sweep=str(file))
    assert f"memsweep run {file}" in [command for _, command in needs(capsys)]
    night(home, "f1", None, start_ticks=processes.start_ticks(os.getpid()))
    assert not [what for what, _ in needs(capsys) if "unfinished" in what], "a night is at it"


def measured(
    home: Home, round_: Round, *, outcome: str = "ok", until: int | None = None
) -> list[RepeatState]:
    """Measure a round's runs with the pins of now, at most the first ``until`` of them."""
    states = []
    lab = Lab(home)
    for run in [*overview.plan_of(home, round_).runs()][:until]:
        key = run.cell.cell_key
        folder = lab.seal(sweep=round_.sweep_name, round=round_.id, repeat=run.repeat)
        digest = sha256_file(folder / "manifest.json")
        states.append(RepeatState(key, run.repeat, 1, folder.name, None, outcome, digest))
        round_.save(states[-1])
    return states


def opened(home: Home, text: str = SWEEP, *, days_ago: float = 0) -> Round:
    sweep = parse_sweep(text, where="x")
    round_, _ = open_round(home, sweep, text, target="local", fresh=True)
    facts = json.loads((round_.folder / "round.json").read_text())
    at = datetime.fromisoformat(facts["opened_at"]) - timedelta(days=days_ago)
    facts["opened_at"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    write_json(round_.folder / "round.json", facts)
    return replace(round_, opened_at=facts["opened_at"])


def row_of(home: Home, round_: Round) -> dict[str, Any]:
    return next(row for row in overview.overview(home)["rounds"] if row["round"] == round_.id)


TWICE = SWEEP.replace("repeats: 1", "repeats: 2")


def pins_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ENGINE_VERSION", "0.99.0")
    overview._surroundings.cache_clear()


@pytest.fixture(autouse=True)
def _pins_of_now() -> Iterator[None]:
    overview._surroundings.cache_clear()
    yield
    overview._surroundings.cache_clear()


def test_a_pruned_round_and_one_of_an_edited_sweep_need_no_hand(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    old = opened(home, TWICE.replace("number: 1", "number: 7"), days_ago=60)
    measured(home, old)
    for days in (50, 40):
        measured(home, opened(home, TWICE, days_ago=days))
    assert cli.run(["prune", "--rounds-older-than", "30", "--yes"]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert [path for path in home.bundles.glob("*-*") if path.is_dir()]
    assert row_of(home, old) | {"newest": False, "finished": 0, "left": 0} == row_of(home, old)
    assert needs(capsys) == []
    unfinished = opened(home, TWICE.replace("number: 1", "number: 9"))
    measured(home, unfinished, until=1)
    ((what, _),) = needs(capsys)
    assert what == f"{unfinished.id}: unfinished, 1 of 2 runs are missing"
    edited = opened(home, TWICE.replace("number: 1", "number: 8"))
    measured(home, edited)
    assert needs(capsys) == [], "its sweep is another one now: nobody would go on with it"


def test_the_newest_round_that_was_pruned_needs_no_hand(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    round_ = opened(home, TWICE)
    (state,) = measured(home, round_, until=1)
    ledger.append(home.bundles, {str(state.run_uuid): str(state.manifest_sha256)})
    assert len(needs(capsys)) == 1
    ledger.prune(home.bundles, [str(state.run_uuid)])
    assert row_of(home, round_)["left"] == 0
    assert needs(capsys) == []


@pytest.mark.parametrize(("until", "missing"), [(None, 0), (1, 2)])
def test_a_round_that_was_measured_with_earlier_pins_needs_no_hand_if_it_was_whole(
    home: Home,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    until: int | None,
    missing: int,
) -> None:
    round_ = opened(home, TWICE)
    measured(home, round_, until=until)
    pins_rise(monkeypatch)
    row = row_of(home, round_)
    assert (row["runs"], row["finished"], row["left"]) == (2, 0, missing)
    assert len(needs(capsys)) == (1 if missing else 0)


def test_a_round_that_goes_on_with_other_pins_is_unfinished_until_all_is_measured(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = opened(home, TWICE)
    measured(home, round_)
    pins_rise(monkeypatch)
    measured(home, round_, until=1)
    row = row_of(home, round_)
    assert (row["runs"], row["finished"], row["left"]) == (2, 1, 1)
    measured(home, round_)
    assert row_of(home, round_)["left"] == 0


def test_what_was_begun_of_a_round_is_never_called_whole(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = opened(home, TWICE)
    first, _ = measured(home, round_)
    pins_rise(monkeypatch)
    for changes in (
        {"outcome": None, "manifest_sha256": None},
        {"outcome": "stopped"},
        {"manifest_sha256": "0" * 64},
    ):
        round_.save(replace(first, **changes))
        assert len(needs(capsys)) == 1, changes
    round_.save(replace(first, outcome="infeasible"))
    assert needs(capsys) == []
    today = next(overview.plan_of(home, round_).runs())
    round_.save(RepeatState(today.cell.cell_key, 1, 1, UUID, None))
    assert len(needs(capsys)) == 1, "it was begun anew with the pins of today"


def test_a_run_is_shown_with_its_phase_and_what_it_waits_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = open_round(home, parse_sweep(SWEEP, where="x"), SWEEP, target="local", fresh=True)[0]
    round_.save(RepeatState("key", 1, 1, UUID, None))
    outputs = run_outputs(home, UUID)
    write_json(outputs / "clock.json", {"monotonic_s": 100.0, "utc": "2026-11-29T02:00:00Z"})
    marks = [{"name": "measure", "load_point": 2, "start_s": 160.0, "end_s": None}]
    write_json(outputs / "phases.json", {"phases": marks})
    monkeypatch.setattr(overview, "_ask", lambda *_: {"status": "queued", "pending": "approval"})
    ends = services.Endpoints("http://p/api", "http://x")
    (row,) = overview._running(home, round_, ends)
    assert (row["phase"], row["load_point"], row["since"]) == (
        "measure", 2, "2026-11-29T02:01:00.000Z",
    )  # fmt: skip
    (need,) = overview._needs_of_runs([row])
    assert need.command == f"polyaxon ops approve -uid {UUID.replace('-', '')}"


def begun(home: Home, round_: Round) -> RepeatState:
    """Begin the first run of a round, with the pins of now, and do not collect it."""
    run = next(overview.plan_of(home, round_).runs())
    round_.save(state := RepeatState(run.cell.cell_key, run.repeat, 1, UUID, None))
    return state


def polyaxon_says(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    ends = services.Endpoints("http://p/api", "http://x")
    monkeypatch.setattr(services, "endpoints", lambda _home: ends)
    monkeypatch.setattr(overview, "_ask", lambda *_: {"status": status, "pending": None})


def test_only_what_a_living_flow_waits_for_is_measured(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    round_ = opened(home, TWICE)
    begun(home, round_)
    polyaxon_says(monkeypatch, "running")
    with round_.only_flow():
        found = told(capsys)
        assert (len(found["running"]), found["uncollected"]) == (1, [])
        polyaxon_says(monkeypatch, "succeeded")
        found = told(capsys)
        assert found["running"] == []
        assert found["uncollected"][0]["collected_by"] == f"process {os.getpid()}"
        assert found["needs"] == [], "its flow is about to collect it"
    found = told(capsys)
    assert found["running"] == []
    (need,) = found["needs"]
    assert need["what"] == (
        f"{round_.id}: unfinished, 2 of 2 runs are missing, 1 of them ended and only to be "
        "collected"
    )
    assert found["uncollected"][0]["command"] == need["command"]
    assert cli.run(["status"]) == 0
    out = capsys.readouterr().out
    assert "Measuring" not in out
    assert "not collected" in out


def test_an_older_rounds_run_is_told_with_what_collects_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = opened(home, TWICE)
    begun(home, older)
    polyaxon_says(monkeypatch, "succeeded")
    edited = opened(home, SWEEP)
    measured(home, edited)
    ((what, command),) = needs(capsys)
    assert what == f"{older.id}: runs that no flow waits for and collects: 1"
    assert command == f"memsweep run {older.folder / 'sweep.yaml'}"
    same, _ = open_round(home, older.sweep(), TWICE, target="local", fresh=False)
    assert same.id == older.id, "the command goes on with it"
    newer = opened(home, TWICE)
    measured(home, newer)
    assert [command for _, command in needs(capsys)] == [f"memsweep run {older.id}"]
    polyaxon_says(monkeypatch, "running")
    assert [command for _, command in needs(capsys)] == [f"memsweep run {older.id}"]


def test_a_run_of_a_cell_with_other_pins_is_collected_by_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    round_ = opened(home, TWICE)
    begun(home, round_)
    polyaxon_says(monkeypatch, "succeeded")
    pins_rise(monkeypatch)
    (row,) = told(capsys)["uncollected"]
    assert row["collected_by"].startswith("nothing: its cell has other pins now")


def test_a_full_disk_and_refused_bundles_are_told(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(home.quarantine / "x" / "reason.json", {"path": UUID, "reason": "no manifest"})
    monkeypatch.setattr(overview, "LOW_DISK_BYTES", 10**18)
    commands = [command for _, command in needs(capsys)]
    assert commands == ["memsweep prune", "memsweep verify"]


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A Prefect server that answers each path with what the test puts there, else 404."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answers.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    monkeypatch.setattr(services, "prefect_api_url", lambda _home: url)
    yield answers
    server.shutdown()
    server.server_close()


def test_what_prefect_lost_paused_or_has_not_fired_is_told(
    home: Home, prefect: dict[str, Any]
) -> None:
    schedule(home)

    def commands() -> list[str]:
        rows = overview.scheduled(home)
        return [need.command for need in overview._needs_of_schedules(home, rows)]

    assert commands() == ["memsweep services up"], "Prefect has no deployment"
    path = "/api/deployments/name/measure-night/small"
    prefect[path] = {"id": "d", "paused": False, "schedules": [{"active": True}]}
    prefect["/api/flow_runs/filter"] = []
    assert commands() == []
    prefect[path] |= {"schedules": [{"active": False}]}
    assert commands() == ["memsweep schedule /sweeps/small.yaml --cron '0 2 * * *'"]
    schedule(
        home, target="/my cluster.yaml", budget_minutes=30.0, webhook_env="HOOK",
        webhook_always=True,
    )  # fmt: skip
    assert commands() == [
        "memsweep schedule /sweeps/small.yaml --cron '0 2 * * *' --target '/my cluster.yaml' "
        "--budget 30.0 --webhook-env HOOK --webhook-always"
    ], "what is called again loses no option"
    schedule(home, webhook="https://hooks.example/secret")
    assert commands()[0].endswith("--webhook URL")
    prefect[path] |= {"schedules": [{"active": True}]}
    prefect["/api/flow_runs/filter"] = [{"expected_start_time": "2026-11-29T02:00:00Z"}]
    assert overview.scheduled(home)[0]["late"] == ["2026-11-29T02:00:00Z"]
    assert commands() == ["memsweep services status"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["schedule"], "give one of SWEEP with --cron"),
        (["schedule", "demo"], "--cron is missing"),
        (["schedule", "demo", "--list"], "give one of"),
        (["schedule", "demo", "--cron", "0 2 * *"], "wanted five fields"),
        (["schedule", "demo", "--cron", "0 2 * * *", "--timezone", "X"], "--timezone"),
        (["schedule", "nope", "--cron", "0 2 * * *"], "unknown sweep"),
        (["schedule", "demo", "--cron", "0 2 * * *", "--target", "nope"], "target 'nope'"),
        (["schedule", "demo", "--cron", "0 2 * * *", "--webhook", "x"], "--webhook"),
        (["schedule", "demo", "--cron", "0 2 * * *", "--webhook-env", "NO_HOOK"], "NO_HOOK is not"),
        (["schedule", "demo", "--cron", "0 2 * * *", "--max-late-hours", "-1"], "--max-late-hours"),
        (["schedule", "--remove", "demo"], "'demo' is not scheduled"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_starts(
    home: Home, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not home.root.exists()


def test_two_sweeps_of_one_name_never_replace_each_others_schedule(
    home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(SWEEP)
    schedule(home)
    before = schedules.schedules(home)
    assert cli.run(["schedule", str(file), "--cron", "0 3 * * *"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    for said in (str(file), before[0].sweep, "a name of its own", "schedule --remove small"):
        assert said in err
    assert schedules.schedules(home) == before


def test_unresolved_pins_are_not_scheduled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "unresolved.yaml"
    file.write_text(SWEEP.replace("tiny-qwen3", "some/model"))
    assert cli.run(["schedule", str(file), "--cron", "0 2 * * *"]) == 2
    assert "pins are unresolved" in capsys.readouterr().err


def test_what_is_scheduled_is_listed_and_removed_with_the_services_down(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule(home, webhook="https://user:pw@hooks.example/secret?x=1")
    assert cli.run(["schedule", "--list", "--json"]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out)["schedules"]
    assert set(row) >= set(KEYS["schedules"].split())
    assert row["webhook"] == "https://hooks.example/…"
    assert "secret" not in out
    assert cli.run(["schedule", "--remove", "small", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["removed"][0]["name"] == "small"
    assert "secret" not in out
    assert schedules.schedules(home) == []


def test_a_damaged_schedule_needs_a_hand(home: Home) -> None:
    path = home.schedules / "a b.json"
    write_json(path, {})
    (need,) = overview.overview(home)["needs"]
    assert need == {
        "what": f"{path}: damaged, no night of it is measured",
        "command": f"rm '{path}'",
    }


def test_a_damaged_round_needs_a_hand_and_its_command_helps(home: Home) -> None:
    round_, _ = open_round(home, parse_sweep(SWEEP, where="x"), SWEEP, target="local", fresh=False)
    (round_.folder / "round.json").write_text('{"id"')
    (need,) = overview.overview(home)["needs"]
    assert f"{round_.folder / 'round.json'}: damaged" in need["what"]
    subprocess.run(shlex.split(need["command"]), check=True)
    assert overview.overview(home)["needs"] == []


def test_the_scheduler_stays_for_what_was_scheduled_meanwhile(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(home)
    ended: list[str] = []
    monkeypatch.setattr(services, "prefect_api_url", lambda _: schedule(home, name="b") and None)
    monkeypatch.setattr(services, "end_scheduler", lambda _: ended.append("scheduler"))
    assert cli.run(["schedule", "--remove", "small"]) == 0
    assert ended == []
    monkeypatch.setattr(services, "prefect_api_url", lambda _: None)
    assert cli.run(["schedule", "--remove", "b"]) == 0
    assert ended == ["scheduler"]
