"""Operations of our own shape whose run's code is a small Python program.

The supervisor executes nothing but ``python -P -m tasks.pod`` from a folder of staged code, so a
program is staged as such a folder.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tasks.canonical import content_key
from tasks.home import Home
from tasks.launch import environments
from tasks.launch import operation as operations
from tasks.launch.settings import artifacts_root

#: Writes what a run writes last, then ends well.
END = """
import json, os, pathlib
outputs = pathlib.Path(os.environ["MEMSWEEP_OUTPUTS"])
(outputs / "server.log").write_text("server line\\n")
print("run line", flush=True)
end = {"observed": "ok", "phase": "collect", "message": "m"}
(outputs / "end.json").write_text(json.dumps(end))
"""
SLEEP = "import time; time.sleep(60)"
#: Ends at once and leaves a process behind.
STRAY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
#: Stays whatever it is asked.
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


#: Polyaxon hands on text that reads like a Python literal as a value; with a null it does not.
CELL = {"limits": {"stop_s": 0.5}, "expect": None}


def places(code: str, home: Home) -> dict[str, str]:
    """Stage ``code`` as the run's own and return the places of a run that executes it."""
    bench = environments.python(home, "bench")
    if not bench.exists():
        bench.parent.mkdir(parents=True, exist_ok=True)
        bench.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        bench.chmod(0o755)
    staged = home.cache / "pod-code" / content_key(code)
    (staged / "tasks/pod").mkdir(parents=True, exist_ok=True)
    for name in ("tasks/__init__.py", "tasks/pod/__init__.py"):
        (staged / name).touch()
    (staged / "tasks/pod/__main__.py").write_text(code)
    return {**environments.places(home), "model_path": "/none", "code": str(staged)}


def operation(code: str, home: Home, *, timeout: int = 60) -> dict[str, object]:
    """Return an operation to submit that executes ``code``."""
    return operations.build(
        CELL, operation_file="local.yaml", parameters=places(code, home), run_limit_s=timeout
    )


def compiled(code: str, home: Home, run_uuid: str, *, timeout: int = 60) -> dict[str, object]:
    """Return what Polyaxon compiles from :func:`operation`, as far as the supervisor reads it."""
    container = operations.read("component.yaml")["run"]["container"]
    values = {
        **places(code, home),
        # As it arrives when it reads like a Python literal: as a value.
        "cell": CELL,
        "globals.run_outputs_path": str(outputs(home, run_uuid)),
        "globals.uuid": run_uuid.replace("-", ""),
    }
    env = [
        {"name": one["name"], "value": values[one["value"].strip("{} ")]}
        for one in container["env"]
    ]
    return {
        "termination": {"maxRetries": 0, "timeout": timeout},
        "run": {"kind": "job", "container": {"command": container["command"], "env": env}},
    }


def outputs(home: Home, run_uuid: str) -> Path:
    """Return a run's outputs folder in the store."""
    return artifacts_root(home) / run_uuid.replace("-", "") / "outputs"
