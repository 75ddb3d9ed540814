"""The engine image's recipe (polyaxonfiles/image): its build arguments for any version of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import polyaxonfiles
from warehouse.errors import BadInput

RECIPE = Path(polyaxonfiles.__file__).parent / "image" / "Dockerfile"
#: The official image and its tags, as the project publishes them.
OFFICIAL, TAG = "vllm/vllm-openai", "v{version}"

_ARGUMENT = re.compile(r"^ARG (?P<name>[A-Z_]+)(?P<default>=\S+)?$", re.MULTILINE)
#: The builder's own, not the user's; an index only where the public one is not to be used.
_OPTIONAL = frozenset({"UV_DEFAULT_INDEX"})


def official(engine_version: str) -> str:
    """Return the official image of a vLLM version, by tag."""
    return f"{OFFICIAL}:{TAG.format(version=engine_version)}"


def arguments(*, base_image: str, base_digest: str, engine_version: str) -> dict[str, str]:
    """Return what pins the base image, by the recipe's arguments; the commit's time comes apart."""
    return {
        "BASE_IMAGE": base_image,
        "BASE_DIGEST": base_digest,
        "ENGINE_VERSION": engine_version,
    }


def required() -> list[str]:
    """Return the recipe's arguments without a default."""
    text = RECIPE.read_text(encoding="utf-8")
    return [
        match["name"]
        for match in _ARGUMENT.finditer(text)
        if match["default"] is None and match["name"] not in _OPTIONAL
    ]


def rendered(values: dict[str, str]) -> str:
    """Return the recipe with its arguments filled in, as a builder sees it.

    Raises:
        BadInput: an argument is missing or unknown, or the digest is none.
    """
    text = RECIPE.read_text(encoding="utf-8")
    known = {match["name"] for match in _ARGUMENT.finditer(text)}
    if missing := [name for name in required() if name not in values]:
        raise BadInput(f"{RECIPE.name}: build argument {missing[0]} is missing")
    if unknown := sorted(set(values) - known):
        raise BadInput(f"{RECIPE.name}: has no build argument {unknown[0]}")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", values["BASE_DIGEST"]):
        raise BadInput(
            f"{RECIPE.name}: BASE_DIGEST is {values['BASE_DIGEST']!r:.80}, wanted sha256:… as "
            "'memsweep pin SWEEP --build' finds it"
        )
    given = {
        match["name"]: (match["default"] or "").removeprefix("=")
        for match in _ARGUMENT.finditer(text)
    } | values
    for name, value in given.items():
        text = text.replace(f"${{{name}}}", value)
    return text
