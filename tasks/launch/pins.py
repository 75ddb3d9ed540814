"""Pins of a sweep: tags resolved to digests and branches to commits, where the servers answer.

What was found goes into a file beside the sweep, with its source and time; nothing is ever made up,
and what could not be found stays unresolved. :func:`merged` puts the file's pins into the sweep's
text, so that everything that reads a sweep sees them.

Sources: the registries' HTTP API (OCI distribution specification: ``/v2/{name}/manifests/{tag}``,
anonymous token flow) and the hub's (``/api/models/{model}/revision/{branch}``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import yaml
from pydantic import Field, ValidationError

from tasks.patience import within
from tasks.plan import hub
from tasks.plan.cell import UNRESOLVED, Strict
from tasks.plan.sweep import SweepPins, first_problem, parse_yaml
from warehouse.errors import BadInput, CannotFindOut

if TYPE_CHECKING:
    import httpx

FORMAT = 1
TIMEOUT_S = 20.0
#: Longest time of one whole answer, however it drips in.
ANSWER_S = 60.0
DEFAULT_TAG_PREFIX = "v"
_DOCKER_HUB = "registry-1.docker.io"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
#: A manifest is a few KB; more is something else.
_MAX_BYTES = 4_000_000
_MAX_SHOWN = 300
#: What a header can hold.
_PRINTABLE = re.compile(r"[!-~]+\Z")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_IMAGE = re.compile(
    r"^(?:(?P<host>[a-z0-9.-]+\.[a-z0-9.-]+(?::\d+)?|localhost(?::\d+)?|[a-z0-9.-]+:\d+)/)?"
    r"(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*):(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})$"
)


class Found(Strict):
    """One pin that was resolved, and how."""

    pin: str = Field(description="which pin")
    of: str = Field(description="the tag or branch that was asked for")
    value: str = Field(description="digest or commit")
    source: str = Field(description="address that answered")
    at: str = Field(description="when, UTC")

    @property
    def what(self) -> str:
        """What was asked, in the words of a step: see :func:`resolve`."""
        kind = "model" if self.pin == "model_revision" else "image"
        return f"{kind} {self.of.partition('@')[0]}"


class PinsFile(Strict):
    """``<sweep>.pins.yaml``: what ``memsweep pin`` found for a sweep."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    sweep: str = Field(description="the sweep's name")
    pins: SweepPins = Field(description="merged into the sweep where it leaves them open")
    build: dict[str, str] = Field(
        default_factory=dict, description="build arguments of the image recipe"
    )
    sources: tuple[Found, ...] = Field(description="where every value comes from")


@dataclass(frozen=True, slots=True)
class Image:
    """An image by tag, taken apart."""

    text: str
    registry: str  # host, with a port where it has one
    name: str
    tag: str

    @property
    def without_tag(self) -> str:
        """The image as it was written, without its tag."""
        return self.text.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server answered, read up to a limit."""

    status_code: int
    headers: httpx.Headers
    content: bytes


def image(text: str) -> Image:
    """Take ``[HOST/]NAME:TAG`` apart; without a host it is one of Docker Hub's.

    Raises:
        BadInput: it has another form.
    """
    match = _IMAGE.match(text)
    if match is None:
        raise BadInput(f"image {text!r}: wanted [HOST/]NAME:TAG, such as vllm/vllm-openai:v0.27.0")
    host, name = match["host"], match["name"]
    if host is None or host in ("docker.io", "index.docker.io"):
        host, name = _DOCKER_HUB, name if "/" in name else f"library/{name}"
    return Image(text, host, name, match["tag"])


def address(text: str, *, what: str) -> str:
    """Return a server's address, checked; http only for this machine.

    Raises:
        BadInput: it is no https address, or one with a login in it.
    """
    wanted = f"{what} {text!r}: wanted https://HOST, or http:// on this machine"
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise BadInput(wanted) from error
    if parts.username or parts.password:  # first: the other refusal shows the address
        raise BadInput(f"{what}: credentials have no place in an address")
    if not _is_safe(text):
        raise BadInput(wanted)
    return text.rstrip("/")


def _is_safe(text: str) -> bool:
    """Whether an address is https, or http of this machine."""
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and _is_local(text)))


def _is_local(base: str) -> bool:
    return urlsplit(base).hostname in _LOOPBACK


def _shown(told: object) -> str:
    """Return what a server told as it may be printed: its control bytes would reach a terminal."""
    return repr(str(told)[:_MAX_SHOWN])[1:-1]


def client(base: str) -> httpx.Client:
    """Return a client that follows no redirect; for this machine without any proxy."""
    import httpx

    return httpx.Client(
        timeout=TIMEOUT_S,
        follow_redirects=False,
        trust_env=not _is_local(base),
        headers={"User-Agent": "memsweep"},
    )


def digest_of(wanted: Image, *, registry: str | None = None) -> Found:
    """Ask the image's registry which digest its tag has now.

    ``registry`` is another address to ask, such as a mirror.

    Raises:
        BadInput: the registry says that there is no such image or tag.
        CannotFindOut: it cannot be reached, or its answer is not the one of a registry.
    """
    url, answer = _ask_registry(wanted, wanted.tag, registry)
    if answer.status_code == 404:
        raise BadInput(f"image {wanted.text}: {url} answers 404: no such image or tag")
    if answer.status_code != 200:
        raise CannotFindOut(
            f"image {wanted.text}: {url} answers {answer.status_code}; is it public?"
        )
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    stated = answer.headers.get("Docker-Content-Digest")
    if stated is not None and stated != digest:
        raise CannotFindOut(
            f"image {wanted.text}: {url} states {_shown(stated)}, but its answer hashes to {digest}"
        )
    _manifest(answer, url, wanted)
    return Found(pin="image_digest", of=wanted.text, value=digest, source=url, at=_now())


def _ask_registry(wanted: Image, reference: str, registry: str | None) -> tuple[str, _Answer]:
    """Return the address of a manifest, by tag or digest, and what the registry answers there."""
    base = registry or f"https://{wanted.registry}"
    url = f"{base}/v2/{wanted.name}/manifests/{reference}"
    with client(base) as session:
        answer = _get(session, url, {"Accept": _MANIFESTS})
        if answer.status_code == 401:
            token = _token(session, base, answer.headers.get("WWW-Authenticate", ""), wanted)
            headers = {"Accept": _MANIFESTS, "Authorization": f"Bearer {token}"}
            answer = _get(session, url, headers)
    return url, answer


def image_is_there(name: str, digest: str, *, registry: str | None = None) -> bool:
    """Ask an image's registry whether it still has this digest; ``name`` bears no tag.

    Raises:
        BadInput: ``name`` is no image's name.
        CannotFindOut: the registry cannot be reached, or wants another login than an anonymous one.
    """
    wanted = image(f"{name}:any")
    url, answer = _ask_registry(wanted, digest, registry)
    if answer.status_code not in (200, 404):
        raise CannotFindOut(f"image {name}@{digest}: {url} answers {answer.status_code}")
    return answer.status_code == 200


def commit_of(model: str, *, branch: str, endpoint: str | None = None) -> Found:
    """Ask the hub which commit a model's branch or tag names now.

    Raises:
        BadInput: the hub says that there is no such model or branch.
        CannotFindOut: it cannot be reached, or its answer names no commit.
    """
    base = endpoint or os.environ.get(hub.ENDPOINT_VARIABLE) or hub.ENDPOINT
    url = f"{address(base, what='hub')}/api/models/{model}/revision/{quote(branch, safe='')}"
    with client(base) as session:
        answer = _get(session, url, {})
    if answer.status_code in (401, 403, 404):
        raise BadInput(
            f"model {model}: {url} answers {answer.status_code}: no such model or branch, or it "
            "needs a login; state its commit under pins.model_revision"
        )
    if answer.status_code != 200:
        raise CannotFindOut(f"model {model}: {url} answers {answer.status_code}")
    value = _json(answer, url, f"model {model}").get("sha")
    if not isinstance(value, str) or not _COMMIT.match(value):
        raise CannotFindOut(f"model {model}: {url} names no commit, got {_shown(value)}")
    return Found(pin="model_revision", of=f"{model}@{branch}", value=value, source=url, at=_now())


def _get(session: httpx.Client, url: str, headers: dict[str, str]) -> _Answer:
    """Return one whole answer.

    Raises:
        CannotFindOut: there is none within :data:`ANSWER_S`, or it is too long.
    """
    try:
        return within(ANSWER_S, lambda: _ask(session, url, headers), name="pins")
    except TimeoutError:
        raise CannotFindOut(f"{_shown(url)}: no whole answer within {ANSWER_S:.0f} s") from None


def _ask(session: httpx.Client, url: str, headers: dict[str, str]) -> _Answer:
    import httpx

    content = bytearray()
    try:
        with session.stream("GET", url, headers=headers) as answer:
            for part in answer.iter_bytes():
                content += part
                if len(content) > _MAX_BYTES:
                    raise CannotFindOut(
                        f"{_shown(url)}: answers with {len(content):,} bytes and more; wanted at "
                        f"most {_MAX_BYTES:,}"
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CannotFindOut(f"{_shown(url)}: cannot be reached ({type(error).__name__})") from error
    return _Answer(answer.status_code, answer.headers, bytes(content))


def _token(session: httpx.Client, base: str, challenge: str, wanted: Image) -> str:
    """Return an anonymous token as the registry's challenge asks for it."""
    scheme, _, rest = challenge.partition(" ")
    parts = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    realm = parts.get("realm", "")
    # http for a registry of this machine only, and then no other one: it could name any address.
    is_allowed = _is_safe(realm) and (_is_local(base) or realm.startswith("https://"))
    if scheme.lower() != "bearer" or not is_allowed:
        raise CannotFindOut(
            f"image {wanted.text}: {base} asks for another login than an anonymous token "
            f"({_shown(scheme) or 'none'}); state the digest under pins.image_digest"
        )
    import httpx

    scope = parts.get("scope") or f"repository:{wanted.name}:pull"
    query = httpx.QueryParams({"service": parts.get("service", ""), "scope": scope})
    answer = _get(session, f"{realm}?{query}", {})
    if answer.status_code != 200:
        raise CannotFindOut(
            f"image {wanted.text}: {_shown(realm)} answers {answer.status_code} to an "
            "anonymous request"
        )
    told = _json(answer, realm, f"image {wanted.text}")
    token = told.get("token") or told.get("access_token")
    if not isinstance(token, str) or not _PRINTABLE.match(token):
        raise CannotFindOut(f"image {wanted.text}: {_shown(realm)} gives no token")
    return token


def _manifest(answer: _Answer, url: str, wanted: Image) -> None:
    """Make sure that it is a manifest that was hashed, not a page of a proxy."""
    told = _json(answer, url, f"image {wanted.text}")
    if not {"manifests", "layers"} & told.keys():
        raise CannotFindOut(f"image {wanted.text}: {url} answers with no manifest")


def _json(answer: _Answer, url: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        raise CannotFindOut(f"{what}: {_shown(url)} answers with no JSON") from error
    if not isinstance(value, dict):
        raise CannotFindOut(f"{what}: {_shown(url)} answers with no JSON object")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# -- the file ----------------------------------------------------------------------------------


def beside(sweep: Path, *, is_shipped: bool) -> Path:
    """Return where a sweep's pins lie: beside its file; a shipped one's in this directory."""
    name = f"{sweep.stem}.pins.yaml"
    return Path(name) if is_shipped else sweep.with_name(name)


def parse(text: str, *, where: str) -> PinsFile:
    """Read a pins file; raises :class:`BadInput` in one line."""
    document = parse_yaml(text, where=where)
    try:
        return PinsFile.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_problem(error)}") from error


def read(path: Path) -> PinsFile | None:
    """Return a sweep's pins, ``None`` where there is no file."""
    if not path.is_file():
        return None
    return parse(path.read_text(encoding="utf-8"), where=str(path))


def merged(text: str, *, where: str, path: Path) -> str:
    """Return a sweep's text with the pins of its file, where it leaves them open.

    Raises:
        BadInput: the file is another sweep's, or says otherwise than the sweep.
    """
    file = read(path)
    document = parse_yaml(text, where=where) if file is not None else None
    if file is None or not isinstance(document, dict):
        return text
    if document.get("name") != file.sweep:
        raise BadInput(
            f"{path}: holds the pins of sweep {file.sweep!r}, wanted {document.get('name')!r}; "
            "move it away or pin again"
        )
    stated = document.get("pins") or {}
    if not isinstance(stated, dict):
        return text
    for name, value in file.pins.model_dump(exclude_none=True).items():
        if stated.get(name) in (None, UNRESOLVED):
            stated = {**stated, name: value}
        elif stated[name] != value:
            raise BadInput(
                f"{path}: pins.{name} is {value}, but the sweep states {stated[name]}; remove one"
            )
    head = f"# {where} with the pins of {path.name}\n"
    return head + yaml.safe_dump({**document, "pins": stated}, sort_keys=False, width=100)


def kept(
    path: Path, *, sweep: str, missing: Iterable[str], not_asked: Container[str] = ()
) -> list[Found]:
    """Return what an earlier call found and still holds.

    That is what this one could not resolve, and the pins in ``not_asked``, which it did not look
    for.
    """
    earlier = read(path)
    if earlier is None or earlier.sweep != sweep:
        return []
    return [
        one
        for one in earlier.sources
        if one.pin in not_asked or any(m.startswith(f"{one.what} (") for m in missing)
    ]


def written(file: PinsFile) -> str:
    """Return a pins file's text."""
    head = (
        "# Written by memsweep pin; merged into the sweep whenever it is read. Pin again for\n"
        "# newer ones: other pins are other cells, and the old ones stay measured as they are.\n"
    )
    document = file.model_dump(mode="json", exclude_none=True)
    return head + yaml.safe_dump(document, sort_keys=False, width=100)


def resolve(steps: Iterator[tuple[str, Callable[[], Found]]]) -> tuple[list[Found], list[str]]:
    """Take every step; return what was found and, in words, what could not be."""
    found, missing = [], []
    for what, step in steps:
        try:
            found.append(step())
        except (BadInput, CannotFindOut) as error:
            missing.append(f"{what} ({error})")
    return found, missing
