"""Retention: copies by age, rounds only as a whole and only when asked, never half a proof."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import filelock
import pytest

from flows import cli
from tasks import record, retention
from tasks.home import Home
from tasks.launch import services
from tasks.launch.settings import artifacts_root
from tasks.launch.supervisor import Folder
from tasks.retention import DAY_S, Policy, carry_out, choose
from tasks.rounds import rounds_of
from tests.support.bundle_maker import Lab
from warehouse import ledger
from warehouse.connection import open_snapshot
from warehouse.errors import BadInput

OLD = Policy(copies_days=30, rounds_days=30)


def open_round(home: Home, label: str, age_days: float) -> str:
    """Write the record of a round of the sweep ``demo`` that was opened so long ago."""
    folder = home.rounds / f"demo-00000000-{label}"
    folder.mkdir(parents=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - age_days * DAY_S))
    value = {
        "format": 1,
        "id": folder.name,
        "sweep_name": "demo",
        "sweep_sha256": "0" * 64,
        "label": label,
        "opened_at": at,
        "target": "local",
    }
    (folder / "round.json").write_text(json.dumps(value))
    return folder.name


def age(path: Path, days: float) -> None:
    moment = time.time() - days * DAY_S
    os.utime(path, (moment, moment))


def copies_of(home: Home, run: str) -> tuple[Path, Path]:
    """Make what Polyaxon and the supervisor keep of a run."""
    copy = artifacts_root(home) / run.replace("-", "")
    (copy / "outputs").mkdir(parents=True)
    (copy / "outputs" / "server.log").write_text("x" * 1000)
    log = Folder(home).runs / f"{run}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("y" * 100)
    return copy, log


def stored(home: Home) -> set[str]:
    with open_snapshot(home.warehouse_snapshot) as connection:
        return {
            run for (run,) in connection.execute("SELECT run_uuid::VARCHAR FROM run").fetchall()
        }


def test_copies_of_old_sealed_runs_may_go_and_nothing_else(lab: Lab) -> None:
    old, new = lab.seal(), lab.seal()
    age(old / "manifest.json", 40)
    copy, log = copies_of(lab.home, old.name)
    copies_of(lab.home, new.name)
    unsealed, _ = copies_of(lab.home, "00000000-0000-4000-8000-000000000001")
    items = choose(lab.home, Policy(copies_days=30))
    assert {item.kind for item in items} == {"copy", "supervisor"}
    assert {path for item in items for path in item.paths} == {copy, log}
    assert sum(item.bytes for item in items) == 1100
    carry_out(lab.home, items)
    assert not copy.exists()
    assert not log.exists()
    assert unsealed.exists()
    assert (old / "manifest.json").exists()


def test_a_round_leaves_with_its_rows_and_the_ledger_says_so(lab: Lab) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in names]
    record.ingest(lab.home, runs)
    items = choose(lab.home, OLD)
    assert [item.run_uuids for item in items] == [(runs[0].name,)]
    carry_out(lab.home, items)
    assert not runs[0].exists()
    assert stored(lab.home) == {runs[1].name, runs[2].name}
    chain = ledger.read(lab.home.bundles)
    assert chain.problems == []
    assert chain.pruned == {runs[0].name}
    assert record.verify(lab.home).differences == []


def test_rounds_stay_without_being_asked_for_and_while_they_are_young(lab: Lab) -> None:
    names = [open_round(lab.home, str(number), 60 - number) for number in range(1, 4)]
    for name in names:
        lab.seal(round=name)
    assert choose(lab.home, Policy(copies_days=30)) == []
    assert choose(lab.home, Policy(copies_days=30, rounds_days=90)) == []


def test_a_prune_that_was_killed_is_finished_by_the_next(lab: Lab) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in names]
    record.ingest(lab.home, runs)
    ledger.prune(lab.home.bundles, [runs[0].name])  # and killed before anything was removed
    record.ingest(lab.home, runs)
    items = choose(lab.home, OLD)  # the bundle is not counted in its round once more
    assert [(item.kind, item.paths) for item in items] == [("leftover", (runs[0],))]
    carry_out(lab.home, items)
    assert stored(lab.home) == {runs[1].name, runs[2].name}
    assert record.verify(lab.home).differences == []


@pytest.mark.parametrize("step", ["tasks.record.rebuild", "tasks.retention._remove"])
def test_a_prune_that_was_killed_on_the_way_leaves_no_row_without_its_bundle(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in names]
    record.ingest(lab.home, runs)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    items = choose(lab.home, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(step, killed)
        with pytest.raises(KeyboardInterrupt):
            carry_out(lab.home, items)
    (left,) = record.verify(lab.home).differences
    assert left.run_uuid == runs[0].name
    assert "end it with: memsweep prune --yes" in left.what
    carry_out(lab.home, choose(lab.home, OLD))
    assert not runs[0].exists()
    assert stored(lab.home) == {runs[1].name, runs[2].name}
    assert record.verify(lab.home).differences == []


def test_a_round_that_began_to_be_measured_meanwhile_stays(lab: Lab) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in names]
    items = choose(lab.home, OLD)
    with rounds_of(lab.home)[0].only_flow(), pytest.raises(BadInput, match="is being measured"):
        carry_out(lab.home, items)
    assert runs[0].exists()
    assert ledger.read(lab.home.bundles).pruned == frozenset()


def test_two_prunes_do_not_go_on_at_once(lab: Lab) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in names]
    chosen = choose(lab.home, OLD)
    with (
        filelock.FileLock(lab.home.root / "prune.lock"),
        pytest.raises(BadInput, match="another prune of this state folder goes on"),
    ):
        carry_out(lab.home, chosen)
    assert runs[0].exists()
    carry_out(lab.home, chosen)
    carry_out(lab.home, chosen)  # chosen by one that had to wait for the other's end
    assert not runs[0].exists()
    assert record.verify(lab.home).differences == []


def test_a_damaged_manifest_stops_no_prune(lab: Lab) -> None:
    names = [open_round(lab.home, label, days) for label, days in (("1", 60), ("2", 50), ("3", 40))]
    runs = [lab.seal(round=name) for name in (*names, names[0])]
    (runs[-1] / "manifest.json").write_text("{")
    (item,) = choose(lab.home, OLD)
    assert item.run_uuids == (runs[0].name,)


def test_a_ledger_line_that_loses_its_pruned_mark_shows(lab: Lab) -> None:
    run = lab.seal()
    record.ingest(lab.home, [run])
    ledger.prune(lab.home.bundles, [run.name])
    path = lab.home.bundles / ledger.NAME
    path.write_text(path.read_text().replace('"pruned": true, ', ""))
    assert any("was changed" in problem for problem in ledger.read(lab.home.bundles).problems)


def test_the_command_shows_first_and_removes_only_with_yes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = lab.seal()
    age(old / "manifest.json", 40)
    copy, _ = copies_of(lab.home, old.name)
    monkeypatch.setenv("MEMSWEEP_HOME", str(lab.home.root))
    assert cli.run(["prune", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] is False
    assert copy.exists()
    assert cli.run(["prune", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 1100
    assert not copy.exists()


@pytest.fixture
def prefect(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A Prefect with two ended flow runs; deletions answer the codes put here, then 204."""
    codes: list[int] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            runs = [{"name": "n", "id": str(number)} for number in range(2)]
            self._send(200, json.dumps(runs).encode())

        def do_DELETE(self) -> None:
            self._send(codes.pop(0) if codes else 204, b"")

        def _send(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ends = services.Endpoints(f"http://127.0.0.1:{server.server_port}", "http://x.invalid")
    monkeypatch.setattr(services, "endpoints", lambda _home: ends)
    monkeypatch.setattr(retention, "BUSY_WAIT_S", 0.0)
    monkeypatch.setenv("MEMSWEEP_HOME", str(lab.home.root))
    yield codes
    server.shutdown()
    server.server_close()


def test_a_busy_prefect_is_asked_again(
    prefect: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    prefect += [503, 429, 204, 404]
    assert cli.run(["prune", "--yes", "--json"]) == 0
    assert [item["kind"] for item in json.loads(capsys.readouterr().out)["items"]] == 2 * [
        "flow_run"
    ]
    assert prefect == []


def test_what_went_is_told_when_a_flow_run_stays(
    lab: Lab,
    prefect: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = lab.seal()
    age(old / "manifest.json", 40)
    copies_of(lab.home, old.name)
    monkeypatch.setattr(retention, "BUSY_S", 0.0)
    prefect += [204, 503]
    assert cli.run(["prune", "--yes", "--json"]) == 3
    out, err = capsys.readouterr()
    kinds = [item["kind"] for item in json.loads(out)["items"]]
    assert kinds == ["copy", "supervisor", "flow_run"]
    assert "1 flow runs stay - Prefect at http://127.0.0.1:" in err
    assert "it answered 503 Service Unavailable; call prune again" in err
    assert "developer.mozilla.org" not in err


def test_flow_runs_are_left_out_when_prefect_is_away() -> None:
    with pytest.raises(Exception, match="does not tell its flow runs"):
        retention.flow_runs("http://127.0.0.1:9/api", OLD)
