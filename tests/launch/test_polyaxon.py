"""The adapter against a small HTTP server that answers as Polyaxon does when things go wrong."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

from tasks.launch import port
from tasks.launch.polyaxon import PolyaxonClient
from tasks.launch.port import Condition, RunUnknown
from warehouse.errors import CannotFindOut, ServiceDown

# Polyaxon's own models, at their import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UUID = "00000000-0000-0000-0000-000000000001"


class Answers:
    """What the server will answer, one after another, the last one for ever."""

    def __init__(self) -> None:
        self.planned: list[tuple[int, object]] = [(200, {})]
        self.asked: list[str] = []
        self.host = ""

    def next(self, asked: str) -> tuple[int, object]:
        self.asked.append(asked)
        return self.planned.pop(0) if len(self.planned) > 1 else self.planned[0]


@pytest.fixture
def server() -> Iterator[Answers]:
    answers = Answers()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = answers.next(f"{self.command} {self.path}")
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
