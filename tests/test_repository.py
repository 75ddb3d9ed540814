"""The repository keeps its own promises: locks, names, documents and tracked YAML are in step."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from flows.shipped import shipped
from tasks import pins
from tasks.plan.published import parse
from tasks.plan.sweep import parse_sweep

ROOT = Path(__file__).parent.parent
TOP = {"flows", "tasks", "polyaxonfiles", "warehouse"}


def tracked() -> list[str]:
    out = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return out.stdout.splitlines()


def project() -> dict[str, object]:
    value: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return value


def test_top_level_is_the_agreed_one() -> None:
    names = {name.split("/")[0] for name in tracked()}
    visible = {name for name in names if not name.startswith(".")}
    assert visible == {*TOP, "tests", "pyproject.toml", "README.md"}


def test_every_package_is_listed_and_belongs_to_us_alone() -> None:
    tool = project()["tool"]
    assert isinstance(tool, dict)
    listed = set(tool["setuptools"]["packages"])
    found = {
        str(Path(name).parent).replace("/", ".")
        for name in tracked()
        if name.endswith("__init__.py") and name.split("/")[0] in TOP
    }
    assert listed == found
    owners = packages_distributions()
    for name in TOP:
        assert set(owners.get(name, [])) <= {"memsweep"}, name


def test_package_init_files_import_nothing() -> None:
    for name in tracked():
        if name.endswith("__init__.py") and name.split("/")[0] in TOP:
            assert (ROOT / name).read_text().strip() == "", name


def test_uv_constraints_equal_the_flow_lock() -> None:
    lock = (ROOT / "polyaxonfiles/locks/flow.txt").read_text()
    locked = {
        match.group(1).strip()
        for match in re.finditer(r"^([a-z0-9][^\\\n#]*==[^\\\n#]*?)\s*\\?$", lock, re.M)
    }
    tool = project()["tool"]
    assert isinstance(tool, dict)
    assert set(tool["uv"]["constraint-dependencies"]) == locked
    for name, version in (
        ("prefect", pins.PREFECT_VERSION),
        ("polyaxon", pins.POLYAXON_VERSION),
        ("duckdb", pins.DUCKDB_VERSION),
    ):
        assert f"{name}=={version}" in locked


def test_no_lock_names_an_address() -> None:
    for path in (ROOT / "polyaxonfiles/locks").glob("*.txt"):
        assert "://" not in path.read_text(), path.name
        assert "--index-url" not in path.read_text(), path.name


@pytest.mark.parametrize("name", [n for n in tracked() if n.endswith((".yaml", ".yml"))])
def test_every_tracked_yaml_is_of_a_known_kind(name: str) -> None:
    if name.startswith("flows/sweeps/published/"):
        parse((ROOT / name).read_text(), where=name)
        return
    if name.startswith("flows/sweeps/"):
        parse_sweep((ROOT / name).read_text(), where=name)
        return
    assert name.startswith(("polyaxonfiles/", "tests/data/", "tests/launch/", "tests/double/")), (
        name
    )


def test_shipped_sweeps_are_named_like_their_files() -> None:
    for name, path in shipped().items():
        assert parse_sweep(path.read_text(), where=name).name == name


def test_links_and_paths_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\b((?:flows|tasks|polyaxonfiles|warehouse|tests)/[\w./-]*\w)", text):
        if not name.endswith(".duckdb"):  # made in the state folder
            assert (ROOT / name).exists(), name


def test_version_literals_live_in_pins_only() -> None:
    versions = {
        pins.ENGINE_VERSION,
        pins.BENCH_VERSION,
        pins.PREFECT_VERSION,
        pins.POLYAXON_VERSION,
        pins.DUCKDB_VERSION,
        pins.TORCH_VERSION,
        pins.TORCHVISION_VERSION,
    }
    for name in tracked():
        if name.endswith(".py") and name.split("/")[0] in TOP and name != "tasks/pins.py":
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                literal = isinstance(node, ast.Constant) and node.value in versions
                assert not literal, f"{name}:{getattr(node, 'lineno', 0)}: a version"


def test_no_skipped_tests_without_a_marker() -> None:
    for name in tracked():
        if name.startswith("tests/") and name.endswith(".py"):
            text = (ROOT / name).read_text()
            assert not re.search(r"pytest\.(mark\.)?(xfail|importorskip)\(", text), name
