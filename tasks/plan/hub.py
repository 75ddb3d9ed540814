"""A model's ``config.json`` from a hub, by revision.

Only a full commit hash names a config for good: a branch moves, and a prediction made from it could
not be made again. What was fetched once is kept and never fetched twice.

Source: the hub's file address, ``{endpoint}/{model}/resolve/{revision}/{file}``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.plan import model
from warehouse.errors import BadInput, CannotFindOut

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
#: The hub's own variable for another address.
ENDPOINT_VARIABLE = "HF_ENDPOINT"
TIMEOUT_S = 20.0
#: The largest config in use is below 1 MB; more is another file.
MAX_BYTES = 10_000_000

_REFERENCE = re.compile(r"^(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})$")


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form OWNER/NAME@REVISION with a full commit hash."""
    return _REFERENCE.match(text) is not None


def is_cached(reference: str, cache: Path) -> bool:
    """Whether the config of ``OWNER/NAME@REVISION`` was fetched before."""
    match = _REFERENCE.match(reference)
    return match is not None and _file(match, cache).is_file()


def _file(match: re.Match[str], cache: Path) -> Path:
    return cache / "configs" / match["name"].replace("/", "__") / match["revision"] / "config.json"


def config(reference: str, cache: Path, *, client: httpx.Client | None = None) -> dict[str, Any]:
    """Return the config of ``OWNER/NAME@REVISION``, from ``cache`` if it was fetched before.

    Raises:
        BadInput: the reference has another form, or the hub has no such model or revision.
        CannotFindOut: the hub cannot be reached, or answered with something else.
    """
    match = _REFERENCE.match(reference)
    if match is None:
        raise BadInput(
            f"model {reference!r}: wanted OWNER/NAME@REVISION with the 40 hex digits of a commit; "
            "a branch or tag moves"
        )
    file = _file(match, cache)
    if not file.exists():
        text = _fetch(match["name"], match["revision"], client)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    return model.load(file)


def _fetch(name: str, revision: str, client: httpx.Client | None) -> str:
    import httpx

    address = f"{os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT}/{name}/resolve/{revision}"
    address += "/config.json"
    try:
        if client is None:
            response = httpx.get(address, timeout=TIMEOUT_S, follow_redirects=True)
        else:
            response = client.get(address)
    except httpx.HTTPError as error:
        raise CannotFindOut(
            f"{address}: cannot be fetched ({type(error).__name__}); give the config.json as a file"
        ) from error
    if response.status_code in {401, 403, 404}:
        raise BadInput(
            f"{address}: the hub answers {response.status_code}; check name and revision, or give "
            "the config.json as a file (gated models need a login)"
        )
    if response.status_code != 200 or len(response.content) > MAX_BYTES:
        raise CannotFindOut(
            f"{address}: status {response.status_code}, {len(response.content):,} bytes; wanted a "
            "config.json; try again, or give it as a file"
        )
    try:
        json.loads(response.text)
    except ValueError as error:
        raise CannotFindOut(f"{address}: the answer is not JSON ({error})") from error
    return response.text
