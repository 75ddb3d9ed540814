"""Speaking to a server that is not ours: token, certificates, faults on the way, what it lacks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.proxy import Proxy, proxied, self_signed

from tasks.launch import access
from tasks.launch.polyaxon import PolyaxonClient
from tasks.launch.port import AccessRefused, RunUnknown
from tasks.launch.target import Profile
from tasks.redact import Secrets
from warehouse.errors import BadInput, CannotFindOut, ServiceDown

# Polyaxon's own models, at their import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UUID = "00000000-0000-0000-0000-000000000001"
NOBODY = "http://127.0.0.1:9"
#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
TOKEN = "0123456789abcdef0123456789abcdef01234567"
RUN = {"uuid": UUID.replace("-", ""), "status": "running", "status_conditions": []}


@pytest.fixture
def server() -> Iterator[Proxy]:
    """A server that answers only what a test tells it to; everything else with 502."""
    with proxied(NOBODY) as proxy:
        yield proxy


def profile(host: str, **changes: Any) -> Profile:
    facts = {
        "name": "there",
        "description": "x",
        "device": "cpu",
        "operation": "local.yaml",
        "host": host,
        "image": "registry.invalid/engine",
        "image_digest": DIGEST,
        "models": "/models",
        "call_s": 5,
    }
    return Profile.model_validate(facts | changes)


def login(folder: Path, host: str) -> dict[str, str]:
    """Leave what ``polyaxon login`` leaves, and return the environment that finds it."""
    (folder / ".client").write_text(json.dumps({"host": host}))
    (folder / ".auth").write_text(json.dumps({"username": "u", "token": TOKEN}))
    return {"POLYAXON_HOME": str(folder)}


def test_the_token_comes_from_the_environment_before_polyaxons_own_login(tmp_path: Path) -> None:
    there = profile("https://polyaxon.invalid")
    given = login(tmp_path, "https://polyaxon.invalid/")
    assert access.find_token(there, given) == TOKEN
    assert access.find_token(there, given | {"POLYAXON_AUTH_TOKEN": "one"}) == "one"
    named = profile("https://polyaxon.invalid", token_env="MINE")
    assert access.find_token(named, given | {"POLYAXON_AUTH_TOKEN": "one", "MINE": "two"}) == "two"
    with pytest.raises(BadInput, match="token_env names MINE, which is not set"):
        access.find_token(named, given)
    assert access.find_token(there, {"POLYAXON_HOME": str(tmp_path / "none")}) is None


def test_a_token_that_was_found_is_looked_for_in_what_is_kept() -> None:
    given = {"PLX": "found-elsewhere-9"}
    access.find_token(profile("https://polyaxon.invalid", token_env="PLX"), given)
    assert Secrets.here().clean_text("with found-elsewhere-9") == "with [redacted]"


def test_a_login_is_not_shown_to_another_server(tmp_path: Path) -> None:
    given = login(tmp_path, "https://polyaxon.invalid")
    assert access.find_token(profile("https://other.invalid"), given) is None


def test_a_token_does_not_travel_in_clear() -> None:
    given = {"POLYAXON_AUTH_TOKEN": TOKEN}
    with pytest.raises(BadInput, match="in clear") as caught:
        access.find_token(profile("http://polyaxon.invalid"), given)
    assert TOKEN not in str(caught.value)
    assert access.find_token(profile("http://127.0.0.1:8000"), given) == TOKEN
    assert access.find_token(profile("http://polyaxon.invalid"), {}) is None


@pytest.mark.parametrize("host", ["polyaxon", "ftp://x", "https://u:secret@x.invalid", "http://"])
def test_an_address_is_one_and_holds_no_credentials(host: str) -> None:
    with pytest.raises(ValueError, match="host") as caught:
        profile(host)
    assert "secret@" not in str(caught.value.errors()[0]["msg"])  # type: ignore[attr-defined]


def test_every_request_bears_the_token_and_no_other_one_is_found(
    server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyaxon import settings
    from polyaxon._schemas.authentication import AccessTokenConfig

    server.answer("/logs", {"logs": [{"value": "line"}]})
    server.answer("GET", RUN)
    monkeypatch.setenv("POLYAXON_AUTH_TOKEN", TOKEN)
    assert access.client(profile(server.host)).logs(UUID) == "line\n"
    assert {one.authorization for one in server.asked} == {f"Token {TOKEN}"}
    server.asked.clear()
    # What Polyaxon's own client would take where it is told of none.
    monkeypatch.setattr(settings, "AUTH_CONFIG", AccessTokenConfig(token=TOKEN))
    PolyaxonClient(server.host).logs(UUID)
    assert {one.authorization for one in server.asked} == {None}


def test_certificates_are_verified(tmp_path: Path) -> None:
    own = self_signed(tmp_path / "own.pem")
    with proxied(NOBODY, certificate=own) as proxy:
        proxy.answer("/logs", {"logs": [{"value": "line"}]})
        proxy.answer("GET", RUN)
        with pytest.raises(CannotFindOut, match=r"CERTIFICATE_VERIFY_FAILED.*ca_file") as caught:
            access.client(profile(proxy.host, call_s=30)).view(UUID)
        assert not isinstance(caught.value, ServiceDown), "a bad certificate is not asked again"
        for good in ({"ca_file": str(own)}, {"verify_tls": False}):
            assert access.client(profile(proxy.host, **good)).logs(UUID) == "line\n"
    with pytest.raises(BadInput, match=r"ca_file .*none\.pem"):
        access.client(profile("https://x.invalid", ca_file=str(tmp_path / "none.pem")))


@pytest.mark.parametrize("code", [401, 403])
def test_a_refused_token_is_told_at_once_and_not_shown(server: Proxy, code: int) -> None:
    server.inject("GET", "status", code=code)
    client = PolyaxonClient(server.host, token=TOKEN)
    with pytest.raises(AccessRefused, match=f"answered {code}.*token") as caught:
        client.view(UUID)
    assert len(server.asked) == 1
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("kind", ["reset", "cut", "nonsense"])
def test_what_does_not_arrive_whole_is_asked_again(server: Proxy, kind: Any) -> None:
    server.inject("GET", kind, code=200, body=RUN)
    server.answer("GET", RUN)
    assert PolyaxonClient(server.host, call_s=20).view(UUID).status == "running"
    assert len(server.asked) >= 2


def test_what_is_never_polyaxons_answer_is_told_after_a_few(server: Proxy) -> None:
    server.inject("GET", "nonsense", times=100)
    with pytest.raises(CannotFindOut, match=r"cannot be read.*address of a Polyaxon") as caught:
        PolyaxonClient(server.host).view(UUID)
    assert not isinstance(caught.value, ServiceDown)
    assert len(server.asked) == 4


def test_a_redirect_is_told_at_once_and_not_followed_with_the_token(server: Proxy) -> None:
    elsewhere = {"Location": f"{NOBODY}/"}
    server.inject("GET", "status", code=301, headers=elsewhere, times=100)
    with pytest.raises(CannotFindOut, match="too many redirects; state the address") as caught:
        PolyaxonClient(server.host, token=TOKEN).view(UUID)
    assert not isinstance(caught.value, ServiceDown)
    assert len(server.asked) == 1


def test_a_server_that_asks_for_patience_gets_it(server: Proxy) -> None:
    server.inject("GET", "status", code=429, headers={"Retry-After": "1"})
    server.answer("GET", RUN)
    began = time.monotonic()
    PolyaxonClient(server.host).content(UUID)
    assert time.monotonic() - began >= 1.0
    assert len(server.asked) == 2


def test_more_patience_than_there_is_ends_at_once(server: Proxy) -> None:
    server.inject("GET", "status", code=503, headers={"Retry-After": "3600"}, times=100)
    with pytest.raises(ServiceDown, match="within 60 s"):
        PolyaxonClient(server.host).view(UUID)
    assert len(server.asked) == 1


def test_only_our_own_servers_405_is_a_lost_write() -> None:
    with proxied(NOBODY, bind="127.0.0.2") as proxy:
        proxy.inject("POST", "status", code=405)
        with pytest.raises(CannotFindOut, match="answered 405"):
            PolyaxonClient(proxy.host).stop(UUID)
        assert len(proxy.asked) == 1


def test_a_cluster_is_asked_for_the_runs_its_agent_executes(server: Proxy) -> None:
    server.answer("GET", {"count": 0, "results": []})
    client = access.client(profile(server.host))
    assert client.active() == []
    assert "managed_by%3Aagent" in server.asked[0].line
    assert "unschedulable" in server.asked[0].line
    server.inject("POST .*/runs", "status", code=201, body=RUN)
    server.faults.insert(0, server.faults.pop())
    with pytest.raises(CannotFindOut):
        client.create(operation={"kind": "operation"}, name="n", meta={"cell_key": "ab"})
    (posted,) = [one for one in server.asked if one.line.startswith("POST")]
    assert json.loads(posted.body)["managed_by"] == "agent"


def test_a_view_tells_what_a_run_waits_for(server: Proxy) -> None:
    server.answer("/statuses", {"uuid": RUN["uuid"], "status": "created", "status_conditions": []})
    server.answer("GET", RUN | {"status": "created", "pending": "approval"})
    view = PolyaxonClient(server.host).view(UUID)
    assert (view.pending, view.is_final) == ("approval", False)


def findings(there: Profile, look: Callable[[], None] = lambda: None) -> dict[str, Any]:
    return {one.name: one for one in access.check(there, look)}


def well(server: Proxy) -> None:
    server.answer("GET .*/installation", {"version": "2.18.0", "dist": "ce"})
    server.answer(r"GET .*/projects?/|GET .*/memsweep$", {"name": "memsweep"})


def test_a_target_that_has_everything(server: Proxy) -> None:
    server.answer("GET .*/queues", {}, code=404)
    well(server)
    found = findings(profile(server.host, queue="a10"))
    assert [one for one in found.values() if one.error is not None] == []
    assert list(found) == ["server", "project", "queue", "operation"]
    assert "tells of no queues" in found["queue"].text
    assert server.count("POST") == 0
    access.require(list(found.values()), "there", lambda text: None)


def test_nobody_there_is_one_line_and_cannot_be_found_out() -> None:
    found = list(findings(profile(NOBODY, call_s=0.5)).values())
    assert [(one.name, one.error) for one in found] == [("server", CannotFindOut)]
    said: list[str] = []
    with pytest.raises(CannotFindOut, match="1 of 1 checks failed; nothing was") as caught:
        access.require(found, "there", said.append)
    assert said == []
    assert "\n" not in str(caught.value)


def test_a_refused_token_a_wrong_version_and_an_address_of_something_else(server: Proxy) -> None:
    server.inject("GET", "status", code=401)
    assert findings(profile(server.host))["access"].error is BadInput
    server.answer("GET .*/installation", {"version": "1.20.0", "dist": "ce"})
    server.answer("GET .*/memsweep", {"name": "memsweep"})
    assert "wanted version 2.x" in findings(profile(server.host))["server"].text
    server.clear()
    server.answer("GET", ["no", "polyaxon"])
    assert findings(profile(server.host))["server"].error is CannotFindOut


def test_a_project_that_may_not_be_made_is_named(server: Proxy) -> None:
    server.answer("GET .*/installation", {"version": "2.18.0", "dist": "ce"})
    server.answer("GET .*/memsweep", {}, code=404)
    server.answer("POST", {}, code=403)
    found = findings(profile(server.host, owner="acme"))["project"]
    assert found.error is BadInput
    assert "acme/memsweep is not there and may not be made" in found.text


def test_a_queue_that_is_not_there_is_named(server: Proxy) -> None:
    known = {"results": [{"uuid": "1" * 32, "agent": "main", "name": "a10"}], "count": 1}
    server.answer("GET .*/queues", known)
    well(server)
    assert findings(profile(server.host, queue="main/a10"))["queue"].error is None
    assert findings(profile(server.host, queue="a10"))["queue"].error is None
    wrong = findings(profile(server.host, queue="h100"))["queue"]
    assert (wrong.error, "main/a10" in wrong.text) == (BadInput, True)


def test_an_operation_that_cannot_be_submitted_is_found_with_all_else(server: Proxy) -> None:
    def look() -> None:
        raise BadInput("cell x:run.container.image: no digest")

    server.answer("GET .*/installation", {"version": "1.20.0", "dist": "ce"})
    server.answer("GET .*/memsweep$", {"name": "memsweep"})
    found = list(findings(profile(server.host), look).values())
    assert [one.name for one in found if one.error is BadInput] == ["server", "operation"]
    said: list[str] = []
    with pytest.raises(BadInput, match=r"2 of 4 checks failed; .*wanted version"):
        access.require(found, "there", said.append)
    assert [one.split(":")[0].strip() for one in said] == ["project", "queue", "operation"]
    assert said[-1] == "  operation: missing: cell x:run.container.image: no digest"


def test_an_unknown_run_is_still_an_unknown_run(server: Proxy) -> None:
    server.answer("GET", {}, code=404)
    with pytest.raises(RunUnknown):
        access.client(profile(server.host)).view(UUID)
