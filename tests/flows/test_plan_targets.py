"""``memsweep plan`` for every target: it measures nothing, so it refuses none."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flows import cli
from flows.commands import planning
from tasks.launch import models, target
from tasks.plan import gpus, hub
from warehouse.errors import CannotFindOut

CLUSTER = """
description: a cluster
device: cuda
gpu: L4
operation: gpu.yaml
host: http://polyaxon.invalid
image: registry.invalid/engine
image_digest: unresolved
models: /nowhere/models
"""
SWEEP = """
name: sized
model: tiny-qwen35
repeats: 1
server: {max_num_seqs: 64, max_model_len: 32768}
experiments:
  - name: profiled
    vary: {gpu_memory_utilization: [0.9, 0.97]}
    points: [{parallel: 1, number: 2}, {parallel: 16, number: 32}]
  - name: tight
    server: {max_model_len: 640}
    points: [{parallel: 16, number: 32}]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sweep and a cluster's profile; no GPU, no state."""
    monkeypatch.setenv("MEMSWEEP_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "_gpu_here", lambda: None)
    (tmp_path / "sized.yaml").write_text(SWEEP)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert cli.run(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json")[0])
    return value


def test_a_cluster_is_planned_with_the_error_bar_of_its_gpu(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    out, err = plan(capsys, "sized.yaml", "--target", "cluster.yaml")
    assert "17.4 ± 1.4 GiB" in out
    assert "skipped: load[0] needs up to 648 tokens" in out
    assert "estimated pool: non-KV: default: no boot of this model and GPU yet" in err
    assert "GPU-hours" in err
    assert "unresolved pin - image_digest of tiny-qwen35 [" in err
    assert not (here / "state").exists()


def test_measuring_on_a_cluster_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert cli.run(["run", "sized.yaml", "--target", "cluster.yaml"]) == 2
    assert "unresolved" in capsys.readouterr().err
    assert not (here / "state").exists()


# Polyaxon's own models, at their import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cluster_that_does_not_answer_is_told_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "revision", lambda home, name: "sha256:" + "0" * 64)
    there = CLUSTER.replace("unresolved", "sha256:" + "0" * 64)
    there = there.replace("http://polyaxon.invalid", "http://127.0.0.1:9") + "call_s: 0.5\n"
    (here / "there.yaml").write_text(there)
    with mock.patch.dict(os.environ):  # the command points its process at that server
        assert cli.run(["run", "sized.yaml", "--target", "there.yaml"]) == 3
    said = capsys.readouterr().err
    assert "server: Polyaxon at http://127.0.0.1:9: could not ask for its version" in said
    assert "Traceback" not in said
    assert not (here / "state").exists()


def test_measuring_on_a_gpu_that_is_not_there_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.launch import environments

    monkeypatch.setattr(environments, "has_nvidia_driver", lambda: False)
    assert cli.run(["run", "sized.yaml", "--target", "local-gpu"]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err
    assert not (here / "state").exists()


def test_a_gpu_host_pins_the_engine_by_its_own_lock(capsys: pytest.CaptureFixture[str]) -> None:
    from tasks.launch import environments

    found = document(capsys, "sized.yaml", "--target", "local-gpu")
    pins = found["cells"][0]["cell"]["pins"]
    assert pins["device"] == "cuda"
    assert pins["engine_lock_sha256"] == environments.lock_sha256("engine", "cuda")
    assert pins["engine_lock_sha256"] != environments.lock_sha256("engine")
    assert pins["image_digest"] is None
    prediction = found["cells"][0]["prediction"]
    assert "neither the profile nor this machine tells the GPU" in prediction["unknown"]
    assert prediction["pool_estimate"] is None


def test_the_gpu_that_is_here_is_the_one_planned_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_gpu_here", lambda: gpus.find("T4"))
    found = document(capsys, "sized.yaml", "--target", "local-gpu")
    assert found["cells"][0]["prediction"]["gpu"]["name"] == "T4"
    assert found["cells"][0]["prediction"]["pool_estimate"]["bytes"] > 0


def test_mistakes_are_findings_in_json_and_one_line_each_in_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "sized.yaml", "--target", "cluster.yaml")["findings"]
    assert {tuple(finding) for finding in found} == {("code", "cell", "message")}
    assert [(f["code"], f["cell"]) for f in found] == [
        ("short-context", "profiled/gpu_memory_utilization=0.9"),
        ("utilization-above-0.95", "profiled/gpu_memory_utilization=0.97"),
        ("short-context", "profiled/gpu_memory_utilization=0.97"),
        ("one-concurrency", "tight"),
    ]
    err = plan(capsys, "sized.yaml", "--target", "cluster.yaml")[1]
    advice = [line for line in err.splitlines() if line.startswith("advice - ")]
    assert len(advice) == 3
    assert advice[0].endswith("[profiled/gpu_memory_utilization=0.9 and 1 more]")


def test_the_demo_has_no_finding_and_says_once_a_model_that_it_is_generated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "demo")
    assert found["findings"] == []
    assert len(found["unresolved"]) == 5
    err = plan(capsys, "demo")[1]
    assert "unresolved" not in err
    assert "advice" not in err
    assert err.count("generated on the first run") == 2


@pytest.mark.parametrize(
    ("given", "shown", "said"),
    [
        (["demo"], "1,073,741,824 B", "#4 measured, refused expected: KV cache"),
        (["sized.yaml", "--target", "here.yaml"], "148,816–175,856", "#3 skipped: load[0]"),
    ],
)
def test_a_terminal_of_80_columns_folds_no_number(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    given: list[str],
    shown: str,
    said: str,
) -> None:
    model_of_8b(here)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    out, err = plan(capsys, *given)
    out = re.sub(r"\x1b\[\d*m", "", out)
    assert max(map(len, out.splitlines())) <= 80
    assert shown in out
    assert said in err


def test_the_config_of_a_pinned_hub_model_is_fetched_for_a_plan(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(__file__).parents[1] / "data" / "model-configs" / "Qwen__Qwen3-8B.json"
    pinned = SWEEP.replace("model: tiny-qwen35", "model: Qwen/Qwen3-8B")
    text = pinned.replace("repeats: 1", f"repeats: 1\npins: {{model_revision: {'a' * 40}}}")
    (here / "sized.yaml").write_text(text)
    asked: list[str] = []

    def config(reference: str, cache: Path) -> Any:
        asked.append(reference)
        return json.loads(data.read_text())

    monkeypatch.setattr(hub, "config", config)
    found = document(capsys, "sized.yaml", "--target", "cluster.yaml")
    assert asked == [f"Qwen/Qwen3-8B@{'a' * 40}"]
    assert found["cells"][0]["prediction"]["values"]["bytes_per_block"] > 0

    def away(reference: str, cache: Path) -> Any:
        raise CannotFindOut(f"{reference}: cannot be fetched")

    monkeypatch.setattr(hub, "config", away)
    out, err = plan(capsys, "sized.yaml", "--target", "cluster.yaml")
    assert err.count("no prediction for Qwen/Qwen3-8B") == 1
    assert "the model's config.json is not here" in out


def model_of_8b(here: Path) -> None:
    """Put config and index of a model into a folder, and a profile and a sweep that name it."""
    data = Path(__file__).parents[1] / "data" / "model-configs" / "Qwen__Qwen3-8B.json"
    folder = here / "models" / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(data.read_text())
    index = {"metadata": {"total_size": 16_381_470_720}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (here / "sized.yaml").write_text(SWEEP.replace("tiny-qwen35", "Qwen/Qwen3-8B"))
    (here / "here.yaml").write_text(
        f"description: x\ndevice: cuda\ngpu: L40S\noperation: local.yaml\nmodels: {here}/models\n"
    )


def test_a_folder_of_the_model_gives_config_and_weights(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    model_of_8b(here)
    found = document(capsys, "sized.yaml", "--target", "here.yaml")
    pool = found["cells"][0]["prediction"]["pool_estimate"]
    assert "checkpoint's index; L40S" in pool["source"]
    assert pool["high_bytes"] - pool["low_bytes"] > 2 * 0.03 * 16_381_470_720


def test_ranges_of_one_value_are_shown_as_one() -> None:
    assert planning._span(["1", "1"]) == "1"
    assert planning._span(["1", "2"]) == "1–2"
