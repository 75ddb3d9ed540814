"""What Polyaxon's agent would create in Kubernetes, as goldens: cell, service and image.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that nobody passes on a
golden nobody has looked at.
"""

from __future__ import annotations

import json
import os
import re

import pytest
import yaml
from testkit.cluster import COMMIT, GOLDEN, NAMES, golden, submitted

from tasks.home import Home
from tasks.launch import labels, objects, render


@pytest.mark.parametrize("name", NAMES)
def test_the_kubernetes_resource_is_the_golden_one(name: str, home: Home) -> None:
    made = render.resource(
        submitted(name, home),
        namespace="polyaxon",
        owner="my-team",
        project="memsweep",
        name=name,
    )
    # Polyaxon ends the name of a git container with random digits.
    text = re.sub(r"(polyaxon-init-git-memsweep)-[0-9a-f]+", r"\1-RANDOM", json.dumps(made))
    made = json.loads(text)
    kept = GOLDEN / f"{name}.kubernetes.yaml"
    if os.environ.get("MEMSWEEP_REGENERATE"):
        kept.write_text(yaml.safe_dump(made, sort_keys=False, width=100))
        raise AssertionError(f"{kept} was rewritten; look at it and run again without")
    assert made == golden(name)


@pytest.mark.parametrize("name", NAMES)
def test_what_every_object_has(name: str) -> None:
    resource = golden(name)
    pod = objects.pod_spec(resource)
    found = resource["metadata"]["labels"]
    assert labels.CREATED_BY.items() <= found.items()
    assert not labels.problems(found)
    assert resource["termination"]["ttlSecondsAfterFinished"] >= 86_400
    assert resource["termination"]["activeDeadlineSeconds"] > 0
    assert resource["collectLogs"] is True
    # A service becomes a Deployment's pod, which Kubernetes takes with Always only.
    assert pod.get("restartPolicy") == (None if name == "service" else "Never")
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


def test_the_service_stands_where_the_profile_puts_a_cell() -> None:
    cell, service = (objects.pod_spec(golden(name)) for name in ("cell", "service"))
    for of_profile in (
        "nodeSelector", "tolerations", "serviceAccountName", "priorityClassName", "volumes",
    ):  # fmt: skip
        assert service[of_profile] == cell[of_profile]
    of_cell, of_service = cell["containers"][0], service["containers"][0]
    for of_profile in ("image", "resources", "volumeMounts"):
        assert of_service[of_profile] == of_cell[of_profile]
    assert of_service["args"][0] == f"/models/Qwen/Qwen3-4B/{COMMIT}"
    assert "--tensor-parallel-size=1" in of_service["args"]
    downloads = [
        next(one for one in pod["initContainers"] if one["name"] == "memsweep-model")
        for pod in (cell, service)
    ]
    tokens = [[v for v in one["env"] if v["name"] == "HF_TOKEN"] for one in downloads]
    assert tokens[0] == tokens[1] != []
    assert golden("service")["metadata"]["labels"]["memsweep/target"] == "cluster-a10"


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
