"""Processes are found by group and descent; what they leave behind is found too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.pod import processes
from tasks.pod.server import Server, free_port


def make(folder: Path, program: str) -> Server:
    return Server(
        argv=[sys.executable, "-c", program],
        environment={"PATH": os.environ["PATH"]},
        port=free_port(),
        log=folder / "server.log",
        folder=folder / "cwd",
    )


def until_members(server: Server, number: int) -> None:
    deadline = time.monotonic() + 10
    while len(server.members()) != number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_children_are_members_and_go_with_the_server(tmp_path: Path) -> None:
    program = (
        "import subprocess,sys,time\n"
        "subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)'])\n"
        "time.sleep(60)"
    )
    server = make(tmp_path, program)
    assert (server.members(), server.alive, server.exit_code) == ([], False, None)
    server.start()
    until_members(server, 2)
    assert {member.group for member in server.members()} == {server.pid}
    assert all(member.rss_bytes > 0 for member in server.members())
    assert server.stop(5) is False
    assert (server.members(), server.alive, server.exit_code) == ([], False, -15)


def test_a_child_that_left_its_group_is_still_a_member(tmp_path: Path) -> None:
    program = (
        "import subprocess,sys,time\n"
        "subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        "time.sleep(60)"
    )
    server = make(tmp_path, program)
    server.start()
    until_members(server, 2)
    assert len({member.group for member in server.members()}) == 2
    server.stop(5)
    assert server.members() == []


def test_stop_is_safe_before_start_and_twice(tmp_path: Path) -> None:
    server = make(tmp_path, "import time; time.sleep(60)")
    assert server.stop(1) is False
    server.start()
    assert server.stop(5) is False
    assert server.stop(5) is False


def test_a_missing_executable_is_an_os_error(tmp_path: Path) -> None:
    server = make(tmp_path, "")
    server.argv = [str(tmp_path / "vllm")]
    with pytest.raises(FileNotFoundError):
        server.start()


def test_output_of_both_streams_is_kept(tmp_path: Path) -> None:
    server = make(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    server.start()
    until_members(server, 0)
    assert server.stop(1) is False
    assert sorted((tmp_path / "server.log").read_text().split()) == ["err", "out"]


def test_a_listening_port_is_seen_and_a_closed_one_is_not() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not processes.listening(port)
        listener.listen()
        assert processes.listening(port)
    assert not processes.listening(port)


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


def test_descendants_need_no_order() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = processes.descendants(processes.table(), [os.getpid()])
        assert {os.getpid(), child.pid} <= found
    finally:
        child.kill()
        child.wait()


def test_memory_is_read_in_bytes() -> None:
    total, available = processes.memory_bytes("MemTotal"), processes.memory_bytes("MemAvailable")
    assert total is not None
    assert available is not None
    assert 0 < available < total
    assert processes.memory_bytes("Nonsense") is None
