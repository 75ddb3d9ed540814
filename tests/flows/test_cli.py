"""The command line: bad input is one line and exit 2, and it starts and makes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows import cli


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "state"
    monkeypatch.setenv("MEMSWEEP_HOME", str(home))
    return home


BAD_SWEEP = """
name: bad
model: tiny-qwen3
server: {max_model_len: 600, kv_cache_memory_bytes: 16777216}
experiments:
  - name: one
    points: [{parallel: 4, number: 8}]
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run"], "Missing argument 'SWEEP'"),
        (["run", "no-such-sweep"], "unknown sweep 'no-such-sweep'"),
        (["plan", "no-such-sweep"], "unknown sweep 'no-such-sweep'"),
        (["plan", "-"], "a pipe can be read only once"),
        (["plan", "/dev/null"], "a pipe can be read only once"),
        (["plan", "demo", "--no-such-option"], "No such option: --no-such-option"),
        (["plan", "demo", "--target", "no-such-target"], "target 'no-such-target'"),
        (["run", "BAD"], "needs 640 tokens"),
        (["plan", "BAD"], "needs 640 tokens"),
        (["logs", "zz"], "unknown run 'zz'"),
        (["stop", "zz"], "unknown run 'zz'"),
        (["services", "up", "--prefect-port", "99999999"], "--prefect-port"),
    ],
)
def test_bad_input(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    state_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD_SWEEP)
    assert cli.run([str(bad) if word == "BAD" else word for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not state_folder.exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_starts(
    state_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    real = shutil.disk_usage(state_folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1_000_000))
    assert cli.run(["run", "demo"]) == 2
    assert "1 MB free, wanted" in capsys.readouterr().err
    assert not state_folder.exists()


def test_no_arguments_print_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert "demo" in out
    assert err == ""


def test_plan_gives_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "demo", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["format"] == 1
    assert [cell["label"] for cell in value["cells"]][-1] == "recovery"
    assert value["boots"] == 5
    assert value["cells"][0]["prediction"]["values"]["kv_cache_size_tokens"] == 975_890


def test_sweeps_lists_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sweeps", "--json"]) == 0
    assert "demo" in [s["sweep"] for s in json.loads(capsys.readouterr().out)["sweeps"]]


def test_looking_ahead_imports_no_service(tmp_path: Path) -> None:
    code = (
        "import sys; from flows import cli; code = cli.run(['plan', 'demo', '--json']);"
        "heavy = {'prefect', 'polyaxon', 'duckdb', 'pyarrow', 'torch', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={"MEMSWEEP_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("home", ["FILE", "FILE/below", "~no-such-user-here/x", "x" * 5000])
@pytest.mark.parametrize("command", [["run", "demo"], ["status"], ["rebuild"], ["setup"]])
def test_a_state_folder_that_cannot_be_is_bad_input(
    home: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MEMSWEEP_HOME", home.replace("FILE", str(file)))
    assert cli.run(command) == 2
    err = capsys.readouterr().err
    assert "MEMSWEEP_HOME" in err
    assert len(err.strip().splitlines()) == 1


def test_an_unforeseen_fault_is_one_line_and_exit_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.commands import planning

    def broken(name: str) -> tuple[str, str]:
        raise RuntimeError(f"a\nfault of {name}\x1b[31m")

    monkeypatch.setattr(planning, "find_sweep", broken)
    assert cli.run(["plan", "demo"]) == 3
    err = capsys.readouterr().err
    assert "RuntimeError: a fault of demo" in err
    assert "\x1b" not in err
    assert len(err.strip().splitlines()) == 1


def test_output_that_cannot_be_encoded_is_replaced(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "runs"],
        cwd=Path(__file__).parents[2],
        env={
            "MEMSWEEP_HOME": str(tmp_path / "é"),
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C",
            "PYTHONIOENCODING": "ascii",
            "PYTHONUTF8": "0",
            "COLUMNS": "0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("memsweep: ")


def test_a_ctrl_c_that_a_library_wrapped_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.commands import planning

    def broken(name: str) -> tuple[str, str]:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError(name) from error

    monkeypatch.setattr(planning, "find_sweep", broken)
    assert cli.run(["plan", "demo"]) == 130
    assert capsys.readouterr().err == "memsweep: interrupted\n"


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "> /dev/full", "| head -n 1 > /dev/null"])
def test_odd_streams_give_no_traceback(redirect: str, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m flows.cli plan demo {redirect}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=Path(__file__).parents[2],
        env={"MEMSWEEP_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (3 if "full" in redirect else 0)
