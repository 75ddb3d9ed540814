"""Small real HTTP servers on loopback that play a registry and a model hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: What a server answers: status, headers, body.
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Served:
    """A running server: its address and what was asked of it."""

    url: str
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def paths(self) -> list[str]:
        """Return the paths asked for, in order."""
        return [path for path, _ in self.asked]


@contextlib.contextmanager
def serving(answer: Callable[[str, Mapping[str, str], str], Answer]) -> Iterator[Served]:
    """Serve GET with ``answer(path, headers, own address)`` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            served.asked.append((self.path, headers))
            status, given, body = answer(self.path, headers, served.url)
            self.send_response(status)
            for name, value in given.items():
                self.send_header(name, value)
            if "Content-Length" not in given:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Served(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join(timeout=10)


def as_json(value: object, **headers: str) -> Answer:
    """Return an answer with a JSON body."""
    return 200, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()


def nothing(status: int = 404) -> Answer:
    """Return an answer without anything in it."""
    return status, {}, b"{}"


MANIFEST = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
MANIFEST_DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


def registry(
    tags: Mapping[str, bytes], *, stated: str | None = None, anonymous: bool = False
) -> Callable[[str, Mapping[str, str], str], Answer]:
    """Play a registry that hands out manifests by ``NAME:TAG``, after an anonymous token.

    ``stated`` is the digest it claims instead of the true one.
    """

    def answer(path: str, headers: Mapping[str, str], url: str) -> Answer:
        if path.startswith("/token"):
            return as_json({"token": "anonymous"})
        if not anonymous and headers.get("authorization") != "Bearer anonymous":
            challenge = f'Bearer realm="{url}/token",service="fake",scope="repository:x:pull"'
            return 401, {"WWW-Authenticate": challenge}, b"{}"
        name, _, tag = path.removeprefix("/v2/").partition("/manifests/")
        body = tags.get(f"{name}:{tag}")
        if body is None:
            return nothing()
        digest = stated or f"sha256:{hashlib.sha256(body).hexdigest()}"
        return 200, {"Docker-Content-Digest": digest}, body

    return answer


def blob_sha1(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\x00" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """A model hub with one model; files above ``large`` bytes are listed by sha256."""

    model: str
    commit: str
    files: dict[str, bytes]
    large: int = 100
    branch: str = "main"
    served: dict[str, bytes] = field(default_factory=dict)  # in place of the true content
    broken: dict[str, int] = field(default_factory=dict)  # answers 503 so many times first

    def __call__(self, path: str, headers: Mapping[str, str], url: str) -> Answer:
        path = path.partition("?")[0]
        if path == f"/api/models/{self.model}/revision/{self.branch}":
            return as_json({"id": self.model, "sha": self.commit})
        if path == f"/api/models/{self.model}/tree/{self.commit}":
            return as_json(
                [{"type": "directory", "path": "sub", "oid": "0", "size": 0}, *self._tree()]
            )
        head = f"/{self.model}/resolve/{self.commit}/"
        name = path.removeprefix(head)
        if path.startswith(head) and name in self.files:
            if self.broken.get(name, 0) > 0:
                self.broken[name] -= 1
                return nothing(503)
            return 200, {}, self.served.get(name, self.files[name])
        return nothing()

    def _tree(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
            entry["oid"] = blob_sha1(content)
            if len(content) > self.large:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content)}
            found.append(entry)
        return found
