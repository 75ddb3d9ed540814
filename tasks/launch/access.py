"""How the server of a profile is spoken to: with which token, and whether all it needs is there.

A token comes from the environment or from Polyaxon's own configuration on this machine. It is held
in memory only: never written, printed or put on a command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tasks.launch.port import AccessRefused
from tasks.launch.target import Profile
from tasks.redact import remember
from warehouse.errors import BadInput, CannotFindOut, MemsweepError

if TYPE_CHECKING:
    from tasks.launch.polyaxon import PolyaxonClient

TOKEN_VARIABLE = "POLYAXON_AUTH_TOKEN"
#: The folder of the user's login, in a process whose POLYAXON_HOME is the embedded server's.
LOGIN_VARIABLE = "MEMSWEEP_POLYAXON_HOME"
#: Major version of the client and of the API it speaks.
MAJOR = "2"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def find_token(profile: Profile, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the token for a profile's server, ``None`` where there is none.

    The variable the profile names; else ``POLYAXON_AUTH_TOKEN``; else what ``polyaxon login`` left,
    but only for the host it was given for: a token is not shown to another server.

    Raises:
        BadInput: the variable the profile names is not set, or the token would travel in clear.
    """
    given = os.environ if environment is None else environment
    name = profile.token_env or TOKEN_VARIABLE
    token = given.get(name, "").strip() or None
    if token is None and profile.token_env is not None:
        raise BadInput(
            f"target {profile.name}: token_env names {name}, which is not set; export {name}"
        )
    token = token or _logged_in(profile, given)
    address = urlsplit(profile.host or "")
    if token and address.scheme != "https" and address.hostname not in _LOOPBACK:
        raise BadInput(
            f"target {profile.name}: the token would travel in clear to {profile.host}; use https, "
            "a port-forward to localhost, or no token"
        )
    if token:
        remember(token)
    return token


def token_environment(profile: Profile) -> dict[str, str]:
    """Return the variables by which another process of ours finds the same token."""
    name = profile.token_env or TOKEN_VARIABLE
    given = {name: os.environ[name]} if name in os.environ else {}
    return {**given, "POLYAXON_HOME": str(login_folder(os.environ))}


def login_folder(given: Mapping[str, str]) -> Path:
    """Return the folder in which ``polyaxon login`` leaves its token."""
    folder = given.get(LOGIN_VARIABLE) or given.get("POLYAXON_HOME")
    return Path(folder or Path.home() / ".polyaxon")


def _logged_in(profile: Profile, given: Mapping[str, str]) -> str | None:
    """Return the token of Polyaxon's own configuration, if it is for this host."""
    folder = login_folder(given)
    host = _read(folder / ".client", "host", "POLYAXON_HOST")
    if host is None or host.rstrip("/") != (profile.host or "").rstrip("/"):
        return None
    return _read(folder / ".auth", "token", TOKEN_VARIABLE)


def _read(path: Path, *names: str) -> str | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = [value[name] for name in names if value.get(name)] if isinstance(value, dict) else []
    return str(found[0]) if found else None


def client(profile: Profile) -> PolyaxonClient:
    """Return the client of a profile's server; asks it nothing yet.

    Raises:
        BadInput: see :func:`find_token`; or the certificates of ``ca_file`` cannot be read.
    """
    from tasks.launch.polyaxon import PolyaxonClient

    token = find_token(profile)
    try:
        return PolyaxonClient(
            str(profile.host),
            owner=profile.owner,
            project=profile.project,
            token=token,
            verify=profile.verify_tls,
            ca_file=None if profile.ca_file is None else Path(profile.ca_file).expanduser(),
            managed_by=profile.managed_by,
            request_s=profile.request_s,
            call_s=profile.call_s,
            sync_s=profile.collect_s,
        )
    except OSError as error:  # ssl.SSLError is one
        raise BadInput(
            f"target {profile.name}: ca_file {profile.ca_file}: {error.strerror or error}; wanted "
            "a file of certificates in PEM"
        ) from error


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a target needs: whether it is there, and what to do where it is not.

    ``error`` is what exit code a missing one means: bad input, or it could not be found out.
    """

    name: str
    text: str
    error: type[MemsweepError] | None = None


def check(profile: Profile, look_at_operations: Callable[[], None]) -> list[Finding]:
    """Look whether a cluster's server can take what would be submitted; creates only the project.

    ``look_at_operations`` raises :class:`BadInput` where one of them is wrong. Behind a server that
    cannot be asked nothing else is looked at.
    """
    try:
        port = client(profile)
        told = port.check()
    except MemsweepError as error:
        name = "access" if isinstance(error, AccessRefused | BadInput) else "server"
        return [_missing(name, error)]
    findings = [_version(profile, told)]
    looks: dict[str, Callable[[], Finding]] = {
        "project": lambda: _project(port),
        "queue": lambda: _queue(profile, port),
        "operation": lambda: _operation(look_at_operations),
    }
    for name, look in looks.items():
        try:
            findings.append(look())
        except MemsweepError as error:
            findings.append(_missing(name, error))
    return findings


def _missing(name: str, error: MemsweepError) -> Finding:
    kind = CannotFindOut if isinstance(error, CannotFindOut) else BadInput
    return Finding(name, str(error), BadInput if isinstance(error, AccessRefused) else kind)


def _version(profile: Profile, told: Mapping[str, str]) -> Finding:
    version = told["version"]
    text = f"Polyaxon {version} ({told['distribution']}) at {profile.host}"
    if version.removeprefix("v").split(".")[0] == MAJOR:
        return Finding("server", text)
    return Finding("server", f"{text}: wanted version {MAJOR}.x; upgrade the server", BadInput)


def _project(port: PolyaxonClient) -> Finding:
    where = f"{port.owner}/{port.project}"
    if port.has_project():
        return Finding("project", where)
    try:
        port.ensure_project()
    except AccessRefused as error:
        raise BadInput(
            f"project {where} is not there and may not be made with this token: have it made, or "
            f"name another one as owner and project in the profile ({error})"
        ) from error
    return Finding("project", f"{where}: made")


def _queue(profile: Profile, port: PolyaxonClient) -> Finding:
    if profile.queue is None:
        return Finding("queue", "none asked for")
    try:
        known = port.queues()
    except AccessRefused:
        known = None
    if known is None:
        return Finding("queue", f"{profile.queue}: this server tells of no queues")
    if profile.queue in known or profile.queue in {one.rpartition("/")[2] for one in known}:
        return Finding("queue", profile.queue)
    return Finding(
        "queue",
        f"queue {profile.queue!r} is not among {', '.join(sorted(known)) or 'none'}; "
        "correct queue in the profile",
        BadInput,
    )


def _operation(look: Callable[[], None]) -> Finding:
    look()
    return Finding("operation", "can be submitted")


def require(findings: list[Finding], target: str, tell: Callable[[str], None]) -> None:
    """Say each finding in one line and go on only where nothing is missing.

    Raises:
        BadInput, CannotFindOut: something is; the message is the line of one of them.
    """
    missing = [one for one in findings if one.error is not None]
    first = next((one for one in missing if one.error is not BadInput), next(iter(missing), None))
    for one in findings:
        if one is not first:
            tell(f"  {one.name}: {'' if one.error is None else 'missing: '}{one.text}")
    if first is not None and first.error is not None:
        raise first.error(
            f"target {target}: {len(missing)} of {len(findings)} checks failed; nothing was "
            f"submitted; {first.name}: {first.text}"
        )
