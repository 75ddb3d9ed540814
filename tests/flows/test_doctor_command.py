"""``memsweep doctor``: this machine, a cluster's server, and a node through a run."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from testkit.polyaxon import FakePolyaxon

from flows import cli, context
from flows.commands import doctor as command
from tasks import pins
from tasks.files import write_json
from tasks.home import Home
from tasks.launch import access, labels, target
from tasks.launch.access import Finding
from tasks.launch.port import RunView
from warehouse.errors import CannotFindOut, ServiceDown

DIGEST = "sha256:" + "0" * 64
CLUSTER = f"""
description: a cluster
device: cuda
gpu: A10
operation: gpu.yaml
host: http://polyaxon.invalid
image: registry.invalid/engine
image_digest: {DIGEST}
models: /models
"""
FACTS: dict[str, Any] = {
    "format": 1,
    "host": "node-7",
    "platform": "Linux",
    "driver": "580.105.08",
    "driver_cuda": "13.0",
    "torch_cuda": "12.8",
    "no_gpu": None,
    "gpus": [],
    "packages": {
        "engine": {"vllm": pins.ENGINE_VERSION, "torch": "1"},
        "bench": {"evalscope": pins.BENCH_VERSION},
    },
    "free_bytes": {"outputs": 2**40},
    "shm_bytes": 2**33,
    "models": [],
}
GPU = {
    "name": "NVIDIA A10",
    "compute_capability": "8.6",
    "total_bytes": 24_146_608_128,
    "reserved_bytes": 459_863_491,
    "used_bytes": 0,
    "processes": [],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMSWEEP_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "POLL_S", 0.001)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.run(["doctor", *arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def states(found: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in found["checks"]}


def test_a_machine_without_anything_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    code, found, err = run(capsys)
    assert code == 1
    assert list(found) == ["format", "target", "sweep", "on_node", "ok", "checks"]
    assert {tuple(one) for one in found["checks"]} == {("name", "state", "text", "todo")}
    assert (found["format"], found["ok"], found["target"]) == (1, False, "local")
    told = states(found)
    assert [told[name] for name in ("driver", "CUDA", "GPU")] == ["none"] * 3
    assert (told["Prefect"], told["vLLM"], told["EvalScope"]) == ("ok", "wrong", "wrong")
    assert (told["polyaxon"], told["Polyaxon server"]) == ("none", "wrong")
    (engine,) = [one for one in found["checks"] if one["name"] == "vLLM"]
    assert "memsweep setup" in engine["todo"]
    assert "checks are wrong" in err
    assert not (here / "state").exists()


def test_a_port_that_others_took_is_wrong(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        recorded = {"prefect": busy.getsockname()[1]}
        write_json(here / "state" / "services" / "ports.json", recorded)
        _, found, err = run(capsys)
    assert states(found)["ports"] == "wrong"
    (ports,) = [one for one in found["checks"] if one["name"] == "ports"]
    assert f"{recorded['prefect']} of prefect" in ports["text"]
    assert "checks are wrong" in err


def test_text_names_what_to_do_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "EvalScope" in out
    assert "EvalScope: not installed" in err


def test_a_cluster_is_asked_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("server", "Polyaxon 2"), Finding("queue", "no queue", CannotFindOut)]
    monkeypatch.setattr(access, "check", lambda profile, look: findings)
    code, found, _ = run(capsys, "--target", "cluster.yaml")
    assert code == 1
    assert (states(found)["server"], states(found)["queue"]) == ("ok", "wrong")
    assert "vLLM" not in states(found)


def on_node(
    monkeypatch: pytest.MonkeyPatch, here: Path, facts: dict[str, Any] | None, *, status: str
) -> list[dict[str, Any]]:
    """Let a run on the cluster leave ``facts``; returns the operations that were submitted."""
    return cluster(monkeypatch, here, facts, status=status)[1]


def cluster(
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    facts: dict[str, Any] | None = None,
    *,
    status: str = "running",
) -> tuple[FakePolyaxon, list[dict[str, Any]]]:
    """Return the server too."""
    monkeypatch.setattr(access, "check", lambda profile, look: [])
    left = here / "left"
    left.mkdir()
    if facts is not None:
        (left / "doctor.json").write_text(json.dumps(facts))
    port = FakePolyaxon(script={"*": ["running", status]})
    submitted: list[dict[str, Any]] = []
    create = port.create

    def creating(**given: Any) -> RunView:
        submitted.append(given["operation"])
        view = create(**given)
        port.outputs[view.uuid] = left
        return view

    port.create = creating  # type: ignore[method-assign]
    monkeypatch.setattr(context, "port_of", lambda *_: port)
    return port, submitted


def test_a_node_is_looked_at_by_a_run_like_a_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    submitted = on_node(monkeypatch, here, FACTS | {"gpus": [GPU]}, status="succeeded")
    code, found, err = run(capsys, "--target", "cluster.yaml", "--on-node")
    assert code == 0, err
    told = states(found)
    assert (told["node"], told["GPU"], told["CUDA"], told["vLLM"]) == ("ok",) * 4
    (operation,) = submitted
    profile = target.load("cluster.yaml")
    cell = target.build(Home.find(), profile, {"x": None}, model="m", run_limit_s=1)
    component: Any = cell["component"]
    container = operation["component"]["run"]["container"]
    assert container["command"] == ["python", "-P", "-m", "tasks.pod.doctor"]
    assert container["env"] == component["run"]["container"]["env"]
    assert operation["runPatch"] == cell["runPatch"]
    found_labels = operation["runPatch"]["environment"]["labels"]
    assert found_labels == labels.of_target("cluster")


def test_a_node_without_its_gpu_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    on_node(monkeypatch, here, FACTS | {"no_gpu": "NVML says no"}, status="succeeded")
    code, found, _ = run(capsys, "--target", "cluster.yaml", "--on-node")
    assert code == 1
    assert states(found)["driver"] == "wrong"


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        (None, "failed", "failed"),
        (None, "succeeded", "left no doctor.json"),
        ({"format": 99}, "succeeded", "left no doctor.json of this version"),
    ],
)
def test_a_node_that_could_not_be_looked_at_is_wrong(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    facts: dict[str, Any] | None,
    status: str,
    said: str,
) -> None:
    on_node(monkeypatch, here, facts, status=status)
    code, found, _ = run(capsys, "--target", "cluster.yaml", "--on-node")
    assert code == 1
    (node,) = [one for one in found["checks"] if one["name"] == "node"]
    assert said in node["text"]


def test_on_node_is_for_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--on-node"]) == 2
    assert "runs cells on this machine" in capsys.readouterr().err


def test_a_sweep_says_which_engine_and_image_a_node_should_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    older = {"engine": {"vllm": "0.11.2", "torch": "1"}, "bench": FACTS["packages"]["bench"]}
    other = "sha256:" + "1" * 64
    (here / "qwen3-4b-polyaxon.pins.yaml").write_text(
        f"format: 1\nsweep: qwen3-4b-polyaxon\npins: {{image_digest: '{other}'}}\nsources: []\n"
    )
    submitted = on_node(
        monkeypatch, here, FACTS | {"gpus": [GPU], "packages": older}, status="succeeded"
    )
    asked = ("--target", "cluster.yaml", "--on-node", "--sweep", "qwen3-4b-polyaxon")
    code, found, err = run(capsys, *asked)
    assert code == 0, err
    assert found["sweep"] == "qwen3-4b-polyaxon"
    assert (states(found)["vLLM"], states(found)["node"]) == ("ok", "ok")
    (operation,) = submitted
    assert operation["runPatch"]["container"]["image"] == f"registry.invalid/engine@{other}"


def test_without_the_sweep_another_engine_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    older = {"engine": {"vllm": "0.11.2", "torch": "1"}, "bench": FACTS["packages"]["bench"]}
    on_node(monkeypatch, here, FACTS | {"gpus": [GPU], "packages": older}, status="succeeded")
    code, found, _ = run(capsys, "--target", "cluster.yaml", "--on-node")
    assert (code, states(found)["vLLM"]) == (1, "wrong")


def test_a_sweep_says_which_engine_this_machine_should_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, found, _ = run(capsys, "--sweep", "qwen3-4b-polyaxon")
    (engine,) = [one for one in found["checks"] if one["name"] == "vLLM"]
    assert engine["text"].endswith("wanted 0.11.2")
    assert cli.run(["doctor", "--sweep", "nowhere"]) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CannotFindOut("gone")])
def test_a_run_that_is_left_is_stopped(
    error: BaseException,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
) -> None:
    port, _ = cluster(monkeypatch, here)

    def failing(run_uuid: str) -> RunView:
        raise error

    port.view = failing  # type: ignore[method-assign]
    assert cli.run(["doctor", "--target", "cluster.yaml", "--on-node"]) != 0
    assert port.stopped == list(port.runs) != []
    capsys.readouterr()


def test_a_run_whose_creation_is_cut_short_is_stopped(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    port, _ = cluster(monkeypatch, here)
    port.die_after_create = True
    assert cli.run(["doctor", "--target", "cluster.yaml", "--on-node"]) == 130
    assert port.stopped == list(port.runs) != []


def test_a_run_that_goes_on_at_its_deadline_is_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    port, _ = cluster(monkeypatch, here)
    monkeypatch.setattr(command, "NODE_S", -1e9)
    code, found, _ = run(capsys, "--target", "cluster.yaml", "--on-node")
    (node,) = [one for one in found["checks"] if one["name"] == "node"]
    assert (code, port.stopped) == (1, list(port.runs))
    assert "at its deadline" in node["text"]


def test_a_run_that_cannot_be_stopped_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    port, _ = cluster(monkeypatch, here)
    port.die_after_create = True

    def down(meta: dict[str, str]) -> list[RunView]:
        raise ServiceDown("no answer")

    port.find = down  # type: ignore[method-assign]
    assert cli.run(["doctor", "--target", "cluster.yaml", "--on-node"]) == 130
    assert "could not be stopped: no answer" in capsys.readouterr().err


def test_a_run_that_ended_is_not_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    port, _ = cluster(monkeypatch, here, status="failed")
    run(capsys, "--target", "cluster.yaml", "--on-node")
    assert port.stopped == []


def test_no_secret_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-secret-1234")
    told = "500: header planted-secret-1234, hf_abcdefghijklmnopqrst"
    finding = Finding("server", told, CannotFindOut)
    monkeypatch.setattr(access, "check", lambda profile, look: [finding])
    for options in ((), ("--json",)):
        assert cli.run(["doctor", "--target", "cluster.yaml", *options]) == 1
        out, err = capsys.readouterr()
        assert "[redacted]" in out
        assert not [text for text in ("planted-secret", "hf_abc") if text in out + err]
