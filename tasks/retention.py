"""What may go, by policy: copies first, whole rounds only when asked, never half a proof.

Three sorts of things pile up. Copies of what a sealed bundle holds (Polyaxon's outputs and
downloads, the supervisor's logs) and Prefect's rows prove nothing and go by age. A round goes as a
whole: its bundles and its rows in the warehouse leave together, because a number without its
bundle could not be audited; the ledger keeps a line for each bundle that left.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import filelock
import httpx
import tenacity

from tasks import bundle, record
from tasks.files import read_json
from tasks.home import Home
from tasks.launch.settings import artifacts_root, polyaxon_root
from tasks.launch.supervisor import Folder
from tasks.rounds import Round, rounds_of
from warehouse import ledger
from warehouse.errors import BadInput, CannotFindOut

DAY_S = 86_400.0
#: Rounds of a sweep on a target that always stay: the newest, and the one it is compared with.
KEPT_ROUNDS = 2
FLOW_NAMES = ("measure-sweep", "measure-night")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
HTTP_S = 20.0
#: A Prefect that measures at the same time is busy (503) now and then: so long it is asked again.
BUSY_S = 30.0
BUSY_WAIT_S = 1.0
PAGE = 200


@dataclass(frozen=True, slots=True)
class Policy:
    """How old, in days, what has to go must be; ``rounds_days`` None: rounds stay."""

    copies_days: float
    rounds_days: float | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that may go: its files here, or its id in Prefect."""

    kind: str  # copy, download, supervisor, round, leftover, flow_run
    what: str
    bytes: int = 0
    paths: tuple[Path, ...] = ()
    run_uuids: tuple[str, ...] = ()
    round: Round | None = None

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {"kind": self.kind, "what": self.what, "bytes": self.bytes}


def choose(home: Home, policy: Policy, *, now_s: float | None = None) -> list[Item]:
    """Return what the policy lets go of this state folder; changes nothing."""
    moment = time.time() if now_s is None else now_s
    pruned = ledger.read(home.bundles).pruned
    chosen = [*_copies(home, moment - policy.copies_days * DAY_S), *_leftovers(home, pruned)]
    if policy.rounds_days is not None:
        chosen += _rounds(home, moment - policy.rounds_days * DAY_S, pruned)
    return chosen


def flow_runs(api_url: str, policy: Policy) -> list[Item]:
    """Return the ended flow runs of ours that Prefect keeps longer than the policy.

    Raises:
        CannotFindOut: the server does not answer.
    """
    before = datetime.now(UTC) - timedelta(days=policy.copies_days)
    wanted: dict[str, object] = {
        "flows": {"name": {"any_": list(FLOW_NAMES)}},
        "flow_runs": {
            "state": {"type": {"any_": list(ENDED)}},
            "end_time": {"before_": before.isoformat()},
        },
        "limit": PAGE,
    }
    found: list[Item] = []
    try:
        with httpx.Client(base_url=api_url, timeout=HTTP_S, trust_env=False) as client:
            while True:
                page = _answer(
                    client, "POST", "/flow_runs/filter", wanted | {"offset": len(found)}
                ).json()
                found += [Item("flow_run", f"{one['name']} ({one['id']})") for one in page]
                if len(page) < PAGE:
                    return found
    except (httpx.HTTPError, ValueError) as error:
        raise CannotFindOut(
            f"Prefect at {api_url} does not tell its flow runs: {_short(error)}"
        ) from error


def carry_out(home: Home, items: Sequence[Item]) -> None:
    """Remove what was chosen of this state folder; Prefect's is :func:`delete_flow_runs`.

    A kill in between loses nothing. First the ledger, after which no bundle of these is taken in;
    then the rows; the bundles last, because one that is still there is chosen again next time, and
    nobody reads it any more.

    Raises:
        BadInput: a round is being measured, or another prune goes on.
        CheckFailed: a bundle is not the one in the ledger.
        CannotFindOut: something could not be removed.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(filelock.FileLock(home.root / "prune.lock", timeout=0))
        except filelock.Timeout as error:
            raise BadInput(
                "another prune of this state folder goes on; wait for its end"
            ) from error
        for item in items:
            if item.round is not None:
                held.enter_context(item.round.only_flow())
        leaving = {
            run: bundle.load(home.bundles / run).manifest_sha256
            for item in items
            for run in item.run_uuids
            # Chosen before the lock was had: another prune may have removed it since.
            if (home.bundles / run).is_dir()
        }
        if leaving:
            ledger.append(home.bundles, leaving)
            ledger.prune(home.bundles, sorted(leaving))
        if any(item.kind in ("round", "leftover") for item in items):
            record.rebuild(home)
        for item in items:
            for path in item.paths:
                _remove(path)


def _copies(home: Home, before_s: float) -> Iterator[Item]:
    """Yield copies of what sealed bundles of that age hold."""
    sealed = {
        path.name for path in bundle.all_sealed(home) if _age(path / bundle.MANIFEST) < before_s
    }
    for run in sorted(sealed):
        copy = artifacts_root(home) / run.replace("-", "")
        if copy.is_dir():
            yield Item("copy", f"Polyaxon's copy of run {run}", _size(copy), (copy,))
        files = tuple(sorted(Folder(home).runs.glob(f"{run}.*")))
        if files:
            size = sum(_size(path) for path in files)
            yield Item("supervisor", f"supervisor's files of run {run}", size, files)
    for path in sorted((polyaxon_root(home) / "archives").glob("*")):
        # A download in progress is minutes old.
        if _age(path) < min(before_s, time.time() - DAY_S / 24):
            yield Item("download", f"Polyaxon's download {path.name}", _size(path), (path,))


def _leftovers(home: Home, pruned: frozenset[str]) -> Iterator[Item]:
    """Yield bundles that the ledger calls pruned and that a killed prune left."""
    for run in sorted(pruned):
        folder = home.bundles / run
        if folder.is_dir():
            yield Item("leftover", f"bundle of pruned run {run}", _size(folder), (folder,))


def _rounds(home: Home, before_s: float, pruned: frozenset[str]) -> Iterator[Item]:
    kept: dict[tuple[str, str], int] = {}
    sealed = _sealed_runs(home, pruned)
    for round_ in reversed(rounds_of(home)):
        place = (round_.sweep_name, round_.target)
        kept[place] = kept.get(place, 0) + 1
        if kept[place] <= KEPT_ROUNDS or round_.holder() is not None:
            continue
        if datetime.fromisoformat(round_.opened_at).timestamp() >= before_s:
            continue
        if runs := sealed.get(round_.id):
            paths = tuple(home.bundles / run for run in runs)
            size = sum(_size(path) for path in paths)
            what = f"round {round_.id}: {len(runs)} runs"
            yield Item("round", what, size, paths, tuple(runs), round_)


def _sealed_runs(home: Home, pruned: frozenset[str]) -> dict[str, list[str]]:
    """Return every attempt that is sealed, by its round: states name only the last one.

    A manifest that cannot be read is no round's: `verify` tells of it. A pruned run's bundle is a
    leftover, whatever its round.
    """
    found = defaultdict(list)
    for path in bundle.all_sealed(home):
        if path.name not in pruned:
            manifest = read_json(path / bundle.MANIFEST) or {}
            found[str(manifest.get("round"))].append(path.name)
    return found


def _age(path: Path) -> float:
    """Return when a file or folder was written last, seconds since the epoch; gone is new."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _size(path: Path) -> int:
    """Return the bytes of a file or of all files below a folder; what has just gone has none."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size(one) for one in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotFindOut(f"{path}: cannot be removed: {error.strerror}") from error


def delete_flow_runs(api_url: str, items: Sequence[Item]) -> tuple[int, str | None]:
    """Delete the chosen flow runs; return how many are gone, and why the others stay.

    All of them together are asked for again for :data:`BUSY_S` at most.
    """
    gone, deadline = 0, time.monotonic() + BUSY_S
    try:
        with httpx.Client(base_url=api_url, timeout=HTTP_S, trust_env=False) as client:
            for item in items:
                one = item.what.rpartition("(")[2].rstrip(")")
                _answer(client, "DELETE", f"/flow_runs/{one}", deadline=deadline)
                gone += 1
    except httpx.HTTPError as error:
        return gone, f"Prefect at {api_url}: {_short(error)}"
    return gone, None


def _answer(
    client: httpx.Client,
    method: str,
    path: str,
    body: object = None,
    *,
    deadline: float | None = None,
) -> httpx.Response:
    """Ask Prefect, again while it is busy; what is gone already (404) is an answer."""
    left = BUSY_S if deadline is None else max(0.0, deadline - time.monotonic())

    def once() -> httpx.Response:
        answer = client.request(method, path, json=body)
        if method != "DELETE" or answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()
        return answer

    again = tenacity.Retrying(
        stop=tenacity.stop_after_delay(left),
        wait=tenacity.wait_fixed(BUSY_WAIT_S),
        retry=tenacity.retry_if_exception(_is_busy),
        reraise=True,
    )
    return again(once)


def _is_busy(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (
            httpx.codes.TOO_MANY_REQUESTS,
            httpx.codes.SERVICE_UNAVAILABLE,
        )
    return isinstance(error, httpx.TimeoutException)


def _short(error: Exception) -> str:
    """Return what went wrong without the address and the advice of httpx's own text."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answered {error.response.status_code} {error.response.reason_phrase}".rstrip()
    return str(error) or type(error).__name__
