"""Processes are found by group and descent; what they leave behind is found too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.pod.processes import descendants, memory_bytes
from tasks.pod.server import Server
from tasks.processes import free_port, table


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


def test_descendants_need_no_order() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = descendants(table(), [os.getpid()])
        assert {os.getpid(), child.pid} <= found
    finally:
        child.kill()
        child.wait()


def test_memory_is_read_in_bytes() -> None:
    total, available = memory_bytes("MemTotal"), memory_bytes("MemAvailable")
    assert total is not None
    assert available is not None
    assert 0 < available < total
    assert memory_bytes("Nonsense") is None
