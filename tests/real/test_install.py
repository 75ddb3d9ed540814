"""The second supported way to install, and what the wheel ships (about 2 minutes)."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from testkit.real import ROOT

from tasks.launch.environments import find_uv

pytestmark = pytest.mark.real


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(find_uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_ships_our_packages_and_nothing_else(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert {name for name in top if not name.endswith(".dist-info")} == packages
    for data in (
        "flows/sweeps/demo.yaml",
        "polyaxonfiles/component.yaml",
        "polyaxonfiles/profiles/local.yaml",
        "polyaxonfiles/locks/engine.txt",
        "warehouse/migrations/0001_tables.sql",
    ):
        assert data in names, data


def test_pip_installs_the_lock_and_the_wheel_and_the_command_works(
    wheel: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(venv), cwd=tmp_path)
    python = str(venv / "bin/python")
    lock = str(ROOT / "polyaxonfiles/locks/flow.txt")
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps")
    run(*pip, "--require-hashes", "-r", lock, cwd=tmp_path)
    run(*pip, str(wheel), cwd=tmp_path)
    plan = run(str(venv / "bin/memsweep"), "plan", "demo", cwd=tmp_path)
    assert "975,890" in plan
    imports = "import prefect, polyaxon.client, duckdb, flows.sweep; print('fine')"
    assert "fine" in run(python, "-c", imports, cwd=tmp_path)
