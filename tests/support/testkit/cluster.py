"""What is submitted to a cluster, with recognisably fake pins, and the goldens kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.home import Home
from tasks.launch import labels, operation, target
from tasks.launch.target import Profile

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
NAMES = ("cell", "service", "image")
#: A commit of digits only would be taken for a number.
DIGEST, COMMIT = "sha256:" + "0" * 64, "a" * 40
_CELL = {"format": 1, "label": "x/y={{ globals.uuid }}", "expect": None}
_PARAMS: dict[str, dict[str, Any]] = {
    "service": {
        "model": "Qwen/Qwen3-4B",
        "model_revision": COMMIT,
        "max_model_len": "4096",
        "max_num_seqs": "8",
    },
    "image": {
        "builder": f"moby/buildkit@{DIGEST}",
        "destination": "registry.example.com/memsweep/engine:v0.27.0",
        "repository": "https://git.example.com/team/memsweep.git",
        "revision": COMMIT,
        "base_digest": DIGEST,
        "engine_version": "0.27.0",
        "source_date_epoch": 1700000000,
    },
}


def profile(**changes: object) -> Profile:
    """Return the shipped example with everything in it that it leaves as a comment."""
    whole = {
        "image_digest": DIGEST,
        "queue": "my-agent/a10",
        "secrets": {"HF_TOKEN": {"name": "hugging-face", "key": "token"}},
    }
    return Profile.model_validate(target.load("cluster-a10").model_dump() | whole | changes)


def submitted(name: str, home: Home, **changes: object) -> dict[str, Any]:
    """Return one of :data:`NAMES` as an operation; ``changes`` are the profile's."""
    if name == "service":
        component = operation.read("service.yaml")
        return dict(target.service(home, profile(**changes), component, _PARAMS[name]))
    if name == "image":
        params = {key: {"value": value} for key, value in _PARAMS[name].items()}
        component = operation.read(f"{name}.yaml")
        return {"version": 1.1, "kind": "operation", "params": params, "component": component}
    return target.build(
        home,
        profile(**changes),
        _CELL,
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


def golden(name: str) -> dict[str, Any]:
    """Return the Kubernetes resource that is kept of one of :data:`NAMES`."""
    value: dict[str, Any] = yaml.safe_load((GOLDEN / f"{name}.kubernetes.yaml").read_text())
    return value
