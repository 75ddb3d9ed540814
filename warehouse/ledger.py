"""The ledger of manifests: an append-only chain beside the bundles.

A bundle's manifest proves its files, but nothing in a bundle proves its manifest: whoever changes a
file can write a new manifest. Each line here holds the manifest's sha256 and the hash of the line
before it, so a changed manifest, a changed line and a missing line all show. A bundle that was
removed by policy keeps its line and gets a second one that says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from warehouse.errors import CheckFailed

NAME = "ledger.jsonl"
_START = "0" * 64


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the ledger says: manifest sha256 by run UUID, and what is wrong with the chain."""

    manifests: dict[str, str]
    problems: list[str]
    head: str
    length: int
    pruned: frozenset[str] = frozenset()  # runs whose bundle was removed by policy


def read(bundles: Path) -> Ledger:
    """Read the ledger beside the bundles and check its chain."""
    path = bundles / NAME
    try:
        # What is not UTF-8 is not an entry: the line is then named, not the byte.
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return Ledger({}, [], _START, 0)
    return _check(path, text)


def _check(path: Path, text: str) -> Ledger:
    manifests: dict[str, str] = {}
    problems: list[str] = []
    pruned: set[str] = set()
    head, number = _START, 0
    for number, line in enumerate(text.splitlines(), start=1):
        entry = _entry(line)
        if entry is None:
            problems.append(f"{path.name} line {number}: not an entry")
            continue
        if entry["previous"] != head or entry["n"] != number:
            problems.append(f"{path.name} line {number}: does not follow the line before it")
        if entry["sha256"] != _digest(entry):
            problems.append(f"{path.name} line {number}: was changed after it was written")
        head = str(entry["sha256"])
        run, manifest = str(entry["run_uuid"]), str(entry["manifest_sha256"])
        if manifests.setdefault(run, manifest) != manifest:
            problems.append(f"{path.name} line {number}: a second manifest for run {run}")
        if entry.get("pruned"):
            pruned.add(run)
    if text and not text.endswith("\n"):
        problems.append(f"{path.name} line {number}: is cut off")
    return Ledger(manifests, problems, head, number, frozenset(pruned))


def append(bundles: Path, manifests: Mapping[str, str]) -> Ledger:
    """Add runs that the ledger does not know yet, in one synced write, and return it as it then is.

    Raises :class:`CheckFailed` when a run is in the ledger with another manifest.
    """
    with _open(bundles) as (file, ledger, lines):
        known = dict(ledger.manifests)
        head, number = ledger.head, ledger.length
        for run, manifest in manifests.items():
            listed = known.get(run)
            if listed is not None and listed != manifest:
                raise differs(run, listed, manifest)
            if listed is None:
                number += 1
                line, head = _line(number, run, manifest, head)
                lines.append(line)
                known[run] = manifest
        _write(file, lines)
    return Ledger(known, ledger.problems, head, number, ledger.pruned)


def prune(bundles: Path, runs: Sequence[str]) -> None:
    """Say of listed runs that their bundles are about to be removed, in one synced write."""
    with _open(bundles) as (file, ledger, lines):
        head, number = ledger.head, ledger.length
        for run in runs:
            if run not in ledger.pruned:
                number += 1
                line, head = _line(number, run, ledger.manifests[run], head, pruned=True)
                lines.append(line)
        _write(file, lines)


@contextlib.contextmanager
def _open(bundles: Path) -> Iterator[tuple[TextIO, Ledger, list[str]]]:
    """Hold the ledger's file for one writer: the file, what it says, and the lines to add."""
    bundles.mkdir(parents=True, exist_ok=True)
    path = bundles / NAME
    # As in `read`: a damaged line is told, and keeps no other from being added.
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        # After a cut-off line the next one must start on its own.
        yield file, _check(path, text), ["\n"] if text and not text.endswith("\n") else []


def _write(file: TextIO, lines: Sequence[str]) -> None:
    if any(line != "\n" for line in lines):
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def differs(run: str, listed: str, got: str) -> CheckFailed:
    """Return the error for a bundle whose manifest is not the one in the ledger."""
    return CheckFailed(
        f"run {run}: manifest.json is {got[:16]}…, the ledger has {listed[:16]}…: the bundle was "
        "changed after it was sealed; restore it from a copy"
    )


def _line(
    number: int, run: str, manifest: str, previous: str, *, pruned: bool = False
) -> tuple[str, str]:
    entry: dict[str, object] = {
        "n": number,
        "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "run_uuid": run,
        "manifest_sha256": manifest,
        "previous": previous,
        **({"pruned": True} if pruned else {}),
    }
    entry["sha256"] = _digest(entry)
    return json.dumps(entry, sort_keys=True) + "\n", str(entry["sha256"])


def _digest(entry: Mapping[str, object]) -> str:
    content = {name: value for name, value in entry.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _entry(line: str) -> dict[str, object] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    wanted = {"n", "at", "run_uuid", "manifest_sha256", "previous", "sha256"}
    return entry if isinstance(entry, dict) and set(entry) - {"pruned"} == wanted else None
