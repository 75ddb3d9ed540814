"""Schedules and nights, as the state folder keeps them.

Prefect fires the nights, but what is scheduled, who measures and what came of each night stands
here too: `status` tells it while the services are down, a deployment that Prefect lost is made
again, and a night that is started a second time finds the round it had.

* ``schedules/<sweep>.json``            one schedule
* ``schedules/held/<sweep>.lock``       held while a night of the sweep goes on; the kernel drops it
* ``schedules/held/<sweep>.json``       the night that holds it
* ``schedules/nights/<flow run>.json``  one night: its process, its label, its verdict
* ``schedules/nights/<flow run>.log``   what its process printed
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import filelock
from pydantic import TypeAdapter, ValidationError

from tasks import processes
from tasks.files import read_json, write_json
from tasks.home import Home
from tasks.rounds import now
from warehouse.errors import BadInput

#: Name of the flow in Prefect; a deployment of it is named like the sweep.
FLOW = "measure-night"
#: How much later than scheduled a night may begin, hours.
MAX_LATE_HOURS = 6.0
#: So many nights are kept, of all sweeps; their rounds and bundles stay whatever happens here.
KEPT_NIGHTS = 500
LABEL = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}Z")

T = TypeVar("T", "Schedule", "Night")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is measured when; ``name`` is the sweep's own name."""

    name: str
    sweep: str  # a shipped name, or the absolute path of a file
    target: str
    cron: str
    timezone: str
    directory: str  # where `schedule` was called: the working folder of its nights
    made_at: str
    max_late_hours: float = MAX_LATE_HOURS
    budget_minutes: float | None = None
    webhook: str | None = None
    webhook_env: str | None = None  # name of the variable that holds the address
    webhook_always: bool = False

    def next_times(self, count: int, *, after: datetime | None = None) -> list[datetime]:
        """Return the next times it is due, in UTC, by the cron line alone."""
        from cronsim import CronSim

        start = (after or datetime.now(UTC)).astimezone(ZoneInfo(self.timezone))
        times = CronSim(self.cron, start)
        return [next(times).astimezone(UTC) for _ in range(count)]

    @property
    def webhook_address(self) -> str | None:
        """The webhook's address, read from the environment where it is kept there."""
        return os.environ.get(self.webhook_env) if self.webhook_env else self.webhook


@dataclass(frozen=True, slots=True)
class Night:
    """One night: its process first, what became of it last."""

    flow_run_id: str
    pid: int
    start_ticks: int | None
    began_at: str
    sweep: str | None = None  # the sweep's name
    target: str | None = None
    night: str | None = None  # its scheduled time as the round's label
    round: str | None = None
    ended_at: str | None = None
    verdict: str | None = None  # ok failed regression missed skipped stopped died
    message: str | None = None
    webhook: str | None = None  # "sent", or why it was not; None: none was to be sent

    @property
    def goes_on(self) -> bool:
        """Whether its process lives and has not told its end."""
        return self.ended_at is None and processes.alive(self.pid, self.start_ticks)

    @property
    def died(self) -> bool:
        """Whether its process ended without a word: killed, or with the machine."""
        return self.verdict == "died" or (
            self.ended_at is None and not processes.alive(self.pid, self.start_ticks)
        )

    @property
    def is_untold(self) -> bool:
        """Whether it has a verdict and no process that could still tell a webhook of it."""
        untold = self.verdict is not None and self.webhook is None
        return untold and not processes.alive(self.pid, self.start_ticks)


class StillGoing(Exception):
    """Another night of the sweep holds it; ``holder`` says who."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def check_cron(cron: str, timezone: str) -> None:
    """Refuse what is no cron line of five fields, never due, or no time zone.

    Raises:
        BadInput: says which and what was got.
    """
    from cronsim import CronSim, CronSimError

    if len(cron.split()) != 5:
        raise BadInput(
            f"--cron: got {cron!r}, wanted five fields: minute hour day month weekday, as in "
            "'0 2 * * *'"
        )
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadInput(
            f"--timezone: got {timezone!r}, wanted a name such as Europe/Berlin or UTC"
        ) from error
    try:
        next(CronSim(cron, datetime.now(zone)))
    except CronSimError as error:
        raise BadInput(f"--cron: got {cron!r}: {error}".replace("Bad", "bad")) from error
    except StopIteration as error:
        raise BadInput(f"--cron: {cron!r} is never due") from error


def label_of(moment: datetime) -> str:
    """Return a scheduled time as a round's label: UTC, to the second, fit for a folder's name."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H-%M-%SZ}"


def time_of(label: str) -> datetime:
    """Return the scheduled time that a night's label stands for."""
    return datetime.strptime(label, "%Y-%m-%dT%H-%M-%SZ").replace(tzinfo=UTC)


# -- schedules ------------------------------------------------------------------------------


def schedules(home: Home) -> list[Schedule]:
    """Return what is scheduled in this state folder, by name."""
    read = (_schedule(path) for path in sorted(home.schedules.glob("*.json")))
    return [schedule for schedule in read if schedule is not None]


def unreadable(home: Home) -> list[Path]:
    """Return the files of schedules that are damaged: no night of theirs is fired any more."""
    return [path for path in sorted(home.schedules.glob("*.json")) if _schedule(path) is None]


def _schedule(path: Path) -> Schedule | None:
    """Return the schedule that a file holds; ``None`` where it is damaged."""
    schedule = _read(_SCHEDULE, path)
    if schedule is None or schedule.name != path.stem:
        return None
    try:
        check_cron(schedule.cron, schedule.timezone)
    except BadInput:
        return None
    return schedule


def find(home: Home, name: str) -> Schedule | None:
    """Return the schedule of a sweep by the sweep's name."""
    return next((one for one in schedules(home) if one.name == name), None)


def save(home: Home, schedule: Schedule) -> None:
    """Write a schedule; one of the same sweep is replaced."""
    write_json(home.schedules / f"{schedule.name}.json", asdict(schedule))


def remove(home: Home, name: str) -> None:
    """Forget a schedule; its nights and rounds stay."""
    (home.schedules / f"{name}.json").unlink(missing_ok=True)


# -- nights ---------------------------------------------------------------------------------


def log_file(home: Home, flow_run_id: str) -> Path:
    """Return where a night's process prints."""
    return home.schedules / "nights" / f"{flow_run_id}.log"


def nights(home: Home) -> list[Night]:
    """Return the nights that are kept, newest first."""
    read = (_night(path) for path in (home.schedules / "nights").glob("*.json"))
    found = [night for night in read if night is not None]
    return sorted(found, key=lambda night: night.began_at, reverse=True)


def find_night(home: Home, flow_run_id: str) -> Night | None:
    """Return what is kept of the night that is this Prefect flow run."""
    return _night(home.schedules / "nights" / f"{flow_run_id}.json")


def _night(path: Path) -> Night | None:
    night = _read(_NIGHT, path)
    return night if night is not None and night.flow_run_id == path.stem else None


def save_night(home: Home, night: Night) -> None:
    """Write what is known of a night."""
    write_json(home.schedules / "nights" / f"{night.flow_run_id}.json", asdict(night))


def note_process(home: Home, flow_run_id: str, sweep: str) -> Night:
    """Record this process as the one of a night of the sweep of this name.

    A night that is started again keeps its label, and so goes on in its round.
    """
    earlier = find_night(home, flow_run_id)
    pid = os.getpid()
    night = Night(
        flow_run_id=flow_run_id,
        pid=pid,
        start_ticks=processes.start_ticks(pid),
        began_at=now(),
        sweep=sweep,
        night=earlier.night if earlier else None,
    )
    save_night(home, night)
    return night


def forget_old_nights(home: Home) -> None:
    """Keep the newest :data:`KEPT_NIGHTS` nights."""
    for night in nights(home)[KEPT_NIGHTS:]:
        for ending in ("json", "log"):
            path = home.schedules / "nights" / f"{night.flow_run_id}.{ending}"
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def only_night(home: Home, name: str, flow_run_id: str) -> Iterator[None]:
    """Hold a sweep for one night.

    A lock of the kernel, which is free again when the holder is dead however it died; Prefect's
    limit of a deployment's concurrency is not.

    Raises:
        StillGoing: another night of the sweep has not ended.
    """
    held = home.schedules / "held"
    held.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(held / f"{name}.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        holder = find_night(home, str((read_json(held / f"{name}.json") or {}).get("flow_run_id")))
        who = f"night {holder.night} (process {holder.pid})" if holder else "another night"
        raise StillGoing(f"{who} still goes on") from error
    try:
        write_json(held / f"{name}.json", {"flow_run_id": flow_run_id})
        yield
    finally:
        lock.release()


_SCHEDULE, _NIGHT = TypeAdapter(Schedule), TypeAdapter(Night)


def _read(kind: TypeAdapter[T], path: Path) -> T | None:
    """Return what a file holds; ``None`` where it is damaged. Unknown keys are left out."""
    try:
        return kind.validate_python(read_json(path))
    except ValidationError:
        return None
