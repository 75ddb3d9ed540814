"""A server that is not ours, over a network that is not kind: the real haupt behind a proxy.

The first part asks every endpoint under every fault and wants the right typed error, or success
after another try, and nothing created twice. The second measures a round on it as on a cluster,
with doubles of engine and load executed by the supervisor beside it. About 4 minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit import doubles
from testkit.proxy import Proxy, proxied
from testkit.real import ROOT

from tasks.home import Home
from tasks.launch import environments, services
from tasks.launch.polyaxon import PolyaxonClient
from tasks.launch.port import AccessRefused, RunUnknown
from tasks.launch.settings import artifacts_root, polyaxon_environment, run_outputs
from warehouse.errors import CannotFindOut

pytestmark = [
    pytest.mark.real,
    # Polyaxon's own models, at their import.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
TOKEN = "0123456789abcdef0123456789abcdef01234567"
HUB = "hf_" + "Ab1" * 11
AWS = "AKIA" + "ABCD1234" * 2
PLANTED = {"HF_TOKEN": HUB, "AWS_ACCESS_KEY_ID": AWS, "SOME_API_KEY": "planted-value-7"}
LINE = "INFO 11-29 12:00:00 [api_server.py:1] hello"
#: Not the supervisor's project: nothing executes these runs.
PROJECT = "matrix"


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The other machine: a state folder with doubles whose services are up."""
    home = doubles.make_home(tmp_path_factory.mktemp("there") / "home")
    # Its engine says something that it should not.
    engine = home.envs / "engine" / "bin" / "vllm"
    start, rest = engine.read_text().split("\n", 1)
    engine.write_text(f"{start}\necho '{LINE}, the token is {HUB}'\n{rest}")
    services.up(home, slots=2, progress=print)
    yield home
    assert doubles.end_services(home) == []


@pytest.fixture(scope="module")
def way(there: Home) -> Iterator[Proxy]:
    """The network in between."""
    ends = services.endpoints(there)
    assert ends is not None
    with proxied(ends.polyaxon_host) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def kind(way: Proxy) -> None:
    """Start every test on a network without faults."""
    way.clear()


@pytest.fixture(scope="module")
def client(way: Proxy, there: Home) -> PolyaxonClient:
    """Our client of it, in a project of its own."""
    import os

    os.environ.update(polyaxon_environment(there, way.host))
    made = PolyaxonClient(way.host, project=PROJECT, request_s=2.0, call_s=30.0)
    made.ensure_project()
    return made


def operation() -> dict[str, object]:
    run = {"kind": "job", "container": {"image": "registry.invalid/x", "command": ["true"]}}
    return {"kind": "operation", "component": {"kind": "component", "run": run}}


@pytest.fixture(scope="module")
def run_uuid(client: PolyaxonClient, there: Home) -> str:
    """A run that left a log and outputs in the store."""
    made = client.create(operation=operation(), name="left", meta={"cell_key": "left"})
    outputs = run_outputs(there, made.uuid)
    outputs.mkdir(parents=True)
    (outputs / "end.json").write_text(json.dumps({"text": "x" * 5000}))
    logs = artifacts_root(there) / made.uuid.replace("-", "") / "plxlogs"
    logs.mkdir()
    (logs / "x.jsonl").write_text(json.dumps({"value": "a line", "timestamp": "2026-11-29"}) + "\n")
    client.post_status(made.uuid, "running", "Test", "x")
    return made.uuid


Ask = Callable[[PolyaxonClient, str, Path], Any]
#: (name, the request that is spoiled, what is asked, the error of a 404).
ENDPOINTS: list[tuple[str, str, Ask, type[CannotFindOut] | None]] = [
    ("check", r"GET .*/installation", lambda c, u, p: c.check(), CannotFindOut),
    ("project", rf"GET .*/{PROJECT}(/?$|\?)", lambda c, u, p: c.has_project(), None),
    ("list", r"GET .*/runs\?", lambda c, u, p: c.active(), CannotFindOut),
    ("find", r"GET .*/runs\?", lambda c, u, p: c.find({"cell_key": "left"}), CannotFindOut),
    ("view", r"GET .*/runs/\w{32}", lambda c, u, p: c.view(u), RunUnknown),
    ("content", r"GET .*/runs/\w{32}", lambda c, u, p: c.content(u), RunUnknown),
    ("stop", r"POST .*/stop", lambda c, u, p: c.stop(u), RunUnknown),
    ("outputs", r"PATCH .*/runs/\w{32}", lambda c, u, p: c.log_outputs(u, {"n": 1}), RunUnknown),
    ("status", r"POST .*/statuses",
     lambda c, u, p: c.post_status(u, "running", "Test", "x"), RunUnknown),
    ("logs", r"GET /streams/.*/logs", lambda c, u, p: c.logs(u), RunUnknown),
    ("fetch", r"GET /streams/.*/artifacts\?",
     lambda c, u, p: c.fetch(u, p / "into"), CannotFindOut),
]  # fmt: skip
PASSING: list[tuple[str, dict[str, Any]]] = [
    ("status", {"code": 405}),
    ("status", {"code": 408}),
    ("status", {"code": 429, "headers": {"Retry-After": "1"}}),
    ("status", {"code": 500}),
    ("status", {"code": 503}),
    ("reset", {}),
    ("lost", {}),
    ("cut", {}),
    ("slow", {"delay_s": 3.0}),
    ("nonsense", {}),
]


def name_of(value: object) -> str | None:
    if isinstance(value, dict):
        return str(value.get("code", "")) or None
    return None


WRITES = ("stop", "outputs", "status")
#: Every fault at every endpoint, but nonsense for a write: its answer is not read, its status says
#: all.
PASSING_AT = [
    pytest.param(endpoint, kind, more, id=f"{endpoint[0]}-{kind}-{more.get('code', '')}")
    for endpoint in ENDPOINTS
    for kind, more in PASSING
    if not (endpoint[0] in WRITES and kind == "nonsense")
]


@pytest.mark.parametrize(("endpoint", "kind_", "more"), PASSING_AT)
def test_what_passes_is_asked_again_and_succeeds(
    client: PolyaxonClient,
    way: Proxy,
    run_uuid: str,
    tmp_path: Path,
    endpoint: tuple[str, str, Ask, object],
    kind_: Any,
    more: dict[str, Any],
) -> None:
    name, pattern, ask, _ = endpoint
    writes = name in WRITES
    wanted = None if writes else ask(client, run_uuid, tmp_path)
    way.clear()
    way.inject(pattern, kind_, **more)
    assert ask(client, run_uuid, tmp_path) == wanted or wanted is None
    assert way.faults[0].times == 0, "the fault was not met"
    # A stream may take its time; anything else that answers late is given up and asked again.
    if not (kind_ == "slow" and "/streams/" in pattern):
        assert way.count(pattern) >= 2
    if name == "fetch":
        assert (tmp_path / "into" / "end.json").read_text().count("x") >= 5000


@pytest.mark.parametrize("code", [401, 403, 404])
@pytest.mark.parametrize(
    ("name", "pattern", "ask", "missing"), ENDPOINTS, ids=[one[0] for one in ENDPOINTS]
)
def test_what_stays_is_told_at_once_as_what_it_is(
    client: PolyaxonClient,
    way: Proxy,
    run_uuid: str,
    tmp_path: Path,
    name: str,
    pattern: str,
    ask: Ask,
    missing: type[CannotFindOut] | None,
    code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    way.inject(pattern, "status", code=code, times=1000)
    if code == 404 and missing is None:
        assert ask(client, run_uuid, tmp_path) is False
        return
    with pytest.raises(CannotFindOut) as caught:
        ask(client, run_uuid, tmp_path)
    assert type(caught.value) is (missing if code == 404 else AccessRefused)
    assert way.count(pattern) == 1
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize(("kind_", "more"), PASSING, ids=name_of)
def test_nothing_is_created_twice(
    client: PolyaxonClient, way: Proxy, kind_: Any, more: dict[str, Any]
) -> None:
    meta = {"cell_key": f"c{uuid.uuid4().hex[:12]}"}
    way.inject(r"POST .*/runs$", kind_, **more)
    made = client.create(operation=operation(), name="once", meta=meta)
    assert way.faults[0].times == 0, "the fault was not met"
    assert [one.uuid for one in client.find(meta)] == [made.uuid]


@pytest.mark.parametrize("code", [400, 401, 403, 404])
def test_a_refused_creation_is_told_and_leaves_nothing(
    client: PolyaxonClient, way: Proxy, code: int
) -> None:
    meta = {"cell_key": f"c{uuid.uuid4().hex[:12]}"}
    way.inject(r"POST .*/runs$", "status", code=code, times=1000)
    with pytest.raises(CannotFindOut) as caught:
        client.create(operation=operation(), name="none", meta=meta)
    assert isinstance(caught.value, AccessRefused) is (code in (401, 403))
    assert not isinstance(caught.value, RunUnknown)
    assert way.count(r"POST .*/runs$") == 1
    assert client.find(meta) == []


# ------------------------------------------------------------------ a round, as on a cluster


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """This machine: no engine, no bench, no Polyaxon; it knows the model's config and revision."""
    home = Home((tmp_path_factory.mktemp("here") / "home").resolve())
    doubles.make_model(home)
    yield home
    assert doubles.end_services(home) == []


@pytest.fixture(scope="module")
def profile(there: Home, way: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster's profile whose agent is the supervisor beside the other machine's server."""
    path = tmp_path_factory.mktemp("profile") / "there.yaml"
    facts = {
        "description": "another machine's server",
        "device": "cpu",
        "operation": "local.yaml",
        "slots": 2,
        "queue_s": 120,
        "host": way.host,
        "managed_by": "cli",
        "image": "registry.invalid/engine",
        "image_digest": DIGEST,
        "models": str(there.models),
        "places": {**environments.places(there), "code": str(environments.stage_pod_code(there))},
        "collect_s": 20,
    }
    path.write_text(json.dumps(facts))
    return path


def memsweep(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command line on this machine, with secrets in its environment."""
    inherited = doubles.environment(home)
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=ROOT,
        env=inherited | PLANTED | {"POLYAXON_AUTH_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def files_that_hold(folder: Path, words: list[str]) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found += [f"{path}: {word}" for word in words if word.encode() in content]
    return found


def test_a_round_on_another_machines_server(
    here: Home, there: Home, way: Proxy, profile: Path, tmp_path: Path
) -> None:
    sweep = tmp_path / "remote.yaml"
    sweep.write_text(doubles.sweep_text("remote", 3))
    way.inject(r"POST .*/runs$", "lost")
    way.inject(r"GET .*/runs/\w{32}", "status", code=503)
    way.inject(r"GET /streams/.*/artifacts\?", "cut")
    done = memsweep(here, "run", str(sweep), "--target", str(profile))
    assert done.returncode == 0, done.stderr
    assert all(fault.times == 0 for fault in way.faults)
    assert "3 of 3 cells as expected" in done.stderr
    # Nothing of the embedded default was made or started, but Prefect.
    assert not here.envs.exists()
    states = {one.name: one.state for one in services.status(here)}
    assert (states["prefect"], states["polyaxon"], states["supervisor"]) == ("up", "down", "down")
    # Every request bore the token, and it lies nowhere.
    assert {one.authorization for one in way.asked} == {f"Token {TOKEN}"}
    secrets = [TOKEN, *PLANTED.values()]
    assert files_that_hold(here.root, secrets) == []
    assert [word for word in secrets if word in done.stdout + done.stderr] == []
    # What the run itself was given: nothing of it. Its log held one secret, the bundle does not.
    (log, *_) = sorted(here.bundles.glob("*/server.log"))
    assert f"{LINE}, the token is [redacted]" in log.read_text()
    manifest = json.loads((log.parent / "manifest.json").read_text())
    assert manifest["redacted"]["server.log"] == 1
    assert (manifest["outcome"], manifest["incomplete"]) == ("ok", [])
    told = json.loads((log.parent / "polyaxon.json").read_text())
    assert told["host"] == way.host
    # One run a cell over there, in spite of the lost answer.
    listed = PolyaxonClient(str(services.endpoints(there).polyaxon_host))  # type: ignore[union-attr]
    runs = listed.find({"round": manifest["round"]})
    assert len(runs) == len({one.meta_info["cell_key"] for one in runs}) == 3


def test_the_round_is_known_the_second_time_and_its_runs_are_found(
    here: Home, profile: Path, tmp_path: Path
) -> None:
    sweep = tmp_path / "remote.yaml"
    sweep.write_text(doubles.sweep_text("remote", 3))
    done = memsweep(here, "run", str(sweep), "--target", str(profile))
    assert (done.returncode, done.stderr.count("measured already (ok)")) == (0, 3), done.stderr
    assert memsweep(here, "verify").returncode == 0
    logs = memsweep(here, "logs", "latest")
    assert (logs.returncode, HUB in logs.stdout) == (0, False)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"host": "http://127.0.0.1:9", "call_s": 1}, 3, "could not ask for its version"),
        ({"token_env": "NOT_SET_ANYWHERE"}, 2, "token_env names NOT_SET_ANYWHERE"),
        ({"image_digest": "unresolved"}, 2, "unresolved"),
        ({"host": "http://polyaxon.invalid"}, 2, "in clear"),
    ],
)
def test_what_is_missing_is_one_line_before_anything_is_made(
    there: Home,
    profile: Path,
    tmp_path: Path,
    changes: dict[str, object],
    code: int,
    said: str,
) -> None:
    home = Home(tmp_path / "home")
    doubles.make_model(home)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(json.dumps(json.loads(profile.read_text()) | changes))
    sweep = tmp_path / "remote.yaml"
    sweep.write_text(doubles.sweep_text("wrong", 1))
    done = memsweep(home, "run", str(sweep), "--target", str(wrong))
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert said in last
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr
    assert not home.services.exists()
    assert not home.rounds.exists()


def test_a_secret_in_a_sweep_is_refused_and_kept_nowhere(
    here: Home, profile: Path, tmp_path: Path
) -> None:
    sweep = tmp_path / "secret.yaml"
    text = json.loads(doubles.sweep_text("secret", 1)) | {"description": f"use {HUB}"}
    sweep.write_text(json.dumps(text, indent=1))
    done = memsweep(here, "run", str(sweep), "--target", str(profile))
    assert done.returncode == 2
    assert "holds what looks like a secret" in done.stderr
    assert HUB not in done.stdout + done.stderr
    assert files_that_hold(here.root, [HUB]) == []
