""".ci/audit: what makes it fail, and that a service that knows nothing is not taken for no finding.

Its uv is a script that prints what pip-audit 2.10.1 prints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "audit"
GOOD: dict[str, object] = {"name": "good", "version": "1.0", "vulns": []}
BAD: dict[str, object] = {
    "name": "bad",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-2000-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}],
}
SKIPPED: dict[str, object] = {
    "name": "gone",
    "skip_reason": "Dependency not found on PyPI and could not be audited: gone (1.0)",
}


def run(
    folder: Path, *told: dict[str, object], accepted: str = "", output: str | None = None
) -> tuple[int, list[str]]:
    """Run a copy of the script over one lock; return its exit code and the lines it prints."""
    (folder / ".ci").mkdir()
    shutil.copy(SCRIPT, folder / ".ci" / "audit")
    (folder / ".ci" / "audit-accepted.txt").write_text(f"# a comment\n{accepted}\n")
    locks = folder / "polyaxonfiles" / "locks"
    locks.mkdir(parents=True)
    (locks / "flow.txt").write_text("bad==1.0\n")
    text = json.dumps({"dependencies": told, "fixes": []}) if output is None else output
    (folder / "told").write_text(text)
    uv = folder / "uv"
    uv.write_text(f"#!/bin/sh\ncat {folder}/told\n")
    uv.chmod(0o755)
    done = subprocess.run(
        [sys.executable, folder / ".ci" / "audit"],
        env=os.environ | {"UV": str(uv)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout.splitlines()


def test_nothing_found(tmp_path: Path) -> None:
    assert run(tmp_path, GOOD, GOOD, SKIPPED) == (
        0,
        ["audit: 3 distributions, 0 findings, 0 of them accepted; not audited: gone"],
    )


def test_a_new_finding_fails(tmp_path: Path) -> None:
    code, lines = run(tmp_path, GOOD, BAD)
    assert code == 1
    assert lines[0] == (
        "audit: bad PYSEC-2000-1: 1.0, repaired in 1.1; update it, or accept it with a reason"
    )


def test_an_accepted_finding_does_not(tmp_path: Path) -> None:
    code, lines = run(tmp_path, GOOD, BAD, accepted="bad PYSEC-2000-1  # not called here")
    assert (code, lines) == (0, ["audit: 2 distributions, 1 findings, 1 of them accepted"])


def test_an_accepted_finding_that_is_gone_fails(tmp_path: Path) -> None:
    code, lines = run(tmp_path, GOOD, accepted="bad PYSEC-2000-1  # not called here")
    assert code == 1
    assert "not found any more" in lines[0]


@pytest.mark.parametrize("entry", ["bad PYSEC-2000-1", "bad PYSEC-2000-1  #", "PYSEC-2000-1 # x"])
def test_no_finding_is_accepted_without_a_reason(tmp_path: Path, entry: str) -> None:
    code, lines = run(tmp_path, GOOD, BAD, accepted=entry)
    wanted = "audit: audit-accepted.txt: line 2: wanted 'NAME ID  # reason'"
    assert (code, lines) == (1, [f"{wanted}, got {entry!r}"])


@pytest.mark.parametrize("output", ["", "no JSON", '{"error": 1}'])
def test_a_service_that_does_not_answer_fails_nothing(tmp_path: Path, output: str) -> None:
    code, lines = run(tmp_path, output=output)
    assert code == 0
    assert len(lines) == 1
    assert lines[0].startswith("audit: not done: pypi cannot be asked about flow.txt: ")


def test_a_mirror_that_knows_nothing_is_told_from_no_finding(tmp_path: Path) -> None:
    code, lines = run(tmp_path, SKIPPED, SKIPPED, GOOD)
    assert code == 0
    assert lines == [
        "audit: not done: pypi cannot be asked about flow.txt: it knows 1 of 3 distributions"
    ]
