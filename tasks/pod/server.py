"""Start the server in a process group of its own, know whether it lives, stop all of it.

Its exit code is no evidence: an engine killed from outside lets the API server exit with 0. A
crash is "the server went though nobody stopped it".
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tasks.pod.processes import descendants
from tasks.processes import Process, table

#: How long after a KILL the kernel may take to end a process.
KILL_WAIT_S = 10.0
_POLL_S = 0.05


@dataclass
class Server:
    """The server process, everything it spawned, and the port it was given."""

    argv: list[str]
    environment: dict[str, str]
    port: int
    log: Path
    folder: Path
    #: PIDs of this run that are not the server's: the load generator.
    others: set[int] = field(default_factory=set)
    _process: subprocess.Popen[bytes] | None = None
    _seen: dict[tuple[int, int], Process] = field(default_factory=dict)

    def start(self) -> None:
        """Start it; raises ``OSError`` when the executable cannot be run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pid(self) -> int | None:
        """PID of the process that was started; also its process group."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, ``None`` while it runs; negative for a signal."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the started process runs."""
        return self._process is not None and self._process.poll() is None

    def members(self) -> list[Process]:
        """Return every running process of the server: its group, its descendants, its orphans."""
        if self.pid is None:
            return []
        all_processes = table()
        below = descendants(all_processes, [self.pid])
        others = descendants(all_processes, self.others)
        found = [
            process
            for process in all_processes.values()
            if process.pid not in others
            and process.group not in self.others
            and process.running
            and self._is_ours(process, below)
        ]
        self._seen.update((process.key, process) for process in found)
        return found

    def _is_ours(self, process: Process, below: set[int]) -> bool:
        return (
            process.group == self.pid
            or process.pid in below
            or process.key in self._seen
            # Orphans come to us (see adopt_orphans), whatever group they went to.
            or process.parent == os.getpid()
        )

    def stop(self, limit_s: float) -> bool:
        """End all of it: TERM, wait at most ``limit_s``, KILL, wait. Returns whether KILL was used.

        Never raises. What is still there afterwards is in :meth:`members`.
        """
        if self.pid is None:
            return False
        self._signal(signal.SIGTERM)
        if self._gone_within(limit_s):
            return False
        self._signal(signal.SIGKILL)
        self._gone_within(KILL_WAIT_S)
        return True

    def _gone_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while True:
            gone = not self.alive
            self._reap_orphans()
            if gone and not self.members():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        for member in self.members():
            if member.group != pid:
                _send(member.pid, number)
        if pid is not None:
            try:
                os.killpg(pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def _reap_orphans(self) -> None:
        """Collect the exit of adopted orphans, never of the processes that Popen waits for."""
        own = {self.pid, *self.others}
        for process in table().values():
            if process.parent == os.getpid() and not process.running and process.pid not in own:
                try:
                    os.waitpid(process.pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
