"""One run measured again: the same cell with the same pins, and whether its numbers come back.

What is measured is a sweep of one cell, derived from the bundle's cell.json, in a round of its own.
What cannot be had any more is said before anything starts: another cell in its place would look
like a result about the first.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks import bundle
from tasks.canonical import content_key
from tasks.files import read_json, write_text
from tasks.home import Home
from tasks.pins import HARNESS
from tasks.plan import gpus
from tasks.plan.cell import UNRESOLVED, Cell, LoadPoint, Pins
from tasks.rounds import AGAIN, DEFAULT_TARGET, rounds_of
from warehouse.errors import BadInput

#: Two machines of one class have as much memory, but for what firmware and kernel keep.
MEMORY_TOLERANCE = 0.03
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Original:
    """The run that is to be measured again."""

    run_uuid: str
    outcome: str
    sweep: str
    round: str
    target: str
    cell: Cell
    environment: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the derived sweep; its rounds are the reproductions of this run."""
        return f"reproduce-{self.run_uuid[:8]}"


def original(home: Home, run_uuid: str) -> Original:
    """Read the run from its sealed bundle.

    Raises:
        BadInput: the bundle is not here or not whole, or its run says nothing about its cell.
    """
    sealed = bundle.sealed(home, run_uuid)
    if sealed is None:
        raise BadInput(
            f"run {run_uuid}: its bundle is not in {home.bundles}; only a sealed bundle says what "
            "exactly was measured"
        )
    problems = bundle.verify(sealed.folder)
    if problems:
        raise BadInput(f"run {run_uuid}: its bundle is not as it was sealed: {problems[0]}")
    outcome = str(sealed.manifest["outcome"])
    if outcome in AGAIN:
        raise BadInput(
            f"run {run_uuid}: ended as {outcome}, so there is nothing to compare with; "
            "memsweep run measures its cell again"
        )
    try:
        cell = Cell.parse(sealed.json("cell.json") or {})
    except ValueError as error:
        what = " ".join(str(error).split())
        raise BadInput(f"run {run_uuid}: cell.json is not read by this version: {what}") from error
    origin = sealed.json("orchestration.json") or {}
    sweep = str(sealed.manifest["sweep"])
    return Original(
        run_uuid=sealed.run_uuid,
        outcome=outcome,
        sweep=sweep,
        round=str(sealed.manifest["round"]),
        target=_given_target(home, sweep, sealed.run_uuid)
        or str(origin.get("target") or DEFAULT_TARGET),
        cell=cell,
        environment=sealed.json("environment.json") or {},
    )


def _given_target(home: Home, sweep: str, run_uuid: str) -> str | None:
    """Return the target as it was given, which may be a file: a bundle holds its name only."""
    for round_ in rounds_of(home, sweep):
        if any(state.run_uuid == run_uuid for state in round_.states()):
            return round_.target
    return None


def write_sweep(home: Home, first: Original, *, repeats: int) -> Path:
    """Write the derived sweep and its prompt files into the state folder; return the sweep's path.

    Equal content gives equal files, so that an interrupted reproduction goes on.
    """
    document = derived(first, repeats=repeats)
    folder = home.cache / "reproduce" / content_key(document)[:16]
    for digest, content in first.cell.prompts.items():
        write_text(folder / _prompt_file(digest), content)
    path = folder / f"{first.name}.yaml"
    write_text(path, yaml.safe_dump(document, sort_keys=False))
    return path


def is_commit(revision: str) -> bool:
    """Whether a model's revision is a commit of a hub, and not of files made here."""
    return _COMMIT.fullmatch(revision) is not None


def derived(first: Original, *, repeats: int) -> dict[str, Any]:
    """Return a sweep of which the only cell has the run's settings and load, nothing left out.

    Pins that a sweep cannot state (locks, a generated model's revision) are the target's:
    :func:`cannot_be_had` compares them.
    """
    cell, pins = first.cell, first.cell.pins
    server = cell.setting.server.model_dump(mode="json")
    name, vary = _parts_of(cell.label, server)
    in_image = pins.image_digest is not None
    stated = {
        "engine_version": pins.engine_version if in_image else None,
        "image_digest": pins.image_digest,
        "model_revision": pins.model_revision if is_commit(pins.model_revision) else None,
    }
    return {
        "name": first.name,
        "description": f"Run {first.run_uuid} of sweep {first.sweep}, {first.round}, once more.",
        "repeats": repeats,
        "model": cell.setting.model.name,
        "pins": {pin: value for pin, value in stated.items() if value is not None},
        "sampling": cell.sampling.model_dump(mode="json"),
        "experiments": [
            {
                "name": name,
                "server": {key: value for key, value in server.items() if key not in vary},
                **({"vary": {key: [value] for key, value in vary.items()}} if vary else {}),
                "points": [_point(point) for point in cell.setting.load],
                **({"expect": cell.expect.value} if cell.expect else {}),
            }
        ],
    }


def _parts_of(label: str, server: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return experiment and varied settings of a label, so that the derived cell has it too."""
    name, *parts = label.split("/")
    keys = [part.partition("=")[0] for part in parts]
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name) or not set(keys) <= server.keys():
        return "cell", {}
    return name, {key: server[key] for key in keys}


def _prompt_file(digest: str) -> str:
    return f"{digest}.txt"


def _point(point: LoadPoint) -> dict[str, Any]:
    values = point.model_dump(mode="json")
    if point.prompts is None:
        return values
    stated = {"prompts", "prompt_tokens", "prefix_tokens", "dataset"}
    rest = {key: value for key, value in values.items() if key not in stated}
    return {**rest, "prompts": _prompt_file(point.prompts.sha256)}


def is_unfinished(home: Home, first: Original, target: str, *, repeats: int) -> bool:
    """Whether the newest reproduction of the run on this target was begun and not ended."""
    rounds = [round_ for round_ in rounds_of(home, first.name) if round_.target == target]
    if not rounds:
        return False
    key = first.cell.cell_key
    return any(rounds[-1].finished(key, repeat) is None for repeat in range(1, repeats + 1))


# What cannot be had


def cannot_be_had(
    first: Original, planned: Cell, *, target: str, generated: bool = False
) -> list[str]:
    """Return what of the run's pins the target does not offer; one line each.

    A revision of a ``generated`` model that is still unresolved is no problem yet: the model is
    made from a fixed seed, and its revision is compared once it is there.
    """
    lines = []
    if first.cell.harness != HARNESS:
        lines.append(
            f"harness {first.cell.harness}: this version measures as harness {HARNESS}; use the "
            "version of memsweep that measured the run (memsweep audit names it)"
        )
    for name, wanted in first.cell.pins:
        got = getattr(planned.pins, name)
        if got == wanted or (generated and name == "model_revision" and got == UNRESOLVED):
            continue
        lines.append(f"{name}: the run had {wanted or 'none'}, target {target} has {got or 'none'}")
    if not lines and planned.setting_key != first.cell.setting_key:
        lines.append("settings: this version reads the run's settings in another way")
    return lines


def other_hardware(
    environment: Mapping[str, Any], *, pins: Pins, here: Mapping[str, Any], gpu: gpus.Gpu | None
) -> list[str]:
    """Return why the target's hardware is of another class than the run's; one line each.

    ``here`` describes this machine as ``environment.json`` does (empty where the run is executed
    elsewhere), ``gpu`` is the target's GPU. Where neither is known nothing is said: what the new
    run finds is compared in the end.
    """
    if not environment:
        return []
    if pins.device == "cpu":
        return _other_cpu(environment, here)
    devices = [one for one in environment.get("gpus") or [] if one.get("total_bytes")]
    if gpu is None:
        return []
    return [
        f"GPU: the run had {one['name']} with {one['total_bytes']:,} bytes, the target {gpu.name}"
        for one in devices
        if not gpu.is_device(str(one["name"]), int(one["total_bytes"]))
    ]


def _other_cpu(environment: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    lines = []
    cores, now = environment.get("cpu_count"), here.get("cpu_count")
    if cores is not None and now is not None and cores != now:
        lines.append(f"CPU: the run had {cores} cores, this machine has {now}")
    memory, present = environment.get("memory_total_bytes"), here.get("memory_total_bytes")
    if memory and present and abs(present - memory) > MEMORY_TOLERANCE * memory:
        lines.append(f"memory: the run had {memory:,} bytes, this machine has {present:,}")
    machine, kind = str(environment.get("platform") or ""), here.get("machine")
    if machine and kind and kind not in machine:
        lines.append(f"CPU: the run had {machine}, this machine is {kind}")
    return lines


def this_machine() -> dict[str, object]:
    """Return what the class of a machine without a GPU is told by."""
    return {
        "cpu_count": os.cpu_count(),
        "memory_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "machine": platform.machine(),
    }


def newest_runs(home: Home, first: Original, target: str) -> list[str]:
    """Return the UUIDs of the newest reproduction's runs that found something out."""
    rounds = [round_ for round_ in rounds_of(home, first.name) if round_.target == target]
    states = rounds[-1].states() if rounds else []
    return [
        state.run_uuid
        for state in states
        if state.run_uuid and state.manifest_sha256 and state.outcome not in AGAIN
    ]


def sealed_environment(home: Home, run_uuid: str) -> Mapping[str, Any]:
    """Return ``environment.json`` of a sealed run; empty where there is none."""
    return read_json(home.bundles / run_uuid / "environment.json") or {}


def same_class(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool | None:
    """Whether two runs were on one class of hardware; ``None`` where one of them does not say."""
    if not a or not b:
        return None
    names = [sorted(str(one["name"]) for one in side.get("gpus") or []) for side in (a, b)]
    if names[0] != names[1]:
        return False
    sizes: Sequence[Any] = (
        [a.get("memory_total_bytes"), b.get("memory_total_bytes")]
        if not names[0]
        else [min(one.get("total_bytes") or 0 for one in side["gpus"]) for side in (a, b)]
    )
    if not all(sizes):
        return None
    cores_differ = not names[0] and a.get("cpu_count") != b.get("cpu_count")
    return not cores_differ and abs(sizes[0] - sizes[1]) <= MEMORY_TOLERANCE * sizes[0]
