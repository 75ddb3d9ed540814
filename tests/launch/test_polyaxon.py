"""The adapter against a small HTTP server that answers as Polyaxon does when things go wrong."""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.launch import polyaxon, port
from tasks.launch.polyaxon import CREATE_S, PolyaxonClient
from tasks.launch.port import Condition, RunUnknown
from tasks.launch.settings import _DATABASE_OPTIONS
from warehouse.errors import CannotFindOut, ServiceDown

# Polyaxon's own models, at their import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UUID = "00000000-0000-0000-0000-000000000001"
Answer = tuple[int, object]


class Answers:
    """What the server will answer, one after another, the last one for ever."""

    def __init__(self) -> None:
        self.planned: list[tuple[int, object]] = [(200, {})]
        #: Asked in any order: what a request's method and path match -> the answer.
        self.routes: dict[str, tuple[int, object]] = {}
        self.delays: list[float] = []
        self.asked: list[str] = []
        self.host = ""

    def next(self, asked: str) -> tuple[int, object]:
        self.asked.append(asked)
        for pattern, answer in self.routes.items():
            if re.search(pattern, asked):
                return answer
        return self.planned.pop(0) if len(self.planned) > 1 else self.planned[0]


@pytest.fixture
def server() -> Iterator[Answers]:
    answers = Answers()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answers.next(f"{self.command} {self.path}")
            time.sleep(answers.delays.pop(0) if answers.delays else 0.0)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _answer

        def log_message(self, *_: object) -> None:
            return

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.host = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield answers
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_a_lost_write_of_the_embedded_server_is_sent_again(server: Answers) -> None:
    server.planned = [(405, {"detail": "locked"}), (503, {}), (200, {})]
    PolyaxonClient(server.host).post_status(UUID, "running", "Test", "text")
    assert len(server.asked) == 3
    assert len(set(server.asked)) == 1


def test_a_refusal_is_told_at_once_and_without_a_banner(
    server: Answers, capfd: pytest.CaptureFixture[str]
) -> None:
    server.planned = [(400, {"errors": "bad filter"})]
    with pytest.raises(CannotFindOut, match=r"could not list runs: answered 400: .*bad filter"):
        PolyaxonClient(server.host).active()
    assert len(server.asked) == 1
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_an_unknown_run_is_a_kind_of_its_own(server: Answers) -> None:
    server.planned = [(404, {"detail": "No Run matches the given query."})]
    with pytest.raises(RunUnknown):
        PolyaxonClient(server.host).view(UUID)


def test_a_missing_project_is_no_unknown_run(server: Answers) -> None:
    server.planned = [(404, {"detail": "No Project matches the given query."})]
    with pytest.raises(CannotFindOut) as caught:
        PolyaxonClient(server.host).active()
    assert not isinstance(caught.value, RunUnknown)


def test_nobody_there_is_found_out_within_the_deadline(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = PolyaxonClient("http://127.0.0.1:9", call_s=0.5)
    began = time.monotonic()
    with pytest.raises(ServiceDown, match=r"within 0.*memsweep services status"):
        client.check()
    assert time.monotonic() - began < 3
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_only_values_that_filters_compare_as_text_are_asked_for(server: Answers) -> None:
    def run(repeat: str, round_: str) -> dict[str, object]:
        meta = {"cell_key": "ab12", "repeat": repeat, "round": round_, "memsweep": "cell"}
        return {"uuid": UUID.replace("-", ""), "status": "running", "meta_info": meta}

    server.planned = [(200, {"count": 2, "results": [run("1", "a:b"), run("2", "a:b")]})]
    found = PolyaxonClient(server.host).find({"cell_key": "ab12", "repeat": "2", "round": "a:b"})
    assert [one.meta_info["repeat"] for one in found] == ["2"]
    assert "query=meta_info.cell_key%3Aab12&" in server.asked[0] + "&"


def test_uuids_have_dashes_on_our_side_only(server: Answers) -> None:
    server.planned = [(200, {"uuid": UUID.replace("-", ""), "status": "succeeded"})]
    view = PolyaxonClient(server.host).view(UUID)
    assert (view.uuid, view.is_final) == (UUID, True)
    assert UUID.replace("-", "") in server.asked[0]
    assert port.canonical_uuid(UUID.replace("-", "")) == UUID


def test_a_condition_is_one_typed_thing_with_times_in_utc(server: Answers) -> None:
    told = {
        "type": "failed",
        "status": True,
        "reason": "Timeout",
        "message": "did not end within 60 s",
        "last_transition_time": "2026-11-29T13:00:00+01:00",
        "last_update_time": "2026-11-29T12:00:01",
    }
    run = {"uuid": UUID.replace("-", ""), "status": "failed", "status_conditions": [told]}
    server.planned = [(200, run)]
    view = PolyaxonClient(server.host).view(UUID)
    (condition,) = view.conditions
    assert condition == Condition(
        type="failed",
        reason="Timeout",
        message="did not end within 60 s",
        at="2026-11-29T12:00:00+00:00",
        updated_at="2026-11-29T12:00:01+00:00",
    )
    assert (view.reason, view.message) == ("Timeout", "did not end within 60 s")
    assert set(condition.to_json()) == {"type", "reason", "message", "at", "updated_at"}


MISSING: Answer = (404, {"detail": "Artifact not found"})
TREE_ERROR: Answer = (200, {"files": {}, "dirs": [], "error": "Could not list path"})
ROOT: Answer = (200, {"files": {}, "dirs": ["outputs", "plxlogs"]})
EMPTY: Answer = (200, {"files": {}, "dirs": []})
NEVER_ASKED: Answer = (500, {})


def fetched(server: Answers, folder: Path, *statuses: str, **answers: tuple[int, object]) -> object:
    """Fetch the outputs of a run that went through ``statuses``."""
    conditions = [{"type": name, "status": True} for name in statuses]
    uuid = UUID.replace("-", "")
    run = {"uuid": uuid, "status": statuses[-1], "status_conditions": conditions}
    server.routes = {
        r"/artifacts/tree\?path=$": answers.get("root", NEVER_ASKED),
        r"/artifacts/tree\?path=outputs$": answers.get("outputs", NEVER_ASKED),
        r"/artifacts\?": answers.get("archive", MISSING),
        uuid: (200, run),
    }
    return PolyaxonClient(server.host, call_s=2).fetch(UUID, folder / "into")


RAN = ("created", "compiled", "starting", "running", "failed")


def test_a_run_that_never_ran_left_nothing(server: Answers, tmp_path: Path) -> None:
    assert fetched(server, tmp_path, "created", "compiled", "stopped") == []


def test_a_run_whose_folder_is_shown_to_be_empty_left_nothing(
    server: Answers, tmp_path: Path
) -> None:
    bare = (200, {"files": {}, "dirs": ["plxlogs"]})
    assert fetched(server, tmp_path, *RAN, root=bare) == []
    assert fetched(server, tmp_path, *RAN, root=ROOT, outputs=EMPTY) == []


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.parametrize(
    "trees",
    [
        {"root": TREE_ERROR},
        {"root": MISSING},
        {"root": ROOT, "outputs": TREE_ERROR},
        {"root": ROOT, "outputs": (200, {"files": {"end.json": 7}, "dirs": []})},
        {"root": ROOT, "outputs": (200, {"files": {}, "dirs": ["raw"]})},
    ],
)
def test_outputs_that_cannot_be_had_are_not_taken_for_none(
    server: Answers, tmp_path: Path, trees: dict[str, tuple[int, object]], status: int
) -> None:
    with pytest.raises(CannotFindOut, match="run") as caught:
        fetched(server, tmp_path, *RAN, archive=(status, {}), **trees)
    assert not isinstance(caught.value, ServiceDown)


def test_a_link_among_the_outputs_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source" / "outputs"
    source.mkdir(parents=True)
    (source / "server.log").write_text("kept")
    (source / "end.json").symlink_to("../server.log")
    (source.parent / "server.log").write_text("another run's")

    def archive(*_: object, save_to: Path, **__: object) -> None:
        with tarfile.open(save_to, "w:gz") as packed:
            packed.add(source.parent, "run")

    client = PolyaxonClient("http://127.0.0.1:9")
    monkeypatch.setattr(client, "_refreshed", lambda run_uuid: None)
    monkeypatch.setattr(client, "_streams", archive)
    assert client.fetch(UUID, tmp_path / "into") == ["server.log"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["server.log"]


def handing_out(
    monkeypatch: pytest.MonkeyPatch, folder: Path, asked: list[object]
) -> PolyaxonClient:
    """Return a client whose server packs ``folder`` whatever run it is asked for."""

    def archive(_run: object, _what: str, parameters: object, *, save_to: Path) -> None:
        asked.append(parameters)
        with tarfile.open(save_to, "w:gz") as packed:
            packed.add(folder, "run")

    client = PolyaxonClient("http://127.0.0.1:9")
    monkeypatch.setattr(client, "_refreshed", lambda run_uuid: None)
    monkeypatch.setattr(client, "_streams", archive)
    return client


def test_the_outputs_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their hashes agree among themselves: only the run's own first event tells whose they are."""
    outputs, other = tmp_path / "source" / "outputs", UUID[:-1] + "f"
    outputs.mkdir(parents=True)
    asked: list[object] = []
    client = handing_out(monkeypatch, outputs.parent, asked)
    (outputs / "events.jsonl").write_text(json.dumps({"run_uuid": other.replace("-", "")}) + "\n")
    with pytest.raises(ServiceDown, match=f"got those of run {other}"):
        client.fetch(UUID, tmp_path / "into")
    (outputs / "events.jsonl").write_text(json.dumps({"run_uuid": UUID.replace("-", "")}) + "\n")
    assert client.fetch(UUID, tmp_path / "into") == ["events.jsonl"]
    # By this path alone the archive is named after the run.
    assert asked == [{"path": "", "force": "true"}] * 2


def test_logs_without_outputs_are_no_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source" / "plxlogs").mkdir(parents=True)
    (tmp_path / "source" / "plxlogs" / "log").write_text("x")
    client = handing_out(monkeypatch, tmp_path / "source", [])
    assert client.fetch(UUID, tmp_path / "into") == []


def test_a_full_disk_here_is_no_server_that_is_away(server: Answers) -> None:
    asked: list[int] = []

    def full() -> None:
        asked.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CannotFindOut, match="No space left on device") as caught:
        PolyaxonClient(server.host, call_s=2)._call("read the artifacts", full)
    assert not isinstance(caught.value, ServiceDown)
    assert len(asked) == 1


def test_what_killed_fetches_left_is_cleared_away(server: Answers, tmp_path: Path) -> None:
    old, young = tmp_path / ".fetch-old", tmp_path / ".fetch-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "outputs.tar.gz").touch()
    for path in (old / "outputs.tar.gz", old):
        os.utime(path, (time.time() - 2 * 3600,) * 2)
    assert fetched(server, tmp_path, "created", "stopped") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fetch-young", "into"]


#: Created as it is: nothing here looks into it.
OPERATION: dict[str, object] = {"version": 1.1, "kind": "operation", "hubRef": "none"}


def created(number: int) -> dict[str, object]:
    meta = {"cell_key": "ab12", "memsweep": "cell"}
    uuid = f"{number:032x}"
    return {"uuid": uuid, "status": "compiled", "meta_info": meta, "status_conditions": []}


def test_creating_waits_longer_than_the_servers_database_does(server: Answers) -> None:
    server.planned = [(201, created(1))]
    server.delays = [1.5]
    client = PolyaxonClient(server.host, call_s=1.0)
    view = client.create(operation=OPERATION, name="n", meta={"cell_key": "ab12"})
    assert view.uuid == UUID
    assert [one for one in server.asked if one.startswith("POST")] == server.asked[:1]
    assert json.loads(_DATABASE_OPTIONS)["timeout"] < CREATE_S


def test_a_run_of_a_lost_answer_that_shows_late_is_taken_and_not_made_again(
    server: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polyaxon, "LOOK_AGAIN_S", 0.2)
    nothing = (200, {"count": 0, "results": []})
    late = (200, {"count": 1, "results": [created(1)]})
    server.planned = [(503, {}), nothing, late, (200, created(1))]
    client = PolyaxonClient(server.host)
    assert client.create(operation=OPERATION, name="n", meta={"cell_key": "ab12"}).uuid == UUID
    assert len([one for one in server.asked if one.startswith("POST")]) == 1


def test_of_two_runs_that_a_repeated_request_made_the_oldest_is_returned(
    server: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polyaxon, "LOOK_AGAIN_S", 0.0)
    nothing = (200, {"count": 0, "results": []})
    both = (200, {"count": 2, "results": [created(1), created(2)]})
    server.planned = [(503, {}), nothing, (201, created(2)), both, (200, created(1))]
    client = PolyaxonClient(server.host)
    assert client.create(operation=OPERATION, name="n", meta={"cell_key": "ab12"}).uuid == UUID
    assert len([one for one in server.asked if one.startswith("POST")]) == 2
