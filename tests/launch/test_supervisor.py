"""The supervisor with real processes and a Polyaxon double."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tasks import files, processes
from tasks.home import Home
from tasks.launch import environments, supervisor, target
from tasks.launch.supervisor import Folder, Record, Supervisor, Tail, judge, read_launch
from tests.double import cells, programs
from tests.double.engine import make_bench, make_engine, make_model
from tests.double.polyaxon_double import PolyaxonDouble
from warehouse.errors import CannotFindOut


@pytest.fixture
def polyaxon() -> PolyaxonDouble:
    return PolyaxonDouble()


class Bench:
    """A supervisor, a Polyaxon and what has been started, ended at the end of the test."""

    def __init__(self, home: Home, polyaxon: PolyaxonDouble) -> None:
        self.home = home
        self.polyaxon = polyaxon
        self.supervisor = self.another()

    def another(self) -> Supervisor:
        return Supervisor(self.home, self.polyaxon, poll_s=0.02, stop_margin_s=0.5)

    def add(self, code: str, *, timeout: int = 60, status: str = "compiled") -> str:
        run_uuid = str(uuid.uuid4())
        content = programs.compiled(code, self.home, run_uuid, timeout=timeout)
        return self.polyaxon.add(content, run_uuid, status)

    def outputs(self, run_uuid: str) -> Path:
        return programs.outputs(self.home, run_uuid)

    def record(self, run_uuid: str) -> Record:
        value = files.read_json(Folder(self.home).record(run_uuid))
        assert value is not None
        return Record(**value)

    def until(self, condition: Callable[[], bool], seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.polyaxon.statuses
            self.supervisor.step()
            time.sleep(0.02)

    def until_status(self, run_uuid: str, status: str) -> None:
        self.until(lambda: self.polyaxon.status(run_uuid) == status)


@pytest.fixture
def bench(home: Home, polyaxon: PolyaxonDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(supervisor, "STRAY_S", 0.3)
    bench = Bench(home, polyaxon)
    yield bench
    for record in Folder(home).records():
        processes.send(processes.session(record.sid, record.start_ticks), signal.SIGKILL)
    for one in bench.supervisor.live.values():
        if one.process is not None:
            one.process.wait(10)


def test_a_run_ends_with_its_outcome_posted_and_its_log_copied(bench: Bench) -> None:
    run = bench.add(programs.END)
    bench.until_status(run, "succeeded")
    assert bench.polyaxon.names(run) == ["compiled", "starting", "running", "succeeded"]
    assert bench.polyaxon.outputs[run] == {"observed": "ok", "phase": "collect", "message": "m"}
    lines = (bench.outputs(run).parent / "plxlogs" / "memsweep.jsonl").read_text().splitlines()
    told = {(line["container"], line["value"]) for line in map(json.loads, lines)}
    assert told == {("run", "run line"), ("server", "server line")}
    assert (bench.outputs(run) / "pod.log").read_text() == "run line\n"
    assert files.read_json(Folder(bench.home).ended(run))["exit_code"] == 0  # type: ignore[index]
    assert not Folder(bench.home).record(run).exists()


def test_a_run_without_a_typed_outcome_fails_with_its_exit_code(bench: Bench) -> None:
    run = bench.add("raise SystemExit(3)")
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1:] == (
        "ExitCode",
        "ended with exit code 3; observed: nothing",
    )


def test_the_environment_is_the_operations_own_and_holds_no_secret(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    write = "import os, json, pathlib; o = pathlib.Path(os.environ['MEMSWEEP_OUTPUTS']);"
    write += "(o / 'env.json').write_text(json.dumps(dict(os.environ)))"
    run = bench.add(write)
    bench.until_status(run, "failed")
    told = json.loads((bench.outputs(run) / "env.json").read_text())
    assert {"SOME_TOKEN", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(told)
    assert told["MEMSWEEP_RUN_UUID"] == run
    assert told["MEMSWEEP_REASON_FILE"] == str(Folder(bench.home).reason(run))
    assert json.loads(told["MEMSWEEP_CELL"]) == programs.CELL


def test_a_deadline_ends_the_run_and_says_why_before_the_signal(bench: Bench) -> None:
    seen = "import os, signal, time, pathlib\n"
    seen += "def caught(*_):\n"
    seen += "    text = open(os.environ['MEMSWEEP_REASON_FILE']).read()\n"
    seen += "    pathlib.Path(os.environ['MEMSWEEP_OUTPUTS'], 'seen').write_text(text)\n"
    seen += "    raise SystemExit(143)\n"
    seen += "signal.signal(signal.SIGTERM, caught)\ntime.sleep(60)\n"
    run = bench.add(seen, timeout=1)
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "Timeout"
    assert json.loads((bench.outputs(run) / "seen").read_text())["reason"] == "timeout"


def test_a_stop_that_is_ignored_ends_in_a_kill_of_the_whole_session(bench: Bench) -> None:
    run = bench.add(programs.STUBBORN)
    bench.until_status(run, "running")
    time.sleep(0.3)  # The program has to have ignored the signal.
    record = bench.record(run)
    bench.polyaxon.stop(run)
    bench.until_status(run, "stopped")
    assert processes.session(record.sid, record.start_ticks) == []


def test_a_final_status_from_elsewhere_ends_the_run_and_gets_no_second_one(bench: Bench) -> None:
    run = bench.add(programs.SLEEP)
    bench.until_status(run, "running")
    record = bench.record(run)
    bench.polyaxon.post_status(run, "failed", "Lost", "somebody else said so")
    bench.until(lambda: not bench.supervisor.live)
    assert processes.session(record.sid, record.start_ticks) == []
    assert bench.polyaxon.statuses[run][-1][1] == "Lost"


def test_a_slot_is_held_until_the_last_process_of_a_run_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STRAY_S", 1.0)
    first = bench.add(programs.STRAY)
    second = bench.add(programs.END)
    bench.until(lambda: first in bench.supervisor.live)
    record = bench.record(first)
    bench.until(lambda: bench.supervisor.live[first].leader_gone_s is not None)
    assert processes.session(record.sid, record.start_ticks) != []
    assert not bench.supervisor.has_free_slot()
    bench.until_status(second, "succeeded")
    assert bench.polyaxon.status(first) == "failed"
    assert processes.session(record.sid, record.start_ticks) == []


def test_a_process_that_left_the_session_is_ended_too(bench: Bench) -> None:
    away = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
    away += f"{programs.SLEEP!r}], start_new_session=True)"
    run = bench.add(away)
    bench.until_status(run, "failed")
    assert processes.marked(supervisor.RUN_VARIABLE, run) == []


def test_a_new_supervisor_takes_over_a_run_that_goes_on(bench: Bench) -> None:
    run = bench.add("import time; time.sleep(1)\n" + programs.END)
    bench.until_status(run, "running")
    orphan = bench.supervisor.live[run].process
    bench.supervisor = bench.another()
    bench.supervisor.adopt()
    assert bench.supervisor.live[run].process is None
    bench.until_status(run, "succeeded")
    assert bench.polyaxon.names(run).count("running") == 1
    assert files.read_json(Folder(bench.home).ended(run))["exit_code"] is None  # type: ignore[index]
    assert orphan is not None
    orphan.wait(5)


def test_a_run_that_ended_unwatched_is_judged_by_what_it_left(bench: Bench) -> None:
    good, bad = bench.add(programs.END), bench.add("pass")
    for run in (good, bad):
        bench.until(lambda run=run: run in bench.supervisor.live)  # type: ignore[misc]
        process = bench.supervisor.live.pop(run).process
        assert process is not None
        process.wait(10)
    bench.supervisor = bench.another()
    bench.supervisor.adopt()
    bench.until(lambda: not bench.supervisor.live)
    assert bench.polyaxon.status(good) == "succeeded"
    assert bench.polyaxon.statuses[bad][-1][:2] == ("failed", "Lost")


def test_a_run_whose_record_was_never_written_is_found_by_its_mark(bench: Bench) -> None:
    run = bench.add("import time; time.sleep(1)\n" + programs.END)
    bench.until_status(run, "running")
    time.sleep(0.3)
    process = bench.supervisor.live[run].process
    Folder(bench.home).record(run).unlink()
    bench.supervisor = bench.another()
    bench.supervisor.adopt()
    assert bench.supervisor.live == {}
    bench.until_status(run, "succeeded")
    assert process is not None
    process.wait(5)


def test_a_run_that_polyaxon_calls_running_without_any_process_is_lost(bench: Bench) -> None:
    run = bench.add(programs.END, status="running")
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "Lost"


def test_a_run_that_never_came_to_start_is_started_after_a_restart(bench: Bench) -> None:
    run = bench.add(programs.END, status="starting")
    bench.until_status(run, "succeeded")


def test_last_words_wait_until_polyaxon_answers_again(bench: Bench) -> None:
    run = bench.add(programs.END)
    bench.until_status(run, "running")
    bench.polyaxon.is_down = True
    bench.until(lambda: bench.supervisor.live[run].ended)
    bench.supervisor.step()
    assert Folder(bench.home).record(run).exists()
    bench.supervisor = bench.another()
    bench.supervisor.adopt()
    bench.polyaxon.is_down = False
    bench.until_status(run, "succeeded")
    assert files.read_json(Folder(bench.home).ended(run))["exit_code"] == 0  # type: ignore[index]


def test_a_run_deleted_in_polyaxon_is_let_go(bench: Bench) -> None:
    run = bench.add(programs.END)
    bench.until_status(run, "running")
    bench.polyaxon.statuses.pop(run)
    bench.until(lambda: not bench.supervisor.live)


@pytest.mark.parametrize("how", ["archived", "deleted"])
def test_a_run_archived_or_deleted_in_polyaxon_ends(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.add(programs.SLEEP)
    bench.until_status(run, "running")
    record = bench.record(run)
    if how == "deleted":
        bench.polyaxon.statuses.pop(run)
    else:
        # haupt asks it to stop, and shows it in no list any more.
        bench.polyaxon.post_status(run, "stopping", "Archived", "")
        monkeypatch.setattr(bench.polyaxon, "active", list)
    bench.until(lambda: not bench.supervisor.live)
    assert processes.session(record.sid, record.start_ticks) == []


def test_a_run_created_while_shutting_down_is_not_left_for_the_next_supervisor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = bench.add(programs.SLEEP)
    bench.until_status(going, "running")
    created: list[str] = []
    finish = Supervisor._finish

    def meanwhile(it: Supervisor, one: supervisor.Live) -> bool:
        created.append(bench.add(programs.SLEEP))
        return finish(it, one)

    monkeypatch.setattr(Supervisor, "_finish", meanwhile)
    bench.supervisor.shut_down()
    assert {bench.polyaxon.status(run) for run in created} == {"stopped"}


def test_shutting_down_stops_what_goes_and_what_waits(bench: Bench) -> None:
    going, waiting = bench.add(programs.SLEEP), bench.add(programs.SLEEP)
    bench.until_status(going, "running")
    record = bench.record(going)
    bench.supervisor.shut_down()
    assert bench.polyaxon.status(going) == "stopped"
    assert bench.polyaxon.status(waiting) == "stopped"
    assert processes.session(record.sid, record.start_ticks) == []


def test_shutting_down_ends_runs_though_polyaxon_is_down(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LAST_WORDS_S", 0.5)
    run = bench.add(programs.SLEEP)
    bench.until_status(run, "running")
    record = bench.record(run)
    bench.polyaxon.is_down = True
    bench.supervisor.shut_down()
    assert processes.session(record.sid, record.start_ticks) == []
    assert Folder(bench.home).record(run).exists(), "the next supervisor has to say its last words"


def test_a_run_of_another_boot_is_over(bench: Bench) -> None:
    run = bench.add(programs.END, status="running")
    mine = processes.read(os.getpid())
    assert mine is not None
    record = Record(
        uuid=run,
        pid=mine.pid,
        start_ticks=mine.start_ticks,
        sid=mine.session,
        outputs=str(bench.outputs(run)),
        launched_at="2026-01-01T00:00:00+00:00",
        launched_s=0.0,
        deadline_s=1.0,
        stop_s=1.0,
        boot_id="another",
    )
    files.write_json(Folder(bench.home).record(run), asdict(record))
    bench.supervisor.adopt()
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "Lost"


def test_an_operation_that_cannot_be_executed_fails_with_the_reason(bench: Bench) -> None:
    missing = bench.polyaxon.add({"run": {"container": {}}}, str(uuid.uuid4()))
    bench.until_status(missing, "failed")
    assert bench.polyaxon.statuses[missing][-1][1] == "BadOperation"
    assert "the command 'none'" in bench.polyaxon.statuses[missing][-1][2]
    run = bench.add("pass")
    environments.python(bench.home, "bench").unlink()
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "CannotStart"


def env(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a change of one variable of a container, or one more variable."""

    def change(container: dict[str, Any]) -> None:
        container["env"] = [one for one in container["env"] if one["name"] != name]
        container["env"].append({"name": name, "value": value})

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.update(command=["touch", "/tmp/x"]), "command 'touch /tmp/x'"),
        (lambda c: c.update(command=["python", "-c", "pass"]), "command 'python -c pass'"),
        (lambda c: c.update(args=["more"]), "tasks.pod more'"),
        (lambda c: c["env"].pop(0), "MEMSWEEP_CELL"),
        (env("LD_PRELOAD", "/tmp/evil.so"), "LD_PRELOAD"),
        (env("PATH", "/tmp/evil"), "PATH is '/tmp/evil'"),
        (env("MEMSWEEP_BENCH_PYTHON", "/tmp/evil"), "MEMSWEEP_BENCH_PYTHON"),
        (env("MEMSWEEP_ENGINE_BIN", "/tmp/evil"), "MEMSWEEP_ENGINE_BIN"),
        (env("PYTHONPATH", "/tmp/evil"), "no folder of the staged code"),
        (env("PYTHONPATH", f"/tmp/evil:{'0' * 64}"), "no folder of the staged code"),
        (env("MEMSWEEP_OUTPUTS", "/tmp/outputs"), "MEMSWEEP_OUTPUTS is '/tmp/outputs'"),
    ],
)
def test_whoever_reaches_the_port_gets_no_command_of_his_own_executed(
    bench: Bench, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    run = str(uuid.uuid4())
    content: dict[str, Any] = programs.compiled(programs.END, bench.home, run)
    change(content["run"]["container"])
    with pytest.raises(ValueError, match=re.escape(told)):
        read_launch(json.dumps(content), bench.home, run)
    bench.polyaxon.add(content, run)
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "BadOperation"
    assert not bench.outputs(run).exists(), "nothing was started"


@pytest.mark.parametrize("content", ["[]", "null", '{"run": {"container": {"env": ["x"]}}}'])
def test_an_operation_of_another_form_is_told_as_such(home: Home, content: str) -> None:
    with pytest.raises(ValueError, match="wanted"):
        read_launch(content, home, str(uuid.uuid4()))


def test_what_a_target_submits_is_executed_here(home: Home) -> None:
    """The shape that is accepted is the one that is submitted, by the same component."""
    run, profile = str(uuid.uuid4()), target.load("local")
    submitted = target.parameters(home, profile, "tiny-qwen3")
    content: dict[str, Any] = programs.compiled("pass", home, run)
    for one in content["run"]["container"]["env"]:
        if one["name"] == "PYTHONPATH":
            one["value"] = submitted["code"]
    launch = read_launch(json.dumps(content), home, run)
    assert launch.command == [submitted["bench_python"], "-P", "-m", "tasks.pod"]
    assert {submitted["engine_bin"], submitted["path"]} <= set(launch.environment.values())


@pytest.mark.parametrize(
    ("reason", "observed", "code", "status", "why"),
    [
        (None, "ok", 0, "succeeded", "Ended"),
        (None, "refused_or_crashed_at_start", 0, "succeeded", "Ended"),
        (None, "ok", None, "succeeded", "Ended"),
        (None, None, 0, "failed", "ExitCode"),
        (None, None, -9, "failed", "ExitCode"),
        (None, "harness_error", 70, "failed", "ExitCode"),
        (None, None, None, "failed", "Lost"),
        ("stop", "interrupted", 143, "stopped", "Stop"),
        ("stop", "ok", 0, "stopped", "Stop"),
        ("timeout", "interrupted", 143, "failed", "Timeout"),
        ("timeout", "ok", 0, "succeeded", "Ended"),
        ("timeout", None, -9, "failed", "Timeout"),
        ("lost", "interrupted", 143, "failed", "Lost"),
    ],
)
def test_final_status(
    reason: str | None, observed: str | None, code: int | None, status: str, why: str
) -> None:
    end: dict[str, object] | None = None if observed is None else {"observed": observed}
    verdict = judge(reason=reason, end=end, exit_code=code, deadline_s=10)
    assert (verdict.status, verdict.reason) == (status, why)


def test_a_tail_copies_each_line_once_over_a_restart(tmp_path: Path) -> None:
    source, sink, state = tmp_path / "a.log", tmp_path / "out.jsonl", tmp_path / "state.json"

    def copied() -> list[str]:
        lines = sink.read_text().splitlines() if sink.exists() else []
        return [json.loads(line)["value"] for line in lines]

    source.write_text("one\ntw")
    Tail("u", {"run": source}, sink, state).pump()
    assert copied() == ["one"], "an unfinished line waits"
    with source.open("a") as file:
        file.write("o\nthree")
    Tail("u", {"run": source}, sink, state).pump()
    assert copied() == ["one", "two"]
    Tail("u", {"run": source}, sink, state).pump(last=True)
    assert copied() == ["one", "two", "three"]


def test_records_of_ended_runs_are_no_records(home: Home) -> None:
    folder = Folder(home)
    record = Record("u", 1, 1, 1, "o", "2026", 0.0, None, 1.0, "b")
    files.write_json(folder.record("b"), asdict(replace(record, uuid="b", launched_at="2")))
    files.write_json(folder.record("a"), asdict(replace(record, uuid="a", launched_at="3")))
    files.write_json(folder.ended("c"), {"uuid": "c"})
    files.write_json(folder.reason("d"), {"reason": "stop"})
    assert [one.uuid for one in folder.records()] == ["b", "a"]


@pytest.fixture
def full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turn a full disk on and off for all that the supervisor writes."""
    state = {"full": False}
    real_open, write_text = Path.open, files.write_text

    def refuse(path: Path) -> None:
        if state["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def full_open(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(path)
        return real_open(path, mode, *more, **named)

    def full_write(path: Path, text: str) -> None:
        try:
            refuse(path)
        except OSError as error:
            raise CannotFindOut(f"{path}: cannot be written") from error
        write_text(path, text)

    def full_copy(source: Path, into: Path) -> Path:
        refuse(into)
        return into

    monkeypatch.setattr(Path, "open", full_open)
    monkeypatch.setattr(files, "write_text", full_write)
    monkeypatch.setattr(shutil, "copyfile", full_copy)
    return lambda full: state.update(full=full)


@pytest.mark.parametrize(("ask", "status"), [("stop", "stopped"), ("timeout", "failed")])
def test_a_full_disk_holds_up_no_signal_and_no_last_words(
    bench: Bench, full_disk: Callable[[bool], None], ask: str, status: str
) -> None:
    talkative = "import time\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.02)"
    run = bench.add(talkative, timeout=1 if ask == "timeout" else 60)
    bench.until_status(run, "running")
    record = bench.record(run)
    full_disk(True)
    if ask == "stop":
        bench.polyaxon.stop(run)
    bench.until_status(run, status)
    assert processes.session(record.sid, record.start_ticks) == []
    assert bench.polyaxon.statuses[run][-1][1].lower() == ask, "the reason was kept in mind"
    full_disk(False)
    after = bench.add(programs.END)
    bench.until_status(after, "succeeded")


def test_a_run_that_cannot_be_recorded_does_not_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write_text = bench.add(programs.SLEEP), files.write_text

    def refuse(path: Path, text: str) -> None:
        if path == Folder(bench.home).record(run):
            raise CannotFindOut(f"{path}: cannot be written")
        write_text(path, text)

    monkeypatch.setattr(files, "write_text", refuse)
    bench.until_status(run, "failed")
    assert bench.polyaxon.statuses[run][-1][1] == "CannotStart"
    assert processes.marked(supervisor.RUN_VARIABLE, run) == []


def test_lines_that_the_disk_refused_are_copied_later(tmp_path: Path) -> None:
    source, sink = tmp_path / "a.log", tmp_path / "out.jsonl"
    source.write_text("one\n")
    sink.mkdir()
    tail = Tail("u", {"run": source}, sink, tmp_path / "state.json")
    with pytest.raises(OSError, match="directory"):
        tail.pump()
    sink.rmdir()
    tail.pump()
    assert [json.loads(line)["value"] for line in sink.read_text().splitlines()] == ["one"]


def test_a_run_is_called_running_though_that_was_lost_at_first(bench: Bench) -> None:
    run = bench.add("import time; time.sleep(0.5)\n" + programs.END)
    post = bench.polyaxon.post_status
    lost: list[str] = []

    def lossy(run_uuid: str, status: str, reason: str, message: str) -> None:
        if status == "running" and not lost:
            lost.append(run_uuid)
            raise CannotFindOut("lost")
        post(run_uuid, status, reason, message)

    bench.polyaxon.post_status = lossy  # type: ignore[method-assign]
    bench.until_status(run, "succeeded")
    assert bench.polyaxon.names(run) == ["compiled", "starting", "running", "succeeded"]
    assert lost == [run]


def test_another_number_of_slots_takes_effect_without_a_restart(bench: Bench) -> None:
    first, second = bench.add(programs.SLEEP), bench.add(programs.SLEEP)
    bench.until_status(first, "running")
    for _ in range(3):
        bench.supervisor.step()
    assert bench.polyaxon.status(second) == "compiled"
    files.write_json(Folder(bench.home).settings, {"slots": 2})
    bench.until_status(second, "running")


def test_what_a_killed_run_left_outside_its_session_is_ended(bench: Bench) -> None:
    """The run's real code with an engine whose worker left: found by the mark it inherited."""
    home, run = bench.home, str(uuid.uuid4())
    make_bench(home.envs / "bench/bin", hang_at_level="load_point_0")
    make_engine(home.envs / "engine/bin", orphan_worker="session")
    values = {
        "MEMSWEEP_CELL": cells.cell_text(),
        "MEMSWEEP_MODEL_PATH": str(make_model(home.root / "model")),
        "PYTHONPATH": str(environments.stage_pod_code(home)),
    }
    content: dict[str, Any] = programs.compiled("", home, run)
    for one in content["run"]["container"]["env"]:
        one["value"] = values.get(one["name"], one["value"])
    bench.polyaxon.add(content, run)
    events = bench.outputs(run) / "events.jsonl"
    bench.until(lambda: events.exists() and '"server_ready"' in events.read_text(), 30)
    record = bench.record(run)
    marked = processes.marked(supervisor.RUN_VARIABLE, run)
    left = [process for process in marked if process.session != record.sid]
    os.kill(record.pid, signal.SIGKILL)
    bench.until_status(run, "failed")
    assert processes.session(record.sid, record.start_ticks) == []
    assert len(left) == 1, "the worker"
    assert not processes.alive(*left[0].key)
