"""polyaxonfiles/LICENCES.md lists what is installed, and nothing in it is there without a reason.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that CI cannot pass on a
list nobody has looked at. The sections of other environments: `.ci/licences --envs FOLDER`.
"""

from __future__ import annotations

import importlib.util
import os
from email.message import Message
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "licences"


def load() -> ModuleType:
    """Return the script as a module; its name has no ending, as the others beside it."""
    loader = SourceFileLoader("ci_licences", str(SCRIPT))
    spec = importlib.util.spec_from_loader("ci_licences", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


LICENCES: Any = load()
ENVIRONMENTS = sorted(LICENCES.ENVIRONMENTS)


class Stated:
    """A distribution with this metadata."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        self.metadata = Message()
        for name, value in (("Name", "Some_Thing"), *fields):
            self.metadata[name] = value


def document() -> str:
    return str(LICENCES.DOCUMENT.read_text(encoding="utf-8"))


def test_the_flow_environment_is_listed_as_installed() -> None:
    installed = LICENCES.installed()
    assert len(installed) > 100
    listed = LICENCES.listed(document(), "flow")
    # What only another Python or platform installs may be listed too, if the lock has it.
    same = {name: text for name, text in listed.items() if name in installed}
    if same == installed and set(listed) <= LICENCES.locked("flow"):
        return
    if os.environ.get("MEMSWEEP_REGENERATE"):
        LICENCES.write()
        pytest.fail("polyaxonfiles/LICENCES.md was rewritten; look at it and run again")
    differing = sorted(set(same.items()) ^ set(installed.items()))
    pytest.fail(f"LICENCES.md differs from what is installed; MEMSWEEP_REGENERATE=1: {differing}")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_licence_is_unknown_or_strong_copyleft_without_a_reason(environment: str) -> None:
    listed = LICENCES.listed(document(), environment)
    assert len(listed) > 50
    assert LICENCES.doubtful(listed) == []


def test_haupt_is_in_its_own_environment_only() -> None:
    has = {name for name in ENVIRONMENTS if "haupt" in LICENCES.listed(document(), name)}
    assert has == {"polyaxon-server"}
    assert all("haupt" not in LICENCES.locked(name) for name in ("flow", "engine", "bench"))


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT"), ("License", "other")], "MIT"),
        ([("Classifier", "License :: OSI Approved :: MIT License"), ("License", "x")], "MIT"),
        ([("Classifier", "License :: OSI Approved"), ("License", "BSD")], "BSD"),
        ([("License", "MIT License\n\nCopyright and so on")], "MIT License"),
        ([("License", "UNKNOWN")], "unknown"),
        ([], "unknown"),
    ],
)
def test_metadata_tells_the_licence(fields: list[tuple[str, str]], licence: str) -> None:
    assert LICENCES.licence(Stated(*fields)) == licence


@pytest.mark.parametrize(
    ("licence", "is_strong"),
    [
        ("AGPLv3", True),
        ("GPL-3.0-or-later", True),
        ("GNU General Public License v2 or later (GPLv2+)", True),
        ("GNU Affero General Public License v3", True),
        ("LGPL-2.1-only", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("MIT", False),
    ],
)
def test_strong_copyleft_is_told_from_weak(licence: str, is_strong: bool) -> None:
    assert LICENCES.is_strong_copyleft(licence) is is_strong
    assert bool(LICENCES.doubtful({"thing": licence})) is is_strong
