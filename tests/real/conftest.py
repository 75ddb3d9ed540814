"""The real tier: real vLLM, EvalScope, Polyaxon, Prefect and DuckDB on this machine.

All tests share one state folder (MEMSWEEP_HOME where it is set, else `.memsweep` of the checkout),
so that environments are made once; every test opens rounds of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.real import ROOT, Memsweep


@pytest.fixture(scope="session")
def memsweep() -> Iterator[Memsweep]:
    """The command line with environments and models made; services are ended at the end."""
    home = Path(os.environ.get("MEMSWEEP_HOME") or ROOT / ".memsweep").resolve()
    one = Memsweep(home)
    done = one.call("setup", timeout=3000)
    assert done.returncode == 0, done.stderr
    yield one
    for process in one.started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    one.call("services", "down", timeout=300)
