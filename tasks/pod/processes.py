"""How the server's processes belong together, and the machine's memory.

By group and descent, never by name: vLLM retitles its processes and its workers can outlive their
parents; whoever looks for names misses them, and an engine that is left behind keeps its memory
into the next measurement.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path

from tasks.processes import Process

_PR_SET_CHILD_SUBREAPER = 36


def descendants(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
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
