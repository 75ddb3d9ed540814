"""Kills, outages, a full disk and a clock that jumps: the end is that of a round nothing disturbed.

The real command line, Prefect server, Polyaxon server and supervisor; the engine and the load are
doubles, so that a cell takes seconds (testkit.doubles). The matrix of kills takes most of the time.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
from testkit import doubles, endstate
from testkit.faulty_flow import BALLAST, SMALL, Fault, Faults
from testkit.real import ROOT, wait_for
from testkit.shifted_clock import ShiftedClock

from tasks import files, processes
from tasks.home import Home
from tasks.launch import services
from tasks.launch.supervisor import Folder
from warehouse.connection import open_snapshot

pytestmark = pytest.mark.real

#: What makes a round durable, in this order: intent, creation, the run's UUID, its end, its
#: outputs, its bundle, the round's record of it, the warehouse's rows, the published snapshot.
STEPS = ("intent", "create", "UUID", "wait", "collect", "seal", "result", "ingest", "publish")
MOMENTS = [
    (step, side)
    for step in STEPS
    for side in (("before", "during", "after") if step == "wait" else ("before", "after"))
]
#: A flow's restart waits for the services, so those are killed before it and start beside it.
KINDS = ("prefect", "polyaxon", "supervisor", "run", "flow")
#: Moments at which the run's process exists; a kill just after the creation waits for its start.
RUN_LIVES = [
    ("create", "after"),
    ("UUID", "before"),
    ("UUID", "after"),
    ("wait", "before"),
    ("wait", "during"),
]


def cannot_exist(fault: Fault) -> str | None:
    """Return why a pair cannot exist, ``None`` where it does."""
    moment = (fault.step, fault.side)
    if fault.kind != "run" or moment in RUN_LIVES:
        return None
    early = MOMENTS.index(moment) < MOMENTS.index(RUN_LIVES[0])
    return "the run is not created yet" if early else "the run has ended"


#: Cells beside those of the matrix, for faults whose cell missed its moment.
SPARE = 4
#: Cells of the tests that need only a few.
FEW = 6
#: Longest time until services are up and a flow measures; a busy machine was seen to need minutes.
START_S = 400.0

ALL = [Fault(step, side, kind) for step, side in MOMENTS for kind in KINDS]
MATRIX = [fault for fault in ALL if cannot_exist(fault) is None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A state folder with doubles; its services are ended at the end."""
    made = doubles.make_home(tmp_path_factory.mktemp("faults") / "home")
    yield made
    assert doubles.end_services(made) == []
    assert endstate.still_running(made) == []


class Start(Protocol):
    """Starts ``run SWEEP`` and returns its process."""

    def __call__(self, sweep: Path, *, log: Path, **more: Any) -> subprocess.Popen[bytes]: ...


@pytest.fixture
def start(home: Home) -> Iterator[Start]:
    """Start flows; those that a failed test leaves are ended."""
    started: list[subprocess.Popen[bytes]] = []

    def one(sweep: Path, *, log: Path, **more: Any) -> subprocess.Popen[bytes]:
        started.append(doubles.start(home, "run", str(sweep), log=log, **more))
        return started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


Reference = Callable[[int], dict[str, str]]


@pytest.fixture(scope="module")
def reference(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the contents of an undisturbed round of so many cells; measured once a number."""
    folder = tmp_path_factory.mktemp("reference")
    profile = doubles.write_profile(folder / "three.yaml", 3)

    @cache
    def measure(cells: int) -> dict[str, str]:
        name = f"undisturbed-{cells}"
        sweep, log = write_sweep(folder, name, cells), folder / f"{name}.log"
        codes = doubles.run_to_the_end(home, str(sweep), "--target", str(profile), log=log)
        assert codes == [0], log.read_text()[-3000:]
        found = endstate.contents(home, endstate.newest_round(home, name))
        assert len(found) == cells
        return found

    return measure


def write_sweep(folder: Path, name: str, cells: int) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(doubles.sweep_text(name, cells))
    return path


def problems(
    home: Home, name: str, reference: Reference, cells: int, lost: set[str] | None = None
) -> list[str]:
    """Judge the newest round of a sweep of so many cells."""
    wanted = reference(cells)
    round_ = endstate.newest_round(home, name)
    return endstate.problems(home, round_, reference=wanted, lost=lost or set())


def test_every_step_with_every_process_killed(
    home: Home, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults(tmp_path, home, MATRIX)
    plan, log = faults.write(), tmp_path / "log"
    cells = len(MATRIX) + SPARE
    sweep = write_sweep(tmp_path, "matrix", cells)
    # Two at a time: what dies in one cell is missed in the middle of another one too.
    target = doubles.write_profile(tmp_path / "two.yaml", 2)
    flows = sum(fault.kind == "flow" for fault in MATRIX)
    began = time.monotonic()
    codes = doubles.run_to_the_end(
        home,
        str(sweep),
        "--target",
        str(target),
        log=log,
        program=("testkit.faulty_flow", str(plan)),
        calls=flows + 5,
        timeout_s=1500,
    )
    done = faults.done()
    with capsys.disabled():
        print()
        for one in sorted(done.values(), key=lambda one: str(one["fault"])):
            print(f"  {one['fault']:40} pid {one['pid']}")
        for fault in ALL:
            if reason := cannot_exist(fault):
                print(f"  {fault.name:40} cannot be: {reason}")
        print(f"  {len(done)} kills in {time.monotonic() - began:.0f} s; exit codes {codes}")
    text = log.read_text()
    assert codes[-1] == 0, text[-3000:]
    assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
    assert sorted(one["fault"] for one in done.values()) == sorted(f.name for f in MATRIX)
    assert not [one for one in done.values() if one["pid"] is None]
    assert codes.count(-signal.SIGKILL) == flows
    killed = {one["run_uuid"] for one in done.values() if one["fault"].startswith("run ")}
    assert problems(home, "matrix", reference, cells, lost=killed) == []


def test_polyaxon_away_for_two_minutes(
    home: Home, reference: Reference, start: Start, tmp_path: Path
) -> None:
    """A server that holds every request and answers none: the run goes on, the flow waits."""
    sweep, log = write_sweep(tmp_path, "outage", FEW), tmp_path / "log"
    process = start(sweep, log=log)
    wait_for("a run", lambda: Folder(home).records(), timeout=START_S, poll=0.01)
    server = files.read_json(home.services / "polyaxon" / "state.json")
    assert server is not None
    members = processes.session(server["sid"], server["start_ticks"])
    processes.send(members, signal.SIGSTOP)
    try:
        time.sleep(120)
        assert process.poll() is None, log.read_text()
    finally:
        processes.send(members, signal.SIGCONT)
    assert process.wait(timeout=400) == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    assert problems(home, "outage", reference, FEW) == []


@pytest.fixture
def small_disks(home: Home) -> Iterator[bool]:
    """Mount small file systems where the flow writes; ``False`` where that is not permitted."""
    places = {"rounds": "4m", "bundles": "400m", "warehouse": "100m"}
    mounted: list[Path] = []
    kept = home.root.with_name("kept")
    for name, size in places.items():
        place = home.root / name
        place.mkdir(exist_ok=True)
        shutil.copytree(place, kept / name)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "memsweep-test", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            break
        mounted.append(place)
        shutil.copytree(kept / name, place, dirs_exist_ok=True)
    yield len(mounted) == len(places)
    for place in mounted:
        shutil.rmtree(kept / place.name)
        shutil.copytree(place, kept / place.name)
        subprocess.run(["umount", str(place)], check=True)
        shutil.copytree(kept / place.name, place, dirs_exist_ok=True)
    shutil.rmtree(kept)


DISK = [("intent", "before"), ("collect", "before"), ("seal", "before"), ("ingest", "before"),
        ("publish", "before")]  # fmt: skip


@pytest.mark.parametrize(("step", "side"), DISK)
def test_no_space_left(
    home: Home,
    reference: Reference,
    small_disks: bool,
    tmp_path: Path,
    step: str,
    side: str,
) -> None:
    """The flow says so in a line and ends with 3; with space again the same call goes on."""
    name, log = f"full-{step}", tmp_path / "log"
    sweep = write_sweep(tmp_path, name, FEW)
    calm = [Fault("none", "", "disk")]
    plan = Faults(tmp_path, home, [*calm, Fault(step, side, "disk")]).write()
    program = ("testkit.faulty_flow", str(plan))
    codes = doubles.run_to_the_end(home, str(sweep), log=log, program=program)
    text = log.read_text()
    assert codes == [3], text
    assert "Traceback" not in text
    assert any(words in text for words in ("No space", "MB free", "File too large")), text
    for folder in SMALL:
        (home.root / folder / BALLAST).unlink(missing_ok=True)
    assert doubles.run_to_the_end(home, str(sweep), log=log, program=program) == [0], (
        log.read_text()
    )
    print("tmpfs" if small_disks else "refused by the process", text)
    assert problems(home, name, reference, FEW) == []


def _wait_for_run(home: Home, log: Path, begun: int) -> None:
    """Wait until the flow's ``begun``-th run was created and goes on."""

    def look() -> bool:
        return log.read_text().count(" created") >= begun and bool(Folder(home).records())

    wait_for(f"run {begun}", look, timeout=START_S, poll=0.02)


def test_a_clock_that_jumps(home: Home, reference: Reference, start: Start, tmp_path: Path) -> None:
    """Five hours on, then ten back, in every process at once, while runs go on."""
    clock = ShiftedClock.make(tmp_path)
    assert doubles.end_services(home) == []
    python = home.envs / "bench" / "bin" / "python"
    plain = python.read_text()
    exports = "".join(f"export {name}={value}\n" for name, value in clock.variables.items())
    python.write_text(plain.replace("#!/bin/sh\n", f"#!/bin/sh\n{exports}"))
    sweep, log = write_sweep(tmp_path, "clock", FEW), tmp_path / "log"
    try:
        process = start(
            sweep, log=log, program=("testkit.shifted_clock",), variables=clock.variables
        )
        for begun, offset in ((2, 5 * 3600), (3, -5 * 3600), (5, 0)):
            _wait_for_run(home, log, begun)
            clock.jump_to(offset)
        assert process.wait(timeout=400) == 0, log.read_text()
    finally:
        python.write_text(plain)
        assert doubles.end_services(home) == []
    assert "Traceback" not in log.read_text()
    services.up(home, progress=print)
    assert problems(home, "clock", reference, FEW) == []
    round_ = endstate.newest_round(home, "clock")
    with open_snapshot(home.warehouse_snapshot) as connection:
        rows = connection.execute(
            "SELECT epoch(ended_at) - epoch(started_at), epoch(started_at) FROM run "
            "WHERE round = ? ORDER BY 2", [round_.id],
        ).fetchall()  # fmt: skip
    assert all(0 < seconds < 60 for seconds, _ in rows), rows
    assert rows[-1][1] - rows[0][1] > 5 * 3600, "the runs' clocks were not shifted"


def test_two_flows_on_one_sweep(
    home: Home, reference: Reference, start: Start, tmp_path: Path
) -> None:
    sweep = write_sweep(tmp_path, "twice", FEW)
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    both = [start(sweep, log=log) for log in logs]
    codes = [process.wait(timeout=400) for process in both]
    texts = [log.read_text() for log in logs]
    assert sorted(codes) == [0, 2], texts
    holder, refused = (both[0], texts[1]) if codes[0] == 0 else (both[1], texts[0])
    assert f"is being measured by process {holder.pid};" in refused
    assert problems(home, "twice", reference, FEW) == []


def test_random_kills(home: Home, tmp_path: Path) -> None:
    """Ten kills of anything at any time; more of them: ``python -m tests.bench.kill``."""
    state = tmp_path / "kill"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.kill", "--kills", "10", "--seed", "1", "--cells", "12",
         "--home", str(state), "--polyaxon-server", str(home.envs / "polyaxon-server")],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
