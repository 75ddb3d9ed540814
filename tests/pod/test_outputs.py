"""Files of a run that may be killed at any moment, on a disk that may be full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.pod.interrupt import read_reason
from tasks.pod.outputs import Lines, Outputs
from tasks.pod.phases import Phases


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Outputs]:
    """An outputs folder at ``tmp_path``."""
    made = Outputs(tmp_path)
    yield made
    made.close()


def test_a_document_gets_shorter_without_leftovers(outputs: Outputs, tmp_path: Path) -> None:
    assert outputs.write("a/b.json", {"long": "x" * 100})
    assert outputs.write("a/b.json", {"s": 1})
    assert json.loads((tmp_path / "a/b.json").read_text()) == {"s": 1}


def test_a_refused_write_is_told_not_raised(outputs: Outputs, tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    assert outputs.write("x.json", {}) is False
    outputs.write_bytes("x.json", b"")
    assert [error.partition(":")[0] for error in outputs.errors] == ["x.json", "x.json"]


def test_lines_are_there_at_once_and_stop_after_close(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "deep" / "rows.jsonl")
    lines.write({"a": 1})
    assert (tmp_path / "deep/rows.jsonl").read_text() == '{"a":1}\n'
    lines.close()
    lines.write({"a": 2})
    assert (tmp_path / "deep/rows.jsonl").read_text() == '{"a":1}\n'


def test_hashes_leave_out_the_commit_marker(outputs: Outputs) -> None:
    outputs.write("end.json", {})
    outputs.write_bytes("sub/data.bin", b"abc")
    outputs.close()
    assert outputs.hashes().keys() == {"events.jsonl", "sub/data.bin"}
    assert outputs.hashes()["sub/data.bin"] == {
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "bytes": 3,
    }


def test_phases_are_on_disk_from_the_first_moment(outputs: Outputs, tmp_path: Path) -> None:
    phases = Phases(outputs)
    phases.start("boot")
    written = json.loads((tmp_path / "phases.json").read_text())["phases"]
    assert (written[0]["name"], written[0]["end_s"]) == ("boot", None)
    phases.end("boot")
    phases.end("boot")  # twice is no harm
    phases.end("measure", 3)  # nor is one that never began
    phases.start("measure", 0, at_s=1.0, source="hook")
    phases.add("drain", 0, 2.0, 3.0, "database")
    phases.close()
    written = json.loads((tmp_path / "phases.json").read_text())["phases"]
    assert all(phase["end_s"] is not None for phase in written)
    assert [phase["source"] for phase in written] == ["run", "hook", "database"]


def test_a_reason_is_read_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "reason.json"
    assert read_reason(None) is None
    assert read_reason(path) is None
    path.write_text("{")
    assert read_reason(path) is None
    path.write_text("[1]")
    assert read_reason(path) is None
    path.write_text('{"reason": "timeout"}')
    assert read_reason(path) == {"reason": "timeout"}
