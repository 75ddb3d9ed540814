"""The processes of a night, from the moment Prefect's worker starts it.

``python -m tasks.launch.night HOME SWEEP``, with the flow run in the environment. The night itself
is a child in a session of its own, so that neither the worker's death nor its impatience is the
night's: a cancelled process that has not ended after 30 s is killed by the worker, and to stop runs
and collect them may take longer. What the worker knows is only this process, which hands SIGTERM on
and ends as the night does.

The night leaves on disk who it is before it does anything else, prints into a file, never into a
pipe that ends with the worker, and then becomes Prefect's engine under the same PID.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tasks import schedules
from tasks.home import Home
from tasks.launch.settings import SERVICE_VARIABLE, service_mark


def main(home: Home, sweep: str) -> NoReturn:
    """Start the night, hand SIGTERM on to it, and end with its exit code."""
    # Not before the night's PID is known, and not lost meanwhile.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        become(home, sweep)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # As a shell tells a signal.
    sys.exit(128 - code if code < 0 else code)


def become(home: Home, sweep: str) -> NoReturn:
    """Become the engine that executes the flow run."""
    flow_run_id = os.environ["PREFECT__FLOW_RUN_ID"]
    schedules.note_process(home, flow_run_id, sweep)
    log = os.open(
        schedules.log_file(home, flow_run_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    # -P: the working folder is the user's, nothing in it may stand for one of our packages.
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "prefect.engine"],
        os.environ | {SERVICE_VARIABLE: service_mark(home, "night")},
    )


if __name__ == "__main__":
    main(Home(Path(sys.argv[1])), sys.argv[2])
