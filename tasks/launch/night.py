"""The process of a night, from the moment Prefect's worker starts it.

``python -m tasks.launch.night HOME SWEEP``, with the flow run in the environment: goes into a
session of its own, so that the death of the worker is not that of the night; prints into a file,
never into a pipe that ends with the worker; and leaves on disk who it is before it does anything
else. Then it becomes Prefect's engine, under the same PID, by which the worker stops it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tasks import schedules
from tasks.home import Home


def main(home: Home, sweep: str) -> None:
    """Become the engine that executes the flow run."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    flow_run_id = os.environ["PREFECT__FLOW_RUN_ID"]
    schedules.note_process(home, flow_run_id, sweep)
    log = os.open(
        schedules.log_file(home, flow_run_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    # -P: the working folder is the user's, nothing in it may stand for one of our packages.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "prefect.engine"])


if __name__ == "__main__":
    main(Home(Path(sys.argv[1])), sys.argv[2])
