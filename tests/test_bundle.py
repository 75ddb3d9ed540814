"""A bundle is whole or it is not there; nothing in it can be changed unseen."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks import bundle
from tasks.home import Home
from tasks.samples import gpu_rows, server_rows
from warehouse.errors import CannotFindOut
from warehouse.registry import Outcome, Phase

UUID = "00000000-0000-4000-8000-000000000001"
IDENTITY = bundle.Identity(
    run_uuid=UUID,
    cell_key="c" * 64,
    setting_key="5" * 64,
    sweep="demo",
    sweep_sha256="e" * 64,
    round="demo-1",
    repeat=1,
    attempt=1,
)
TICK = {"tick": 0, "due_s": 1.0, "t_s": 1.0, "took_s": 0.01, "state": "ok", "reason": None}


def build(home: Home) -> bundle.Bundle:
    folder = bundle.staging(home, UUID)
    (folder / "server.log").write_text("a log\n")
    raw = folder / "raw"
    raw.mkdir()
    lines = [
        json.dumps(TICK | {"values": {"kv_usage_ratio": 0.5, "requests_running": None}}),
        json.dumps(TICK | {"tick": 1, "state": "missed", "reason": "timeout", "values": {}}),
        '{"tick": 2, "cut',
    ]
    (raw / "server_samples.jsonl").write_text("\n".join(lines))
    return bundle.seal(
        home, folder, IDENTITY, outcome=Outcome.OK, phase=Phase.STOP, facts={"message": ""}
    )


def test_sealing_gives_a_whole_bundle_with_tables_and_compressed_lines(home: Home) -> None:
    sealed = build(home)
    assert sealed.folder == home.bundles / UUID
    assert bundle.verify(sealed.folder) == []
    assert bundle.all_sealed(home) == [sealed.folder]
    table = pq.read_table(sealed.folder / "server_samples.parquet").to_pylist()
    assert [row["kv_usage_ratio"] for row in table] == [0.5, None]
    assert [row["requests_running"] for row in table] == [None, None]
    packed = sealed.folder / "raw" / "server_samples.jsonl.gz"
    assert gzip.decompress(packed.read_bytes()).decode().endswith('{"tick": 2, "cut')
    assert not (sealed.folder / "raw" / "server_samples.jsonl").exists()
    assert not list(home.bundles.glob(".tmp-*"))


def test_equal_content_gives_an_equal_manifest(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    assert build(home).manifest_sha256 == build(other).manifest_sha256


def test_a_sealed_run_keeps_its_first_bundle(home: Home) -> None:
    first = build(home)
    folder = bundle.staging(home, UUID)
    (folder / "server.log").write_text("another")
    again = bundle.seal(home, folder, IDENTITY, outcome=Outcome.LOST, phase=Phase.STOP, facts={})
    assert again.manifest_sha256 == first.manifest_sha256
    assert again.manifest["outcome"] == "ok"


def relist(folder: Path, name: str, facts: object) -> None:
    """Change one entry of a manifest's list of files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = facts
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "server.log").write_text("b log\n"), "server.log: content differs"),
        (lambda f: (f / "server.log").unlink(), "server.log: listed in the manifest, but not"),
        (lambda f: (f / "extra").write_text(""), "extra: there, but not listed"),
        (lambda f: (f / "extra").symlink_to("/etc/passwd"), "extra: there, but not listed"),
        (lambda f: relist(f, "../../etc/passwd", {"bytes": 1, "sha256": "0"}), "not a path within"),
        (lambda f: relist(f, "/etc/passwd", {"bytes": 1, "sha256": "0"}), "not a path within"),
        (lambda f: relist(f, "server.log", 5), "states no size and sha256"),
        (lambda f: (f / "manifest.json").unlink(), "not a sealed bundle"),
        (lambda f: (f / "manifest.json").write_text('{"format": 99}'), "bundle format 99"),
        (lambda f: (f / "manifest.json").write_text("{"), "not a sealed bundle"),
    ],
)
def test_every_damage_is_named(home: Home, damage: object, said: str) -> None:
    sealed = build(home)
    assert callable(damage)
    damage(sealed.folder)
    problems = bundle.verify(sealed.folder)
    assert len(problems) == 1
    assert said in problems[0]


def test_a_link_in_place_of_a_file_is_no_file(home: Home) -> None:
    sealed = build(home)
    log = sealed.folder / "server.log"
    target = home.root / "elsewhere"
    log.rename(target)
    log.symlink_to(target)
    assert bundle.verify(sealed.folder) == ["server.log: listed in the manifest, but not there"]


def test_a_folder_without_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(CannotFindOut, match="not a sealed bundle"):
        bundle.load(tmp_path)


def test_absent_stays_absent() -> None:
    rows = server_rows([json.dumps(TICK | {"values": {"requests_waiting": True}}), "[1]", ""])
    assert rows[0]["requests_waiting"] is None
    gpus = gpu_rows([json.dumps({"tick": 0, "gpus": [{"uuid": "g", "used_bytes": 1}]})])
    assert gpus[0]["power_mw"] is None
    assert gpus[0]["processes"] is None
