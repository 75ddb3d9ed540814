"""Process identity, sessions and ports, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(30)"]
#: Starts a child, says so, and ends.
LEAVES_A_CHILD = [
    sys.executable,
    "-c",
    f"import subprocess; subprocess.Popen({SLEEP!r}); print('started', flush=True)",
]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process
    process.kill()
    process.wait(5)


def test_a_process_is_identified_by_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = processes.start_ticks(sleeper.pid)
    assert ticks is not None
    assert processes.alive(sleeper.pid, ticks)
    assert not processes.alive(sleeper.pid, ticks + 1), "another process got the pid"


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = processes.start_ticks(sleeper.pid)
    assert ticks is not None
    sleeper.kill()
    deadline = time.monotonic() + 5
    while (process := processes.read(sleeper.pid)) is not None and process.state != "Z":
        assert time.monotonic() < deadline
    assert processes.read(sleeper.pid) is not None, "not reaped yet"
    assert not processes.alive(sleeper.pid, ticks)
    assert processes.session(sleeper.pid, ticks) == []


def test_a_session_outlives_its_leader_and_is_ended_as_a_whole() -> None:
    leader = subprocess.Popen(LEAVES_A_CHILD, start_new_session=True, stdout=subprocess.PIPE)
    ticks = processes.start_ticks(leader.pid)
    assert ticks is not None
    assert leader.stdout is not None
    leader.stdout.readline()
    leader.wait(5)
    leader.stdout.close()
    left = processes.session(leader.pid, ticks)
    assert [process.pid for process in left] != [leader.pid]
    assert len(left) == 1
    assert processes.end(lambda: processes.session(leader.pid, ticks), grace_s=5)
    assert processes.session(leader.pid, ticks) == []


def test_a_reused_session_number_is_not_the_recorded_session(
    sleeper: subprocess.Popen[bytes],
) -> None:
    ticks = processes.start_ticks(sleeper.pid)
    assert ticks is not None
    assert processes.session(sleeper.pid, ticks - 1) == []


def test_no_signal_reaches_a_process_that_took_the_pid(sleeper: subprocess.Popen[bytes]) -> None:
    process = processes.read(sleeper.pid)
    assert process is not None
    processes.send([replace(process, start_ticks=process.start_ticks - 1)], signal.SIGKILL)
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(30)"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    assert processes.end(lambda: processes.session(process.pid, ticks), grace_s=0.2)
    assert process.wait(5) == -signal.SIGKILL
    process.stdout.close()


def test_a_marked_process_is_found_outside_its_session() -> None:
    process = subprocess.Popen(SLEEP, env={"MARK": "x1"}, start_new_session=True)
    try:
        deadline = time.monotonic() + 5
        while not (found := processes.marked("MARK", "x1")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [one.pid for one in found] == [process.pid]
        assert processes.marked("MARK", "x") == []
    finally:
        process.kill()
        process.wait(5)


def test_a_name_with_brackets_and_spaces_is_read() -> None:
    code = "import time\nopen('/proc/self/comm', 'w').write('a) b (c')\nprint(1, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}time.sleep(30)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        read = processes.read(process.pid)
        assert read is not None
        assert (read.name, read.parent) == ("a) b (c", os.getpid())
    finally:
        process.kill()
        process.wait(5)
        process.stdout.close()


def test_listening_is_told_from_the_kernels_table() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not processes.listening(port), "bound is not listening"
        server.listen()
        assert processes.listening(port)
    assert not processes.listening(port)


def test_a_free_port_is_none_that_outgoing_connections_use() -> None:
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = [processes.free_port() for _ in range(20)]
    assert all(20_000 <= port < 32_000 for port in ports), ports
    assert max(ports) < int(outgoing[0]), "this machine's outgoing connections use the range too"
    assert not any(processes.listening(port) for port in ports)


def test_a_busy_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", processes.free_port()))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(processes, "FREE_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            processes.free_port()
    assert processes.free_port() == port
    with pytest.raises(OSError, match="no free port"):
        processes.free_port(but=(port,))


def test_a_process_name_may_hold_anything() -> None:
    line = "42 (a b) c) S 1 42 7 0 -1 4194304 0 0 0 0 1 2 0 0 20 0 1 0 999 1000 25 0 0"
    process = processes.parse_stat(line)
    assert (process.pid, process.name, process.state) == (42, "a b) c", "S")
    assert (process.parent, process.group, process.session, process.start_ticks) == (1, 42, 7, 999)
    assert process.rss_bytes == 25 * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(ValueError, match="not a /proc/PID/stat line"):
        processes.parse_stat("nonsense")


def test_our_own_resident_memory_is_measured() -> None:
    own = processes.table()[os.getpid()]
    assert 1 << 20 < own.rss_bytes < 1 << 36
    assert own.running


#: A leader whose main thread is gone while another one works on, as a server's may be.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(30,)).start()
print(1, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_leader_whose_threads_work_on_still_executes() -> None:
    process = subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        deadline = time.monotonic() + 5
        while (read := processes.read(process.pid)) is not None and read.state != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert read is not None
        assert processes.executes(read)
        assert processes.alive(process.pid, None)
    finally:
        process.kill()
        process.wait(5)
        process.stdout.close()
    assert not processes.alive(process.pid, None)
