"""Operations that execute a small Python program where a cell would run."""

from __future__ import annotations

import sys
from pathlib import Path

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


def container(code: str, outputs: str) -> dict[str, object]:
    """Return the container of a compiled operation that executes ``code``."""
    return {
        "command": [sys.executable, "-c", code],
        "env": [
            {"name": "MEMSWEEP_OUTPUTS", "value": outputs},
            # As Polyaxon hands on text that reads like a Python literal: as a value.
            {"name": "MEMSWEEP_CELL", "value": {"limits": {"stop_s": 0.5}}},
        ],
    }


def operation(code: str, *, timeout: int = 60) -> dict[str, object]:
    """Return an operation to submit that executes ``code``."""
    return {
        "version": 1.1,
        "kind": "operation",
        "name": "program",
        "cache": {"disable": True},
        "termination": {"maxRetries": 0, "timeout": timeout},
        "component": {
            "version": 1.1,
            "kind": "component",
            "name": "program",
            "run": {
                "kind": "job",
                "container": container(code, "{{ globals.run_outputs_path }}"),
            },
        },
    }


def compiled(code: str, store: Path, run_uuid: str, *, timeout: int = 60) -> dict[str, object]:
    """Return what Polyaxon compiles from :func:`operation`, as far as the supervisor reads it."""
    outputs = store / run_uuid.replace("-", "") / "outputs"
    return {
        "termination": {"maxRetries": 0, "timeout": timeout},
        "run": {"kind": "job", "container": container(code, str(outputs))},
    }
