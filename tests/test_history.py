"""What the published warehouse says of past runs on a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import history, record
from tasks.home import Home
from tasks.plan.spending import NO_HISTORY
from tests.support.bundle_maker import Lab
from warehouse.errors import CannotFindOut
from warehouse.registry import Outcome


def on(target: str) -> Callable[[Path], None]:
    """Return what writes the target into a bundle's outputs."""

    def change(folder: Path) -> None:
        path = folder / "orchestration.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target": target}))

    return change


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, list[Path]]:
    """Return a warehouse with runs of two settings on one target, one on another, one lost."""
    lab = Lab(Home(tmp_path_factory.mktemp("history") / "home"))
    here = on("here")
    folders = [
        lab.seal(change=here, started_s=1001.0, ended_s=1011.0),
        lab.seal(change=here, started_s=1101.0, ended_s=1131.0, repeat=2),
        lab.seal(change=here, started_s=1201.0, ended_s=1203.0, outcome=Outcome.LOST),
        lab.seal(change=here, max_model_len=8192, outcome=Outcome.REFUSED, requests=()),
        lab.seal(change=on("there"), started_s=2001.0),
        lab.seal(change=here, max_model_len=4096, outcome=Outcome.STOPPED),
    ]
    record.ingest(lab.home, folders)
    return lab.home, folders


def test_runs_of_the_target_that_found_something_count(
    published: tuple[Home, list[Path]],
) -> None:
    home, folders = published
    found = history.read(home.warehouse_snapshot, "here")
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    key, other = manifests[0]["setting_key"], manifests[3]["setting_key"]
    assert set(found.settings) == {key, other}
    past = found.settings[key]
    assert (past.runs, past.median_s) == (2, 20.0)
    assert past.last_at == datetime(2026, 11, 29, 12, 1, 41, tzinfo=UTC)
    sizes = [sum(f["bytes"] for f in manifest["files"].values()) for manifest in manifests[:2]]
    assert past.bundle_bytes == max(sizes)
    assert found.settings[other].runs == 1


def test_bundles_correct_the_estimate_of_others(published: tuple[Home, list[Path]]) -> None:
    home, folders = published
    found = history.read(home.warehouse_snapshot, "here")
    counted = [folders[0], folders[1], folders[3]]
    taken = sum(
        f["bytes"]
        for folder in counted
        for f in json.loads((folder / "manifest.json").read_text())["files"].values()
    )
    # Four requests and one to warm up in each.
    assert found.bundle_ratio == pytest.approx(taken / (3 * (1_000_000 + 5 * 45_000)))


def test_an_unknown_target_and_no_warehouse_have_no_history(
    published: tuple[Home, list[Path]], tmp_path: Path
) -> None:
    assert history.read(published[0].warehouse_snapshot, "nowhere") == NO_HISTORY
    assert history.read(tmp_path / "snapshot.duckdb", "here") == NO_HISTORY


def test_a_damaged_warehouse_is_told(tmp_path: Path) -> None:
    (tmp_path / "snapshot.duckdb").write_bytes(b"no database" * 1000)
    with pytest.raises(CannotFindOut, match="rebuild"):
        history.read(tmp_path / "snapshot.duckdb", "here")
