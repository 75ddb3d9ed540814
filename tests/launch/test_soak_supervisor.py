"""Kills the supervisor again and again while real runs go through it (about 4 minutes)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tasks import processes
from tasks.home import Home
from tasks.launch import environments, services, supervisor
from tasks.launch.polyaxon import PolyaxonClient
from tests.double import programs

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RUNS = 60
KILLS = 40
#: Leaves one line for each time it was started.
COUNTED = """
import os, pathlib, time
with (pathlib.Path(os.environ["MEMSWEEP_OUTPUTS"]) / "started").open("a") as file:
    file.write("started\\n")
time.sleep(0.5)
"""


def test_every_run_is_started_once_and_ends_once_whenever_the_supervisor_dies(
    tmp_path: Path,
) -> None:
    shared, home = Home.find(), Home(tmp_path / "state")
    environments.ensure(shared, ("polyaxon-server",), progress=print)
    home.envs.mkdir(parents=True)
    (home.envs / "polyaxon-server").symlink_to(shared.envs / "polyaxon-server")
    port = PolyaxonClient(services.up(home, progress=print).polyaxon_host)
    draw = random.Random(7)
    try:
        runs = [
            port.create(
                operation=programs.operation(COUNTED + programs.END, home),
                name="soak",
                meta={"cell_key": f"soak{n}x", "round": "r", "repeat": str(n), "attempt": "1"},
            ).uuid
            for n in range(RUNS)
        ]
        for _ in range(KILLS):
            time.sleep(draw.uniform(0.0, 4.0))
            entry = services._entry(home, "supervisor")
            assert entry is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)
            time.sleep(0.2)
            services.keep_alive(home)
        deadline = time.monotonic() + 300
        while port.active():
            services.keep_alive(home)
            assert time.monotonic() < deadline
            time.sleep(0.5)
        for run in runs:
            view = port.view(run)
            assert view.status == "succeeded", view
            port.fetch(run, tmp_path / run)
            assert (tmp_path / run / "started").read_text() == "started\n", run
            assert processes.marked(supervisor.RUN_VARIABLE, run) == []
    finally:
        services.down(home)
