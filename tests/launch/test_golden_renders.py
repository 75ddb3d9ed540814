"""What Polyaxon's agent would create in Kubernetes, as goldens: cell, service and image.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that nobody passes on a
golden nobody has looked at.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.home import Home
from tasks.launch import labels, objects, operation, render, target
from tasks.launch.target import Profile

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
#: Recognisably fake; a commit of digits only would be taken for a number.
DIGEST, COMMIT = "sha256:" + "0" * 64, "a" * 40
CELL = {"format": 1, "label": "x/y={{ globals.uuid }}", "expect": None}
SERVICE = {
    "image": f"registry.example.com/memsweep/engine@{DIGEST}",
    "model": "Qwen/Qwen3-4B",
    "model_revision": COMMIT,
    "max_model_len": "4096",
    "max_num_seqs": "8",
}
IMAGE = {
    "builder": f"moby/buildkit@{DIGEST}",
    "destination": "registry.example.com/memsweep/engine:v0.27.0",
    "repository": "https://git.example.com/team/memsweep.git",
    "revision": COMMIT,
    "base_digest": DIGEST,
    "engine_version": "0.27.0",
    "source_date_epoch": "1700000000",
}


def profile() -> Profile:
    """The shipped example with everything in it that it leaves as a comment."""
    shipped = target.load("cluster-a10").model_dump()
    return Profile.model_validate(
        shipped
        | {
            "image_digest": DIGEST,
            "queue": "my-agent/a10",
            "secrets": {"HF_TOKEN": {"name": "hugging-face", "key": "token"}},
        }
    )


def cell(home: Home) -> dict[str, Any]:
    built = target.build(
        home,
        profile(),
        CELL,
        model="Qwen/Qwen3.5-4B",
        revision=COMMIT,
        run_limit_s=7200,
        run_labels=labels.of_run(
            target="cluster-a10",
            cell_key="0" * 64,
            setting_key="1" * 64,
            round_id="demo-1a2b3c4d-1",
        ),
    )
    return render.resource(
        built, namespace="polyaxon", owner="my-team", project="memsweep", name="cell"
    )


def of_file(name: str, params: dict[str, str]) -> dict[str, Any]:
    made = render.resource(
        operation.read(f"{name}.yaml"),
        namespace="polyaxon",
        owner="my-team",
        project="memsweep",
        name=name,
        params=params,
    )
    # Polyaxon ends the name of a git container with random digits.
    text = re.sub(r"(polyaxon-init-git-memsweep)-[0-9a-f]+", r"\1-RANDOM", json.dumps(made))
    return dict(json.loads(text))


@pytest.mark.parametrize("name", ["cell", "service", "image"])
def test_the_kubernetes_resource_is_the_golden_one(name: str, home: Home) -> None:
    made = cell(home) if name == "cell" else of_file(name, SERVICE if name == "service" else IMAGE)
    golden = GOLDEN / f"{name}.kubernetes.yaml"
    if os.environ.get("MEMSWEEP_REGENERATE"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(yaml.safe_dump(made, sort_keys=False, width=100))
        raise AssertionError(f"{golden} was rewritten; look at it and run again without")
    assert made == yaml.safe_load(golden.read_text())


def golden(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((GOLDEN / f"{name}.kubernetes.yaml").read_text())
    return value


@pytest.mark.parametrize("name", ["cell", "service", "image"])
def test_what_every_object_has(name: str) -> None:
    resource = golden(name)
    pod = objects.pod_spec(resource)
    found = resource["metadata"]["labels"]
    assert labels.CREATED_BY.items() <= found.items()
    assert not labels.problems(found)
    assert resource["termination"]["ttlSecondsAfterFinished"] >= 86_400
    assert resource["termination"]["activeDeadlineSeconds"] > 0
    assert resource["collectLogs"] is True
    assert pod["restartPolicy"] == "Never"
    ours = [c for c in [*pod["containers"], *pod["initContainers"]] if "memsweep" in c["image"]]
    for container in [pod["containers"][0], *ours]:
        assert "@sha256:" in container["image"]
        assert container["command"][0] not in ("sh", "bash", "/bin/sh", "/bin/bash")


def test_the_cells_pod_is_the_profiles() -> None:
    resource = golden("cell")
    pod = objects.pod_spec(resource)
    main = pod["containers"][0]
    assert main["command"] == ["python", "-P", "-m", "tasks.pod"]
    assert main["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "1"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A10"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("memsweep", "memsweep-batch")
    mounts = {one["mountPath"]: one for one in main["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "8Gi",
    }
    assert resource["termination"]["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert resource["metadata"]["labels"]["memsweep/round"] == "demo-1a2b3c4d-1"


def test_a_secret_is_a_reference_and_only_for_the_download() -> None:
    pod = objects.pod_spec(golden("cell"))
    holders = [
        one["name"]
        for one in [*pod["containers"], *pod["initContainers"]]
        if any(v["name"] == "HF_TOKEN" for v in one["env"])
    ]
    assert holders == ["memsweep-model"]
    (download,) = (one for one in pod["initContainers"] if one["name"] == "memsweep-model")
    (token,) = (v for v in download["env"] if v["name"] == "HF_TOKEN")
    assert token == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
    }


def test_the_download_and_the_run_mean_the_same_folder() -> None:
    pod = objects.pod_spec(golden("cell"))
    paths = {
        v["value"]
        for one in [*pod["containers"], *pod["initContainers"]]
        for v in one["env"]
        if v["name"] == "MEMSWEEP_MODEL_PATH"
    }
    assert paths == {f"/models/Qwen/Qwen3.5-4B/{COMMIT}"}
