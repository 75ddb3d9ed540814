"""The webhook of a night: one JSON object, posted in bounded time; it never fails the night.

A webhook's address is often its secret, so no message here holds more of it than scheme and host.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
import tenacity

from tasks.patience import within
from warehouse.errors import BadInput

TRIES = 3
TIMEOUT_S = 10.0
#: Between two tries.
WAIT_S = 2.0
#: For all tries together: a receiver that drips its answer would be waited for without end.
DEADLINE_S = 120.0


class _Refused(Exception):
    """The receiver answered, but not with success."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.status = status


def check_address(address: str, where: str) -> None:
    """Refuse an address that is not http or https with a host.

    Raises:
        BadInput: without naming more of the address than its scheme.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise BadInput(f"{where}: not an address; wanted http://… or https://…") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadInput(
            f"{where}: got an address of scheme {parts.scheme or 'none'!r}, wanted http://… or "
            "https://… with a host"
        )


def shown(address: str) -> str:
    """Return an address without anything that may be secret: scheme, host and port."""
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{parts.hostname}{port}/…"


def post(address: str, document: Mapping[str, object], *, wait_s: float = WAIT_S) -> str | None:
    """Post ``document`` as JSON; return ``None`` when it was taken, else why it was not.

    Tries :data:`TRIES` times, waits at most :data:`TIMEOUT_S` seconds for each connection and each
    piece of an answer, and :data:`DEADLINE_S` in all; an answer below 500 other than 429 is not
    asked for again.
    """
    try:
        check_address(address, "webhook")
    except BadInput as error:
        return str(error)
    try:
        return within(DEADLINE_S, lambda: _post(address, document, wait_s), name="webhook")
    except TimeoutError:
        return f"webhook {shown(address)}: no whole answer within {DEADLINE_S:.0f} s"


def _post(address: str, document: Mapping[str, object], wait_s: float) -> str | None:
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_fixed(wait_s),
        retry=tenacity.retry_if_exception(_worth_another_try),
        reraise=True,
    )
    try:
        retrying(_once, address, document)
    except _Refused as refused:
        return f"webhook {shown(address)}: {refused}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # The text of httpx's own errors may hold the whole address.
        return f"webhook {shown(address)}: {type(error).__name__} after {TRIES} tries"
    return None


def _once(address: str, document: Mapping[str, object]) -> None:
    # Streamed: the answer's body is of no interest, however long it is.
    with httpx.stream(
        "POST", address, json=dict(document), timeout=TIMEOUT_S, follow_redirects=False
    ) as answer:
        if not answer.is_success:
            raise _Refused(answer.status_code)


def _worth_another_try(error: BaseException) -> bool:
    if isinstance(error, _Refused):
        return error.status >= 500 or error.status == httpx.codes.TOO_MANY_REQUESTS
    return isinstance(error, httpx.TransportError)
