"""The webhook against a receiver on this machine: what arrives, how often, and what is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tasks import notify
from tasks.processes import free_port
from warehouse.errors import BadInput


class Receiver:
    """Takes posts and answers with the statuses it was told, the last one for ever."""

    def __init__(self) -> None:
        self.taken: list[dict[str, object]] = []
        self.answers = [204]
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.taken.append(json.loads(body))
                answers = receiver.answers
                self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://user:pass@127.0.0.1:{self.server.server_port}/secret?token=t0k3n"


class Dripping(list[int]):
    """An answer that comes only when the test is over."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__([204])
        self.over = over

    def __getitem__(self, which: Any) -> Any:
        self.over.wait(30)
        return super().__getitem__(which)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    threading.Thread(target=one.server.serve_forever, daemon=True).start()
    yield one
    one.server.shutdown()
    one.server.server_close()


def post(receiver: Receiver) -> str | None:
    return notify.post(receiver.address, {"format": 1, "night": "n"}, wait_s=0.0)


def test_a_document_arrives_once(receiver: Receiver) -> None:
    assert post(receiver) is None
    assert receiver.taken == [{"format": 1, "night": "n"}]


def test_a_receiver_in_trouble_is_asked_again(receiver: Receiver) -> None:
    receiver.answers = [503, 429, 200]
    assert post(receiver) is None
    assert len(receiver.taken) == 3


@pytest.mark.parametrize(("status", "tries"), [(500, notify.TRIES), (404, 1), (302, 1)])
def test_a_refusal_is_told_without_the_secret(receiver: Receiver, status: int, tries: int) -> None:
    receiver.answers = [status]
    told = post(receiver)
    assert told == (
        f"webhook http://127.0.0.1:{receiver.server.server_port}/…: it answered {status}"
    )
    assert len(receiver.taken) == tries


def test_nobody_there_is_told_without_the_secret() -> None:
    told = notify.post(f"http://127.0.0.1:{free_port()}/secret", {}, wait_s=0.0)
    assert told is not None
    assert "ConnectError after 3 tries" in told
    assert "secret" not in told


def test_a_receiver_that_drips_its_answer_is_not_waited_for(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(receiver, "answers", Dripping(over))
    monkeypatch.setattr(notify, "DEADLINE_S", 0.2)
    told = post(receiver)
    over.set()
    assert told is not None
    assert told.endswith("no whole answer within 0 s")
    assert "secret" not in told


@pytest.mark.parametrize(
    "address",
    ["ftp://h/secret", "file:///secret", "secret", "http://", "http://[secret", "http://h:secret/"],
)
def test_only_http_addresses_are_taken(address: str) -> None:
    with pytest.raises(BadInput) as caught:
        notify.check_address(address, "--webhook")
    assert "secret" not in str(caught.value)
    assert "http" in str(notify.post(address, {}))
