"""HTTP to the server on loopback over one keep-alive connection, with a deadline for the whole.

A connection a scrape would cost the server more than the scrape; the socket timeout of the
standard library starts anew with every byte, so a server that dribbles would never time out.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass

#: What can go wrong on the way: connection, protocol, deadline.
HTTP_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: status, body and how long it took, in seconds."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> object:
        """Return the body as JSON; ``None`` when it is not."""
        try:
            value: object = json.loads(self.body)
        except ValueError:
            return None
        return value


class Client:
    """One connection to 127.0.0.1:``port``; not for use by two threads at once."""

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, *, timeout_s: float) -> Reply:
        """GET ``path``. Raises one of :data:`HTTP_ERRORS`."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, document: object, *, timeout_s: float) -> Reply:
        """POST a JSON document. Raises one of :data:`HTTP_ERRORS`."""
        return self._request("POST", path, json.dumps(document).encode(), timeout_s)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        kept = self._connection is not None
        try:
            return self._once(method, path, body, timeout_s)
        except (ConnectionError, http.client.BadStatusLine, http.client.CannotSendRequest):
            self.close()
            # A kept connection that the server closed meanwhile is no failure: one fresh attempt.
            if not kept or method != "GET":
                raise
        except HTTP_ERRORS:
            self.close()
            raise
        try:
            return self._once(method, path, body, timeout_s)
        except HTTP_ERRORS:
            self.close()
            raise

    def _once(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        start = time.monotonic()
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            self._connection = connection
        elif connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        parts: list[bytes] = []
        while part := response.read1(1 << 17):
            parts.append(part)
            left = start + timeout_s - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{method} {path}: not answered whole within {timeout_s} s")
            if connection.sock is not None:
                connection.sock.settimeout(left)
        missing = response.length
        response.close()  # read1() does not, and the connection could not be used again
        if missing:
            raise http.client.IncompleteRead(b"".join(parts), missing)
        if response.will_close:
            self.close()
        return Reply(response.status, b"".join(parts), time.monotonic() - start)
