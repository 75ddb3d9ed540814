"""The server's processes, found by group and descent in /proc, never by name.

vLLM retitles its processes and its workers can outlive their parents; whoever looks for names
misses them, and an engine that is left behind keeps its memory into the next measurement.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/PID/stat has it; ``start_ticks`` makes a PID an identity."""

    pid: int
    start_ticks: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    rss_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        """PID and start time: what a reused PID does not share."""
        return self.pid, self.start_ticks

    @property
    def running(self) -> bool:
        """Whether it still runs; a zombie only waits to be reaped."""
        return self.state not in "ZX"

    def document(self) -> dict[str, object]:
        """Return what is kept of it in files."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "name": self.name,
            "rss_bytes": self.rss_bytes,
        }


def parse_stat(text: str) -> Process:
    """Parse /proc/PID/stat; the name may hold spaces and parentheses. Raises ``ValueError``."""
    head, separator, tail = text.rpartition(")")
    fields = tail.split()
    pid, _, name = head.partition(" (")
    if not separator or len(fields) < 22:
        raise ValueError(f"not a /proc/PID/stat line: {text[:60]!r}")
    return Process(
        pid=int(pid),
        start_ticks=int(fields[19]),
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def table() -> dict[int, Process]:
    """Return every process that can be seen, by PID."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - twice as fast, and asked every second
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                process = parse_stat(file.read())
        except (OSError, ValueError):
            continue  # ended while we looked
        found[process.pid] = process
    return found


def descendants(processes: dict[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the PIDs below ``roots``, the roots included where they exist."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    queue = [pid for pid in roots if pid in processes]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return found


def adopt_orphans() -> bool:
    """Make orphans below this process its children, so that none can escape; Linux only."""
    try:
        done: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return False
    return done == 0


def listening(port: int) -> bool:
    """Return whether any socket listens on TCP ``port``.

    A trial bind would also fail on TIME_WAIT after a clean stop.
    """
    wanted = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTEN and fields[1].endswith(wanted):
                return True
    return False


def memory_bytes(field: str) -> int | None:
    """Return ``MemTotal`` or ``MemAvailable`` of /proc/meminfo in bytes, ``None`` if absent."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None
