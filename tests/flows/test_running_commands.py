"""What ``run`` and ``stop`` say of a flow's end and of runs that nobody can be asked about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import FailedRun
from prefect.states import Cancelled, Completed, Failed
from testkit.polyaxon import FakePolyaxon

from flows import cli, context, sweep
from flows.commands import running
from flows.commands.running import not_as_expected
from flows.context import Context, Wishes
from flows.sweep import measure_in_flow
from tasks import processes
from tasks.files import write_json
from tasks.home import Home
from tasks.launch import port, services
from tasks.launch.supervisor import Folder, Record
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, Round, open_round
from warehouse import errors

SWEEP = """
name: NAME
model: tiny-qwen3
experiments:
  - {name: e, points: [{parallel: 1, number: 1}]}
"""
UUID = "00000000-0000-4000-8000-000000000001"


def every(kind: type[errors.MemsweepError]) -> Iterator[type[errors.MemsweepError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


ERRORS = [*every(errors.MemsweepError)]


def test_the_servers_errors_are_among_them() -> None:
    assert {port.RunUnknown, port.AccessRefused, errors.WarehouseBusy} <= set(ERRORS)


@pytest.mark.parametrize("kind", ERRORS)
def test_each_of_our_errors_keeps_its_exit_code_and_its_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[errors.MemsweepError]
) -> None:
    def refused(*_: Any, **__: Any) -> Context:
        raise kind("what went wrong; what to do")

    monkeypatch.setattr(sweep, "open_context", refused)
    state = measure_in_flow("demo", "local", Wishes())
    assert (state.is_failed(), state.name) == (True, kind.__name__)
    with pytest.raises(errors.MemsweepError) as caught:
        not_as_expected(state)
    assert str(caught.value) == "what went wrong; what to do"
    assert caught.value.exit_code == kind.exit_code


def test_what_is_none_of_our_errors_stays_what_it_is() -> None:
    assert not_as_expected(Completed(message="all")) is None
    assert not_as_expected(Failed(name=sweep.NOT_AS_EXPECTED, message="e: oom")) == "e: oom"
    assert not_as_expected(Cancelled(message="1 of 5")) == "1 of 5"
    with pytest.raises(FailedRun):
        not_as_expected(Failed(message="unforeseen"))


def opened(home: Home, name: str, run_uuid: str | None = None) -> Round:
    """Open a round with one repeat that was begun and not collected."""
    text = SWEEP.replace("NAME", name)
    sweep_ = parse_sweep(text, where="x")
    round_, _ = open_round(home, sweep_, text, target="local", fresh=False)
    round_.save(RepeatState("key", 1, 1, run_uuid, None))
    return round_


def live(home: Home, run_uuid: str) -> None:
    """Record this process's session as a run's."""
    sid = os.getsid(0)
    ticks = processes.start_ticks(sid)
    boot = processes.boot_id()
    record = Record(run_uuid, sid, ticks or 0, sid, "", "", 0.0, None, 1.0, str(boot))
    write_json(Folder(home).record(run_uuid), {n: getattr(record, n) for n in record.__slots__})
    assert [one.uuid for one in services.live_runs(home)] == [run_uuid]


@pytest.fixture
def here(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    return home


@pytest.mark.parametrize("recorded", [UUID, None])
def test_a_run_that_no_server_can_stop_is_told(
    here: Home, capsys: pytest.CaptureFixture[str], recorded: str | None
) -> None:
    opened(here, "mine", recorded)
    live(here, UUID)
    for what in ([], ["mine"]):
        assert cli.run(["stop", *what]) == 3
        err = capsys.readouterr().err
        assert f"run {UUID}: its process goes on, and no Polyaxon server is up" in err
        assert "memsweep services up, then memsweep stop" in err
        assert "nothing is being measured" not in err


def test_another_sweeps_run_and_one_that_is_over_keep_no_stop_from_saying_so(
    here: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(here, "mine")
    assert cli.run(["stop"]) == 0
    opened(here, "other", UUID)
    live(here, UUID)
    assert cli.run(["stop", "mine"]) == 0
    assert capsys.readouterr().err.count("nothing is being measured") == 2


def test_a_flow_is_asked_to_stop_though_another_rounds_run_cannot_be(
    here: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(here, "other", UUID)
    live(here, UUID)
    mine = opened(here, "mine")
    with mine.only_flow():
        assert cli.run(["stop"]) == 3
        assert mine.stop_asked() == "now"
    assert "its process goes on" in capsys.readouterr().err


def test_after_current_leaves_a_run_whose_flow_is_gone_to_its_end(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    round_ = opened(home, "two", UUID)
    view = port.RunView(UUID, "running", False, meta_info={"round": round_.id})
    polyaxon = FakePolyaxon(runs={UUID: (view, {})})
    monkeypatch.setattr(polyaxon, "active", lambda: [view])
    monkeypatch.setattr(context, "port_of", lambda *_: polyaxon)
    monkeypatch.setattr(services, "endpoints", lambda _home: object())
    assert cli.run(["stop", "two", "--after-current"]) == 0
    assert polyaxon.stopped == []
    assert f"goes on without a flow; collected by: memsweep run {round_.id}" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.run(["stop", "two"]) == 0
    assert polyaxon.stopped == [UUID]


def test_a_profile_from_a_file_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "mine.yaml")
    assert {context.given_target(one) for one in ("mine.yaml", "./mine.yaml", whole)} == {whole}
    assert context.given_target("local") == "local"
    assert context.given_target("not-there.yaml") == "not-there.yaml"


def test_a_rounds_name_goes_on_with_it_though_there_is_a_newer_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    text = SWEEP.replace("NAME", "two").replace("number: 1", "number: 1, prompts: p.jsonl")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "tokens": 1}\n')
    (tmp_path / "two.yaml").write_text(text)
    parsed, _ = context.read_sweep(str(tmp_path / "two.yaml"))
    older, _ = open_round(home, parsed, text, target="local", fresh=True)
    open_round(home, parsed, text, target="local", fresh=True)
    asked: list[tuple[Any, ...]] = []

    def measure(sweep_: str, target: str, wishes: Any, **_: object) -> None:
        again, text_ = context.read_sweep(sweep_)
        label = wishes["label"]
        found = open_round(home, again, text_, target=target, fresh=False, label=label)
        asked.append(found)

    monkeypatch.setattr(running, "measure", measure)
    assert cli.run(["run", older.id]) == 0
    assert asked == [(older, False)]
    assert cli.run(["run", older.id, "--fresh"]) == 2
    assert "leave out --fresh" in capsys.readouterr().err


def test_a_sweep_that_was_never_measured_is_not_being_measured(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    assert cli.run(["stop", "demo"]) == 0
    assert "nothing is being measured" in capsys.readouterr().err


def test_a_missing_option_names_the_commands_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fit"]) == 2
    assert "see: memsweep fit --help" in " ".join(capsys.readouterr().err.split())
