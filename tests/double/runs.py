"""Start the run's own code against the doubles and read what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tasks import processes
from tests.double import cells
from tests.double.engine import make_bench, make_engine, make_model

ROOT = Path(__file__).parents[2]
RUN_UUID = "00000000-0000-4000-8000-000000000000"


@dataclass
class PodRun:
    """One run of ``python -P -m tasks.pod``: started by :meth:`start`, ended by :meth:`wait`."""

    folder: Path
    engine: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    cell: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    #: Variables that replace the doubles' places, as for a run against the real parts.
    places: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None

    @property
    def outputs(self) -> Path:
        """The run's outputs folder."""
        return self.folder / "outputs"

    @property
    def reason_file(self) -> Path:
        """Where a supervisor writes why it is about to send a signal."""
        return self.folder / "reason.json"

    def environment(self) -> dict[str, str]:
        """Return the run's environment, with a secret and other things it must not pass on."""
        engine = make_engine(self.folder / "engine", **self.engine)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "HF_TOKEN": "hf_secret",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MEMSWEEP_CELL": self.text or cells.cell_text(**self.cell),
            "MEMSWEEP_OUTPUTS": str(self.outputs),
            "MEMSWEEP_MODEL_PATH": str(make_model(self.folder / "model")),
            "MEMSWEEP_ENGINE_BIN": str(engine),
            "MEMSWEEP_BENCH_PYTHON": str(make_bench(self.folder / "bench", **self.bench)),
            "MEMSWEEP_RUN_UUID": RUN_UUID,
            "MEMSWEEP_REASON_FILE": str(self.reason_file),
            "MEMSWEEP_CACHE": str(self.folder / "cache"),
            **self.places,
        }

    def start(self) -> PodRun:
        """Start it in a session of its own, as the supervisor does."""
        with (self.folder / "stdout.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.pod"],
                env=self.environment(),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for its end; returns the exit code."""
        assert self.process is not None, "start() comes first"
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.returncode is None:
                self.process.kill()
                self.process.wait()

    def run(self) -> int:
        """Start it and wait."""
        return self.start().wait()

    def json(self, name: str) -> Any:
        """Return a JSON document that the run left."""
        return json.loads((self.outputs / name).read_text(encoding="utf-8"))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return a file of JSON lines; a torn last line is left out."""
        try:
            text = (self.outputs / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name."""
        return [event for event in self.lines("events.jsonl") if event["event"] == name]

    def until(self, ready: Callable[[], object], timeout_s: float = 20) -> None:
        """Wait until ``ready()`` is true; fails when the run ends or the time is over first."""
        assert self.process is not None, "start() comes first"
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, "the run ended first"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)

    def until_phase(self, name: str, load_point: int | None = None) -> None:
        """Wait until that phase began."""
        self.until(
            lambda: any(
                (event["phase"], event["load_point"]) == (name, load_point)
                for event in self.events("phase_start")
            )
        )


#: Runs one cell after the other, each as `python -P -m tasks.pod` would.
_MANY = """
import json, os, pathlib, sys
from tasks.pod.__main__ import main
for environment in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environment)
    code = main()
    pathlib.Path(environment["MEMSWEEP_OUTPUTS"] + ".code").write_text(str(code))
"""


def run_all(runs: Sequence[PodRun], *, workers: int = 4, timeout_s: float = 120) -> None:
    """Run many runs in few processes, several at a time: a start of Python each would cost more.

    Each run's ``exit_code`` is set.
    """
    started: list[subprocess.Popen[bytes]] = []
    for share in filter(None, (list(runs[number::workers]) for number in range(workers))):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MANY],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps([run.environment() for run in share]).encode())
        process.stdin.close()
        started.append(process)
    deadline = time.monotonic() + timeout_s
    for process in started:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0] * len(started)
    for run in runs:
        run.exit_code = int(run.outputs.with_name("outputs.code").read_text())


def end_what_is_left(folder: Path) -> list[int]:
    """End every process that was started for a run below ``folder``; returns their PIDs."""
    left = [
        process.pid
        for process in processes.table().values()
        if process.running and _belongs(process.pid, folder)
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _belongs(pid: int, folder: Path) -> bool:
    """Whether a process was started for one of the runs: they all name its folder."""
    try:
        command = (
            Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False
    return str(folder).encode() in command


class MakeRun(Protocol):
    """The fixture that makes runs which are not started yet."""

    def __call__(self, name: str = ..., **parts: Any) -> PodRun:
        """Make a run in a folder of its own; ``parts`` are fields of :class:`PodRun`."""
        ...
