"""The download of a model: by commit, once, every file checked against the hub's own hash."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPMessage
from pathlib import Path

import pytest
from testkit.servers import Answer, Hub, serving

from tasks import revision
from tasks.pod import fetch
from tasks.pod.environment import describe_model

#: Recognisably fake.
COMMIT = "0" * 40
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 20,
    "README.md": b"not served",
    "pytorch_model.bin": b"another format",
    "modeling.py": b"code is never taken",
}


def hub(**changes: object) -> Hub:
    parts: dict[str, object] = {"model": "owner/name", "commit": COMMIT, "files": dict(FILES)}
    return Hub(**(parts | changes))  # type: ignore[arg-type]


def environ(url: str, folder: Path, **changes: str) -> dict[str, str]:
    return {
        "MEMSWEEP_MODEL_NAME": "owner/name",
        "MEMSWEEP_MODEL_PATH": str(folder),
        "MEMSWEEP_FETCH_S": "30",
        "HF_ENDPOINT": url,
    } | changes


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_commit_is_downloaded_whole_and_once(tmp_path: Path) -> None:
    folder = tmp_path / "owner" / "name" / COMMIT
    with serving(hub()) as server:
        said = fetch.fetch(fetch.wanted(environ(server.url, folder)))
        asked = len(server.asked)
        again = fetch.fetch(fetch.wanted(environ(server.url, folder)))
        assert len(server.asked) == asked
    assert "3 files" in said
    assert "there already" in again
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", revision.MARKER}
    marker = json.loads((folder / revision.MARKER).read_text())
    assert (marker["name"], marker["revision"], marker["source"]) == (
        "owner/name", COMMIT, server.url,
    )  # fmt: skip
    for name in names - {revision.MARKER}:
        assert (folder / name).read_bytes() == FILES[name]
        assert marker["files"][name]["sha256"] == hashlib.sha256(FILES[name]).hexdigest()
    assert not folder.with_name(f".{COMMIT}.part").exists()


def test_the_run_records_commit_and_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / COMMIT
    with serving(hub()) as server:
        fetch.fetch(fetch.wanted(environ(server.url, folder)))
    monkeypatch.setattr(revision, "MAX_BYTES", 100)
    told = describe_model(folder)
    assert told["revision"] is None
    assert told["fetched"]["revision"] == COMMIT  # type: ignore[index]
    digest = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert told["weights"] == [{"name": "model.safetensors", "bytes": 5120, "sha256": digest}]
    (folder / "model.safetensors").write_bytes(b"cut")
    assert describe_model(folder)["fetched"] is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_other_content_is_never_kept(name: str, tmp_path: Path) -> None:
    same_size = b"x" * len(FILES[name])
    with (
        serving(hub(served={name: same_size})) as server,
        pytest.raises(fetch.FetchError, match="of another content"),
    ):
        fetch.fetch(fetch.wanted(environ(server.url, tmp_path / COMMIT)))
    assert not (tmp_path / COMMIT).exists()


def test_a_hub_that_falters_is_asked_again(tmp_path: Path) -> None:
    with serving(hub(broken={"model.safetensors": 2})) as server:
        fetch.fetch(fetch.wanted(environ(server.url, tmp_path / COMMIT)))
    assert server.paths().count(f"/owner/name/resolve/{COMMIT}/model.safetensors") == 3


def test_a_hub_that_falters_at_its_listing_is_asked_again(tmp_path: Path) -> None:
    whole, refusals = hub(), [503, 429]

    def faltering(path: str, headers: Mapping[str, str], url: str) -> Answer:
        if "/tree/" in path and refusals:
            return refusals.pop(), {}, b""
        return whole(path, headers, url)

    with serving(faltering) as server:
        fetch.fetch(fetch.wanted(environ(server.url, tmp_path / COMMIT)))
    assert (tmp_path / COMMIT / revision.MARKER).is_file()


def test_after_the_deadline_the_hub_is_asked_no_more(tmp_path: Path) -> None:
    with serving(hub()) as server:
        late = replace(fetch.wanted(environ(server.url, tmp_path / COMMIT)), deadline=0.0)
        with pytest.raises(fetch.FetchError, match="not downloaded in time"):
            fetch.fetch(late)
        assert server.asked == []


def test_what_a_killed_download_left_is_used_if_it_is_right(tmp_path: Path) -> None:
    part = tmp_path / f".{COMMIT}.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(FILES["model.safetensors"])
    (part / "config.json").write_bytes(b"cut")
    with serving(hub()) as server:
        fetch.fetch(fetch.wanted(environ(server.url, tmp_path / COMMIT)))
    assert f"/owner/name/resolve/{COMMIT}/model.safetensors" not in server.paths()
    assert (tmp_path / COMMIT / "config.json").read_bytes() == FILES["config.json"]


def test_two_at_once_download_it_once(tmp_path: Path) -> None:
    said: list[str] = []
    with serving(hub()) as server:
        threads = [
            threading.Thread(
                target=lambda: said.append(
                    fetch.fetch(fetch.wanted(environ(server.url, tmp_path / COMMIT)))
                )
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert sorted("already" in text for text in said) == [False, True]


def test_the_token_goes_to_the_hub_and_not_where_it_redirects(tmp_path: Path) -> None:
    elsewhere = hub()
    with serving(elsewhere) as store:

        def answer(path: str, headers: dict[str, str], url: str) -> Answer:
            if "/resolve/" in path:
                return 302, {"Location": f"{store.url}{path}"}, b""
            return elsewhere(path, headers, url)

        with serving(answer) as server:  # type: ignore[arg-type]
            want = environ(server.url, tmp_path / COMMIT, HF_TOKEN="planted-token")
            fetch.fetch(fetch.wanted(want))
    assert all(h.get("authorization") == "Bearer planted-token" for _, h in server.asked)
    assert all("authorization" not in headers for _, headers in store.asked)
    assert "planted-token" not in (tmp_path / COMMIT / revision.MARKER).read_text()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_the_token_is_kept_where_the_hub_redirects_to_itself(code: int, tmp_path: Path) -> None:
    """The hub answers ``resolve`` with an address of its own, which is as closed."""
    whole = hub()

    def answer(path: str, headers: Mapping[str, str], url: str) -> Answer:
        if headers.get("authorization") != "Bearer planted-token":
            return 401, {}, b""
        if path.startswith("/owner/name/resolve/"):
            # By path alone and in full, as both are met.
            where = path.replace("/owner/", "/moved/")
            return code, {"Location": where if "config" in path else f"{url}{where}"}, b""
        return whole(path.replace("/moved/", "/owner/"), headers, url)

    with serving(answer) as server:
        want = environ(server.url, tmp_path / COMMIT, HF_TOKEN="planted-token")
        fetch.fetch(fetch.wanted(want))
    assert f"/moved/name/resolve/{COMMIT}/model.safetensors" in server.paths()


def test_a_token_that_left_the_hub_does_not_come_back(tmp_path: Path) -> None:
    """Hub, another server, hub again: what that one made of the address is not the hub's word."""
    whole = hub()
    with serving(lambda path, headers, url: (302, {"Location": back + path}, b"")) as other:

        def answer(path: str, headers: Mapping[str, str], url: str) -> Answer:
            if path.startswith("/owner/name/resolve/"):
                return 302, {"Location": f"{other.url}{path.replace('/owner/', '/moved/')}"}, b""
            return whole(path.replace("/moved/", "/owner/"), headers, url)

        with serving(answer) as server:
            back = server.url
            want = environ(server.url, tmp_path / COMMIT, HF_TOKEN="planted-token")
            fetch.fetch(fetch.wanted(want))
    told = {path.partition("/name")[0] for path, h in server.asked if "authorization" in h}
    assert told == {"/api/models/owner", "/owner"}
    assert all("authorization" not in headers for _, headers in other.asked)


def redirected(url: str, to: str) -> urllib.request.Request:
    request = urllib.request.Request(url)
    request.add_unredirected_header("Authorization", "Bearer planted-token")
    handler, none = fetch._Redirects(), HTTPMessage()
    following = handler.redirect_request(request, io.BytesIO(), 307, "", none, to)
    assert following is not None
    return following


@pytest.mark.parametrize(
    ("to", "is_kept"),
    [
        ("https://hub.example.com/other", True),
        ("https://HUB.example.com:443/other", True),
        ("http://hub.example.com/other", False),
        ("http://hub.example.com:443/other", False),
        ("https://hub.example.com:8443/other", False),
        ("https://cdn.hub.example.com/other", False),
        ("https://hub.example.com@evil.example.com/other", False),
        ("https://hub.example.com.evil.example.com/other", False),
    ],
)
def test_another_scheme_host_or_port_gets_no_token(to: str, is_kept: bool) -> None:
    following = redirected("https://hub.example.com/owner", to)
    assert (following.get_header("Authorization") is not None) is is_kept
    assert "Authorization" not in following.headers, "it would go on to anywhere"


@pytest.mark.parametrize(
    ("hub_url", "is_refused"),
    [
        ("http://hub.example.com", True),
        ("http://10.0.0.1:8080", True),
        ("http://127.0.0.1.example.com", True),
        ("http://:80", True),
        ("http://[", True),
        ("https://hub.example.com", False),
        ("http://localhost:8080", False),
        ("http://127.0.0.2", False),
        ("http://[::1]:8080", False),
    ],
)
def test_a_token_goes_over_plain_http_only_on_this_machine(
    hub_url: str, is_refused: bool, tmp_path: Path
) -> None:
    given = environ(hub_url, tmp_path / COMMIT)
    assert fetch.wanted(given).token is None
    given["HF_TOKEN"] = "planted-token\n"
    if not is_refused:
        assert fetch.wanted(given).token == "planted-token"
        return
    with pytest.raises(fetch.FetchError, match="wanted https://, or no HF_TOKEN") as caught:
        fetch.wanted(given)
    assert "planted" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MEMSWEEP_MODEL_PATH": "/models/owner/name/main"}, "40 hex digits"),
        ({"MEMSWEEP_MODEL_PATH": "/models/unresolved"}, "40 hex digits"),
        ({"MEMSWEEP_MODEL_NAME": "../../etc"}, "OWNER/NAME"),
        ({"MEMSWEEP_MODEL_PATH": "models"}, "absolute path"),
        ({"MEMSWEEP_FETCH_S": "soon"}, "wanted seconds"),
        ({"HF_ENDPOINT": "file:///etc"}, "http"),
        ({"HF_TOKEN": "planted\ntoken"}, "no token has"),
        ({"HF_ENDPOINT": "https://me:planted@hub.example.com"}, "no place in an address"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(
    changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(fetch.FetchError, match=said) as caught:
        fetch.wanted(environ("http://127.0.0.1:9", tmp_path / COMMIT) | changes)
    assert "planted" not in str(caught.value)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    with serving(hub(files={"config.json": b"{}"})) as server:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tasks.pod.fetch"],
            env={**os.environ, "no_proxy": "127.0.0.1", **environ(server.url, tmp_path / COMMIT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == fetch.EXIT_FAILED
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert ".safetensors" in done.stderr
