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
from tasks.launch import access, target
from tasks.launch.access import Finding
from tasks.launch.port import RunView
from warehouse.errors import CannotFindOut

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
    assert list(found) == ["format", "target", "on_node", "ok", "checks"]
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
    return submitted


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
