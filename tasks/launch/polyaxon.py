"""The one adapter of the port: Polyaxon's real client over HTTP.

What it works around, all seen with 2.18.0: the client has no deadline of its own and repeats
nothing; SQLite's "database is locked" of the embedded server arrives as 405 on POST; a log that
was read early stays cut unless ``force`` is asked for; status posts are sent in the background,
where an error is lost; filters compare what looks like a number as a number and then miss the
stored string; every error prints a banner; certificates are not verified unless it is told to.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import json
import logging
import re
import shutil
import ssl
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import tenacity

from tasks.launch import port
from tasks.launch.port import AccessRefused, Condition, RunUnknown, RunView
from warehouse.errors import CannotFindOut, ServiceDown

T = TypeVar("T")

#: One request may take this long.
REQUEST_S = 10.0
#: Creating may take longer than the embedded server waits for its database (30 s): given up sooner,
#: the request would still be carried out, and the one sent after it too.
CREATE_S = 45.0
#: After a request to create was repeated: until the one thought lost shows, if it was not.
LOOK_AGAIN_S = 2.0
#: A fetch that a kill left half done is cleared away by a later one after this time.
STALE_FETCH_S = 3600.0
#: One call of the port, repeats included, may take this long by default.
CALL_S = 60.0
#: One answer that streams (a log, an archive) may pause this long.
STREAM_S = 60.0
#: An answer that cannot be read may have been cut off; after so many of them it is what is sent.
UNREADABLE_TIMES = 4
_PAGE = 100
#: Values a filter finds again: no number, no sign that has a meaning in the query language.
_FILTERABLE = re.compile(r"(?=.*[a-z])[a-z0-9_]+")
#: What a run that may have left something went through.
_RAN = frozenset({"running", "processing"})
#: What will not be otherwise the next time, though no status says so -> what to do.
_STAYS = {
    "CERTIFICATE_VERIFY_FAILED": "state its authority as ca_file in the profile",
    "too many redirects": "state the address it redirects to as host (https for http?)",
}
#: Faults of this machine's own disk, which asking the server again does not mend.
_OWN_DISK = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST}
)
_NOISY = ("polyaxon", "polyaxon.cli", "urllib3.connectionpool")


class _Transient(Exception):
    """A fault after which the same request may be sent again; ``after_s`` as the server asks."""

    after_s: float = 0.0


class _Unreadable(_Transient):
    """An answer of the right status that is not what it should be."""


class _Wait(tenacity.wait.wait_base):
    """Longer from time to time with some jitter, and never less than the server asked for."""

    _own = tenacity.wait_exponential_jitter(multiplier=0.1, max=3.0, jitter=0.2)

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        fault = retry_state.outcome.exception() if retry_state.outcome else None
        asked = fault.after_s if isinstance(fault, _Transient) else 0.0
        return max(asked, self._own(retry_state))


class _Hopeless(tenacity.stop.stop_base):
    """Answers that could not be read one after another."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        fault = retry_state.outcome.exception() if retry_state.outcome else None
        return isinstance(fault, _Unreadable) and retry_state.attempt_number >= UNREADABLE_TIMES


class PolyaxonClient:
    """The port over ``RunClient``. Making one costs about 2.5 s of imports, once a process."""

    def __init__(
        self,
        host: str,
        *,
        owner: str = "default",
        project: str = "memsweep",
        token: str | None = None,
        verify: bool = True,
        ca_file: Path | None = None,
        managed_by: Literal["cli", "agent"] = "cli",
        request_s: float = REQUEST_S,
        call_s: float = CALL_S,
        sync_s: float = 0.0,
    ) -> None:
        """Make a client of one project.

        ``verify`` and ``ca_file`` (else the system's) are for TLS; ``managed_by`` says who executes
        runs: a supervisor of ours or the server's agent; ``request_s`` and ``call_s`` bound one
        request and one call with its repeats; ``sync_s`` is :attr:`PolyaxonPort.sync_s`.
        """
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        from polyaxon._constants.globals import NO_AUTH
        from polyaxon._schemas.client import ClientConfig
        from polyaxon.client import PolyaxonClient as HttpClient

        self._host = host.rstrip("/")
        self._owner = owner
        self._project = project
        self._call_s = call_s
        self._managed_by = managed_by
        self._sync_s = sync_s
        self._local = urlsplit(self._host).hostname in {"127.0.0.1", "localhost", "::1"}
        self._tls = ssl.create_default_context(cafile=ca_file) if verify else False

        def client(request_s: float) -> Any:
            config = ClientConfig(
                host=self._host,
                timeout=request_s,
                retries=0,
                verify_ssl=verify,
                ssl_ca_cert=None if ca_file is None else str(ca_file),
            )
            # Without a word for it, a token found in the environment goes to whatever host this is.
            return HttpClient(config=config, token=token or NO_AUTH)

        self._client = client(min(request_s, call_s))
        self._creating = client(max(request_s, CREATE_S))

    @property
    def host(self) -> str:
        return self._host

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def project(self) -> str:
        return self._project

    @property
    def sync_s(self) -> float:
        return self._sync_s

    def check(self) -> dict[str, str]:
        told = self._call(
            "ask for its version", lambda: self._client.versions_v1.get_installation()
        )
        return {
            "host": self._host,
            "version": str(told.version),
            "distribution": str(told.dist),
        }

    def ensure_project(self) -> None:
        from polyaxon.schemas import V1Project

        projects = self._client.projects_v1

        def look_or_create() -> None:
            try:
                projects.get_project(self._owner, self._project)
            except Exception as error:
                if _http_status(error) != 404:
                    raise
                body = V1Project.model_construct(name=self._project)
                projects.create_project(self._owner, body)

        self._call(f"make project {self._project}", look_or_create)

    def has_project(self) -> bool:
        """Tell whether the project is there."""

        def look() -> bool:
            try:
                self._client.projects_v1.get_project(self._owner, self._project)
            except Exception as error:
                if _http_status(error) == 404:
                    return False
                raise
            return True

        return self._call(f"look for project {self._project}", look)

    def queues(self) -> list[str] | None:
        """Return the queues of the owner, each as ``agent/queue``; ``None`` where none are told."""

        def look() -> list[str] | None:
            try:
                told = self._client.queues_v1.list_organization_queue_names(
                    self._owner, no_page=True
                )
            except Exception as error:
                if _http_status(error) in {404, 405}:  # only the commercial server has queues
                    return None
                raise
            return [f"{one.agent}/{one.name}" for one in told.results or []]

        return self._call("list queues", look)

    def find(self, meta: dict[str, str]) -> list[RunView]:
        filters = [
            f"meta_info.{key}:{value}"
            for key, value in meta.items()
            if _FILTERABLE.fullmatch(value)
        ]
        return [
            run
            for run in self._list(",".join(filters) or f"managed_by:{self._managed_by}")
            if all(run.meta_info.get(key) == value for key, value in meta.items())
        ]

    def active(self) -> list[RunView]:
        statuses = "|".join(port.LIVE_STATUSES)
        runs = self._list(f"managed_by:{self._managed_by},status:{statuses}")
        return [run for run in runs if port.META_MARK in run.meta_info]

    def create(self, *, operation: dict[str, object], name: str, meta: dict[str, str]) -> RunView:
        from polyaxon.schemas import ManagedBy

        marked = {port.META_MARK: "cell", **meta}
        tries = 0

        def look_or_create() -> RunView:
            nonlocal tries
            tries += 1
            # After a lost answer the run may exist, or come to exist while we look.
            if tries > 1 and (found := self._find_soon(marked)):
                return found
            created = self._run(None, self._creating).create(
                content=operation,
                name=name,
                managed_by=ManagedBy(self._managed_by),
                meta_info=marked,
            )
            if tries > 1 and (found := self._find_soon(marked)):
                return found
            return _view(created)

        created = self._call(f"create run {name}", look_or_create)
        return self.view(created.uuid)

    def _find_soon(self, meta: dict[str, str]) -> RunView | None:
        """Return the oldest run with these values, looking again a moment later."""
        deadline = time.monotonic() + LOOK_AGAIN_S
        while True:
            found = self.find(meta)
            if time.monotonic() >= deadline:
                return found[0] if found else None
            time.sleep(min(0.5, LOOK_AGAIN_S))

    def view(self, run_uuid: str) -> RunView:
        def look() -> RunView:
            run = self._run(run_uuid)
            run.refresh_data(load_conditions=True)
            return _view(run.run_data)

        return self._call(f"view run {run_uuid}", look)

    def content(self, run_uuid: str) -> str:
        def look() -> str:
            run = self._run(run_uuid)
            run.refresh_data()
            return str(run.run_data.content or "")

        return self._call(f"read the operation of run {run_uuid}", look)

    def stop(self, run_uuid: str) -> None:
        self._call(f"stop run {run_uuid}", lambda: self._run(run_uuid).stop())

    def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None:
        self._call(
            f"log outputs of run {run_uuid}",
            lambda: self._run(run_uuid).log_outputs(async_req=False, **outputs),
        )

    def post_status(self, run_uuid: str, status: str, reason: str, message: str) -> None:
        from polyaxon.schemas import V1StatusCondition, V1Statuses

        now = datetime.now(UTC)
        condition = V1StatusCondition.model_construct(
            type=V1Statuses(status),
            status=True,
            reason=reason,
            message=message,
            last_transition_time=now,
            last_update_time=now,
        )
        # RunClient.log_status sends in the background, where a lost write is never seen.
        self._call(
            f"post status {status} of run {run_uuid}",
            lambda: self._client.runs_v1.create_run_status(
                owner=self._owner,
                project=self._project,
                uuid=_hex(run_uuid),
                body={"condition": condition},
                async_req=False,
            ),
        )

    def logs(self, run_uuid: str) -> str:
        run = self._call(f"view run {run_uuid}", lambda: self._refreshed(run_uuid))
        lines: list[str] = []
        last_file: str | None = None
        while True:
            parameters = {"force": "true", **({"last_file": last_file} if last_file else {})}
            page = self._streams(run, "logs", parameters)
            lines += [str(line.get("value", "")) for line in page.get("logs") or []]
            files = page.get("files") or []
            if not page.get("last_file") or page["last_file"] == (files or [None])[-1]:
                return "\n".join(lines) + ("\n" if lines else "")
            last_file = page["last_file"]

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        run = self._call(f"view run {run_uuid}", lambda: self._refreshed(run_uuid))
        into.mkdir(parents=True, exist_ok=True)
        _clear_stale_fetches(into.parent)
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".fetch-") as scratch:
            archive = Path(scratch) / "run.tar.gz"
            try:
                # The whole run: the server names the archive it packs by the path's last part, so
                # that "outputs" of two runs at a time are one file, and either may be handed out.
                parameters = {"path": "", "force": "true"}
                self._streams(run, "artifacts", parameters, save_to=archive)
            except CannotFindOut as error:
                if _http_status(error) not in {400, 404}:
                    raise
                if self._left_nothing(run, run_uuid):
                    return []
                raise CannotFindOut(
                    f"Polyaxon at {self._host}: did not hand out the outputs of run {run_uuid}, "
                    "which ran and may have left some; call again, or look at them in Polyaxon "
                    f"({error})"
                ) from error
            unpacked = Path(scratch) / "run"
            _unpack(archive, unpacked, run_uuid)
            root = _outputs_root(unpacked)
            if root is None:
                return []
            self._check_owner(root, run_uuid)
            names = sorted(
                str(path.relative_to(root))
                for path in root.rglob("*")
                # Moved, a link may lead out of the bundle.
                if path.is_file() and not path.is_symlink()
            )
            for name in names:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(root / name, into / name)
            return names

    def _check_owner(self, outputs: Path, run_uuid: str) -> None:
        """Refuse outputs that say they are another run's: their own hashes would all agree.

        Raises:
            ServiceDown: they are; asking again may give the right ones.
        """
        try:
            with (outputs / "events.jsonl").open(encoding="utf-8") as lines:
                said = port.canonical_uuid(str(json.loads(next(lines)).get("run_uuid")))
        except (OSError, ValueError, StopIteration, AttributeError):
            return  # it did not come so far as to say it
        if said != run_uuid:
            raise ServiceDown(
                f"Polyaxon at {self._host}: asked for the outputs of run {run_uuid}, got those of "
                f"run {said}"
            )

    def _left_nothing(self, run: Any, run_uuid: str) -> bool:
        """Tell whether it is certain that a run has no outputs, after they were not found.

        The server answers the same when it could not pack them (its disk is full, a file cannot be
        read), and what is sealed without them stays so.
        """
        if not any(one.type in _RAN for one in self.view(run_uuid).conditions):
            return True
        root = self._tree(run, "")
        if root is None or "outputs" not in root[1]:
            return root is not None
        return self._tree(run, "outputs") == ([], [])

    def _tree(self, run: Any, path: str) -> tuple[list[str], list[str]] | None:
        """Return names of files and folders of the run, None when they could not be listed."""
        told = self._streams(run, "artifacts/tree", {"path": path})
        # A listing that failed is answered with 200, empty lists and the fault beside them.
        if not isinstance(told, dict) or told.get("error") or "files" not in told:
            return None
        return list(told["files"]), list(told.get("dirs") or [])

    def _list(self, query: str) -> list[RunView]:
        found: list[RunView] = []

        def page() -> Any:
            return self._run(None).list(
                query=query, sort="created_at", limit=_PAGE, offset=len(found)
            )

        while True:
            answer = self._call("list runs", page)
            found += [_view(run) for run in answer.results or []]
            if not answer.results or len(found) >= (answer.count or 0):
                return found

    def _run(self, run_uuid: str | None, client: Any = None) -> Any:
        from polyaxon.client import RunClient

        return RunClient(
            owner=self._owner,
            project=self._project,
            # Any UUID will do where none is meant; without one RunClient reads the environment.
            run_uuid=_hex(run_uuid) if run_uuid else "0" * 32,
            client=client or self._client,
            manual_exceptions_handling=True,
        )

    def _refreshed(self, run_uuid: str) -> Any:
        run = self._run(run_uuid)
        run.refresh_data()
        return run

    def _streams(
        self, run: Any, what: str, parameters: dict[str, str], *, save_to: Path | None = None
    ) -> Any:
        """GET from the streams API, which the client can only ask without ``force``.

        Returns the JSON of the answer, or writes the archive to ``save_to`` and returns ``None``.
        """
        import httpx

        url = (
            f"{self._host}/streams/v1/{run.namespace}/{self._owner}/{self._project}"
            f"/runs/{run.run_uuid}/{what}"
        )
        headers = self._client.config.get_full_headers(headers={})

        def get() -> Any:
            with httpx.stream(
                "GET",
                url,
                params=parameters,
                headers=headers,
                timeout=STREAM_S,
                trust_env=False,
                verify=self._tls,
            ) as response:
                if save_to is not None and response.is_success:
                    with save_to.open("wb") as file:
                        for chunk in response.iter_bytes():
                            file.write(chunk)
                else:
                    response.read()
                response.raise_for_status()
                if save_to is None:
                    return response.json()
                if not tarfile.is_tarfile(save_to):
                    raise ValueError("no archive")
                return None

        return self._call(f"read the {what} of run {port.canonical_uuid(run.run_uuid)}", get)

    def _call(self, what: str, function: Callable[[], T]) -> T:
        """Call ``function``, repeat it after a transient fault, translate what is left."""

        def once() -> T:
            with self._translated(what):
                return function()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Transient),
            stop=tenacity.stop_any(tenacity.stop_before_delay(self._call_s), _Hopeless()),
            wait=_Wait(),
            reraise=True,
        )
        try:
            return retrying(once)
        except _Unreadable as error:
            raise CannotFindOut(
                f"Polyaxon at {self._host}: could not {what}: the answer cannot be read: {error}; "
                "is this the address of a Polyaxon server?"
            ) from error.__cause__
        except _Transient as error:
            raise ServiceDown(
                f"Polyaxon at {self._host}: could not {what} within {self._call_s:.0f} s: {error}; "
                + (
                    "is it up? ('memsweep services status')"
                    if self._local
                    else "is it up, and can it be reached from here?"
                )
            ) from error.__cause__

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        import httpx
        from polyaxon.exceptions import PolyaxonException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (PolyaxonException, HTTPError, httpx.HTTPError, OSError) as error:
            status = _http_status(error)
            text = _short(error)
            if self._is_transient(status, error):
                fault = _Transient(text)
                fault.after_s = _retry_after_s(error)
                raise fault from error
            raise self._refusal(what, status, text) from error
        except ValueError as error:  # cut off, or no JSON of Polyaxon's
            raise _Unreadable(_short(error)) from error

    def _refusal(self, what: str, status: int | None, text: str) -> CannotFindOut:
        if status is None:
            hints = [hint for words, hint in _STAYS.items() if words in text]
            said = f"Polyaxon at {self._host}: could not {what}: {text}"
            return CannotFindOut("; ".join([said, *hints]))
        said = f"Polyaxon at {self._host}: could not {what}: answered {status}: {text}"
        if status in {401, 403}:
            return AccessRefused(f"{said}; does the token hold, and may it do this in the project?")
        # A 404 of a call about one run; creating and listing name none.
        about_one = "run " in what and not what.startswith("create")
        return RunUnknown(said) if status == 404 and about_one else CannotFindOut(said)

    def _is_transient(self, status: int | None, error: BaseException) -> bool:
        if status is None:
            stays = any(words in str(error) for words in _STAYS)
            return not (stays or (isinstance(error, OSError) and error.errno in _OWN_DISK))
        return status in {408, 429} or status >= 500 or (status == 405 and self._local)


def _hex(run_uuid: str) -> str:
    return port.canonical_uuid(run_uuid).replace("-", "")


def _http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status an exception, or what caused it, carries; None for no answer."""
    seen = 0
    while error is not None and seen < 10:
        for value in (
            getattr(error, "status", None),
            getattr(getattr(error, "response", None), "status_code", None),
        ):
            if isinstance(value, int):
                return value
        error = error.__cause__ or error.__context__
        seen += 1
    return None


def _retry_after_s(error: BaseException | None) -> float:
    """Return how long the server asks to wait, by its Retry-After header; 0 where it does not."""
    seen = 0
    while error is not None and seen < 10:
        for holder in (error, getattr(error, "response", None)):
            headers = getattr(holder, "headers", None)
            if headers is not None and (said := headers.get("Retry-After")):
                return _seconds(str(said))
        error = error.__cause__ or error.__context__
        seen += 1
    return 0.0


def _seconds(said: str) -> float:
    """Return a Retry-After header's value, a number or a date, as seconds from now."""
    if said.strip().isdigit():
        return float(said)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    return 0.0


def _short(error: BaseException) -> str:
    """Return one short line: what the server said, or why it could not be reached."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Exception):  # urllib3 wraps the fault into a paragraph about retries.
        error = reason
    body = getattr(error, "body", None)
    # The text of the client's own errors is the whole answer with its headers.
    text = reason if isinstance(reason, str) and reason else str(error)
    if isinstance(body, str) and body and len(body) < 500:
        text = body
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]


def _view(run: Any) -> RunView:
    status = _plain(run.status) or "unknown"
    conditions = tuple(_condition(one) for one in run.status_conditions or [])
    last = conditions[-1] if conditions else None
    created = run.created_at
    return RunView(
        uuid=port.canonical_uuid(str(run.uuid)),
        status=status,
        is_final=port.is_final(status),
        reason=last.reason if last else None,
        message=last.message if last else None,
        created_at=_time(created),
        meta_info={str(key): str(value) for key, value in (run.meta_info or {}).items()},
        outputs=dict(run.outputs or {}),
        conditions=conditions,
        pending=_plain(run.pending) or None,
    )


def _condition(condition: Any) -> Condition:
    return Condition(
        type=_plain(condition.type) or "unknown",
        reason=_text(condition.reason),
        message=_text(condition.message),
        at=_time(condition.last_transition_time),
        updated_at=_time(condition.last_update_time),
    )


def _plain(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _time(value: Any) -> str | None:
    """Return a time as ISO 8601 in UTC; a time without zone is taken for UTC."""
    if value is None:
        return None
    moment = datetime.fromisoformat(str(value)) if not isinstance(value, datetime) else value
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat()


def _clear_stale_fetches(folder: Path) -> None:
    """Remove what fetches that were killed have left; a young one may be at work."""
    for left in folder.glob(".fetch-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest > STALE_FETCH_S:
                shutil.rmtree(left)


def _unpack(archive: Path, into: Path, run_uuid: str) -> None:
    into.mkdir()
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(into, filter="data")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise CannotFindOut(
            f"Polyaxon: the outputs of run {run_uuid} arrived as no readable archive "
            f"({_short(error)}); call again, or look at the run's outputs in Polyaxon"
        ) from error


def _outputs_root(unpacked: Path) -> Path | None:
    """Return the folder inside the archive that holds the outputs' own files, if there is one."""
    named = sorted(unpacked.rglob("outputs"), key=lambda path: len(path.parts))
    return next((path for path in named if path.is_dir()), None)
