"""Configs by revision: what is fetched once is kept, what moves is refused."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tasks.plan import hub
from warehouse.errors import BadInput, CannotFindOut

REVISION = "0" * 40
REFERENCE = f"owner/name@{REVISION}"


def client(status: int = 200, text: str = '{"model_type": "llama"}') -> httpx.Client:
    """A client whose server answers every request the same way."""
    return httpx.Client(
        transport=httpx.MockTransport(lambda _request: httpx.Response(status, text=text))
    )


def test_a_config_is_fetched_once(tmp_path: Path) -> None:
    """Test that the second call reads the kept file and asks nobody."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json={"model_type": "llama"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as server:
        first = hub.config(REFERENCE, tmp_path, client=server)
        second = hub.config(REFERENCE, tmp_path, client=server)
    assert first == second == {"model_type": "llama"}
    assert asked == [f"https://huggingface.co/owner/name/resolve/{REVISION}/config.json"]
    kept = tmp_path / "configs" / "owner__name" / REVISION / "config.json"
    assert json.loads(kept.read_text()) == first


@pytest.mark.parametrize("text", ["owner/name", "owner/name@main", f"name@{REVISION}", "a/b@123"])
def test_what_moves_is_no_reference(text: str, tmp_path: Path) -> None:
    """Test that a branch, a short hash or a missing owner is refused."""
    assert not hub.is_reference(text)
    with pytest.raises(BadInput, match="40 hex digits"):
        hub.config(text, tmp_path)


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (404, "", BadInput),
        (401, "", BadInput),
        (500, "", CannotFindOut),
        (200, "<html>", CannotFindOut),
    ],
)
def test_a_wrong_answer_is_never_kept(
    status: int, text: str, error: type[Exception], tmp_path: Path
) -> None:
    """Test that nothing but a config lands in the cache."""
    with client(status, text) as server, pytest.raises(error):
        hub.config(REFERENCE, tmp_path, client=server)
    assert not list(tmp_path.rglob("config.json"))


def test_an_unreachable_hub_is_not_bad_input(tmp_path: Path) -> None:
    """Test that a network failure is told apart: exit code 3."""

    def fail(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        httpx.Client(transport=httpx.MockTransport(fail)) as server,
        pytest.raises(CannotFindOut, match="cannot be fetched"),
    ):
        hub.config(REFERENCE, tmp_path, client=server)
