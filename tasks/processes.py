"""What runs on this machine, read from /proc: identity by PID and start time, never by name.

vLLM retitles its processes, PIDs are reused and a zombie still answers signal 0, so a name or a
bare PID would sooner or later end, or wait for, somebody else's process. Standard library only: the
run's own code works with it too. Linux only, as is everything that serves vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

#: Below the range that outgoing connections use (32,768 and up by default), see :func:`free_port`.
FREE_PORTS = range(20_000, 32_000)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: State "LISTEN" in /proc/net/tcp.
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/PID/stat has it; ``start_ticks`` counts from the machine's boot."""

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


def read(pid: int | str) -> Process | None:
    """Return the process with this PID, None when there is none; a zombie is returned as such."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return parse_stat(file.read())
    except (OSError, ValueError):
        return None  # ended, perhaps while we looked


def table() -> dict[int, Process]:
    """Return every process of the machine that can be seen, by PID."""
    # Not through Path: this is twice as fast, and it is asked several times a second.
    pids = (entry for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return {process.pid: process for pid in pids if (process := read(pid)) is not None}


def executes(process: Process) -> bool:
    """Tell whether a process still executes: no zombie, or a zombie leader with live threads."""
    if process.running:
        return True
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")  # noqa: PTH208 - see above
    except OSError:
        return False
    others = (thread for thread in threads if thread != str(process.pid))
    states = (read(f"{process.pid}/task/{thread}") for thread in others)
    return any(thread is not None and thread.running for thread in states)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone."""
    process = read(pid)
    return None if process is None else process.start_ticks


def alive(pid: int, ticks: int | None) -> bool:
    """Tell whether the process with this PID, and this start time where it is known, executes."""
    process = read(pid)
    return process is not None and ticks in (None, process.start_ticks) and executes(process)


def boot_id() -> str:
    """Return the id of this boot of the machine: start ticks of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def session(sid: int, ticks: int) -> list[Process]:
    """Return what still executes of the session whose leader had PID ``sid`` and this start time.

    The kernel gives a PID to nobody else while a session of that number lives, so another start
    time under that PID means that the whole session is gone.
    """
    leader = read(sid)
    if leader is not None and leader.start_ticks != ticks:
        return []
    return [one for one in table().values() if one.session == sid and executes(one)]


def marked(variable: str, value: str) -> list[Process]:
    """Return what executes with ``variable=value`` in the environment it was started with.

    Finds a process that left its session. A process that overwrote its own environment block (by
    retitling itself) is not found.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for process in table().values():
        try:
            block = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in block.split(b"\0") and executes(process):
            found.append(process)
    return found


def environment(pid: int) -> set[str] | None:
    """Return the names of the variables that a process was started with, ``None`` if unknown."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    return {one.partition(b"=")[0].decode(errors="replace") for one in block.split(b"\0") if one}


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


def listening(port: int) -> bool:
    """Tell whether something on this machine listens on a TCP port.

    Read from /proc/net: a trial bind() also fails on connections in TIME_WAIT after a clean stop.
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


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a TCP port of 127.0.0.1 that is free now, and none of ``but``.

    Taken below the range that outgoing connections use: whoever gets the port binds it half a
    minute later (vLLM) or at its next start (a service), and a port from that range would by then
    now and then be some client's.

    Raises:
        OSError: all of :data:`FREE_PORTS` are taken.
    """
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port in but:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    wanted = f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}"
    raise OSError(errno.EADDRINUSE, wanted)
