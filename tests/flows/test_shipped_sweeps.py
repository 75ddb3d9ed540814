"""The shipped sweeps and ``compare --with published``: no network, no service, no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows import cli
from flows.shipped import shipped
from tasks.launch import environments, services, target
from tasks.plan import hub
from warehouse.errors import CannotFindOut

A10 = """
description: a cluster
device: cuda
gpu: A10
operation: gpu.yaml
host: http://polyaxon.invalid
image: registry.invalid/engine
image_digest: unresolved
models: /nowhere/models
"""
OF_DOCUMENTS = sorted(set(shipped()) - {"demo"})
#: Cells and load points of each: a slip in a grid would show here.
SIZES = {
    "context-limit": (3, 3),
    "kv-dtype": (2, 2),
    "memory-utilization": (3, 3),
    "misconfiguration": (2, 2),
    "nightly": (14, 25),
    "prompt-length": (1, 12),
    "qwen3-4b-polyaxon": (5, 5),
    "scheduler-limits": (5, 5),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile of an A10; nothing may be fetched, installed or started."""

    def fetched(*arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"fetched, installed or started: {arguments}")

    monkeypatch.setenv("MEMSWEEP_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(httpx, "get", fetched)
    monkeypatch.setattr(environments, "ensure", fetched)
    monkeypatch.setattr(services, "up", fetched)
    monkeypatch.setattr(target, "_gpu_here", lambda: None)
    (tmp_path / "a10.yaml").write_text(A10)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_every_sweep_is_planned_without_a_network_and_says_what_is_unresolved(
    name: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    code, out, err = run(capsys, "plan", name, "--target", "a10.yaml", "--json")
    assert code == 0, err
    plan = json.loads(out)
    cells = plan["cells"]
    assert (len(cells), sum(len(c["cell"]["setting"]["load"]) for c in cells)) == SIZES[name]
    wanted = {"image_digest"} if "qwen3" in name else {"image_digest", "model_revision"}
    assert {pin.rpartition(": ")[2] for pin in plan["unresolved"]} == wanted
    for cell in cells:
        prediction = cell["prediction"]
        assert prediction["model_config"], cell["label"]
        if cell["expect"] is None:
            assert prediction["pool_estimate"]["bytes"] > 0, cell["label"]
            assert cell["infeasible"] is None, cell["label"]
    assert not (here / "state").exists()


def test_pinned_and_without_a_network_the_documents_fields_stand_in(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a commit found by `memsweep pin` costs no prediction, and that it is said."""
    pinned = shipped()["memory-utilization"].read_text().replace("unresolved #", f"{'a' * 40} #")
    (here / "pinned.yaml").write_text(pinned)

    def away(reference: str, cache: Path) -> Any:
        raise CannotFindOut(f"{reference}: cannot be fetched")

    monkeypatch.setattr(hub, "config", away)
    code, out, err = run(capsys, "plan", "pinned.yaml", "--target", "a10.yaml", "--json")
    assert code == 0
    assert all(cell["prediction"]["pool_estimate"] for cell in json.loads(out)["cells"])
    assert err.count("prediction from its documents' figures for Qwen/Qwen3.5-4B") == 1


@pytest.mark.parametrize("where", ["a10.yaml", "local"])
def test_what_is_unresolved_is_not_run(
    where: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Test that it is said before an environment is made or a service started."""
    code, _, err = run(capsys, "run", "memory-utilization", "--target", where)
    assert code == 2
    assert "unresolved" in err
    assert len(err.strip().splitlines()) == 1
    assert not (here / "state").exists()


def test_published_beside_predicted_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Test that every figure that arithmetic knows agrees, and that nothing was measured."""
    code, out, err = run(capsys, "compare", "memory-utilization", "--with", "published", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["selection"] is None
    figures = [figure for cell in found["cells"] for figure in cell["figures"]]
    assert {figure["verdict"] for figure in figures} == {"not measured"}
    assert all(figure["predicted_agrees"] in (True, None) for figure in figures)
    (tokens,) = [f for f in figures if f["metric"] == "kv_cache_size_tokens"]
    assert (tokens["printed"], tokens["predicted"]) == ("273,563 tokens", 273_563)
    code, out, err = run(capsys, "compare", "nightly", "--with", "published")
    assert code == 0
    assert "about 19.35 GiB" in out
    assert "0.5818" in out
    assert "nothing is measured yet" in err
    assert "is not what is predicted" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["memory-utilization", "--with", "notes"], "--with: wanted published"),
        (["memory-utilization", "demo", "--with", "published"], "with one sweep or round"),
        (["memory-utilization", "--with", "published", "--unlike"], "without --fail-on"),
        (["demo", "--with", "published"], "nothing is measured yet, wanted one of context-limit"),
        (["--with", "published"], "got no sweep"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "compare", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1
