"""Fixtures of the warehouse's tests: what is slow is made once and copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks import record
from tasks.home import Home
from tests.support.bundle_maker import Lab
from warehouse.connection import open_writer


@dataclass(frozen=True)
class Stored:
    """A state folder with one run, ingested and published."""

    lab: Lab
    bundle: Path


@pytest.fixture(scope="session", autouse=True)
def _no_sync() -> Iterator[None]:
    """Leave out waiting for the disk: no test here cuts the power."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="session")
def new_lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Lab]:
    """Return a maker of state folders whose warehouse is migrated but empty."""
    empty = tmp_path_factory.mktemp("empty") / "live.duckdb"
    with open_writer(empty):
        pass

    def make(folder: Path) -> Lab:
        home = Home(folder / "home")
        home.warehouse_live.parent.mkdir(parents=True)
        shutil.copyfile(empty, home.warehouse_live)
        return Lab(home)

    return make


@pytest.fixture
def lab(tmp_path: Path, new_lab: Callable[[Path], Lab]) -> Lab:
    """Return an empty state folder that can make bundles."""
    return new_lab(tmp_path)


@pytest.fixture(scope="session")
def one_run(tmp_path_factory: pytest.TempPathFactory, new_lab: Callable[[Path], Lab]) -> Stored:
    """Return a folder with one ingested run; tests only read it."""
    made = new_lab(tmp_path_factory.mktemp("one"))
    bundle = made.seal()
    record.ingest(made.home, [bundle])
    return Stored(made, bundle)


@pytest.fixture
def stored(tmp_path: Path, one_run: Stored) -> Stored:
    """Return a copy of the folder with one ingested run, for tests that change it."""
    root = tmp_path / "home"
    shutil.copytree(one_run.lab.home.root, root)
    lab = Lab(Home(root))
    return Stored(lab, lab.home.bundles / one_run.bundle.name)
