"""The image recipe: one for every version, nothing in it without a pin, all of the run's code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.launch import environments, image, operation
from warehouse.errors import BadInput

#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
ROOT = Path(__file__).parent.parent.parent
FOLDER = image.RECIPE.parent


def arguments(version: str) -> dict[str, str]:
    found = image.arguments(base_image=image.OFFICIAL, base_digest=DIGEST, engine_version=version)
    return found | {"SOURCE_DATE_EPOCH": "1700000000"}


@pytest.mark.parametrize("version", ["0.27.0", "0.11.2"])
def test_both_versions_render(version: str) -> None:
    text = image.rendered(arguments(version))
    assert f"FROM vllm/vllm-openai@{DIGEST}\n" in text
    assert f'"vLLM {version}, EvalScope' in text
    assert image.official(version) == f"vllm/vllm-openai:v{version}"
    left = set(re.findall(r"\$\{([A-Z_]+)", text))
    assert left <= {"ENGINE_VERSION", "SOURCE_DATE_EPOCH", "UV_DEFAULT_INDEX"}  # of the shell


def test_the_recipe_knows_no_digest_and_no_version() -> None:
    text = image.RECIPE.read_text()
    assert "sha256" not in text
    assert not re.search(r"\d+\.\d+\.\d+", text)
    assert image.required() == ["BASE_DIGEST", "ENGINE_VERSION", "SOURCE_DATE_EPOCH"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"BASE_DIGEST": "latest"}, "BASE_DIGEST is 'latest'"),
        ({"BASE_DIGEST": None}, "BASE_DIGEST is missing"),
        ({"ENGINE_VERSION": None}, "ENGINE_VERSION is missing"),
        ({"NONSENSE": "1"}, "no build argument NONSENSE"),
    ],
)
def test_what_is_missing_or_no_digest_is_refused(changes: dict[str, str | None], said: str) -> None:
    given = {k: v for k, v in (arguments("0.27.0") | changes).items() if v is not None}
    with pytest.raises(BadInput, match=said):
        image.rendered(given)


def test_the_image_holds_exactly_the_code_a_run_needs() -> None:
    text = image.RECIPE.read_text()
    copied = set(re.findall(r"\btasks/(\w+\.py)", text))
    assert copied == set(environments.POD_MODULES)
    assert "COPY tasks/pod /opt/memsweep/tasks/pod" in text
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    for name in re.findall(r"\b(?:tasks/\w+\.py|polyaxonfiles/\S+\.txt)", text):
        assert f"!{name}" in ignored, name
        assert (ROOT / name).is_file(), name


def test_everything_installed_is_locked_by_hash() -> None:
    text = image.RECIPE.read_text()
    installs = re.findall(r"pip install (.*?);", text, re.DOTALL)
    assert len(installs) == 3  # uv, setuptools, all of the lock
    for one in installs:
        assert "--require-hashes" in one
        assert "--no-deps" in one
        assert "--no-cache" in one
    assert all("--only-binary=:all:" in one for one in installs[:2])
    # What comes as source is built with what the lock pins, never with what an index offers.
    assert "--no-build-isolation" in installs[2]
    assert re.search(r"^setuptools==", environments.lock_file("bench").read_text(), re.M)
    lock = (FOLDER / "uv.txt").read_text()
    assert re.match(r"uv==\d+\.\d+\.\d+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+$", lock)
    assert "://" not in lock
    assert "apt" not in text


def test_the_operation_passes_every_required_argument() -> None:
    arguments_passed = {
        match[1]
        for one in operation.read("image.yaml")["run"]["container"]["args"]
        if (match := re.match(r"--opt=build-arg:([A-Z_]+)=", one))
    }
    assert set(image.required()) <= arguments_passed


def test_the_operations_places_are_those_of_the_image() -> None:
    text = image.RECIPE.read_text()
    params = operation.read("gpu.yaml")["params"]
    assert params["bench_python"]["value"] == "/opt/bench/bin/python"
    assert params["code"]["value"] == "/opt/memsweep"
    assert "/opt/bench\n" in text or "/opt/bench;" in text
