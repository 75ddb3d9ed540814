"""The one adapter of the port: Polyaxon's real client over HTTP.

What it works around, all seen with 2.18.0: the client has no deadline of its own and repeats
nothing; SQLite's "database is locked" of the embedded server arrives as 405 on POST; a log that
was read early stays cut unless ``force`` is asked for; status posts are sent in the background,
where an error is lost; filters compare what looks like a number as a number and then miss the
stored string; every error prints a banner.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import tenacity

from tasks.launch import port
from tasks.launch.port import Condition, RunUnknown, RunView
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
_PAGE = 100
#: Values a filter finds again: no number, no sign that has a meaning in the query language.
_FILTERABLE = re.compile(r"(?=.*[a-z])[a-z0-9_]+")
#: What a run that may have left something went through.
_RAN = frozenset({"running", "processing"})
_NOISY = ("polyaxon", "polyaxon.cli", "urllib3.connectionpool")


class _Transient(Exception):
    """A fault after which the same request may be sent again."""


class PolyaxonClient:
    """The port over ``RunClient``. Making one costs about 2.5 s of imports, once a process."""

    def __init__(
        self,
        host: str,
        *,
        owner: str = "default",
        project: str = "memsweep",
        token: str | None = None,
        call_s: float = CALL_S,
    ) -> None:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        from polyaxon._schemas.client import ClientConfig
        from polyaxon.client import PolyaxonClient as HttpClient

        self._host = host.rstrip("/")
        self._owner = owner
        self._project = project
        self._call_s = call_s
        self._local = urlsplit(self._host).hostname in {"127.0.0.1", "localhost", "::1"}

        def client(request_s: float) -> Any:
            config = ClientConfig(host=self._host, token=token, timeout=request_s, retries=0)
            return HttpClient(config=config, token=token)

        self._client = client(min(REQUEST_S, call_s))
        self._creating = client(CREATE_S)

    @property
    def host(self) -> str:
        return self._host

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def project(self) -> str:
        return self._project

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

    def find(self, meta: dict[str, str]) -> list[RunView]:
        filters = [
            f"meta_info.{key}:{value}"
            for key, value in meta.items()
            if _FILTERABLE.fullmatch(value)
        ]
        return [
            run
            for run in self._list(",".join(filters) or "managed_by:cli")
            if all(run.meta_info.get(key) == value for key, value in meta.items())
        ]

    def active(self) -> list[RunView]:
        runs = self._list("managed_by:cli,status:" + "|".join(port.LIVE_STATUSES))
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
                content=operation, name=name, managed_by=ManagedBy.CLI, meta_info=marked
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
            page = self._streams(run, "logs", parameters).json()
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
            archive = Path(scratch) / "outputs.tar.gz"
            try:
                parameters = {"path": "outputs", "force": "true"}
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
            unpacked = Path(scratch) / "outputs"
            _unpack(archive, unpacked, run_uuid)
            root = _outputs_root(unpacked)
            names = sorted(
                str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()
            )
            for name in names:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(root / name, into / name)
            return names

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
        told = self._streams(run, "artifacts/tree", {"path": path}).json()
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
        """GET from the streams API, which the client can only ask without ``force``."""
        import httpx

        url = (
            f"{self._host}/streams/v1/{run.namespace}/{self._owner}/{self._project}"
            f"/runs/{run.run_uuid}/{what}"
        )
        headers = self._client.config.get_full_headers(headers={})

        def get() -> httpx.Response:
            with httpx.stream(
                "GET", url, params=parameters, headers=headers, timeout=60, trust_env=False
            ) as response:
                if save_to is not None and response.is_success:
                    with save_to.open("wb") as file:
                        for chunk in response.iter_bytes():
                            file.write(chunk)
                else:
                    response.read()
                response.raise_for_status()
                return response

        return self._call(f"read the {what} of run {port.canonical_uuid(run.run_uuid)}", get)

    def _call(self, what: str, function: Callable[[], T]) -> T:
        """Call ``function``, repeat it after a transient fault, translate what is left."""

        def once() -> T:
            with self._translated(what):
                return function()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Transient),
            stop=tenacity.stop_after_delay(self._call_s),
            wait=tenacity.wait_exponential_jitter(initial=0.1, max=3.0, jitter=0.2),
            reraise=True,
        )
        try:
            return retrying(once)
        except _Transient as error:
            raise ServiceDown(
                f"Polyaxon at {self._host}: could not {what} within {self._call_s:.0f} s: {error}; "
                "is it up? ('memsweep services status')"
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
                raise _Transient(text) from error
            # A 404 of a call about one run; creating and listing name none.
            about_one = "run " in what and not what.startswith("create")
            kind = RunUnknown if status == 404 and about_one else CannotFindOut
            raise kind(
                f"Polyaxon at {self._host}: could not {what}: answered {status}: {text}"
            ) from error

    def _is_transient(self, status: int | None, error: BaseException) -> bool:
        if status is None:
            return not isinstance(error, FileExistsError | PermissionError)
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


def _short(error: BaseException) -> str:
    """Return one short line: what the server said, or why it could not be reached."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Exception):  # urllib3 wraps the fault into a paragraph about retries.
        error = reason
    body = getattr(error, "body", None)
    text = body if isinstance(body, str) and body and len(body) < 500 else str(error)
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
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CannotFindOut(
            f"Polyaxon: the outputs of run {run_uuid} arrived as no readable archive "
            f"({_short(error)}); call again, or look at the run's outputs in Polyaxon"
        ) from error


def _outputs_root(unpacked: Path) -> Path:
    """Return the folder inside the archive that holds the outputs' own files."""
    named = sorted(unpacked.rglob("outputs"), key=lambda path: len(path.parts))
    return next((path for path in named if path.is_dir()), unpacked)
