"""What runs on this machine, read from /proc: identity by pid and start time, never by name.

vLLM retitles its processes, pids are reused and a zombie still answers signal 0, so a name or a
bare pid would sooner or later end, or wait for, somebody else's process.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from warehouse.errors import CannotFindOut

PROC = Path("/proc")
FREE_PORTS = range(20_000, 32_000)
#: State "LISTEN" in /proc/net/tcp.
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/<pid>/stat shows it; ``start_ticks`` counts from the machine's boot."""

    pid: int
    name: str
    state: str
    ppid: int
    pgid: int
    sid: int
    start_ticks: int


def boot_id() -> str:
    """Return the id of this boot of the machine: start ticks of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read(pid: int) -> Process | None:
    """Return the process with this pid, None when there is none; a zombie is returned as such."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name stands in brackets and may hold spaces and brackets itself.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        pid=pid,
        name=head.partition("(")[2],
        state=fields[0],
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def every() -> list[Process]:
    """Return all processes of the machine that can be read."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for pid in pids if (process := read(pid)) is not None]


def runs(process: Process) -> bool:
    """Tell whether a process still executes: no zombie, or a zombie leader with live threads."""
    if process.state not in "ZX":
        return True
    try:
        threads = list((PROC / str(process.pid) / "task").iterdir())
    except OSError:
        return False
    for thread in threads:
        if thread.name == str(process.pid):
            continue
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "ZX":
                return True
    return False


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone."""
    process = read(pid)
    return None if process is None else process.start_ticks


def is_alive(pid: int, ticks: int) -> bool:
    """Tell whether the process with this pid *and* start time still executes."""
    process = read(pid)
    return process is not None and process.start_ticks == ticks and runs(process)


def session(sid: int, ticks: int) -> list[Process]:
    """Return what still executes of the session whose leader had pid ``sid`` and this start time.

    The kernel gives a pid to nobody else while a session of that number lives, so another start
    time under that pid means that the whole session is gone.
    """
    leader = read(sid)
    if leader is not None and leader.start_ticks != ticks:
        return []
    return [one for one in every() if one.sid == sid and runs(one)]


def marked(variable: str, value: str) -> list[Process]:
    """Return what executes with ``variable=value`` in the environment it was started with.

    Finds a process that left its session. A process that overwrote its own environment block (by
    retitling itself) is not found.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for process in every():
        try:
            block = (PROC / str(process.pid) / "environ").read_bytes()
        except OSError:
            continue
        if wanted in block.split(b"\0") and runs(process):
            found.append(process)
    return found


def send(members: Iterable[Process], number: signal.Signals) -> None:
    """Signal processes that are still the same ones; those gone meanwhile are passed over."""
    for process in members:
        if start_ticks(process.pid) == process.start_ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def wait_gone(members: Callable[[], list[Process]], seconds: float) -> bool:
    """Wait until ``members()`` is empty, at most ``seconds``; tell whether it became so."""
    deadline = time.monotonic() + seconds
    while members():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def end(members: Callable[[], list[Process]], *, grace_s: float, kill_s: float = 10.0) -> bool:
    """SIGTERM all members, after ``grace_s`` SIGKILL what is left; tell whether none is left."""
    send(members(), signal.SIGTERM)
    if wait_gone(members, grace_s):
        return True
    send(members(), signal.SIGKILL)
    return wait_gone(members, kill_s)


def is_listening(port: int) -> bool:
    """Tell whether something on this machine listens on a TCP port.

    Read from /proc/net: a trial bind() also fails on connections in TIME_WAIT after a clean stop.
    """
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a TCP port of 127.0.0.1 that is free now, and none of ``but``.

    Taken below the range that outgoing connections use: a port that is recorded for the next start
    would otherwise now and then be some client's by then.
    """
    candidates = random.sample(FREE_PORTS, len(FREE_PORTS))
    for port in candidates:
        if port in but:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise CannotFindOut(f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")
