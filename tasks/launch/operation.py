"""From a cell to the operation that is submitted: one component, one input that says what to do.

Polyaxon renders every string of an operation as a template. A cell is therefore written so that
nothing in it can be taken for one, and read back byte for byte equal JSON by the run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import polyaxonfiles
from tasks.canonical import canonical_json, content_key
from tasks.plan.cell import MAX_CELL_BYTES
from warehouse.errors import BadInput

FOLDER = Path(polyaxonfiles.__file__).parent
#: What a run leaves unsaid is never repeated by Polyaxon: an attempt is a run of its own.
MAX_RETRIES = 0
#: Inside JSON's strings only: outside them "{" is followed by a quote or "}".
_TEMPLATE_START = re.compile(r"\{(?=[{%#])")


@dataclass(frozen=True, slots=True)
class Placement:
    """What a cluster's profile adds to an operation; on this machine there is none.

    Nothing in it says what is measured: that is the cell's alone.
    """

    image: str | None = None  # by digest
    environment: Mapping[str, object] = field(default_factory=dict)  # node, priority, account
    labels: Mapping[str, str] = field(default_factory=dict)  # to find and to remove it by
    resources: Mapping[str, object] | None = None  # CPU, memory and GPUs
    volumes: Sequence[Mapping[str, object]] = ()  # models and shared memory
    mounts: Sequence[Mapping[str, object]] = ()  # where the container sees them
    init: Sequence[Mapping[str, object]] = ()  # downloads the pinned model before the run
    queue: str | None = None
    namespace: str | None = None
    ttl_s: int | None = None  # a finished pod is kept that long, for a late collection


def cell_text(cell: Mapping[str, object]) -> str:
    """Return the cell's JSON as the run gets it: canonical, and free of template syntax.

    An opening brace that would begin a template is written as its JSON escape: the text parses to
    the same object. Polyaxon also turns text that reads like a Python literal into a value; JSON
    with a ``null``, ``true`` or ``false`` in it, as every cell has, is none.

    Raises:
        BadInput: the text is too long for an environment variable, or reads like a Python literal.
    """
    text = _TEMPLATE_START.sub(r"\\u007b", canonical_json(cell))
    if len(text) > MAX_CELL_BYTES:
        raise BadInput(
            f"cell: {len(text)} bytes as JSON, wanted at most {MAX_CELL_BYTES}; "
            "give it fewer load points or shorter prompts"
        )
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    raise BadInput("cell: has no null, true or false, so Polyaxon would not hand it on as text")


def build(
    cell: Mapping[str, object],
    *,
    operation_file: str,
    parameters: Mapping[str, str],
    run_limit_s: float,
    placement: Placement | None = None,
) -> dict[str, object]:
    """Return the operation to submit, its component inline.

    ``parameters`` are the places of the target (they win over those the file names);
    ``run_limit_s`` is the run's deadline, seconds; ``placement`` is what a cluster's profile adds,
    and nothing else may differ between targets.
    """
    operation = read(operation_file)
    component = read(str(operation.pop("pathRef")))
    places = {name: {"value": value} for name, value in parameters.items()}
    operation["params"] = {
        **operation.get("params", {}),
        **places,
        "cell": {"value": cell_text(cell)},
    }
    operation["termination"] = {
        **operation.get("termination", {}),
        "maxRetries": MAX_RETRIES,
        "timeout": int(run_limit_s),
    }
    if placement is not None:
        _place(operation, placement)
    operation["component"] = component
    return operation


def build_service(
    component: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    run_limit_s: float,
    placement: Placement,
) -> dict[str, object]:
    """Return the operation of a model server, its component inline, as a profile places it."""
    operation: dict[str, Any] = {
        "version": 1.1,
        "kind": "operation",
        "name": component["name"],
        "params": {name: {"value": value} for name, value in inputs.items()},
        "termination": {"maxRetries": MAX_RETRIES, "timeout": int(run_limit_s)},
    }
    _place(operation, placement)
    operation["component"] = dict(component)
    return operation


def _place(operation: dict[str, Any], placement: Placement) -> None:
    """Put what a profile adds into an operation."""
    patch = operation.setdefault("runPatch", {})
    container = patch.setdefault("container", {})
    environment = {**patch.get("environment", {}), **placement.environment}
    labels = {**environment.get("labels", {}), **placement.labels}
    patch["environment"] = {**environment, "labels": labels} if labels else environment
    for section, name, value in (
        (container, "image", placement.image),
        (container, "resources", placement.resources and dict(placement.resources)),
        (container, "volumeMounts", [dict(one) for one in placement.mounts]),
        (patch, "volumes", [dict(one) for one in placement.volumes]),
        (patch, "init", [dict(one) for one in placement.init]),
        (operation, "queue", placement.queue),
        (operation, "namespace", placement.namespace),
        (operation["termination"], "ttl", placement.ttl_s),
    ):
        if value:
            section[name] = value


def template_key(operation: Mapping[str, object]) -> str:
    """Return the sha256 of component and typed inputs: equal for every run of the same thing.

    What Polyaxon compiles from it holds the run's UUID and paths, so its hash never repeats; the
    places of a target (paths of the state folder) and the labels (they name the round) are left out
    for the same reason.
    """
    params = operation.get("params")
    cell = params.get("cell") if isinstance(params, Mapping) else None
    return content_key(
        {
            "component": operation.get("component"),
            "cell": cell,
            "runPatch": _without_labels(operation.get("runPatch")),
        }
    )


def _without_labels(patch: object) -> object:
    if not isinstance(patch, Mapping) or not isinstance(patch.get("environment"), Mapping):
        return patch
    environment = {name: v for name, v in patch["environment"].items() if name != "labels"}
    return {**patch, "environment": environment}


def read(name: str) -> dict[str, Any]:
    """Return one of the shipped polyaxonfiles.

    Raises:
        BadInput: there is no such file.
    """
    path = FOLDER / name
    if path.parent != FOLDER or not path.is_file():
        shipped = ", ".join(sorted(one.name for one in FOLDER.glob("*.yaml")))
        raise BadInput(f"operation {name!r}: not among the shipped ones ({shipped})")
    value: dict[str, Any] = yaml.safe_load(path.read_text())
    return value
