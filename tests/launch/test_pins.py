"""Pins: tags and branches resolved over real HTTP, merged into a sweep that leaves them open."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
from testkit.servers import (
    MANIFEST,
    MANIFEST_DIGEST,
    Hub,
    as_json,
    nothing,
    registry,
    serving,
)

from flows.shipped import find_sweep
from tasks.launch import pins
from tasks.plan.sweep import parse_sweep
from warehouse.errors import BadInput, CannotFindOut

#: Recognisably fake.
DIGEST, COMMIT = "sha256:" + "0" * 64, "0" * 40
SWEEP = """
name: mine
model: owner/name
pins: {image_digest: unresolved, engine_version: 0.27.0}
server: {max_model_len: 1024}
experiments:
  - name: one
    points: [{parallel: 4, number: 8}]
"""


def refused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "where", "name"),
    [
        ("vllm/vllm-openai:v0.27.0", "registry-1.docker.io", "vllm/vllm-openai"),
        ("docker.io/vllm/vllm-openai:v1", "registry-1.docker.io", "vllm/vllm-openai"),
        ("busybox:1", "registry-1.docker.io", "library/busybox"),
        ("registry.example.com/team/engine:v1", "registry.example.com", "team/engine"),
        ("registry.example.com:5000/engine:v1", "registry.example.com:5000", "engine"),
        ("localhost:5000/engine:v1", "localhost:5000", "engine"),
    ],
)
def test_an_image_is_taken_apart(text: str, where: str, name: str) -> None:
    found = pins.image(text)
    assert (found.registry, found.name) == (where, name)
    assert f"{found.without_tag}:{found.tag}" == text


@pytest.mark.parametrize(
    "text", ["vllm", f"a/b@{DIGEST}", "A/b:c", "a/b:", "https://x/y:z", "a b:c"]
)
def test_what_is_no_image_by_tag_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="NAME:TAG"):
        pins.image(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://registry.example.com",
        "ftp://x",
        "x",
        "https://user:word@x.example.com",
        "http://user:word@x.example.com",
        "",
        "https://[x",
    ],
)
def test_http_is_for_this_machine_only_and_logins_have_no_place(text: str) -> None:
    with pytest.raises(BadInput) as error:
        pins.address(text, what="--registry")
    assert "word" not in str(error.value).replace("password", "")


def test_a_branch_with_a_slash_is_one_part_of_the_address() -> None:
    with serving(Hub("owner/name", "0" * 40, {}, branch="refs%2Fpr%2F1")) as server:
        found = pins.commit_of("owner/name", branch="refs/pr/1", endpoint=server.url)
    assert found.of == "owner/name@refs/pr/1"


def test_a_tag_becomes_the_digest_of_what_was_answered() -> None:
    with serving(registry({"vllm/vllm-openai:v1": MANIFEST})) as server:
        found = pins.digest_of(pins.image("vllm/vllm-openai:v1"), registry=server.url)
    assert (found.value, found.of) == (MANIFEST_DIGEST, "vllm/vllm-openai:v1")
    assert found.source == f"{server.url}/v2/vllm/vllm-openai/manifests/v1"
    assert found.at.endswith("Z")
    tokens = [path for path in server.paths() if path.startswith("/token")]
    assert len(tokens) == 1
    assert "scope=repository" in tokens[0]
    assert "index.v1+json" in server.asked[0][1]["accept"]


def test_a_registry_without_tokens_is_asked_once() -> None:
    with serving(registry({"a/b:v1": MANIFEST}, anonymous=True)) as server:
        assert pins.digest_of(pins.image("a/b:v1"), registry=server.url).value == MANIFEST_DIGEST
    assert server.paths() == ["/v2/a/b/manifests/v1"]


def test_a_digest_that_is_not_the_contents_is_not_believed() -> None:
    with (
        serving(registry({"a/b:v1": MANIFEST}, stated=DIGEST)) as server,
        pytest.raises(CannotFindOut, match="its answer hashes to"),
    ):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)


def test_the_page_of_a_proxy_is_no_manifest() -> None:
    for body in (b"<html>login</html>", b"{}", b"[]"):
        with (
            serving(registry({"a/b:v1": body}, anonymous=True)) as server,
            pytest.raises(CannotFindOut),
        ):
            pins.digest_of(pins.image("a/b:v1"), registry=server.url)


def test_a_tag_that_is_not_there_and_a_registry_that_wants_a_login() -> None:
    with serving(registry({})) as server, pytest.raises(BadInput, match="no such image or tag"):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)

    def basic(*_: object) -> tuple[int, dict[str, str], bytes]:
        return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""

    with serving(basic) as server, pytest.raises(CannotFindOut, match="another login"):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)


def test_an_image_by_digest_is_there_or_gone_or_nobody_knows() -> None:
    with serving(registry({f"team/engine:{MANIFEST_DIGEST}": MANIFEST})) as server:
        host = server.url.removeprefix("http://")
        name = f"{host}/team/engine"
        assert pins.image_is_there(name, MANIFEST_DIGEST, registry=server.url)
        assert not pins.image_is_there(name, DIGEST, registry=server.url)
    with pytest.raises(CannotFindOut, match="cannot be reached"):
        pins.image_is_there(name, DIGEST, registry=server.url)
    with serving(lambda *_: (500, {}, b"")) as server, pytest.raises(CannotFindOut, match="500"):
        pins.image_is_there(name, DIGEST, registry=server.url)


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_MAX_BYTES", 1000)

    def long(*_: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, b"[" * 100_000

    with serving(long) as server:
        with pytest.raises(CannotFindOut, match=r"wanted at most 1,000$"):
            pins.digest_of(pins.image("a/b:v1"), registry=server.url)
        with pytest.raises(CannotFindOut, match=r"wanted at most 1,000$"):
            pins.commit_of("owner/name", branch="main", endpoint=server.url)


def test_headers_that_drip_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line comes in time, the whole never: only a limit of the whole ends it."""
    monkeypatch.setattr(pins, "ANSWER_S", 0.3)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with listening.accept()[0] as one, contextlib.suppress(OSError):
                one.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.02):
                    one.sendall(b"X-More: 1\r\n")

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with pytest.raises(CannotFindOut, match="no whole answer within"):
                pins.commit_of("owner/name", branch="main", endpoint=url)
        finally:
            ended.set()
            dripping.join(10)


def test_an_answer_nested_without_end_is_no_json() -> None:
    with (
        serving(lambda *_: (200, {}, b"[" * 200_000)) as server,
        pytest.raises(CannotFindOut, match="no JSON"),
    ):
        pins.commit_of("owner/name", branch="main", endpoint=server.url)


def test_control_bytes_of_an_answer_reach_no_terminal() -> None:
    with (
        serving(registry({"a/b:v1": MANIFEST}, stated="\x1b[31mX")) as server,
        pytest.raises(CannotFindOut) as digest,
    ):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)
    with (
        serving(lambda *_: (200, {}, b'{"sha": "\\u001b[31m\\u202eX"}')) as server,
        pytest.raises(CannotFindOut) as commit,
    ):
        pins.commit_of("owner/name", branch="main", endpoint=server.url)
    with (
        serving(lambda *_: (401, {"WWW-Authenticate": "\x1b[31mX y"}, b"")) as server,
        pytest.raises(CannotFindOut) as login,
    ):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)
    for error in (digest, commit, login):
        assert "\\x1b[31m" in str(error.value)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "realm", ["http://169.254.169.254/latest", "http://127.0.0.1.example.com/token", "http://[x"]
)
def test_a_registry_of_this_machine_names_no_other_one_over_http(realm: str) -> None:
    challenge = {"WWW-Authenticate": f'Bearer realm="{realm}"'}
    with (
        serving(lambda *_: (401, challenge, b"")) as server,
        pytest.raises(CannotFindOut, match="another login"),
    ):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)


def test_a_token_that_no_header_can_hold_is_none() -> None:
    def answer(path: str, headers: object, url: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/token"):
            return 200, {}, '{"token": "a\u00e4\\n"}'.encode()
        return 401, {"WWW-Authenticate": f'Bearer realm="{url}/token"'}, b""

    with serving(answer) as server, pytest.raises(CannotFindOut, match="gives no token"):
        pins.digest_of(pins.image("a/b:v1"), registry=server.url)


def test_no_redirect_is_followed() -> None:
    def moved(*_: object) -> tuple[int, dict[str, str], bytes]:
        return 307, {"Location": "http://127.0.0.1:9/elsewhere"}, b""

    with serving(moved) as server:
        with pytest.raises(CannotFindOut, match="answers 307"):
            pins.digest_of(pins.image("a/b:v1"), registry=server.url)
        with pytest.raises(CannotFindOut, match="answers 307"):
            pins.commit_of("owner/name", branch="main", endpoint=server.url)


def test_a_branch_becomes_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    with serving(Hub("owner/name", commit, {})) as server:
        found = pins.commit_of("owner/name", branch="main", endpoint=server.url)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert pins.commit_of("owner/name", branch="main").value == commit
    assert (found.value, found.of) == (commit, "owner/name@main")


def test_what_names_no_commit_is_never_a_pin() -> None:
    values: list[object] = [{"sha": "main"}, {}, {"sha": None}, []]
    for value in values:
        with (
            serving(lambda *_, value=value: as_json(value)) as server,
            pytest.raises(CannotFindOut),
        ):
            pins.commit_of("owner/name", branch="main", endpoint=server.url)
    with (
        serving(lambda *_: nothing(401)) as server,
        pytest.raises(BadInput, match="no such model or branch"),
    ):
        pins.commit_of("owner/name", branch="main", endpoint=server.url)


def test_a_server_that_is_not_there_cannot_be_found_out() -> None:
    gone = f"http://127.0.0.1:{refused_port()}"
    with pytest.raises(CannotFindOut, match="cannot be reached"):
        pins.digest_of(pins.image("a/b:v1"), registry=gone)
    with pytest.raises(CannotFindOut, match="cannot be reached"):
        pins.commit_of("owner/name", branch="main", endpoint=gone)


# -- the file beside a sweep -------------------------------------------------------------------


def pinned(**changes: object) -> str:
    found = [
        {
            "pin": "model_revision",
            "of": "owner/name@main",
            "value": COMMIT,
            "source": "s",
            "at": "t",
        }
    ]
    document = {
        "format": 1,
        "sweep": "mine",
        "pins": {"model_revision": COMMIT, "image_digest": DIGEST},
        "sources": found,
    }
    return pins.written(pins.PinsFile.model_validate(document | changes))


def test_pins_stand_in_the_sweep_where_it_leaves_them_open(tmp_path: Path) -> None:
    path = tmp_path / "mine.sweep.yaml"
    path.write_text(SWEEP)
    before = parse_sweep(find_sweep(str(path))[1], where="x")
    assert pins.beside(path, is_shipped=False) == tmp_path / "mine.sweep.pins.yaml"
    (tmp_path / "mine.sweep.pins.yaml").write_text(pinned())
    where, text = find_sweep(str(path))
    sweep = parse_sweep(text, where=where)
    assert sweep.pins.model_revision == COMMIT
    assert sweep.pins.image_digest == DIGEST
    assert sweep.pins.engine_version == "0.27.0"
    assert sweep.sha256 != before.sha256
    assert sweep.model_copy(update={"pins": before.pins}).sha256 == before.sha256
    assert find_sweep(str(path), with_pins=False)[1] == SWEEP


def test_a_shipped_sweeps_pins_are_those_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = find_sweep("demo")[1]
    (tmp_path / "demo.pins.yaml").write_text(pinned(sweep="demo", pins={"image_digest": DIGEST}))
    where, text = find_sweep("demo")
    assert parse_sweep(text, where=where).pins.image_digest == DIGEST
    (tmp_path / "demo.pins.yaml").unlink()
    assert find_sweep("demo")[1] == before


def test_pins_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, file = tmp_path / "mine.yaml", tmp_path / "mine.pins.yaml"
    path.write_text(SWEEP)
    file.write_text(pinned(sweep="other"))
    with pytest.raises(BadInput, match="pins of sweep 'other'"):
        find_sweep(str(path))
    file.write_text(pinned())
    path.write_text(SWEEP.replace("engine_version", f"model_revision: {'1' * 40}, engine_version"))
    with pytest.raises(BadInput, match="but the sweep states 1111"):
        find_sweep(str(path))
    file.write_text(pinned().replace(f"model_revision: '{COMMIT}'", "model_revision: main"))
    with pytest.raises(BadInput, match="model_revision"):
        find_sweep(str(path))
    file.write_text("pins: [")
    with pytest.raises(BadInput, match="not valid YAML"):
        find_sweep(str(path))
