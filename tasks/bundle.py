"""The bundle: the files one run leaves behind, immutable once sealed. It is the truth.

``manifest.json`` is written last and is the commit marker: a bundle is complete when every listed
file has the listed hash. Sealing builds a folder beside the others under a temporary name, syncs
every file and renames it, so that no reader ever sees part of a bundle.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.canonical import sha256_file
from tasks.files import read_json, sync_folder
from tasks.home import Home
from tasks.pins import BUNDLE_FORMAT
from warehouse.errors import CannotFindOut
from warehouse.registry import Outcome, Phase

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A sealed bundle: its folder and its manifest."""

    folder: Path
    manifest: dict[str, object]

    @property
    def run_uuid(self) -> str:
        """The Polyaxon run's UUID."""
        return str(self.manifest["run_uuid"])

    @property
    def manifest_sha256(self) -> str:
        """The bundle's identity."""
        return sha256_file(self.folder / MANIFEST)

    def json(self, name: str) -> dict[str, object] | None:
        """Return a JSON object among the files, or ``None`` where there is none."""
        return read_json(self.folder / name)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the manifest says a bundle belongs to."""

    run_uuid: str
    cell_key: str
    setting_key: str
    sweep: str
    sweep_sha256: str
    round: str
    repeat: int
    attempt: int


def load(folder: Path) -> Bundle:
    """Read a bundle's manifest; raises :class:`CannotFindOut` where there is none."""
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise CannotFindOut(f"{folder}: no whole {MANIFEST}: not a sealed bundle")
    if manifest.get("format") != BUNDLE_FORMAT:
        raise CannotFindOut(
            f"{folder}: bundle format {manifest.get('format')!r}, this version reads "
            f"{BUNDLE_FORMAT}"
        )
    return Bundle(folder, manifest)


def verify(folder: Path) -> list[str]:
    """Return what is wrong with a sealed bundle, one line a problem; empty when it is whole."""
    try:
        bundle = load(folder)
    except CannotFindOut as error:
        return [str(error)]
    problems = []
    listed = bundle.manifest.get("files")
    if not isinstance(listed, dict):
        return [f"{folder}: manifest lists no files"]
    for name, facts in listed.items():
        path = folder / name
        if not _is_inside(name):
            problems.append(f"{name[:200]}: not a path within the bundle")
        elif not isinstance(facts, dict) or not {"bytes", "sha256"} <= facts.keys():
            problems.append(f"{name}: the manifest states no size and sha256")
        elif not path.is_file() or path.is_symlink():
            problems.append(f"{name}: listed in the manifest, but not there")
        elif path.stat().st_size != facts["bytes"] or sha256_file(path) != facts["sha256"]:
            problems.append(f"{name}: content differs from the manifest")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or path.is_file()) and name != MANIFEST and name not in listed:
            problems.append(f"{name}: there, but not listed in the manifest")
    return problems


def _is_inside(name: str) -> bool:
    """Whether a listed name stays within its bundle: relative, no "..", no NUL."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def sealed(home: Home, run_uuid: str) -> Bundle | None:
    """Return the sealed bundle of a run, or ``None``."""
    folder = home.bundles / run_uuid
    return load(folder) if (folder / MANIFEST).is_file() else None


def all_sealed(home: Home) -> list[Path]:
    """Return the folders of every sealed bundle."""
    manifests = home.bundles.glob(f"*/{MANIFEST}")
    return sorted(path.parent for path in manifests if not path.parent.name.startswith("."))


def staging(home: Home, run_uuid: str) -> Path:
    """Return an empty folder beside the bundles to build one in; an earlier try is dropped."""
    folder = home.bundles / f".tmp-{run_uuid}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def seal(
    home: Home,
    folder: Path,
    identity: Identity,
    *,
    outcome: Outcome,
    phase: Phase,
    facts: dict[str, object],
) -> Bundle:
    """Turn a staging folder into the run's sealed bundle and return it.

    Sample lines are turned into Parquet and kept compressed; then the manifest is written, every
    file synced and the folder renamed. A run that is sealed already keeps its first bundle.
    """
    existing = sealed(home, identity.run_uuid)
    if existing is not None:
        shutil.rmtree(folder)
        return existing
    try:
        _add_tables(folder)
        files = {
            path.relative_to(folder).as_posix(): {
                "sha256": sha256_file(path),
                "bytes": path.stat().st_size,
            }
            for path in _files(folder)
        }
        manifest: dict[str, object] = {
            "format": BUNDLE_FORMAT,
            **{name: getattr(identity, name) for name in Identity.__slots__},
            "outcome": outcome.value,
            "phase": phase.value,
            **facts,
            "files": files,
        }
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        _sync(folder)
        target = home.bundles / identity.run_uuid
        folder.rename(target)
        sync_folder(home.bundles)
    except OSError as error:
        raise CannotFindOut(
            f"{folder}: the bundle cannot be sealed: {error.strerror or error}; "
            "free disk space and run again: the run's outputs are kept"
        ) from error
    return Bundle(target, manifest)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _add_tables(folder: Path) -> None:
    """Write the samples' Parquet files beside the raw lines and compress the lines."""
    from tasks import requests, samples  # pyarrow: only where a bundle is sealed

    samples.write_tables(folder)
    requests.write_table(folder)
    for path in sorted((folder / "raw").glob("*.jsonl")):
        packed = path.with_name(path.name + ".gz")
        # No name and no time in the header: equal lines give equal bytes.
        with (
            path.open("rb") as source,
            packed.open("wb") as sink,
            gzip.GzipFile(filename="", mode="wb", fileobj=sink, mtime=0) as out,
        ):
            shutil.copyfileobj(source, out)
        path.unlink()
