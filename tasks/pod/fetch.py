"""``python -P -m tasks.pod.fetch``: downloads one commit of a model into a kept volume, once.

Runs as an init container before the run. Every file is checked against the hash that the hub's own
listing of the commit states (sha256 of large files, git's blob hash of small ones), so a cut or
mixed-up download is never served; the sha256 of all of them is written last, beside the files, as
the sign that the folder is whole. Two at once: the second waits and finds the work done.

Source of addresses and fields: the hub's API, ``/api/models/{model}/tree/{revision}`` and
``/{model}/resolve/{revision}/{file}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, BinaryIO

from tasks import revision

HUB = "https://huggingface.co"
EXIT_FAILED = 70
#: What a server needs: weights in one format, settings and tokenizer; no code, no other formats.
SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Files of the top folder only; the name comes from a server and becomes a path.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_CHUNK = 1 << 20
_MAX_LISTING = 10_000_000
_TRIES = 4
_ANSWER_S = 60


class FetchError(Exception):
    """The model cannot be had; the text says what was wanted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which commit of which model, where it comes from and where it goes."""

    name: str
    revision: str
    folder: Path
    hub: str
    token: str | None
    deadline: float  # on time.monotonic()


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the commit as the hub lists it; exactly one of the hashes is given."""

    name: str
    size: int
    sha256: str | None
    blob_sha1: str | None


def wanted(environ: Mapping[str, str]) -> Wanted:
    """Read what is wanted from the environment; raises :class:`FetchError`."""
    name = environ.get("MEMSWEEP_MODEL_NAME", "")
    folder = environ.get("MEMSWEEP_MODEL_PATH", "")
    # Not a variable of its own: Polyaxon would turn a hash of digits only into a number.
    commit = Path(folder).name
    if not _NAME.fullmatch(name):
        raise FetchError(f"MEMSWEEP_MODEL_NAME: got {name!r:.80}, wanted OWNER/NAME of a hub")
    if not (Path(folder).is_absolute() and _COMMIT.fullmatch(commit)):
        raise FetchError(
            f"MEMSWEEP_MODEL_PATH: got {folder!r:.200}, wanted an absolute path that ends with the "
            "commit, 40 hex digits"
        )
    limit = environ.get("MEMSWEEP_FETCH_S", "3600")
    if not limit.isdecimal() or int(limit) < 1:
        raise FetchError(f"MEMSWEEP_FETCH_S: got {limit!r:.80}, wanted seconds")
    # A secret made of a file often ends with the file's line end.
    token = environ.get("HF_TOKEN", "").strip() or None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise FetchError("HF_TOKEN: holds what no token has, such as a line's end")
    return Wanted(
        name=name,
        revision=commit,
        folder=Path(folder),
        hub=_hub(environ.get("HF_ENDPOINT") or HUB, is_secret=token is not None),
        token=token,
        deadline=time.monotonic() + int(limit),
    )


def _hub(text: str, *, is_secret: bool) -> str:
    """Return the hub's address, checked before anything is sent there."""
    hub = text.rstrip("/")
    if "@" in hub:
        raise FetchError("HF_ENDPOINT: a login has no place in an address; wanted HF_TOKEN for it")
    if not hub.startswith(("https://", "http://")):
        raise FetchError(f"HF_ENDPOINT: got {hub!r:.80}, wanted an http(s) address")
    if is_secret and not _keeps_a_secret(hub):
        raise FetchError(
            f"HF_ENDPOINT: got {hub!r:.80} with HF_TOKEN, which anybody on the way could read; "
            "wanted https://, or no HF_TOKEN"
        )
    return hub


def _keeps_a_secret(hub: str) -> bool:
    """Whether what is sent there can be read by nobody else: by https, or on this machine."""
    origin = _origin(hub)
    if origin is None:
        return False
    scheme, host, _ = origin
    if scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an address; ``None`` where it has none that are valid."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}[parts.scheme]
    except (KeyError, ValueError):
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the token where a redirect stays at the same scheme, host and port.

    The hub names files by other addresses of its own, which ask for the token again, and sends on
    to where its large ones lie, which must not get it.
    """

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        login = req.get_header("Authorization")
        if following is not None and login is not None and _origin(newurl) == _origin(req.full_url):
            following.add_unredirected_header("Authorization", login)
        return following


def fetch(want: Wanted) -> str:
    """Bring the commit into its folder unless it is there; return what was done in one line."""
    want.folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(want):
        if _is_whole(want):
            return f"{want.name}@{want.revision}: there already"
        entries = _chosen(_listing(want), want)
        part = want.folder.with_name(f".{want.folder.name}.part")
        part.mkdir(exist_ok=True)
        files = {entry.name: _file(want, entry, part / entry.name) for entry in entries}
        (part / revision.MARKER).write_text(
            json.dumps(_marker(want, entries, files), indent=2) + "\n"
        )
        if want.folder.exists():  # without its marker: nobody can have served from it
            shutil.rmtree(want.folder)
        part.rename(want.folder)
    return (
        f"{want.name}@{want.revision}: {len(entries)} files, {sum(e.size for e in entries)} bytes"
    )


def _marker(want: Wanted, entries: list[Entry], files: dict[str, str]) -> dict[str, object]:
    return {
        "format": 1,
        "name": want.name,
        "revision": want.revision,
        "source": want.hub,
        "fetched_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {e.name: {"bytes": e.size, "sha256": files[e.name]} for e in entries},
    }


def _is_whole(want: Wanted) -> bool:
    marker = revision.downloaded(want.folder) or {}
    return (marker.get("name"), marker.get("revision")) == (want.name, want.revision)


@contextlib.contextmanager
def _alone(want: Wanted) -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops when this process ends."""
    path = want.folder.with_name(f".{want.folder.name}.lock")
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > want.deadline:
                    raise FetchError(f"{path}: another download did not end in time") from None
                time.sleep(0.5)
        yield


def _chosen(entries: list[Entry], want: Wanted) -> list[Entry]:
    chosen = [e for e in entries if _FILE.fullmatch(e.name) and e.name.endswith(SUFFIXES)]
    names = [entry.name for entry in chosen]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise FetchError(
            f"{want.name}@{want.revision}: the commit has no config.json with .safetensors; got "
            f"{', '.join(names) or 'nothing to serve'}"
        )
    return chosen


def _listing(want: Wanted) -> list[Entry]:
    url: str | None = f"{want.hub}/api/models/{want.name}/tree/{want.revision}"
    found: list[Entry] = []
    while url is not None:
        text, link = _page(want, url)
        try:
            found += [_entry(one) for one in json.loads(text) if one.get("type") == "file"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(f"{url}: not a listing of files ({error})") from error
        following = _NEXT.search(link)
        url = following[1] if following else None
        if url is not None and not url.startswith(want.hub + "/"):
            raise FetchError(f"{want.hub}: its listing goes on at another address, {url:.100}")
    return found


def _page(want: Wanted, url: str) -> tuple[bytes, str]:
    """Return one page of a listing and its ``Link`` header."""
    problem = "not tried"
    for again in range(_TRIES):
        _pause(want, again)
        try:
            with _opened(want, url) as answer:
                return answer.read(_MAX_LISTING), answer.headers.get("Link") or ""
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
    raise FetchError(f"{url}: {problem}, after {_TRIES} tries")


def _pause(want: Wanted, again: int) -> None:
    """Wait before another try, longer each time, never beyond the deadline."""
    if again:
        time.sleep(min(2.0**again, max(0.0, want.deadline - time.monotonic())))


def _entry(one: Mapping[str, object]) -> Entry:
    large = one.get("lfs")
    name, size = str(one["path"]), one["size"]
    if not isinstance(size, int):
        raise TypeError(f"size of {name} is {size!r}")
    if isinstance(large, dict):
        return Entry(name, size, str(large["oid"]), None)
    return Entry(name, size, None, str(one["oid"]))


def _file(want: Wanted, entry: Entry, path: Path) -> str:
    """Download one file unless a try before left it whole; return its sha256."""
    url = f"{want.hub}/{want.name}/resolve/{want.revision}/{entry.name}"
    if path.is_file() and (digest := _checked(path, entry)):
        return digest
    problem = "not tried"
    for again in range(_TRIES):
        _pause(want, again)
        try:
            with _opened(want, url) as answer, path.open("wb") as file:
                _copy(answer, file, want)
        except (OSError, HTTPException) as error:  # a stream that broke
            problem = f"{type(error).__name__}: {error}"
            continue
        if digest := _checked(path, entry):
            return digest
        problem = f"got {path.stat().st_size} bytes of another content, wanted {entry.size}"
    path.unlink(missing_ok=True)
    raise FetchError(f"{url}: {problem}, after {_TRIES} tries")


def _copy(answer: HTTPResponse, file: BinaryIO, want: Wanted) -> None:
    # read1: what has come so far, or one that comes in drops would never reach the deadline.
    while chunk := answer.read1(_CHUNK):
        _in_time(want)
        file.write(chunk)


def _in_time(want: Wanted) -> None:
    if time.monotonic() > want.deadline:
        raise FetchError(f"{want.name}: not downloaded in time; raise fetch_s in the profile")


def _checked(path: Path, entry: Entry) -> str | None:
    """Return the file's sha256 if it is what the hub lists, else ``None``."""
    if path.stat().st_size != entry.size:
        return None
    # SHA-1 because git names files by it; large ones have a sha256.
    blob = hashlib.sha1(b"blob %d\x00" % entry.size, usedforsecurity=False)
    content = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
            if entry.sha256 is None:
                blob.update(chunk)
    digest = content.hexdigest()
    good = blob.hexdigest() == entry.blob_sha1 if entry.sha256 is None else digest == entry.sha256
    return digest if good else None


@contextlib.contextmanager
def _opened(want: Wanted, url: str) -> Iterator[HTTPResponse]:
    _in_time(want)
    request = urllib.request.Request(url)
    if want.token is not None:
        # Handed on by a redirect as _Redirects says, and in no other way.
        request.add_unredirected_header("Authorization", f"Bearer {want.token}")
    try:
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(request, timeout=_ANSWER_S) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        if error.code == 429 or error.code >= 500:
            raise
        hint = "; a gated model needs HF_TOKEN" if error.code in (401, 403) else ""
        raise FetchError(f"{url}: the hub answers {error.code}{hint}") from error


def main() -> int:
    """Download the model given in the environment and return the exit code."""
    try:
        done = fetch(wanted(os.environ))
    except (FetchError, OSError, HTTPException) as error:
        sys.stderr.write(f"model not fetched: {error}\n")
        return EXIT_FAILED
    sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
